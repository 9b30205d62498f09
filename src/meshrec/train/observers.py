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
    """Validation metrics, and whether their AUC is the best so far."""

    line: Line
    is_best: bool


class Said(NamedTuple):
    """Something that users should know."""

    text: str


class Finished(NamedTuple):
    """The end, early or not: what ``summary.json`` says."""

    summary: Line


Event = Started | Stepped | Logged | Evaluated | Said | Finished
Observer = Callable[[Event], None]
"""Is told every event, on rank 0 only."""


class FolderObserver:
    """Appends metrics to the run's ``metrics.jsonl``."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __call__(self, event: Event) -> None:
        """Takes note of metrics."""
        if isinstance(event, Logged | Evaluated):
            self._folder.append_metrics(dict(event.line))


class TensorBoardObserver:
    """Writes event files; without the tensorboard package, one log line says so and nothing is written."""

    def __init__(self, folder: Path) -> None:
        self._writer: Any = None
        try:
            # It imports TensorFlow where that is installed, which talks.
            with contextlib.redirect_stderr(io.StringIO()):
                from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            _logger.warning("no TensorBoard events are written: install meshrec[train] for them.")
        else:
            self._writer = SummaryWriter(str(folder))

    def __call__(self, event: Event) -> None:
        """Writes scalars under ``train/`` and ``validation/``."""
        if self._writer is None:
            return
        if isinstance(event, Logged | Evaluated):
            tag = "train" if isinstance(event, Logged) else "validation"
            for name, value in event.line.items():
                if isinstance(value, float):
                    self._writer.add_scalar(f"{tag}/{name}", value, event.line["step"])
            self._writer.flush()
        elif isinstance(event, Finished):
            self._writer.close()
