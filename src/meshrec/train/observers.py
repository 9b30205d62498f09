"""Run observers for the run folder and TensorBoard. The command line has another observer for the screen."""

import contextlib
import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from meshrec.planner import PlannedShardingPlan
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RunFolder

_logger = logging.getLogger("meshrec")

Line = Mapping[str, Any]
"""A line in ``metrics.jsonl``."""


class Started(NamedTuple):
    """Event: the run starts. It carries everything known before the first step."""

    recipe: Recipe
    folder: RunFolder | None
    dataset: str
    num_samples: int
    num_validation: int
    num_test: int
    num_ranks: int
    device: str
    num_table_parameters: int
    num_dense_parameters: int
    plan: PlannedShardingPlan | None
    first_step: int
    num_steps: int


class Stepped(NamedTuple):
    """Event: a step has finished.

    Attributes:
        step: number of finished steps.
        num_samples: samples of this step, over all ranks.
    """

    step: int
    num_samples: int


class Logged(NamedTuple):
    """Event: training metrics since the last line."""

    line: Line


class Evaluated(NamedTuple):
    """Event: metrics on held-out data.

    Attributes:
        line: metrics by name; ``line["kind"]`` is ``validation`` or ``test``.
        is_best: whether these validation metrics are the best so far.
    """

    line: Line
    is_best: bool


class Reported(NamedTuple):
    """Event: a message for the user."""

    text: str


class Advanced(NamedTuple):
    """Event: progress on a task outside training.

    Attributes:
        what: name of the task, such as ``baselines``.
        done: finished share in [0, 1].
    """

    what: str
    done: float


class Finished(NamedTuple):
    """Event: the run has ended, early or not. It carries the contents of ``summary.json``."""

    summary: Line


Event = Started | Stepped | Logged | Evaluated | Reported | Advanced | Finished
Observer = Callable[[Event], None]
"""Callback which receives every event, on rank 0 only."""


class FolderObserver:
    """Appends metrics to the run's ``metrics.jsonl``. If a write fails, as on a full disk, one warning is
    logged.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        # Set by the first failed write, so that there is only one warning.
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        """Write an event's metrics."""
        if isinstance(event, Logged | Evaluated):
            try:
                self._folder.append_metrics(dict(event.line))
            except OSError as error:
                if not self._has_failed:
                    _logger.warning("metrics from step %d on are lost: %s", event.line["step"], error)
                self._has_failed = True


class TensorBoardObserver:
    """Writes TensorBoard event files. Without the tensorboard package, it logs a warning and writes nothing.

    When a run resumes, TensorBoard hides everything after the resumed step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # SummaryWriter class, if TensorBoard is installed.
        self._make: Any = None
        # Opened by Started, closed by Finished; None after a write error.
        self._writer: Any = None
        try:
            # This import also imports an installed TensorFlow, which prints to stderr.
            with contextlib.redirect_stderr(io.StringIO()):
                from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            _logger.warning("no TensorBoard events are written: install meshrec[train] for them.")
        else:
            self._make = SummaryWriter

    def __call__(self, event: Event) -> None:
        """Write scalars under ``train/``, ``validation/`` and ``test/``."""
        if isinstance(event, Started) and self._make is not None:
            self._writer = self._make(str(self._folder), purge_step=event.first_step + 1)
        if self._writer is None:
            return
        if isinstance(event, Logged | Evaluated):
            tag = event.line.get("kind", "train")
            try:
                for name, value in event.line.items():
                    if isinstance(value, float):
                        self._writer.add_scalar(f"{tag}/{name}", value, event.line["step"])
                self._writer.flush()
            except OSError as error:
                _logger.warning("no more TensorBoard events are written: %s", error)
                self._writer = None
        elif isinstance(event, Finished):
            self._writer.close()
