import pytest
import torch

from meshrec.modules import SwishLayerNorm


@pytest.mark.parametrize("dims", [4, [3, 4], torch.Size([3, 4])])
def test_the_input_is_gated_by_its_norm(dims):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    sizes = [dims] if isinstance(dims, int) else list(dims)
    expected = x * torch.sigmoid(torch.nn.functional.layer_norm(x, sizes))
    torch.testing.assert_close(SwishLayerNorm(dims)(x), expected)
    assert SwishLayerNorm(4, device="meta").norm[0].weight.is_meta
