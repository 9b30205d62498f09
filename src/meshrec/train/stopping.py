"""Reasons to end a run early: a signal, or evaluations that no longer improve."""

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

from meshrec.comms.collectives import blocked
from meshrec.train.ranks import Ranks

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # prctl(2)


def stop_with_parent() -> None:
    """Make the system send this process a SIGTERM when the parent process ends for any reason.

    Ranks must not continue without their launcher. This works on Linux only; elsewhere it does nothing.
    """
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent exited before the system knew of our wish
            os.kill(os.getpid(), signal.SIGTERM)


class Agreement(NamedTuple):
    """Flags of all ranks combined.

    Attributes:
        stop: whether any rank was asked to stop.
        failed: whether a step failed on any rank.
    """

    stop: bool = False
    failed: bool = False


class StopRequest:
    """A stop request, set by a signal. Ranks agree on it, because signals reach them at different steps.

    Flags shared in a step are read in the next step, so that no rank waits for the exchange.
    """

    def __init__(self) -> None:
        # Set by the signal handler or by `request`, and never reset.
        self.signal: int | None = None
        # Flags and pending all-reduce from the last step, until finish reads them.
        self._pending: tuple[torch.Tensor, Any] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for SIGINT (Ctrl-C) and SIGTERM (preemption) in this context, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():  # such as a worker of Ray
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def exchange(self, ranks: Ranks, *, failed: bool = False, at_once: bool = False) -> Agreement:
        """Exchange flags with the other ranks, once per step; return those of the previous step. Collective.

        Args:
            ranks: the ranks, from `join`.
            failed: whether this rank's step failed.
            at_once: whether to wait for this step's flags, rather than read them in the next step. Equal on
                all ranks.
        """
        if ranks.control is None:
            return Agreement(self.signal is not None, failed)
        agreement = self.finish()
        flags = torch.tensor([float(self.signal is not None), float(failed)])
        self._pending = (flags, dist.all_reduce(flags, group=ranks.control, async_op=True))
        if at_once:
            newer = self.finish()
            agreement = Agreement(agreement.stop or newer.stop, agreement.failed or newer.failed)
        return agreement

    def finish(self) -> Agreement:
        """Wait for the pending flags, and return the agreement."""
        if self._pending is None:
            return Agreement()
        (flags, work), self._pending = self._pending, None
        with blocked():
            work.wait()
        return Agreement(*map(bool, flags.tolist()))

    def request(self) -> None:
        """Ask for an early end, as SIGINT does."""
        self.signal = signal.SIGINT

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signal = number


_BEYOND_CHANCE = 2.0
"""Standard errors by which the mean validation loss must fall below the reference to replace it."""
_PROMISING = 1.0
_RECENT = 3
"""Training continues while the loss of one of the last `_RECENT` evaluations is below the reference by
`_PROMISING` standard errors.
"""


class PairedTest:
    """A sequential paired test on per-sample validation losses, against earlier weights.

    The first evaluation is the reference. A later evaluation replaces it if the loss is lower by more than
    chance. Paired differences vary less than the losses, so a few hundred samples suffice.

    Args:
        patience: evaluations without a new reference after which the run ends; None: never.

    Attributes:
        step: step of the reference; None before the first evaluation.
        num_samples: number of samples in the test.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.step: int | None = None
        # Reference losses, float32 [n].
        self._losses = torch.zeros(0)
        # Loss reduction against the reference, in standard errors, for each evaluation since.
        self._deviations: list[float] = []

    @property
    def num_samples(self) -> int:
        """Number of compared samples."""
        return len(self._losses)

    @property
    def num_evaluations(self) -> int:
        """Number of evaluations since the reference."""
        return len(self._deviations)

    @property
    def is_over(self) -> bool:
        """Whether more training is unlikely to help."""
        if self.patience is None or len(self._deviations) < self.patience:
            return False
        return max(self._deviations[-_RECENT:]) < _PROMISING

    def add(self, losses: torch.Tensor, weights: torch.Tensor | None, step: int) -> None:
        """Compare an evaluation with the reference.

        Args:
            losses: per-sample losses, for the same samples in the same order at every call, [n].
            weights: sample weights, [n]; None: 1.
            step: step of the evaluation.
        """
        deviations = 0.0
        if self.step is not None:
            deviations = _mean_in_standard_errors((self._losses - losses).double(), weights)
        if self.step is None or deviations >= _BEYOND_CHANCE:
            # Cloned: `float` returns the caller's tensor if it has this type already.
            self.step, self._losses, self._deviations = step, losses.float().clone(), []
        else:
            self._deviations.append(deviations)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"step": self.step, "losses": self._losses, "deviations": self._deviations}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from ``state_dict``."""
        self.step, self._losses = state["step"], state["losses"]
        self._deviations = [float(value) for value in state["deviations"]]


def _mean_in_standard_errors(gains: torch.Tensor, weights: torch.Tensor | None) -> float:
    """Return the weighted mean of paired gains [n], in standard errors."""
    weights = torch.ones_like(gains) if weights is None else weights.double()
    total = weights.sum()
    if not len(gains) or not total:
        return 0.0
    mean = (gains @ weights) / total
    # Standard error of a weighted mean.
    error = ((weights * (gains - mean)).square().sum().sqrt() / total).item()
    return float(mean) / error if error else 0.0


class EarlyStopping:
    """Decides after each evaluation whether the run should end, from the metrics so far.

    Args:
        patience: evaluations without a better AUC after which the run ends; None: never.
        chance_patience: patience for `PairedTest`; None: no such test.

    Attributes:
        test: paired test of validation losses.
    """

    def __init__(self, patience: int | None, chance_patience: int | None = None) -> None:
        self._patience = patience
        self.test = PairedTest(chance_patience)
        # Best metric so far; `WeightsEvaluator.favor_current` raises it above the measured value.
        self.best_auc = float("-inf")
        self.best_step = 0
        self.num_worse = 0
        self.last_step = 0
        """Step of the last evaluation."""

    def record(self, auc: float | None, step: int) -> bool:
        """Record an evaluation; return whether it is the best so far. ``auc`` is None if no metric selects
        the best weights.
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
        is_patient = self._patience is None or self.num_worse < self._patience
        return not is_patient or self._is_perfect or self.test.is_over

    @property
    def _is_perfect(self) -> bool:  # only with `PairedTest`, so that runs without it keep all evaluations
        return self.test.patience is not None and self.best_auc >= 1

    def reason(self, metric: str) -> str | None:
        """Return why training should end, as a sentence; None if it should continue.

        Args:
            metric: title of the metric that selects the weights.
        """
        test, best = self.test, f"step {self.best_step:,}"
        if self._is_perfect:
            return f"the validation {metric} of {best} leaves nothing to improve."
        if test.is_over:
            return (
                f"in the last {test.num_evaluations} evaluations, no validation loss was below that of step "
                f"{test.step:,} by more than chance (paired test of {test.num_samples:,} samples)."
            )
        if self.is_over:
            noun = "evaluation" if self.num_worse == 1 else "evaluations"
            return f"{self.num_worse} {noun} in a row had no better validation {metric} than {best}."
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "best_auc": self.best_auc,
            "best_step": self.best_step,
            "num_worse": self.num_worse,
            "last_step": self.last_step,
            "test": self.test.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state from ``state_dict``."""
        self.best_auc, self.best_step = float(state["best_auc"]), int(state["best_step"])
        self.num_worse, self.last_step = int(state["num_worse"]), int(state["last_step"])
        if "test" in state:  # earlier releases had no such test
            self.test.load_state_dict(state["test"])
