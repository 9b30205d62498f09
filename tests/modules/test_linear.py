import pytest
import torch
from torch import nn
from torch.testing import assert_close

from meshrec.modules import linear

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="needs oneDNN",
)


@pytest.fixture
def with_onednn(monkeypatch):
    monkeypatch.setattr(linear, "_prefer_onednn", lambda: True)


def both(**options):
    torch.manual_seed(0)
    ours, plain = linear.Linear(7, 5, **options), nn.Linear(7, 5, **options)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@needs_onednn
@pytest.mark.usefixtures("with_onednn")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 7), (1, 7), (0, 7), (2, 3, 7)])
def test_values_and_gradients_are_those_of_nn_linear(bias, shape):
    results = []
    for layer in both(bias=bias):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out = layer(x)
        out.square().sum().backward()
        results.append((out, x.grad, [parameter.grad for parameter in layer.parameters()]))
    assert_close(*results)


@needs_onednn
@pytest.mark.usefixtures("with_onednn")
def test_second_derivatives():
    layer, _ = both()
    x = torch.randn(3, 7, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.square().sum().backward()
    weight = layer.weight.detach()
    assert_close(layer.bias.grad, 8 * (first.detach() @ weight.t()).sum(0) / 2)


@needs_onednn
@pytest.mark.usefixtures("with_onednn")
def test_other_types_compilation_and_autocast_do_not_take_the_fp32_path(monkeypatch):
    monkeypatch.setattr(linear, "_OneDNNLinear", None)
    layer, _ = both()
    assert layer.double()(torch.randn(2, 7, dtype=torch.float64)).dtype == torch.float64
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 7)).dtype == torch.bfloat16
    exported = torch.export.export(layer, (torch.randn(2, 7),))
    assert "linear" in str(exported.graph)


def test_whether_prefer_onednn_is_asked_once():
    assert linear._prefer_onednn() in (True, False)
    assert linear._prefer_onednn.cache_info().misses == 1
