"""Ending early: on a signal, and when the model gets no better."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

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

    def agreed(self, ranks: Ranks) -> bool:
        """Whether all ranks stop now because one of them was asked to. Collective, once per step."""
        if ranks.control is None:
            return self.signal is not None
        stop = False
        if self._asked is not None:
            flag, work = self._asked
            work.wait()
            stop = bool(flag.item())
        flag = torch.tensor([float(self.signal is not None)])
        self._asked = (flag, dist.all_reduce(flag, group=ranks.control, async_op=True))
        return stop

    def finish(self) -> None:
        """Waits for the question that is under way."""
        if self._asked is not None:
            self._asked[1].wait()
            self._asked = None

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

    def improves(self, auc: float, step: int) -> bool:
        """Whether this is the best AUC so far."""
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
        return {"best_auc": self.best_auc, "best_step": self.best_step, "num_worse": self.num_worse}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there."""
        self.best_auc, self.best_step = float(state["best_auc"]), int(state["best_step"])
        self.num_worse = int(state["num_worse"])
