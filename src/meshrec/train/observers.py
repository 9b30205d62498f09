"""Who is told what a run does: the run's folder, TensorBoard; the screen is the command line's."""

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
    """What is known before the first step."""

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
    """A step is done: its number, and how many samples it had."""

    step: int
    num_samples: int


class Logged(NamedTuple):
    """Training metrics of the last steps."""

    line: Line


class Evaluated(NamedTuple):
    """Metrics of validation or test data (``line["kind"]``), and whether their AUC is the best so far."""

    line: Line
    is_best: bool


class Said(NamedTuple):
    """Something that users should know."""

    text: str


class Advanced(NamedTuple):
    """Work beside training goes on: what, and how much of it is done, in [0, 1]."""

    what: str
    done: float


class Finished(NamedTuple):
    """The end, early or not: what ``summary.json`` says."""

    summary: Line


Event = Started | Stepped | Logged | Evaluated | Said | Advanced | Finished
Observer = Callable[[Event], None]
"""Is told every event, on rank 0 only."""


class FolderObserver:
    """Appends metrics to the run's ``metrics.jsonl``; on a full disk, a warning says what is not written."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        """Takes note of metrics."""
        if isinstance(event, Logged | Evaluated):
            try:
                self._folder.append_metrics(dict(event.line))
            except OSError as error:
                if not self._has_failed:
                    _logger.warning("metrics from step %d on are not kept: %s", event.line["step"], error)
                self._has_failed = True


class TensorBoardObserver:
    """Writes event files; without the tensorboard package, one log line says so and nothing is written.

    Where a run is resumed, TensorBoard no longer shows what came after the step that it goes on from.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._make: Any = None
        self._writer: Any = None
        try:
            # It imports TensorFlow where that is installed, which talks.
            with contextlib.redirect_stderr(io.StringIO()):
                from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            _logger.warning("no TensorBoard events are written: install meshrec[train] for them.")
        else:
            self._make = SummaryWriter

    def __call__(self, event: Event) -> None:
        """Writes scalars under ``train/``, ``validation/`` and ``test/``."""
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
