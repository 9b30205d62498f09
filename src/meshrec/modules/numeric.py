"""Embeddings for numeric features, from a piecewise linear or a periodic encoding of the value.

Gorishniy, Rubachev, Babenko: "On embeddings for numerical features in tabular deep learning" (2022).

Shape legend: B batch, N numeric features, T bins, K frequencies, D width.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshrec.modules.precision import is_autocast


class PiecewiseLinear(nn.Module):
    """Piecewise linear encoding of numeric features.

    Entry t is 0 if the value lies below bin t, 1 if it lies above, and rises linearly within the bin. A
    linear function of the entries is a piecewise linear function of the value. The module has no parameters.

    Args:
        edges: Increasing bin edges for every feature, at least two. A feature with fewer edges is not
            encoded: entry 0 is the value itself.
        device: Device for the buffers.

    Raises:
        ValueError: Edges do not increase.

    Example::

        >>> PiecewiseLinear([[0.0, 1.0, 3.0]])(torch.tensor([[2.0]]))
        tensor([[[1.0000, 0.5000]]])
    """

    # Read by export: these buffers may be folded into a program as constants.
    constant_buffers = ("first", "scale", "low", "high")
    first: Tensor  # lower bin edge, [N, T]
    # For bins a feature does not have, scale is 1 and both clamps are 0.
    scale: Tensor  # 1 / bin width, [N, T]
    low: Tensor  # lower clamp, [N, T]: 0, or -inf for a feature without bins
    high: Tensor  # upper clamp, [N, T]: 1, or inf for a feature without bins

    def __init__(self, edges: Sequence[Sequence[float]], device: torch.device | None = None) -> None:
        super().__init__()
        for feature, feature_edges in enumerate(edges):
            if any(not before < after for before, after in itertools.pairwise(feature_edges)):
                raise ValueError(f"the edges of number {feature} must rise, got {list(feature_edges)}.")
        self.N = len(edges)
        # Common number of bins; features with fewer are padded with bins clamped to 0. A scale of 0 would
        # turn infinite values into NaN.
        self.T = max((max(1, len(feature_edges) - 1) for feature_edges in edges), default=0)
        first, scale = torch.zeros(self.N, self.T), torch.ones(self.N, self.T)
        low, high = torch.zeros(self.N, self.T), torch.zeros(self.N, self.T)
        for feature, feature_edges in enumerate(edges):
            # Identity: scale 1 and no clamping.
            if len(feature_edges) < 2:
                low[feature, 0], high[feature, 0] = -math.inf, math.inf
                continue
            # float64: the difference of two close edges would lose digits in fp32.
            edge_values = torch.tensor(list(feature_edges), dtype=torch.float64)
            first[feature, : len(feature_edges) - 1] = edge_values[:-1]
            scale[feature, : len(feature_edges) - 1] = 1.0 / edge_values.diff()
            high[feature, : len(feature_edges) - 1] = 1.0
        # Not persistent, because the edges come from the configuration and not from training.
        for name, value in (("first", first), ("scale", scale), ("low", low), ("high", high)):
            self.register_buffer(name, value.to(device), persistent=False)

    @property
    def widths(self) -> Tensor:
        """Bin widths, [N, T].

        A feature without bins has width 1 at entry 0. Entries for bins that a feature lacks are 0.
        """
        return torch.where(self.high > 0, 1.0 / self.scale, 0.0)

    def forward(self, values: Tensor) -> Tensor:
        """Encode values [B, N] as [B, N, T]. Entries for bins a feature does not have are 0."""
        reached = (values.unsqueeze(-1) - self.first) * self.scale
        return torch.minimum(torch.maximum(reached, self.low), self.high)


class NumberEmbedding(nn.Module):
    """Embeddings of numeric features: a linear layer per feature, applied to the piecewise linear encoding.

    Args:
        edges: Increasing bin edges for every feature; see `PiecewiseLinear`.
        dim: Embedding width D.
        std: Standard deviation of the initial weights.
        device: Parameter and buffer device.
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

    def forward(self, values: Tensor) -> Tensor:
        """Map values [B, N] to embeddings [B, N, D]."""
        if is_autocast(values):
            # fp32: columns may be linear terms of the logits, as in WideDeep.
            with torch.autocast(values.device.type, enabled=False):
                return self._embed(values.float())
        return self._embed(values)

    def _embed(self, values: Tensor) -> Tensor:
        """Map values [B, N] to embeddings [B, N, D], in the dtype of the values."""
        # A batched matmul per feature.
        encoded_NBT = self.encoding(values).transpose(0, 1)
        return torch.bmm(encoded_NBT, self.weight).transpose(0, 1) + self.bias


class PeriodicEmbedding(nn.Module):
    """Embeddings of numeric features from sines and cosines at learned frequencies.

    One linear layer per feature maps its 2 K sines and cosines to D columns, followed by a ReLU.

    Args:
        num_features: Number of features N.
        dim: Embedding width D.
        num_frequencies: Frequencies K per feature.
        std: Standard deviation of the initial frequencies. With larger frequencies, close values get
            embeddings which differ more.
        device: Parameter device.
    """

    def __init__(
        self,
        num_features: int,
        dim: int,
        *,
        num_frequencies: int = 16,
        std: float = 0.1,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.frequency = nn.Parameter(std * torch.randn(num_features, num_frequencies, device=device))
        # Uniform initialization as in nn.Linear.
        bound = 1.0 / math.sqrt(2 * num_frequencies)
        weight = torch.empty(num_features, 2 * num_frequencies, dim, device=device).uniform_(-bound, bound)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(num_features, dim, device=device))

    def forward(self, values: Tensor) -> Tensor:
        """Map values [B, N] to embeddings [B, N, D]."""
        angle = 2 * math.pi * values.unsqueeze(-1) * self.frequency
        waves_NBK = torch.cat([angle.sin(), angle.cos()], dim=-1).transpose(0, 1)
        return torch.relu(torch.bmm(waves_NBK, self.weight).transpose(0, 1) + self.bias)
