"""Sums since the last look, and since the start, over all ranks."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Computed(NamedTuple):
    """Metrics since the last look, and since the start."""

    window: dict[str, float]
    lifetime: dict[str, float]


class Totals(NamedTuple):
    """Sums over all ranks."""

    window: Tensor
    lifetime: Tensor


class WindowedSum:
    """A vector of sums.

    Not a metric of torchmetrics, whose states belong to ranks: these, saved on some, load on any number of
    them, and they are exchanged in one collective, not three for each state.

    Args:
        size: of the vector.
        device: where it is kept.
        group: the ranks; without it all, where a process group is initialized.
    """

    def __init__(self, size: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._window = torch.zeros(size, dtype=torch.float64, device=device)
        self._lifetime = torch.zeros_like(self._window)

    @property
    def window(self) -> Tensor:
        """This rank's sums since the last look: add to it."""
        return self._window

    def take(self) -> Totals:
        """The sums, after which the window begins anew. Collective."""
        window = self._window
        self._window = torch.zeros_like(window)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(window, group=self._group)
        self._lifetime += window
        return Totals(window, self._lifetime)

    def state_dict(self) -> dict[str, Any]:
        """What has been taken: the same on every rank, and good for any number of ranks."""
        return {"lifetime": self._lifetime.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, with an empty window.

        Raises:
            ValueError: the state is that of another configuration.
        """
        lifetime = state["lifetime"]
        if lifetime.shape != self._lifetime.shape:
            raise ValueError(
                f"the saved metrics have {lifetime.numel()} sums, these have {self._lifetime.numel()}. Use "
                "the configuration they were saved with (num_bins, ks)."
            )
        self._lifetime.copy_(lifetime)
        self._window.zero_()
