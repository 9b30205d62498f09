"""Embeddings of numbers: piecewise-linear and periodic.

Gorishniy, Rubachev, Babenko: "On embeddings for numerical features in tabular deep learning" (2022).

Shape legend: B batch, N numbers, T bins, K frequencies, D width.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PiecewiseLinear(nn.Module):
    """The piecewise-linear encoding of numbers: how far each value reaches into each bin.

    Bin t of a number lies between its edges t and t + 1. Its share is 0 for values below the bin, 1 for
    values above it, and linear in between. A linear function of the shares is a piecewise-linear function of
    the number. The module has no parameters.

    Args:
        edges: the edges of each number's bins, rising: two or more. A number with fewer edges has one bin,
            which passes the value on as it is.
        device: device of the buffers.

    Raises:
        ValueError: edges do not rise.
    """

    constant_buffers = ("first", "scale", "low", "high")
    first: Tensor
    scale: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, edges: Sequence[Sequence[float]], device: torch.device | None = None) -> None:
        super().__init__()
        for number, each in enumerate(edges):
            if any(not before < after for before, after in itertools.pairwise(each)):
                raise ValueError(f"the edges of number {number} must rise, got {list(each)}.")
        self.N = len(edges)
        self.T = max((max(1, len(each) - 1) for each in edges), default=0)
        first, scale = torch.zeros(self.N, self.T), torch.zeros(self.N, self.T)
        low, high = torch.zeros(self.N, self.T), torch.ones(self.N, self.T)
        for number, each in enumerate(edges):
            if len(each) < 2:
                scale[number, 0], low[number, 0], high[number, 0] = 1.0, -math.inf, math.inf
                continue
            found = torch.tensor(list(each), dtype=torch.float64)
            first[number, : len(each) - 1] = found[:-1]
            scale[number, : len(each) - 1] = 1.0 / found.diff()
        for name, value in (("first", first), ("scale", scale), ("low", low), ("high", high)):
            self.register_buffer(name, value.to(device), persistent=False)

    @property
    def widths(self) -> Tensor:
        """The widths of all bins, [N, T]: 1 for a number without edges, 0 for a bin that a number lacks."""
        return torch.where(self.scale > 0, 1.0 / self.scale, 0.0)

    def forward(self, numbers: Tensor) -> Tensor:
        """Encode numbers [B, N] as shares [B, N, T]; bins that a number does not have are 0."""
        reached = (numbers.unsqueeze(-1) - self.first) * self.scale
        return torch.minimum(torch.maximum(reached, self.low), self.high)


class NumberEmbedding(nn.Module):
    """Embeddings of numbers: a linear function of each number's piecewise-linear encoding.

    Args:
        edges: see `PiecewiseLinear`.
        dim: width D of the embeddings.
        std: standard deviation of the initial weights.
        device: device of parameters and buffers.
    """

    def __init__(
        self,
        edges: Sequence[Sequence[float]],
        dim: int,
        *,
        std: float = 0.1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.encoding = PiecewiseLinear(edges, device)
        self.weight = nn.Parameter(std * torch.randn(self.encoding.N, self.encoding.T, dim, device=device))
        self.bias = nn.Parameter(torch.zeros(self.encoding.N, dim, device=device))

    def forward(self, numbers: Tensor) -> Tensor:
        """Map numbers [B, N] to embeddings [B, N, D]."""
        shares_NBT = self.encoding(numbers).transpose(0, 1)
        return torch.bmm(shares_NBT, self.weight).transpose(0, 1) + self.bias


class PeriodicEmbedding(nn.Module):
    """Embeddings of numbers: a linear function of sines and cosines at learned frequencies, then a ReLU.

    Args:
        num_numbers: how many numbers N.
        dim: width D of the embeddings.
        num_frequencies: how many frequencies K each number has.
        std: standard deviation of the initial frequencies. A larger one tells closer numbers apart.
        device: device of the parameters.
    """

    def __init__(
        self,
        num_numbers: int,
        dim: int,
        *,
        num_frequencies: int = 16,
        std: float = 0.1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.frequency = nn.Parameter(std * torch.randn(num_numbers, num_frequencies, device=device))
        bound = 1.0 / math.sqrt(2 * num_frequencies)
        weight = torch.empty(num_numbers, 2 * num_frequencies, dim, device=device).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(num_numbers, dim, device=device))

    def forward(self, numbers: Tensor) -> Tensor:
        """Map numbers [B, N] to embeddings [B, N, D]."""
        angle = 2 * math.pi * numbers.unsqueeze(-1) * self.frequency
        waves_NBK = torch.cat([angle.sin(), angle.cos()], dim=-1).transpose(0, 1)
        return torch.relu(torch.bmm(waves_NBK, self.weight).transpose(0, 1) + self.bias)
