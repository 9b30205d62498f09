import pytest
import torch

from meshrec.modules import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(4, 5)


def drawn(net):
    """With biases that count."""
    for bias in net.bias:
        torch.nn.init.normal_(bias)
    return net


def test_full_crosses(x):
    net, crossed = drawn(CrossNet(5, 2)), x
    for kernel, bias in zip(net.kernels, net.bias, strict=True):
        crossed = torch.stack([x[b] * (kernel @ crossed[b] + bias[:, 0]) + crossed[b] for b in range(4)])
    torch.testing.assert_close(net(x), crossed)


def test_low_rank_crosses(x):
    net, crossed = drawn(LowRankCrossNet(5, 2, low_rank=3)), x
    for up, down, bias in zip(net.W_kernels, net.V_kernels, net.bias, strict=True):
        crossed = torch.stack([x[b] * (up @ (down @ crossed[b]) + bias) + crossed[b] for b in range(4)])
    torch.testing.assert_close(net(x), crossed)


def test_vector_crosses(x):
    net, crossed = drawn(VectorCrossNet(5, 2)), x
    for kernel, bias in zip(net.kernels, net.bias, strict=True):
        crossed = torch.stack(
            [x[b] * (kernel[:, 0] @ crossed[b]) + bias[:, 0] + crossed[b] for b in range(4)]
        )
    torch.testing.assert_close(net(x), crossed)


@pytest.mark.parametrize("num_experts", [1, 3])
def test_mixtures_of_crosses(x, num_experts):
    net, crossed = drawn(LowRankMixtureCrossNet(5, 2, num_experts, low_rank=2, activation=torch.tanh)), x
    layers = zip(net.U_kernels, net.V_kernels, net.C_kernels, net.bias, strict=True)
    for up, down, inner, bias in layers:
        rows = []
        for b in range(4):
            gates = [gate(crossed[b]).item() for gate in net.gates] if net.gates else [0.0]
            shares = torch.tensor(gates).softmax(0)
            mixed = torch.zeros(5)
            for k in range(num_experts):
                narrow = torch.tanh(inner[k] @ torch.tanh(down[k] @ crossed[b]))
                mixed = mixed + shares[k] * x[b] * (up[k] @ narrow + bias[:, 0])
            rows.append(mixed + crossed[b])
        crossed = torch.stack(rows)
    torch.testing.assert_close(net(x), crossed)
    assert (net.gates is None) == (num_experts == 1)


KINDS = [CrossNet, LowRankCrossNet, VectorCrossNet, LowRankMixtureCrossNet]


@pytest.mark.parametrize("kind", KINDS)
def test_from_meta(kind):
    net = kind(5, 1, device="meta")
    assert all(parameter.is_meta for parameter in net.parameters())
    net.to_empty(device="cpu")
    for child in net.modules():
        if hasattr(child, "reset_parameters"):
            child.reset_parameters()
    assert not net.bias[0].any()


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_break(kind, x):
    torch.manual_seed(0)
    net = kind(5, 2, **({"num_experts": 2} if kind is LowRankMixtureCrossNet else {}))
    torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(x), net(x))


def test_ranks_and_experts_must_be_positive():
    with pytest.raises(ValueError, match=r"low_rank.*1.*0"):
        LowRankCrossNet(5, 1, low_rank=0)
    with pytest.raises(ValueError, match=r"low_rank.*1.*-1"):
        LowRankMixtureCrossNet(5, 1, low_rank=-1)
    with pytest.raises(ValueError, match=r"num_experts.*1.*0"):
        LowRankMixtureCrossNet(5, 1, num_experts=0)
