"""Ensembles in one pass: members that share their weights, and differ in a scale per column.

Wen, Tran, Ba: "BatchEnsemble" (2020); Gorishniy, Kotelnikov, Babenko: "TabM" (2024).

Shape legend: B batch, M members, I and O columns.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class MemberLinear(nn.Module):
    """A linear layer that M members share: each scales the input's and the output's columns its own way.

    Member m computes ``(x * r[m]) @ W.T * s[m] + b[m]``.

    Args:
        in_size, out_size: number of columns of input and output.
        num_members: number of members M.
        signs: draw the input's scales as +1 or -1, so that members differ from the start; else they are 1.
        device: device of the parameters.
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
        bound = 1.0 / math.sqrt(max(in_size, 1))
        self.weight = nn.Parameter(torch.empty(out_size, in_size, device=device).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_members, out_size, device=device).uniform_(-bound, bound))
        scale = torch.ones(num_members, in_size, device=device)
        if signs and num_members > 1:
            scale = torch.randint(0, 2, (num_members, in_size), device=device) * 2.0 - 1.0
        self.in_scale = nn.Parameter(scale)
        self.out_scale = nn.Parameter(torch.ones(num_members, out_size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, M, I], or [B, 1, I] for one input of all members, to [B, M, O]."""
        return nn.functional.linear(x * self.in_scale, self.weight) * self.out_scale + self.bias


class MemberMLP(nn.Module):
    """An MLP of M members with an output each: `MemberLinear` layers, ReLU, dropout, and a head per member.

    Args:
        in_size: number of columns of the input.
        layer_sizes: number of columns of the hidden layers, at least one.
        num_outputs: number of outputs of each member.
        num_members: number of members M.
        dropout: share of the hidden values that training drops.
        device: device of the parameters.
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
        for number, size in enumerate(layer_sizes):
            before = layer_sizes[number - 1] if number else in_size
            layers += [
                MemberLinear(before, size, num_members, signs=number == 0, device=device),
                nn.ReLU(),
                nn.Dropout(dropout),
            ]
        self.layers = nn.Sequential(*layers)
        last = layer_sizes[-1]
        bound = 1.0 / math.sqrt(last)
        head = torch.empty(num_members, num_outputs, last, device=device).uniform_(-bound, bound)
        self.head = nn.Parameter(head)
        self.bias = nn.Parameter(torch.zeros(num_members, num_outputs, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, I] to [B, num_outputs, M]."""
        hidden = self.layers(x.unsqueeze(1))
        return ((hidden.unsqueeze(2) * self.head).sum(-1) + self.bias).transpose(1, 2)
