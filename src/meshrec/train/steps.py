"""The steps of a run, and a line of metrics about those since the last line."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshrec.data import Batch
from meshrec.train.building import Built
from meshrec.train.evaluation import Window
from meshrec.train.phase_times import PhaseTimes
from meshrec.train.profiling import StepProfiler
from meshrec.train.progress import Progress
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RunFolder
from meshrec.train.schedule import LearningRates
from meshrec.train.step import TrainStep
from meshrec.train.stragglers import WaitClock
from meshrec.train.table_counts import IdCounts
from meshrec.train.usage import gradient_norm, memory_and_cpu

_logger = logging.getLogger("meshrec.train")


class Steps:
    """Runs steps with their learning rates, and records phases, a profile and the first failure.

    Args:
        recipe: the recipe.
        built: the model and its optimizers.
        ranks: the ranks, from `join`.
        folder: the folder of the run; None: nothing is recorded.
        num_steps: number of steps of the whole run.
        profile: trace a few steps into the folder.

    Attributes:
        step: runs one step.
        phases: the recorder of phases.
        first_failure: the first step of this rank whose loss was not finite, and why; None: all were finite.
    """

    def __init__(
        self,
        recipe: Recipe,
        built: Built,
        ranks: Ranks,
        *,
        folder: RunFolder | None,
        num_steps: int,
        profile: bool,
    ) -> None:
        training = recipe.training
        pipeline = training.pipeline and ranks.size > 1
        self.step = TrainStep(built, ranks, recipe.loss, bf16=training.bf16, pipeline=pipeline)
        self.phases = PhaseTimes(training.phases_every, folder, ranks, is_pipelined=self.step.is_pipelined)
        self.first_failure: tuple[int, str] | None = None
        self._rates = LearningRates([built.tables, built.dense], recipe.schedule, num_steps)
        self._batch_size = training.batch_size
        self._trace = folder.trace(ranks.rank) if profile and folder is not None else None
        self._profiler: StepProfiler | None = None

    def run(self, batches: Iterator[Batch], num_samples: int, lines: "MetricLines") -> None:
        """Train one step on ``num_samples`` samples of all ranks, and add it to ``lines``.

        Raises:
            StopIteration: no data was left for the step.
        """
        step = lines.progress.step
        self._rates.set(step)
        with self.phases.recording(step):
            outputs = self.step(batches, -(-num_samples // self._batch_size), num_samples)
        lines.add(outputs)
        if self.step.failure is not None and self.first_failure is None:
            self.first_failure = (step + 1, self.step.failure)

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Record a trace of some of the steps inside, if a profile was asked for."""
        if self._trace is None:
            yield
            return
        with StepProfiler(self._trace) as self._profiler:
            yield
        self._profiler = None

    def end_step(self) -> None:
        """Tell the profile that a step is over."""
        if self._profiler is not None:
            self._profiler.step()


class MetricLines:
    """The samples, time and outputs since the last line of training metrics.

    Args:
        recipe: the recipe.
        built: the model and its optimizers.
        ranks: the ranks, from `join`.
        progress: the progress, whose samples and seconds each line brings up to date.
        samples_per_epoch: number of samples of the training data.
    """

    def __init__(
        self, recipe: Recipe, built: Built, ranks: Ranks, progress: Progress, samples_per_epoch: int
    ) -> None:
        self._built, self._ranks, self.progress = built, ranks, progress
        self._samples_per_epoch = samples_per_epoch
        self._window = Window(recipe.loss)
        self._since = (0, 0.0)
        self._waits = WaitClock()
        self._tables = IdCounts(built.model, ranks)
        self._num_untold = 0

    def add(self, outputs: list[Any]) -> None:
        """Add the outputs of a step."""
        self._window.add(outputs)
        self._num_untold += sum(len(output.labels) for output in outputs)
        self._waits.stepped()

    @property
    def is_empty(self) -> bool:
        """Whether no step came since the last line."""
        return self._window.is_empty

    def start_clock(self) -> None:
        """Measure the next line's throughput from now on."""
        self._since = (self.progress.num_samples, time.perf_counter())
        self._waits.start()

    def where(self) -> dict[str, Any]:
        """Return step, epoch, samples and seconds of training so far, which every line of metrics has."""
        progress = self.progress
        epoch, sample = progress.position
        return {
            "step": progress.step,
            "epoch": epoch + sample / self._samples_per_epoch,
            "samples": progress.num_samples,
            "seconds": progress.seconds,
        }

    def take(self) -> dict[str, Any]:
        """Return a line for the steps since the last one, and start anew. Collective."""
        progress, built = self.progress, self._built
        num_samples, memory, cpu = self._ranks.sum([self._num_untold, *memory_and_cpu()])
        progress.num_samples += int(num_samples)
        self._num_untold = 0
        samples, since = self._since
        seconds = time.perf_counter() - since
        progress.seconds += seconds
        line: dict[str, Any] = {
            "kind": "train",
            **self.where(),
            **self._window.take(self._ranks),
            "samples_per_second": (progress.num_samples - samples) / seconds,
            "lr": float(built.dense.param_groups[0]["lr"]),
            "table_lr": float(built.tables.param_groups[0]["lr"]),
            "dense_gradient_norm": gradient_norm(built.dense.params.values()),
            "peak_memory_mib": memory,
            "cpu_seconds": cpu,
            **self._tables.take(),
        }
        slowest, waiting = self._waits.take(self._ranks, seconds), ""
        if slowest is not None:
            line |= {"straggler": slowest.rank, "straggler_share": slowest.share}
            waiting = f"; {100 * slowest.share:.0f} % waiting for rank {slowest.rank}"
        _logger.info("step %d: loss %.6g%s", progress.step, line.get("loss", math.nan), waiting)
        return line
