"""Decide when a run ends early: after a signal, or if evaluations do not improve any more."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshrec.comms.collectives import blocked
from meshrec.train.ranks import Ranks

# SIGINT from Ctrl-C, SIGTERM from launchers and batch systems, such as Slurm before it preempts a job.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_with_launcher() -> None:
    """Send SIGTERM to this rank when MeshRec's launcher ends, for any reason.

    Ranks must not continue without their launcher. Does nothing under another launcher.
    """
    launcher = multiprocessing.parent_process()  # not the process that has forked this one
    if launcher is not None:
        ended = launcher.sentinel

        def wait() -> None:
            """Wait for the end of the launcher."""
            connection.wait([ended])
            os.kill(os.getpid(), signal.SIGTERM)

        # A daemon thread does not keep a finished rank alive.
        threading.Thread(target=wait, name="launcher", daemon=True).start()


class Agreement(NamedTuple):
    """Flags combined over all ranks.

    Attributes:
        stop: whether any rank was asked to stop.
        failed: whether a step failed on any rank.
        due: work that rank 0 has announced, a bit per kind.
    """

    stop: bool = False
    failed: bool = False
    due: int = 0

    def merged(self, other: "Agreement") -> "Agreement":
        """Return the flags that are set in either agreement."""
        return Agreement(self.stop or other.stop, self.failed or other.failed, self.due | other.due)


class StopRequest:
    """A request to stop the run, set by a signal.

    Signals may reach ranks at different steps, so the ranks exchange flags after every step, and all stop at
    the same step. The flags of a step are read in the next step, so that no rank waits for the exchange.
    """

    def __init__(self) -> None:
        # Number of the signal. Set by the signal handler or by `request`, and never reset.
        self.signal: int | None = None
        # Flags and pending all-reduce of the last step, until `finish` reads them.
        self._pending: tuple[torch.Tensor, Any] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context manager in which SIGINT (Ctrl-C) and SIGTERM (preemption) request a stop.

        Does nothing outside the main thread.
        """
        # Python allows signal handlers only in the main thread. A Ray worker, for example, has another
        # thread.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def exchange(
        self, ranks: Ranks, *, failed: bool = False, due: int = 0, at_once: bool = False
    ) -> Agreement:
        """Exchange flags with the other ranks. Called once per step. Collective.

        Args:
            ranks: the ranks, from `join`.
            failed: whether the step failed on this rank.
            due: work that all ranks shall do, such as a checkpoint, a bit per kind. Only rank 0 sets it.
            at_once: whether to wait for the flags of this step, instead of reading them in the next step.
                Equal on all ranks.

        Returns:
            The flags of the previous step, and with ``at_once`` also those of this step.
        """
        if ranks.control is None:
            return Agreement(self.signal is not None, failed, due)
        # `_pending` holds a single exchange, so the previous step's must be read before the next one starts.
        agreement = self.finish()
        # The sum over ranks is above 0 if any rank has set the flag. CPU tensors, because `control` is a gloo
        # group.
        flags = torch.tensor([float(self.signal is not None), float(failed), float(due)])
        self._pending = (flags, dist.all_reduce(flags, group=ranks.control, async_op=True))
        if at_once:
            agreement = agreement.merged(self.finish())
        return agreement

    def finish(self) -> Agreement:
        """Wait for the flags of the last step if they have not been read yet, and return them.

        Otherwise, no flag in the result is set.
        """
        if self._pending is None:
            return Agreement()
        (flags, work), self._pending = self._pending, None
        # Count this wait as time blocked in collectives; see stragglers.py.
        with blocked():
            work.wait()
        stop, failed, due = flags.tolist()
        return Agreement(bool(stop), bool(failed), int(due))

    def request(self) -> None:
        """Request a stop, as SIGINT does."""
        self.signal = signal.SIGINT

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.signal = number


_SIGNIFICANT_ERRORS = 2.0
"""An evaluation becomes the reference if the mean validation loss is lower by this many standard errors."""
_PROMISING_ERRORS = 1.0
_RECENT = 3
"""Training continues while one of the last `_RECENT` evaluations has a loss lower than the reference by at
least `_PROMISING_ERRORS` standard errors.
"""


