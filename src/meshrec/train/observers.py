"""Observers of a run: its folder and TensorBoard. The command line has its own observer for the screen."""

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
"""A line of ``metrics.jsonl``."""


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
    """Event: a step is done, with its number and its number of samples."""

    step: int
    num_samples: int


class Logged(NamedTuple):
    """Event: training metrics of the last steps."""

    line: Line


class Evaluated(NamedTuple):
    """Event: metrics of validation or test data (``line["kind"]``), and whether they are the best so far."""

    line: Line
    is_best: bool


class Said(NamedTuple):
    """Event: a message for the user."""

    text: str


class Advanced(NamedTuple):
    """Event: work beside training has progressed. ``done`` is in [0, 1]."""

    what: str
    done: float


class Finished(NamedTuple):
    """Event: the run has ended, early or not. It carries the contents of ``summary.json``."""

    summary: Line


Event = Started | Stepped | Logged | Evaluated | Said | Advanced | Finished
Observer = Callable[[Event], None]
"""Function that gets every event, on rank 0 only."""


class FolderObserver:
    """Appends metrics to the run's ``metrics.jsonl``. If a write fails, as on a full disk, one warning is
    logged.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        """Write the metrics of an event."""
        if isinstance(event, Logged | Evaluated):
            try:
                self._folder.append_metrics(dict(event.line))
            except OSError as error:
                if not self._has_failed:
                    _logger.warning("metrics from step %d on are lost: %s", event.line["step"], error)
                self._has_failed = True


class TensorBoardObserver:
    """Writes TensorBoard event files. Without the tensorboard package, one log line says that nothing is
    written.

    When a run resumes, TensorBoard hides everything after the step that it resumes from.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._make: Any = None
        self._writer: Any = None
        try:
            # It imports TensorFlow if that is installed, which prints to stderr.
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
