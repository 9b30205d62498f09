import torch
from torch import nn

from meshrec.quant.quantize import BFloat16Linear, in_bfloat16


def test_linear_layers_alone_change():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Sequential(nn.Linear(3, 2, bias=False)))
    inputs = torch.randn(5, 4)
    before = model(inputs)
    in_bfloat16(model)
    assert isinstance(model[0], BFloat16Linear)
    assert {p.dtype for p in model[1].parameters()} == {torch.float32}
    assert model[2][0].bias is None
    assert model(inputs).dtype == torch.float32
    assert torch.allclose(model(inputs), before, atol=0.05)
