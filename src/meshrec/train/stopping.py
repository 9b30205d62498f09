"""Ending early: on a signal, and when the model gets no better."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshrec.train.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def stop_with_parent() -> None:
    """Asks the system for a SIGTERM to this process when its parent is gone, however it ended: ranks must not
    go on without their launcher. Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it went before it was asked for
            os.kill(os.getpid(), signal.SIGTERM)


class Agreement(NamedTuple):
    """What all ranks know together after a step: one was asked to stop; one could not go on."""

    stop: bool = False
    failed: bool = False


class StopRequest:
    """Set by a signal; ranks agree on it, since signals reach them at different steps.

    The question of a step is answered in the next one, so that nobody waits for the answer.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked: tuple[torch.Tensor, Any] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While inside, SIGINT (Ctrl-C) and SIGTERM (preemption) ask to stop."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, ranks: Ranks, *, failed: bool = False, at_once: bool = False) -> Agreement:
        """What the ranks agreed on: all stop because one was asked to, or failed. Collective, once per step.

        Args:
            failed: whether this rank's step did.
            at_once: wait for this step's answer; otherwise it comes with that of the next step. The same on
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
        """Waits for the question that is under way, and gives its answer."""
        if self._asked is None:
            return Agreement()
        (flags, work), self._asked = self._asked, None
        work.wait()
        return Agreement(*(bool(flag) for flag in flags.tolist()))

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signal = number


class EarlyStopping:
    """Counts evaluations without a better AUC.

    Args:
        patience: so many end the run; None: never.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self.best_auc = float("-inf")
        self.best_step = 0
        self.num_worse = 0
        self.last_step = 0
        """Of the last evaluation."""

    def improves(self, auc: float | None, step: int) -> bool:
        """Whether this is the best AUC so far; None: nothing chooses among weights."""
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
        """Whether patience is at an end."""
        return self._patience is not None and self.num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "best_auc": self.best_auc,
            "best_step": self.best_step,
            "num_worse": self.num_worse,
            "last_step": self.last_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.best_auc, self.best_step = float(state["best_auc"]), int(state["best_step"])
        self.num_worse, self.last_step = int(state["num_worse"]), int(state["last_step"])
