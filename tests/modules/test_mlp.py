import pytest
import torch
from torch import nn

from meshrec.modules import MLP, Perceptron, SwishLayerNorm


def test_layers_and_activation():
    torch.manual_seed(0)
    mlp = MLP(3, [4, 2])
    x = torch.randn(5, 3)
    first, second = (mlp._mlp[i]._linear for i in (0, 1))
    assert torch.equal(mlp(x), torch.relu(second(torch.relu(first(x)))))
    assert MLP(3, [2], bias=False, activation=torch.tanh)._mlp[0]._linear.bias is None
    assert MLP(3, [2], activation="sigmoid")(x).min() > 0
    assert MLP(3, [2], device="meta")._mlp[0]._linear.weight.is_meta
    assert MLP(3, [2], dtype=torch.float64)(x.double()).dtype == torch.float64


def test_the_last_layer_may_be_linear():
    torch.manual_seed(0)
    mlp = MLP(3, [4, 2], activation_on_last=False)
    x = torch.randn(5, 3)
    assert torch.equal(mlp(x), mlp._mlp[1]._linear(torch.relu(mlp._mlp[0]._linear(x))))


def test_a_perceptron_is_one_layer():
    torch.manual_seed(0)
    layer = Perceptron(3, 2, activation=nn.PReLU())
    x = torch.randn(4, 3)
    assert torch.equal(layer(x), layer._activation_fn(layer._linear(x)))
    assert "_activation_fn.weight" in layer.state_dict()


def test_activations_with_parameters():
    swish = MLP(3, [4, 2], activation="swish_layernorm")
    norms = [layer._activation_fn.norm[0].normalized_shape for layer in swish._mlp]
    assert norms == [(4,), (2,)]
    each = MLP(3, [2, 2], activation=nn.PReLU)
    assert len({id(layer._activation_fn) for layer in each._mlp}) == 2
    made = MLP(3, [2, 2], activation=lambda: SwishLayerNorm(2))
    assert len({id(layer._activation_fn) for layer in made._mlp}) == 2
    shared = MLP(3, [2, 2], activation=nn.PReLU())
    assert len({id(layer._activation_fn) for layer in shared._mlp}) == 1


def test_unknown_activation():
    with pytest.raises(ValueError, match="activation"):
        MLP(3, [2], activation="swish")
    with pytest.raises(ValueError, match="module"):
        MLP(3, [2], activation=lambda: 3)


@pytest.mark.parametrize("activation", [torch.relu, "swish_layernorm", nn.PReLU])
def test_compiles_without_a_break(activation):
    torch.manual_seed(0)
    mlp, x = MLP(3, [4, 2], activation=activation), torch.randn(5, 3)
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), mlp(x))
