"""Events of a run, and observers that write them to the run folder and to TensorBoard.

The command line has another observer, for the screen (``cli/screen.py``).
"""

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
"""A line in ``metrics.jsonl``: values by name."""


class Started(NamedTuple):
    """Event: the run starts its first step, with everything that is known before this step.

    Attributes:
        recipe: the recipe.
        folder: run folder; None if the trainer has none.
        dataset: name of the dataset.
        num_samples: number of training samples; None: a stream without an end.
        num_validation: number of validation samples.
        num_test: number of test samples.
        num_ranks: number of ranks.
        device: device type.
        num_table_parameters: number of parameters in the embedding tables.
        num_dense_parameters: number of all other parameters.
        plan: sharding plan; None for an unsharded model.
        first_step: number of steps finished by earlier starts of the run.
        num_steps: step at which the run ends; None: it has no last step.
    """

    recipe: Recipe
    folder: RunFolder | None
    dataset: str
    num_samples: int | None
    num_validation: int
    num_test: int
    num_ranks: int
    device: str
    num_table_parameters: int
    num_dense_parameters: int
    plan: PlannedShardingPlan | None
    first_step: int
    num_steps: int | None


class Stepped(NamedTuple):
    """Event: a training step has finished.

    Attributes:
        step: number of finished steps.
        num_samples: samples in this step, over all ranks.
    """

    step: int
    num_samples: int


class Logged(NamedTuple):
    """Event: metrics of the training steps since the last such event.

    Attributes:
        line: metrics by name.
    """

    line: Line


class Evaluated(NamedTuple):
    """Event: the model was evaluated on held-out data.

    Attributes:
        line: metrics by name; ``line["kind"]`` is ``validation`` or ``test``.
        is_best: whether these validation metrics are the best so far.
    """

    line: Line
    is_best: bool


class Reported(NamedTuple):
    """Event: a message for the user.

    Attributes:
        text: the message.
    """

    text: str


class Progressed(NamedTuple):
    """Event: progress of a task outside training.

    Attributes:
        task: name of the task, such as ``baselines``.
        share: finished share of the task in [0, 1].
    """

    task: str
    share: float


class Finished(NamedTuple):
    """Event: the run has ended, early or not.

    Attributes:
        summary: ``summary.json`` content.
    """

    summary: Line


Event = Started | Stepped | Logged | Evaluated | Reported | Progressed | Finished
Observer = Callable[[Event], None]
"""Function that is called with every event, usually on rank 0 only."""


class FolderObserver:
    """Observer that appends metrics to the run's ``metrics.jsonl``.

    If a write fails, for example because the disk is full, a single warning is logged. Training continues.

    Args:
        folder: run folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        # Set by the first failed write, so that there is only one warning.
        self._has_failed = False

    def __call__(self, event: Event) -> None:
        """Write the metrics in an event, if it has any."""
        if isinstance(event, Logged | Evaluated):
            try:
                self._folder.append_metrics(dict(event.line))
            except OSError as error:
                if not self._has_failed:
                    _logger.warning("metrics from step %d on are lost: %s", event.line["step"], error)
                self._has_failed = True


class TensorBoardObserver:
    """Observer that writes metrics to TensorBoard event files.

    Without the tensorboard package, it logs a warning and writes nothing. When a run resumes from a
    checkpoint, TensorBoard hides the values of later steps from the previous start.

    Args:
        folder: folder for the event files.
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
        """Write the event's float metrics as scalars ``train/NAME``, ``validation/NAME`` or ``test/NAME``.

        `Started` opens the event file, and `Finished` closes it.
        """
        if isinstance(event, Started) and self._make is not None:
            # Hides the points which an earlier start has written after the step from which this one
            # continues.
            self._writer = self._make(str(self._folder), purge_step=event.first_step + 1)
        if self._writer is None:
            return
        if isinstance(event, Logged | Evaluated):
            tag = event.line.get("kind", "train")
            try:
                for name, value in event.line.items():
                    # Counters such as step and samples are integers, and are not worth a chart.
                    if isinstance(value, float):
                        self._writer.add_scalar(f"{tag}/{name}", value, event.line["step"])
                self._writer.flush()
            except OSError as error:
                _logger.warning("no more TensorBoard events are written: %s", error)
                self._writer = None
        elif isinstance(event, Finished):
            self._writer.close()
