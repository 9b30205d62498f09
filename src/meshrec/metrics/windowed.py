"""Sums over all ranks, for the current window and the whole run."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Computed(NamedTuple):
    """Metrics for the current window and the whole run."""

    window: dict[str, float]
    lifetime: dict[str, float]


class Totals(NamedTuple):
    """Sums over all ranks, for the current window and the whole run."""

    window: Tensor
    lifetime: Tensor


class WindowedSum:
    """Sum vector that starts a new window whenever it is read.

    Unlike torchmetrics metrics, whose state belongs to a rank, these sums can be saved on some ranks and
    loaded on any number of ranks, and need one collective instead of three per state.

    Args:
        size: number of sums in the vector.
        device: where the sums are.
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
            # float64 sums of all ranks in one collective, instead of one per metric.
            dist.all_reduce(window, group=self._group)
        self._lifetime += window
        return Totals(window, self._lifetime)

    def state_dict(self) -> dict[str, Any]:
        """Return the lifetime sums. Equal on all ranks, and loadable on any number of ranks."""
        return {"lifetime": self._lifetime.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the lifetime sums, and clear the window.

        Raises:
            ValueError: the state belongs to another configuration.
        """
        lifetime = state["lifetime"]
        if lifetime.shape != self._lifetime.shape:
            raise ValueError(
                f"the saved metrics have {lifetime.numel()} sums, these have {self._lifetime.numel()}. Use "
                "the configuration they were saved with (num_bins, ks)."
            )
        self._lifetime.copy_(lifetime)
        self._window.zero_()
