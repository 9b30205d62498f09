"""Running sums over all ranks, for a window of the run and for the whole run."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class MetricValues(NamedTuple):
    """Result of ``MetricSet.compute``: metric values by name, for the last window and for the whole run."""

    window: dict[str, float]
    """Metrics over the samples since the previous ``compute``."""
    lifetime: dict[str, float]
    """Metrics over all samples in the run."""


class Totals(NamedTuple):
    """Sums over all ranks, from `WindowedSum.take`."""

    window: Tensor
    """Sums since the previous ``take``, [size]."""
    lifetime: Tensor
    """Sums over the whole run, [size]."""


class WindowedSum:
    """Vector of running sums over all ranks, for the current window and for the whole run.

    A rank adds to its local `window` without communication. `take` adds up the windows of all ranks in one
    all-reduce, and starts a new window. The saved state is equal on all ranks, and a run with another number
    of ranks can load it. Metrics in torchmetrics instead save a state per rank, and need three collectives
    per state.

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
        """This rank's sums in the current window, float64 [size]. Add to this tensor in place."""
        return self._window

    def take(self) -> Totals:
        """Return the sums over all ranks, and start a new window. Collective."""
        window = self._window
        # A new tensor, because the caller gets the old one.
        self._window = torch.zeros_like(window)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(window, group=self._group)
        self._lifetime += window
        return Totals(window, self._lifetime)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums for the whole run up to the last `take`, equal on all ranks."""
        return {"lifetime": self._lifetime.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums for the whole run, and set the sums of the window to 0.

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
        # Checkpoints have no window, which belongs to the process that saved it.
        self._window.zero_()
