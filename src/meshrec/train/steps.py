"""Run training steps with scheduled learning rates, measure them, and summarize them in metrics lines."""

import itertools
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor, nn, profiler

from meshrec.data import Batch
from meshrec.distributed import record_phases
from meshrec.planner.measured import PhaseTime, write_phases
from meshrec.train.building import BuiltModel
from meshrec.train.evaluation import OutputWindow
from meshrec.train.progress import RunProgress
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RunFolder
from meshrec.train.schedule import LearningRates
from meshrec.train.step import TrainStep
from meshrec.train.stragglers import WaitClock
from meshrec.train.table_counts import IdCounts
from meshrec.train.watch import LossError

_logger = logging.getLogger("meshrec.train")

# Maximum number of phase times that are kept per rank, and of each kind.
_MAX_TIMES = 1 << 16


class Steps:
    """Training steps with scheduled learning rates. Records phase times, a profile and failures.

    Args:
        recipe: the recipe.
        built: the model and the optimizers.
        ranks: the ranks, from `join`.
        folder: run folder; None: phase times and profile are not recorded.
        num_steps: number of steps in the learning rate schedule.
        profile: whether to record a profiler trace for a few steps in the folder.
        bf16: whether to compute the dense part in bf16.

    Attributes:
        step: runs a single step.
        phases: recorder of the time per phase.
        first_failure: number of the first step with a loss that was not finite on this rank, and a message.
            None until then.
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
        # A single rank has no exchanges to overlap.
        pipeline = training.pipeline and ranks.size > 1
        self.step = TrainStep(built, ranks, recipe.loss, bf16=bf16, pipeline=pipeline)
        self.phases = PhaseTimes(training.phases_every, folder, ranks, is_pipelined=self.step.is_pipelined)
        self.first_failure: tuple[int, str] | None = None
        self._rates = LearningRates([built.tables, built.dense], recipe.schedule, num_steps)
        self._batch_size, self._ranks = training.batch_size, ranks
        self._trace = folder.trace(ranks.rank) if profile and folder is not None else None
        # Exists only inside `profiled`.
        self._profiler: profiler.profile | None = None

    def run(self, batches: Iterator[Batch], num_samples: int, lines: "MetricLines") -> None:
        """Run a training step, and add the outputs to ``lines``. Collective.

        Args:
            batches: this rank's batches.
            num_samples: samples in the step, over all ranks.
            lines: collects the outputs for training metrics.

        Raises:
            StopIteration: no data was left for the step.
        """
        step = lines.progress.step
        # Set at every step, so that a resumed run has the same rates without stored state.
        self._rates.set(step)
        # With `training.accumulate`, a step has several batches, whose gradients are added up.
        with self.phases.recording(step):
            # The last step of an epoch may have fewer batches than `training.accumulate`.
            outputs = self.step(batches, -(-num_samples // self._batch_size), num_samples)
        lines.add(outputs)
        if self.step.failure is not None and self.first_failure is None:
            self.first_failure = (step + 1, self.step.failure)

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Context manager in which torch's profiler records a few steps, if a profile was requested.

        The profiler writes a trace to the run folder, which Perfetto (ui.perfetto.dev) can show. Without a
        request, the context manager does nothing.
        """
        if self._trace is None:
            yield
            return
        path = str(self._trace)
        # Steps 1 to 5 are skipped, steps 6 and 7 warm the profiler up, and steps 8 to 12 are recorded.
        schedule = profiler.schedule(wait=5, warmup=2, active=5, repeat=1)
        with profiler.profile(
            schedule=schedule, on_trace_ready=lambda trace: trace.export_chrome_trace(path)
        ) as self._profiler:
            yield
        self._profiler = None

    def raise_first_failure(self, latest: Callable[[], str | None]) -> NoReturn:
        """Raise a LossError about the first failed step on any rank. Collective.

        All ranks raise the same error. Call this method only after a step has failed on some rank.

        Args:
            latest: returns the path of the newest checkpoint, if there is one. Collective.
        """
        # All ranks choose the earliest step, so that they raise the same error.
        failures = [failure for failure in self._ranks.collect(self.first_failure) if failure is not None]
        step, cause = min(failures)
        path = latest()
        saved = f"The last good checkpoint is {path}" if path else "No checkpoint was saved before it"
        raise LossError(
            f"step {step}: {cause}. {saved}. Lower the learning rates (--tables.lr, --dense.lr), or clip the "
            "gradients (--training.clip-norm 1), and train again."
        )

    def end_step(self) -> None:
        """Tell the profiler that a step has ended."""
        if self._profiler is not None:
            self._profiler.step()


