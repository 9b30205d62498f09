import pytest
import torch
from torch.autograd import forward_ad

from meshrec.modules import SwishLayerNorm
from meshrec.modules.activation import relu


@pytest.mark.parametrize("dims", [4, [3, 4], torch.Size([3, 4])])
def test_the_input_is_gated_by_its_norm(dims):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    sizes = [dims] if isinstance(dims, int) else list(dims)
    expected = x * torch.sigmoid(torch.nn.functional.layer_norm(x, sizes))
    torch.testing.assert_close(SwishLayerNorm(dims)(x), expected)
    assert SwishLayerNorm(4, device="meta").norm[0].weight.is_meta


@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (1024, 300), (2, 1024, 300)])
def test_relu_is_torch_s(shape):
    torch.manual_seed(0)
    x = torch.randn(shape).requires_grad_()
    with torch.no_grad():
        x.view(-1)[:3] = torch.tensor([float("nan"), -0.0, float("inf")])[: x.numel()]
    other = x.detach().clone().requires_grad_()
    out, expected, grad = relu(x), torch.relu(other), torch.randn(shape)
    assert out.detach().numpy().tobytes() == expected.detach().numpy().tobytes()
    (ours,) = torch.autograd.grad(out, x, grad)
    (theirs,) = torch.autograd.grad(expected, other, grad)
    assert ours.numpy().tobytes() == theirs.numpy().tobytes()


def test_the_gradient_of_relu_has_a_gradient():
    x = torch.randn(1024, 300).requires_grad_()
    grad = torch.randn(1024, 300, requires_grad=True)
    (first,) = torch.autograd.grad(relu(x), x, grad, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), grad)
    assert torch.equal(second, (x > 0).float())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch itself, in forward mode
def test_relu_carries_tangents():
    x, tangent, grad = torch.randn(3, 600, 600)
    x[0, 0] = 0
    for turned in (False, True):  # forward mode, and forward over reverse
        results = []
        for function in (relu, torch.relu):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x.clone().requires_grad_(turned), tangent)
                out = function(dual)
                if turned:
                    (out,) = torch.autograd.grad(out.square(), dual, grad, create_graph=True)
                results.append(forward_ad.unpack_dual(out))
        for own, expected in zip(*results, strict=True):
            assert torch.equal(own, expected)


def test_relu_compiles_and_maps():
    x = torch.randn(4, 1024, 300)
    assert torch.equal(torch.vmap(relu)(x), torch.relu(x))
    assert torch.equal(torch.compile(relu, backend="eager", fullgraph=True)(x), torch.relu(x))
