"""Sums over all ranks, for the current window and the whole run."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Computed(NamedTuple):
    """Metrics by name, over the last window and over the whole run."""

    window: dict[str, float]
    """Metrics over the samples between the last two calls of ``compute``."""
    lifetime: dict[str, float]
    """Metrics over all samples."""


class Totals(NamedTuple):
    """Sum vectors over all ranks, over the last window and over the whole run."""

    window: Tensor
    lifetime: Tensor


class WindowedSum:
    """Vector of sums, added over ranks only when `take` reads it, which starts a new window.

    torchmetrics metrics save a state per rank and need three collectives per state. The state of these sums
    is equal on all ranks, loads on any number of ranks, and needs one collective.

    Args:
        size: number of sums.
        device: device of the sums.
        group: process group; None: all ranks, if a process group is initialized.
    """

    def __init__(self, size: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._group = group
        # This rank's sums since the last take().
        self._window = torch.zeros(size, dtype=torch.float64, device=device)
        # Sums over all ranks until the last take(), equal on all ranks.
        self._lifetime = torch.zeros_like(self._window)

    @property
    def window(self) -> Tensor:
        """This rank's sums in the current window. Add in place."""
        return self._window

    def take(self) -> Totals:
        """Return the sums over all ranks, and start a new window. Collective."""
        window = self._window
        self._window = torch.zeros_like(window)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(window, group=self._group)
        self._lifetime += window
        return Totals(window, self._lifetime)

    def state_dict(self) -> dict[str, Any]:
        """Return the lifetime sums up to the last `take`, equal on all ranks."""
        return {"lifetime": self._lifetime.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the lifetime sums, and set the window's sums to 0.

        Raises:
            ValueError: the state has another number of sums.
        """
        lifetime = state["lifetime"]
        if lifetime.shape != self._lifetime.shape:
            raise ValueError(
                f"the saved metrics have {lifetime.numel()} sums, these have {self._lifetime.numel()}. Use "
                "the configuration they were saved with (num_bins, ks)."
            )
        self._lifetime.copy_(lifetime)
        self._window.zero_()