class PhaseTimes:
    """Recorder of the time that some steps spend in every phase, such as lookup or exchange.

    If exchanges overlap with computation, the step after a recorded step runs without overlap, and is
    recorded as well. The difference between both steps is the time that the overlap hides.

    Args:
        every: steps between recordings, at least 2 if exchanges overlap; 0: nothing is recorded.
        folder: run folder; None: nothing is recorded.
        ranks: the ranks, which all record the same steps.
        is_pipelined: whether exchanges overlap with computation.
    """

    def __init__(self, every: int, folder: RunFolder | None, ranks: Ranks, *, is_pipelined: bool) -> None:
        self._every, self._folder, self._ranks, self._is_pipelined = every, folder, ranks, is_pipelined
        # Times for steps with overlap, and for steps that wait for every exchange; cleared by `write`. Only
        # the newest are kept, because a run on a stream may take weeks.
        self._times: tuple[deque[PhaseTime], ...] = (deque(maxlen=_MAX_TIMES), deque(maxlen=_MAX_TIMES))

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Context manager for a training step. It records the step's phase times if a recording is due.

        Otherwise, it does nothing.

        Args:
            step: number of finished steps.
        """
        # A pipelined run needs two steps, so with `every` = 1 they alternate.
        every = max(self._every, 2) if self._is_pipelined else self._every
        # Record in the middle of every interval, because the first steps of a run also allocate memory.
        first = every // 2
        if not self._every or self._folder is None or step < first:
            yield
            return
        offset = (step - first) % every
        if offset > self._is_pipelined:
            yield
            return
        with record_phases(device=self._ranks.device, overlap=offset == 0) as seconds:
            yield
        rank = self._ranks.rank
        # The offset is also the index: 0 for the overlapped step, and 1 for the step after it, which waits.
        self._times[offset].extend(PhaseTime(name, rank, value, step + 1) for name, value in seconds.items())

    def write(self) -> None:
        """Write the recorded times of all ranks to the run folder, and clear them. Collective."""
        if not self._every or self._folder is None:
            return
        # Cleared on every rank, although only rank 0 writes.
        by_rank = self._ranks.collect(tuple(map(list, self._times)))
        for times in self._times:
            times.clear()
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
    """Collector of outputs and times of training steps, which it summarizes in metrics lines.

    Args:
        recipe: the recipe.
        built: the model and the optimizers.
        ranks: the ranks, from `join`.
        progress: progress of the run, to which `take` adds the samples and seconds since the last line.
        position: returns the values that tell the position in the data, such as the epoch.
    """

    def __init__(
        self,
        recipe: Recipe,
        built: BuiltModel,
        ranks: Ranks,
        progress: RunProgress,
        position: Callable[[], dict[str, float]],
    ) -> None:
        self._built, self._ranks, self.progress = built, ranks, progress
        self._position = position
        # Outputs since the last line, which `take` clears.
        self._window = OutputWindow(recipe.loss)
        # Samples and time (perf_counter) at the last `start_clock`, from which throughput is measured.
        self._since = (0, 0.0)
        self._waits = WaitClock()
        self._tables = IdCounts(built.model, ranks)
        # Samples on this rank since the last line. `take` adds their sum over ranks to the progress.
        self._num_unreported = 0

    def add(self, outputs: list[Any]) -> None:
        """Add the outputs of a step."""
        self._window.add(outputs)
        for output in outputs:
            self._num_unreported += len(output.labels)
        self._waits.record_step()

    @property
    def is_empty(self) -> bool:
        """Whether no step has been added since the last line."""
        return self._window.is_empty

    def start_clock(self) -> None:
        """Start to measure the training time for the next line.

        Called after other work, such as an evaluation, which must not count as training time.
        """
        self._since = (self.progress.num_samples, time.perf_counter())
        self._waits.start()

    def restart_waits(self) -> None:
        """Leave the time since the last step out of the time that ranks wait for one another."""
        self._waits.start()

    def step_fields(self) -> dict[str, Any]:
        """Return the values in every metrics line: step, position, samples and training seconds so far."""
        progress = self.progress
        return {
            "step": progress.step,
            **self._position(),
            "samples": progress.num_samples,
            "seconds": progress.seconds,
        }

    def take_line(self) -> dict[str, Any]:
        """Return a metrics line for the steps since the last line, and start the next line. Collective."""
        progress, built = self.progress, self._built
        # Memory is the sum of the ranks' peaks, although ranks may reach their peaks at different times.
        num_samples, memory, cpu = self._ranks.sum([self._num_unreported, *memory_and_cpu()])
        progress.num_samples += int(num_samples)
        self._num_unreported = 0
        samples, since = self._since
        # Wall-clock time since `start_clock`, without evaluations and checkpoints.
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
    """Return the peak memory (MiB) and the CPU time (seconds) of this process so far."""
    # Linux reports ru_maxrss in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, time.process_time()


def num_threads(recipe: Recipe, ranks: Ranks) -> int:
    """Return the maximum number of threads that pay in a training step on a rank."""
    return max(1, recipe.training.batch_size // ranks.size // recipe.model.samples_per_thread)


def gradient_norm(parameters: Iterable[Tensor]) -> float:
    """Return the parameters' gradient norm in the last step, after clipping."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    # A DTensor. Not isinstance, because importing the class is slow.
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
