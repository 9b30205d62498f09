"""Stacks of linear layers."""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers of the given sizes, each followed by ``activation``.

    Args:
        in_size: columns of the input.
        layer_sizes: columns of each layer's output.
        bias: whether layers have one.
        activation: ``"relu"``, ``"sigmoid"``, or any function of a tensor.
        device: where the parameters live.

    Raises:
        ValueError: for a word that names no activation.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        named: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "sigmoid": torch.sigmoid}
        if isinstance(activation, str) and activation not in named:
            raise ValueError(f"activation must be a function or one of {sorted(named)}, got {activation!r}.")
        self._activation = named[activation] if isinstance(activation, str) else activation
        sizes = [in_size, *layer_sizes]
        self.layers = nn.ModuleList(
            nn.Linear(size, next_size, bias, device=device) for size, next_size in itertools.pairwise(sizes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_size] -> [B, layer_sizes[-1]]."""
        for layer in self.layers:
            x = self._activation(layer(x))
        return x
