"""Ensembles computed in a single pass: the members share a weight matrix, and differ in scales per column.

Wen, Tran, Ba: "BatchEnsemble" (2020); Gorishniy, Kotelnikov, Babenko: "TabM" (2024).

Shape legend: B batch, M members, I input columns, O output columns.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshrec.modules.linear import linear
from meshrec.modules.precision import bf16_weight, computes_in_bf16


class MemberLinear(nn.Module):
    """Linear layer of an ensemble with M members, which share the weight.

    Members differ in their input scales, output scales and bias.

    Member m computes ``(x * r[m]) @ W.T * s[m] + b[m]``.

    Args:
        in_size: Input columns I.
        out_size: Output columns O.
        num_members: Members M.
        signs: Whether to initialize input scales to 1 or -1 at random, so that members differ from the start.
            If False, they are 1.
        device: Parameter device.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        num_members: int,
        *,
        signs: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        # The uniform initialization of nn.Linear.
        bound = 1.0 / math.sqrt(max(in_size, 1))
        self.weight = nn.Parameter(torch.empty(out_size, in_size, device=device).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_members, out_size, device=device).uniform_(-bound, bound))
        scale = torch.ones(num_members, in_size, device=device)
        if signs and num_members > 1:
            scale = torch.randint(0, 2, (num_members, in_size), device=device) * 2.0 - 1.0
        # Scales per member are the only weights that differ between members, besides the bias.
        self.in_scale = nn.Parameter(scale)
        self.out_scale = nn.Parameter(torch.ones(num_members, out_size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, M, I], or [B, 1, I] for an input shared by all members, to [B, M, O]."""
        parameters: list[Tensor] = [self.in_scale, self.out_scale, self.bias]
        if computes_in_bf16(x):
            x, parameters = x.bfloat16(), [bf16_weight(parameter) for parameter in parameters]
        in_scale, out_scale, bias = parameters
        return linear(x * in_scale, self.weight) * out_scale + bias


class MemberMLP(nn.Module):
    """Ensemble of M MLPs, made of `MemberLinear` layers with ReLU and dropout, and a separate head per
    member.

    Args:
        in_size: Input columns.
        layer_sizes: Hidden layer sizes, at least one.
        num_outputs: Outputs per member.
        num_members: Members M.
        dropout: Dropout probability.
        device: Parameter device.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        num_outputs: int,
        num_members: int,
        *,
        dropout: float = 0.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index, size in enumerate(layer_sizes):
            in_columns = layer_sizes[index - 1] if index else in_size
            layers += [
                # Random signs in the first layer suffice: later layers then see different inputs.
                MemberLinear(in_columns, size, num_members, signs=index == 0, device=device),
                nn.ReLU(),
                nn.Dropout(dropout),
            ]
        self.layers = nn.Sequential(*layers)
        out_columns = layer_sizes[-1]
        bound = 1.0 / math.sqrt(out_columns)
        head = torch.empty(num_members, num_outputs, out_columns, device=device).uniform_(-bound, bound)
        self.head = nn.Parameter(head)
        self.bias = nn.Parameter(torch.zeros(num_members, num_outputs, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, in_size] to [B, num_outputs, M]."""
        # [B, 1, in_size]: all members see the same input.
        hidden = self.layers(x.unsqueeze(1))
        # [B, M, num_outputs]; a batched dot product per member, without a [B, M, M] intermediate.
        logits: Tensor = ((hidden.unsqueeze(2) * self.head).sum(-1) + self.bias).transpose(1, 2)
        return logits