class PairedTest:
    """Paired test over samples: does training still lower the validation loss?

    The first evaluation is the reference. A later evaluation becomes the reference if the loss is lower by
    more than chance. The losses of the same sample are compared (paired), because their differences vary less
    than the losses, so a few hundred samples suffice.

    Args:
        patience: number of evaluations without a new reference after which the run may end; None: never.

    Attributes:
        step: step of the reference; None before the first evaluation.
        num_samples: number of samples in the test.
    """

    def __init__(self, patience: int | None) -> None:
        self.patience = patience
        self.step: int | None = None
        # Losses of the samples in the reference evaluation, float32 [n].
        self._losses = torch.zeros(0)
        # For every evaluation since the reference: by how many standard errors the loss is lower.
        self._deviations: list[float] = []

    @property
    def num_samples(self) -> int:
        """Number of samples that are compared."""
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
        # A recent evaluation may be better without being significant yet.
        return max(self._deviations[-_RECENT:]) < _PROMISING_ERRORS

    def add(self, losses: torch.Tensor, weights: torch.Tensor | None, step: int) -> None:
        """Compare an evaluation with the reference. A significantly better evaluation becomes the reference.

        Args:
            losses: loss of every sample, [n]. All calls must have the same samples in the same order.
            weights: sample weights, [n]; None: all weights are 1.
            step: training step at the evaluation.
        """
        deviations = 0.0
        if self.step is not None:
            deviations = _mean_in_standard_errors((self._losses - losses).double(), weights)
        if self.step is None or deviations >= _SIGNIFICANT_ERRORS:
            # Clone, because `float` returns the caller's tensor itself if that is float32 already.
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
    """Return the weighted mean of paired gains [n], divided by the standard error."""
    weights = torch.ones_like(gains) if weights is None else weights.double()
    total = weights.sum()
    if not len(gains) or not total:
        return 0.0
    mean = (gains @ weights) / total
    # Standard error of a weighted mean.
    error = ((weights * (gains - mean)).square().sum().sqrt() / total).item()
    return float(mean) / error if error else 0.0


class EarlyStopping:
    """Early stopping criterion, checked after every evaluation. It compares all metrics so far.

    Args:
        patience: number of evaluations without a better AUC after which the run ends; None: never.
        chance_patience: patience for `PairedTest`; None: the test is not used.

    Attributes:
        test: paired test of validation losses.
        best_auc: best metric so far, which a later evaluation must exceed. `WeightsEvaluator.favor_current`
            raises it above the measured value.
        best_step: step of the best evaluation.
        num_worse: number of evaluations since the best.
        last_step: step of the last evaluation.
    """

    def __init__(self, patience: int | None, chance_patience: int | None = None) -> None:
        self._patience = patience
        self.test = PairedTest(chance_patience)
        # Checkpoints contain the fields below and the test; see `state_dict`.
        self.best_auc = float("-inf")
        self.best_step = 0
        self.num_worse = 0
        self.last_step = 0

    def record(self, auc: float | None, step: int) -> bool:
        """Record an evaluation, and return whether it is the best so far.

        Args:
            auc: value of the metric that selects the best weights; None if there is no such metric.
            step: training step at the evaluation.
        """
        self.last_step = step
        # Without a metric, the evaluation counts neither as better nor as worse.
        if auc is None:
            return False
        if auc > self.best_auc:
            self.best_auc, self.best_step, self.num_worse = auc, step, 0
            return True
        self.num_worse += 1
        return False

    @property
    def is_over(self) -> bool:
        """Whether the run should end now."""
        is_patient = self._patience is None or self.num_worse < self._patience
        return not is_patient or self._is_perfect or self.test.is_over

    @property
    def _is_perfect(self) -> bool:  # only with `PairedTest`, so that runs without it keep all evaluations
        """Whether the best metric cannot be improved."""
        return self.test.patience is not None and self.best_auc >= 1

    def reason(self, metric: str) -> str | None:
        """Return a sentence that says why training should end, or None if it should continue.

        Args:
            metric: title of the metric that selects the best weights, for the sentence.
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
