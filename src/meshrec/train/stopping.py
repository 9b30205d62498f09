"""Early ends of a run: on a signal, and when the model stops improving."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshrec.comms.waiting import blocked
from meshrec.train.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def stop_with_parent() -> None:
    """Make the system send this process a SIGTERM when its parent ends, however it ends.

    Ranks must not continue without their launcher. This works on Linux only; elsewhere it does nothing.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent exited before the system knew of our wish
            os.kill(os.getpid(), signal.SIGTERM)


class Agreement(NamedTuple):
    """Agreement of all ranks after a step: whether one was asked to stop, and whether one failed."""

    stop: bool = False
    failed: bool = False


class StopRequest:
    """A request to stop, set by a signal. Ranks agree on it, because signals reach them at different steps.

    The answer to the question of one step arrives in the next step, so that no rank waits for it.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked: tuple[torch.Tensor, Any] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for SIGINT (Ctrl-C) and SIGTERM (preemption) while inside, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():  # such as a worker of Ray
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, ranks: Ranks, *, failed: bool = False, at_once: bool = False) -> Agreement:
        """Share flags once per step; return whether any rank was asked to stop, and whether any failed.
        Collective.

        Args:
            ranks: the ranks, from `join`.
            failed: whether this rank's step failed.
            at_once: whether to wait for this step's answer, instead of taking it in the next step. Equal on
                all ranks.
        """
        if ranks.control is None:
            return Agreement(self.signal is not None, failed)
        found = self.finish()
        flags = torch.tensor([float(self.signal is not None), float(failed)])
        self._asked = (flags, dist.all_reduce(flags, group=ranks.control, async_op=True))
        if at_once:
            newer = self.finish()
            found = Agreement(found.stop or newer.stop, found.failed or newer.failed)
        return found

    def finish(self) -> Agreement:
        """Wait for the pending question, and return its answer."""
        if self._asked is None:
            return Agreement()
        (flags, work), self._asked = self._asked, None
        with blocked():
            work.wait()
        return Agreement(*(bool(flag) for flag in flags.tolist()))

    def request(self) -> None:
        """Ask for an early end, as SIGINT does."""
        self.signal = signal.SIGINT

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signal = number


class EarlyStopping:
    """Counter of evaluations without a better AUC.

    Args:
        patience: number of such evaluations after which the run ends; None: never.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self.best_auc = float("-inf")
        self.best_step = 0
        self.num_worse = 0
        self.last_step = 0
        """Step of the last evaluation."""

    def improves(self, auc: float | None, step: int) -> bool:
        """Record an evaluation; return whether it is the best so far. ``auc`` is None if nothing selects the
        best weights.
        """
        self.last_step = step
        if auc is None:
            return False
        if auc > self.best_auc:
            self.best_auc, self.best_step, self.num_worse = auc, step, 0
            return True
        self.num_worse += 1
        return False

    @property
    def is_over(self) -> bool:
        """Whether the run should end."""
        return self._patience is not None and self.num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "best_auc": self.best_auc,
            "best_step": self.best_step,
            "num_worse": self.num_worse,
            "last_step": self.last_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state that ``state_dict`` returned."""
        self.best_auc, self.best_step = float(state["best_auc"]), int(state["best_step"])
        self.num_worse, self.last_step = int(state["num_worse"]), int(state["last_step"])
