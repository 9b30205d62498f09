"""Training steps with learning rates, profile and phase times; and the metrics lines that summarize them."""

import itertools
import logging
import math
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn, profiler
from torch.distributed.tensor import DTensor

from meshrec.data import Batch
from meshrec.distributed import record_phases
from meshrec.planner.measured import PhaseTime, write_phases
from meshrec.train.building import BuiltModel
from meshrec.train.evaluation import OutputWindow
from meshrec.train.progress import Progress
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RunFolder
from meshrec.train.schedule import LearningRates
from meshrec.train.step import TrainStep
from meshrec.train.stragglers import WaitClock
from meshrec.train.table_counts import IdCounts

_logger = logging.getLogger("meshrec.train")


class Steps:
    """Runs steps with scheduled learning rates; records phases, a profile and the first failure.

    Args:
        recipe: the recipe.
        built: the model and the optimizers.
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
        built: BuiltModel,
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
        self._profiler: profiler.profile | None = None

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
        # A step may have several batches: gradients are accumulated to the global batch size.
        with self.phases.recording(step):
            outputs = self.step(batches, -(-num_samples // self._batch_size), num_samples)
        lines.add(outputs)
        if self.step.failure is not None and self.first_failure is None:
            self.first_failure = (step + 1, self.step.failure)

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Trace some steps in this context, for Perfetto (ui.perfetto.dev), if a profile was requested."""
        if self._trace is None:
            yield
            return
        path = str(self._trace)
        # Steps 1 to 5 are skipped, 6 and 7 are warmup, 8 to 12 are recorded.
        schedule = profiler.schedule(wait=5, warmup=2, active=5, repeat=1)
        with profiler.profile(
            schedule=schedule, on_trace_ready=lambda trace: trace.export_chrome_trace(path)
        ) as self._profiler:
            yield
        self._profiler = None

    def end_step(self) -> None:
        """Tell the profiler that a step has ended."""
        if self._profiler is not None:
            self._profiler.step()


class PhaseTimes:
    """Records the time per phase of some steps.

    If exchanges overlap with computation, the step after a recorded step waits for every exchange and is
    recorded as well. The difference between both steps is the time hidden by the overlap.

    Args:
        every: steps between recordings; 0: none.
        folder: run folder; None: nothing is recorded.
        ranks: the ranks, which record the same steps.
        is_pipelined: whether exchanges overlap with computation.
    """

    def __init__(self, every: int, folder: RunFolder | None, ranks: Ranks, *, is_pipelined: bool) -> None:
        self._every, self._folder, self._ranks, self._is_pipelined = every, folder, ranks, is_pipelined
        # Times for steps with overlap, and for steps that wait for every exchange; cleared by `write`.
        self._times: tuple[list[PhaseTime], list[PhaseTime]] = ([], [])

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record the step after ``step`` steps, if a recording is due."""
        every = self._every
        # Not in the first steps, which allocate memory.
        offset = step % every - every // 2 if every and self._folder is not None else -1
        if offset != 0 and not (offset == 1 and self._is_pipelined):
            yield
            return
        with record_phases(device=self._ranks.device, overlap=offset == 0) as seconds:
            yield
        rank = self._ranks.rank
        self._times[offset].extend(PhaseTime(name, rank, value, step + 1) for name, value in seconds.items())

    def write(self) -> None:
        """Write the recorded times from all ranks. Collective."""
        if not self._every or self._folder is None:
            return
        times, self._times = self._times, ([], [])
        by_rank = self._ranks.collect(times)
        if self._ranks.is_first:
            try:
                write_phases(self._folder.phases, itertools.chain(*(overlapped for overlapped, _ in by_rank)))
                if self._is_pipelined:
                    write_phases(
                        self._folder.whole_phases, itertools.chain(*(waiting for _, waiting in by_rank))
                    )
            except OSError as error:
                _logger.warning("the time per phase is not kept: %s", error)


class MetricLines:
    """Collects samples, time and outputs of steps, and turns them into lines of training metrics.

    Args:
        recipe: the recipe.
        built: the model and the optimizers.
        ranks: the ranks, from `join`.
        progress: the progress; every line updates the samples and seconds.
        samples_per_epoch: number of training samples.
    """

    def __init__(
        self, recipe: Recipe, built: BuiltModel, ranks: Ranks, progress: Progress, samples_per_epoch: int
    ) -> None:
        self._built, self._ranks, self.progress = built, ranks, progress
        self._samples_per_epoch = samples_per_epoch
        self._window = OutputWindow(recipe.loss)
        # (num_samples, perf_counter) at the last start_clock: throughput is measured from there.
        self._since = (0, 0.0)
        self._waits = WaitClock()
        self._tables = IdCounts(built.model, ranks)
        # Samples on this rank since the last line; summed over ranks into the progress by take.
        self._num_unreported = 0

    def add(self, outputs: list[Any]) -> None:
        """Add a step's outputs."""
        self._window.add(outputs)
        for output in outputs:
            self._num_unreported += len(output.labels)
        self._waits.record_step()

    @property
    def is_empty(self) -> bool:
        """Whether no step was added since the last line."""
        return self._window.is_empty

    def start_clock(self) -> None:
        """Start to measure throughput for the next line."""
        # Evaluations between lines do not count as training time.
        self._since = (self.progress.num_samples, time.perf_counter())
        self._waits.start()

    def step_fields(self) -> dict[str, Any]:
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
        num_samples, memory, cpu = self._ranks.sum([self._num_unreported, *memory_and_cpu()])
        progress.num_samples += int(num_samples)
        self._num_unreported = 0
        samples, since = self._since
        seconds = time.perf_counter() - since
        progress.seconds += seconds
        line: dict[str, Any] = {
            "kind": "train",
            **self.step_fields(),
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


def memory_and_cpu() -> tuple[float, float]:
    """Return this process's peak memory in MiB and CPU seconds, both since process start."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.process_time()


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the last step's gradient norm, after clipping."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
