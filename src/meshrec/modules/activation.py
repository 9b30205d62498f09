"""Activations with parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """``x * sigmoid(layer_norm(x))``.

    Args:
        input_dims: the size, or sizes, of the last dimensions, which are normalised over.
        device: where the parameters live.
    """

    def __init__(self, input_dims: int | Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        sizes = [input_dims] if isinstance(input_dims, int) else list(input_dims)
        self.norm = nn.Sequential(nn.LayerNorm(sizes, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """``[..., *input_dims]`` -> the same shape."""
        return input * self.norm(input)  # type: ignore[no-any-return]
