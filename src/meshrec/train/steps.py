"""Training steps, and metrics lines that summarize them."""

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
    """Runs steps with scheduled learning rates; records phases, a profile and the first failure.

    Args:
        recipe: the recipe.
        built: the model and its optimizers.
        ranks: the ranks, from `join`.
        folder: run folder; None: nothing is recorded.
        num_steps: number of steps in the whole run.
        profile: trace a few steps into the folder.
        bf16: compute the dense part in bf16.

    Attributes:
        step: runs a step.
        phases: phase time recorder.
        first_failure: first step on this rank with a non-finite loss, and the reason; None: all were finite.
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
        bf16: bool,
    ) -> None:
        training = recipe.training
        pipeline = training.pipeline and ranks.size > 1
        self.step = TrainStep(built, ranks, recipe.loss, bf16=bf16, pipeline=pipeline)
        self.phases = PhaseTimes(training.phases_every, folder, ranks, is_pipelined=self.step.is_pipelined)
        self.first_failure: tuple[int, str] | None = None
        self._rates = LearningRates([built.tables, built.dense], recipe.schedule, num_steps)
        self._batch_size = training.batch_size
        self._trace = folder.trace(ranks.rank) if profile and folder is not None else None
        # Open only inside `profiled`.
        self._profiler: StepProfiler | None = None

    def run(self, batches: Iterator[Batch], num_samples: int, lines: "MetricLines") -> None:
        """Train a step on ``num_samples`` samples over all ranks, and add it to ``lines``.

        Args:
            batches: this rank's batches.
            num_samples: number of samples over all ranks.
            lines: collects the outputs.

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
        """Record a trace of some steps in this context, if a profile was requested."""
        if self._trace is None:
            yield
            return
        with StepProfiler(self._trace) as self._profiler:
            yield
        self._profiler = None

    def end_step(self) -> None:
        """Tell the profiler that a step has ended."""
        if self._profiler is not None:
            self._profiler.step()


class MetricLines:
    """Samples, time and outputs since the last line of training metrics.

    Args:
        recipe: the recipe.
        built: the model and its optimizers.
        ranks: the ranks, from `join`.
        progress: the progress; every line updates its samples and seconds.
        samples_per_epoch: number of training samples.
    """

    def __init__(
        self, recipe: Recipe, built: Built, ranks: Ranks, progress: Progress, samples_per_epoch: int
    ) -> None:
        self._built, self._ranks, self.progress = built, ranks, progress
        self._samples_per_epoch = samples_per_epoch
        self._window = Window(recipe.loss)
        # (num_samples, perf_counter) at the last start_clock: throughput is measured from there.
        self._since = (0, 0.0)
        self._waits = WaitClock()
        self._tables = IdCounts(built.model, ranks)
        # Samples on this rank since the last line; summed over ranks into the progress by take.
        self._num_untold = 0

    def add(self, outputs: list[Any]) -> None:
        """Add a step's outputs."""
        self._window.add(outputs)
        for output in outputs:
            self._num_untold += len(output.labels)
        self._waits.stepped()

    @property
    def is_empty(self) -> bool:
        """Whether there was no step since the last line."""
        return self._window.is_empty

    def start_clock(self) -> None:
        """Start to measure throughput for the next line."""
        # Evaluations between lines do not count as training time.
        self._since = (self.progress.num_samples, time.perf_counter())
        self._waits.start()

    def where(self) -> dict[str, Any]:
        """Return step, epoch, samples and training seconds so far, which every metrics line has."""
        progress = self.progress
        epoch, sample = progress.position
        return {
            "step": progress.step,
            "epoch": epoch + sample / self._samples_per_epoch,
            "samples": progress.num_samples,
            "seconds": progress.seconds,
        }

    def take(self) -> dict[str, Any]:
        """Return a line for the steps since the last line, and start the next. Collective."""
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
