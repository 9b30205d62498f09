import pytest
import torch

from meshrec.modules.mlp import MLP


def test_layers_and_activation():
    torch.manual_seed(0)
    mlp = MLP(3, [4, 2])
    x = torch.randn(5, 3)
    first, second = mlp.layers
    assert torch.equal(mlp(x), torch.relu(second(torch.relu(first(x)))))
    assert MLP(3, [2], bias=False, activation=torch.tanh).layers[0].bias is None
    assert MLP(3, [2], activation="sigmoid")(x).min() > 0
    assert MLP(3, [2], device="meta").layers[0].weight.is_meta


def test_unknown_activation():
    with pytest.raises(ValueError, match="activation must be a function or one of"):
        MLP(3, [2], activation="swish")
