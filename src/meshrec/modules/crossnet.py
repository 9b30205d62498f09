"""Cross networks: polynomial feature interactions whose degree grows by one per layer.

Vector form: Wang et al., "Deep & cross network for ad click predictions" (2017). Other forms: "DCN V2:
Improved deep & cross network" (2021), equations 1 to 4. Parameters have TorchRec's names, so that its
checkpoints load. Kernels have Xavier normal initialization, biases are 0.
"""

# Shape legend: B batch, N features (columns), R rank, K experts.

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshrec.modules.linear import linear
from meshrec.modules.parameters import InitializedList
from meshrec.modules.precision import as_activations


class CrossNet(nn.Module):
    """Cross network with full-rank kernels: ``x_{l+1} = x_0 * (W_l x_l + b_l) + x_l``.

    Args:
        in_features: Width of input and output.
        num_layers: Number of cross layers.
        device: Parameter device.

    Example::

        >>> CrossNet(in_features=8, num_layers=2)(torch.ones(4, 8)).shape
        torch.Size([4, 8])
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.kernels = _kernels(num_layers, (in_features, in_features), device)
        self.bias = _biases(num_layers, (in_features, 1), device)

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in_features] to [B, in_features]."""
        input = as_activations(input)
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            crossed = input * linear(crossed, kernel, bias.squeeze(1)) + crossed
        return crossed


class LowRankCrossNet(nn.Module):
    """Cross network with low-rank kernels: ``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``.

    Args:
        in_features: Width of input and output.
        num_layers: Number of cross layers.
        low_rank: Kernel rank. V_l is [low_rank, in_features], and W_l is [in_features, low_rank].
        device: Parameter device.

    Raises:
        ValueError: The rank is below 1.
    """

    def __init__(
        self, in_features: int, num_layers: int, low_rank: int = 1, device: torch.device | None = None
    ) -> None:
        super().__init__()
        _check_positive("low_rank", low_rank)
        self.W_kernels = _kernels(num_layers, (in_features, low_rank), device)
        self.V_kernels = _kernels(num_layers, (low_rank, in_features), device)
        self.bias = _biases(num_layers, (in_features,), device)

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in_features] to [B, in_features]."""
        input = as_activations(input)
        crossed = input
        for up, down, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            # [B, low_rank]
            narrow = linear(crossed, down)
            crossed = input * linear(narrow, up, bias) + crossed
        return crossed


class VectorCrossNet(nn.Module):
    """Cross network with a kernel vector w_l per layer: ``x_{l+1} = x_0 <w_l, x_l> + b_l + x_l``.

    Args:
        in_features: Width of input and output.
        num_layers: Number of cross layers.
        device: Parameter device.
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.kernels = _kernels(num_layers, (in_features, 1), device)
        self.bias = _biases(num_layers, (in_features, 1), device)

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in_features] to [B, in_features]."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            # [B, 1]: a single weight per sample and layer.
            crossed = input * (crossed @ kernel) + bias.squeeze(1) + crossed
        return crossed


class LowRankMixtureCrossNet(nn.Module):
    """Low-rank cross network with a mixture of experts.

    ``x_{l+1} = sum over experts k of softmax_k(G_k x_l) * E_lk(x_l) + x_l``, with ``E_lk(x) = x_0 * (U_lk
    g(C_lk g(V_lk x)) + b_l)``. A single expert has no gate.

    Args:
        in_features: Width of input and output.
        num_layers: Number of cross layers.
        num_experts: Experts per layer. All layers share the gates G_k.
        low_rank: Expert kernel rank.
        activation: Activation g, a tensor function or a module.
        device: Parameter device.

    Raises:
        ValueError: The rank or the expert count is below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        _check_positive("num_experts", num_experts)
        _check_positive("low_rank", low_rank)
        self.U_kernels = _kernels(num_layers, (num_experts, in_features, low_rank), device)
        self.V_kernels = _kernels(num_layers, (num_experts, low_rank, in_features), device)
        self.bias = _biases(num_layers, (in_features, 1), device)
        # A softmax over a single expert is constant.
        self.gates: nn.ModuleList | None = None
        if num_experts > 1:
            self.gates = nn.ModuleList(
                nn.Linear(in_features, 1, bias=False, device=device) for _ in range(num_experts)
            )
        self._activation = activation
        # Created last, in TorchRec's order: initialization consumes random numbers in this order.
        self.C_kernels = _kernels(num_layers, (num_experts, low_rank, low_rank), device)

    def forward(self, input: Tensor) -> Tensor:
        """Map [B, in_features] to [B, in_features]."""
        crossed_BN = input
        layers = zip(self.U_kernels, self.V_kernels, self.C_kernels, self.bias, strict=True)
        for up_KNR, down_KRN, inner_KRR, bias_N1 in layers:
            # A batched product for all experts: [B, N] is broadcast over K.
            narrow_KBR = self._activation(crossed_BN @ down_KRN.transpose(1, 2))
            narrow_KBR = self._activation(narrow_KBR @ inner_KRR.transpose(1, 2))
            experts_KBN = input * (narrow_KBR @ up_KNR.transpose(1, 2) + bias_N1.squeeze(1))
            crossed_BN = self._mix(experts_KBN, crossed_BN) + crossed_BN
        return crossed_BN

    def _mix(self, experts_KBN: Tensor, crossed_BN: Tensor) -> Tensor:
        """Return the sum of the experts' outputs weighted by the gates, [B, N]."""
        if self.gates is None:
            return experts_KBN[0]
        # [K, B, 1]; the softmax runs over experts.
        gates_KB1 = torch.stack([gate(crossed_BN) for gate in self.gates])
        return (experts_KBN * gates_KB1.softmax(0)).sum(0)


def _kernels(num_layers: int, size: tuple[int, ...], device: torch.device | None) -> InitializedList:
    """Create one kernel per layer with Xavier normal initialization."""
    # InitializedList restores this initialization after to_empty on meta.
    return InitializedList(
        (torch.empty(size, device=device) for _ in range(num_layers)), nn.init.xavier_normal_
    )


def _biases(num_layers: int, size: tuple[int, ...], device: torch.device | None) -> InitializedList:
    """Create one bias per layer, initialized to 0."""
    return InitializedList((torch.empty(size, device=device) for _ in range(num_layers)), nn.init.zeros_)


def _check_positive(name: str, value: int) -> None:
    """Raise ValueError if the argument ``name`` is below 1."""
    if value < 1:
        raise ValueError(f"{name} must be 1 or more, got {value}.")
