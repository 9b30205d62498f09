"""The trainer: it runs the steps, metrics, evaluations and checkpoints of a run, and ends it."""

import itertools
import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from meshrec.checkpoint import CheckpointError, CheckpointManager, DeltaPublisher
from meshrec.checkpoint.stored import ObjectStore, StoredCheckpoints
from meshrec.data import Batch, Dataset, Reader, prefetch
from meshrec.distributed import record_phases
from meshrec.metrics import curves_of, score_histograms
from meshrec.metrics.named import leading_metric, quality, title_of
from meshrec.model_parallel import DistributedModelParallel
from meshrec.reports.measured import PhaseTime, write_phases
from meshrec.train.building import Built, build
from meshrec.train.checkpoints import Checkpoints
from meshrec.train.evaluation import Scored, Window, evaluate, outputs_of, score
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.observers import Evaluated, Event, Logged, Observer, Said, Started, Stepped
from meshrec.train.profiling import StepProfiler
from meshrec.train.progress import Progress
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import DELTAS, RunFolder
from meshrec.train.schedule import LearningRates
from meshrec.train.step import TrainStep
from meshrec.train.stopping import EarlyStopping, StopRequest
from meshrec.train.stragglers import WaitClock
from meshrec.train.usage import gradient_norm, memory_and_cpu
from meshrec.train.watch import LossError
from meshrec.train.weights import BestWeights

_logger = logging.getLogger("meshrec.train")


class Trainer:
    """Trains a recipe on a dataset. Every rank has a trainer, and all of them work in step.

    Args:
        recipe: the recipe.
        dataset: the dataset that ``recipe.data`` loaded.
        ranks: the ranks, from `join`.
        folder: the folder of the run; None: nothing is stored.
        observer: receives the events of the run, on every rank that passes one.
        stop: can request an early end.
        profile: trace a few steps.
        keep: save checkpoints. If not, each rank keeps its part of the best weights in memory.
        store: where checkpoints go; if none, into the folder.

    Attributes:
        state: everything that a checkpoint stores, by name: the model, its optimizers, the progress, early
            stopping. Learning rates and the order of samples are functions of the progress.
        stopped: whether `stop` ended the run.
        validation: validation metrics of the weights that the run reports.
        test: test metrics of these weights. The test data is read once, at the end.
        curves: the ROC curve and the calibration of these weights by part of the data, for clicks only; see
            `meshrec.metrics.curves_of`.
        weights_step: the step of these weights: the best by validation AUC, or the last.
        failures: the error of each checkpoint that could not be saved.
        is_saved: whether the final state is on disk; True if nothing is stored.

    Raises:
        ValueError: these ranks cannot run the recipe; raised on every rank.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        ranks: Ranks,
        *,
        folder: RunFolder | None = None,
        observer: Observer | None = None,
        stop: StopRequest | None = None,
        profile: bool = False,
        keep: bool = True,
        store: ObjectStore | None = None,
    ) -> None:
        recipe.check(ranks.size)
        self.recipe, self.dataset, self.ranks, self.folder = recipe, dataset, ranks, folder
        self.built: Built = build(recipe, dataset, ranks)
        self.progress = Progress()
        self.early = EarlyStopping(recipe.training.patience)
        self.state: dict[str, Any] = {
            "model": self.built.model,
            "table_optimizer": self.built.tables,
            "dense_optimizer": self.built.dense,
            "progress": self.progress,
            "early_stopping": self.early,
        }
        self.stopped = False
        self.validation: dict[str, float] = {}
        self.test: dict[str, float] = {}
        self.curves: dict[str, Any] = {}
        self._histograms: dict[str, Tensor] = {}
        self.weights_step = 0
        self.failures: list[str] = []
        self.is_saved = True
        self._observer = observer
        self._stop = stop or StopRequest()
        self._profile = profile
        self._profiler: StepProfiler | None = None
        self._step = TrainStep(
            self.built,
            ranks,
            recipe.loss,
            bf16=recipe.training.bf16,
            pipeline=recipe.training.pipeline and ranks.size > 1,
        )
        self._rates = LearningRates([self.built.tables, self.built.dense], recipe.schedule, self.num_steps)
        self._window = Window(recipe.loss)
        self._checkpoints: Checkpoints | None = None
        self._publisher: DeltaPublisher | None = None
        best: CheckpointManager | StoredCheckpoints | None = None
        if folder is not None and keep:
            self._checkpoints = Checkpoints(
                folder, recipe.training, ranks, self.state, lambda text: self._tell(Said(text)), store=store
            )
            self.failures, best = self._checkpoints.failures, self._checkpoints.best
        self._best = BestWeights(self.built.model, best)
        self._phase_times: list[PhaseTime] = []
        self._whole_times: list[PhaseTime] = []
        self._logged = (0, 0.0)
        self._waits = WaitClock()
        self._measured_step = -1
        self._kept_step: int | None = None
        self._first_failure: tuple[int, str] | None = None
        self._num_untold = 0
        """Number of samples this rank has trained since the ranks last added up their counts."""

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one pass over the data; the last one may have fewer samples."""
        return -(-self.dataset.train.num_samples // self._samples_per_step)

    @property
    def num_steps(self) -> int:
        """Number of steps of the whole run, unless it ends early."""
        training = self.recipe.training
        steps = training.epochs * self.steps_per_epoch
        return steps if training.max_steps is None else min(steps, training.max_steps)

    def resume(self) -> bool:
        """Continue from the folder's newest intact checkpoint; return False if there is none. Collective."""
        if self._checkpoints is None or self.folder is None:
            return False
        groups = [group for each in (self.built.tables, self.built.dense) for group in each.param_groups]
        options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        found = self._checkpoints.resume()
        for group, values in zip(groups, options, strict=True):
            group.update(values)  # the recipe's, not those of the checkpoint
        if found and self.ranks.is_first:
            step = self.progress.step
            self.folder.forget_after(step, judged=self.early.last_step == step)
        return found

    def run(self) -> dict[str, float]:
        """Train to the end, or until an early stop; return the validation metrics of the selected weights.

        Raises:
            LossError: the loss of a step is NaN or infinite on one of the ranks; raised on every rank.
        """
        self._tell(self._started())
        self._publisher = self._make_publisher()
        with ExitStack() as stack:
            if self._profile and self.folder is not None:
                self._profiler = stack.enter_context(StepProfiler(self.folder.trace(self.ranks.rank)))
            if self._owes_an_evaluation():
                self._evaluate()
            while not self._is_over():
                self._epoch()
        if self._stop.finish().failed:
            self._fail()
        self._log_rest()
        if self.progress.step and not self.progress.num_samples:
            raise ValueError(
                f"nothing was trained: all rows of {self.dataset.name!r} were left out as damaged, see the "
                "warnings. Repair the data."
            )
        self._write_phases()
        self._publish()
        if self._checkpoints is not None:
            # Save before the best weights replace the last ones: training can continue only from the latter.
            self.is_saved = self._checkpoints.finish(self.progress.step)
        self._finish()
        return self.validation

    def evaluate(self, reader: Reader) -> dict[str, float]:
        """Return the metrics of other samples, such as ``dataset.open(paths, True)``. Collective."""
        bf16, loss = self.recipe.training.bf16, self.recipe.loss
        return evaluate(self.built.model, reader, self.ranks, bf16=bf16, loss=loss)

    def predict(self, reader: Reader) -> Iterator[Scored]:
        """Yield the logits of this rank's part of ``reader``, in order. Collective until the iterator is
        exhausted.
        """
        return score(self.built.model, reader, self.ranks, bf16=self.recipe.training.bf16)

    def _owes_an_evaluation(self) -> bool:
        """Return whether a resumed run was stopped between the end of an epoch and the evaluation of that
        epoch.
        """
        at_end = self.progress.step > 0 and self.progress.position.sample == 0
        between = self.recipe.training.evaluate_every is None and self.early.last_step < self.progress.step
        return at_end and between and not self._is_over()

    @property
    def _samples_per_step(self) -> int:
        return self.recipe.training.batch_size * self.recipe.training.accumulate

    def _is_over(self) -> bool:
        return self.stopped or self.progress.step >= self.num_steps or self.early.is_over

    def _epoch(self) -> None:
        """Train the rest of the epoch, or of the run."""
        training, ranks = self.recipe.training, self.ranks
        reader = self.dataset.train.batches(
            training.batch_size // ranks.size,
            position=self.progress.position,
            rank=ranks.rank,
            world_size=ranks.size,
        )
        with prefetch(reader, training.prefetch) as batches:
            self._start_clock()
            try:
                while self._one_step(batches):
                    if self._is_over():
                        return
                    if self.progress.position.sample == 0:
                        break
            finally:
                self._step.reset()  # batches in flight have not been trained on
        if training.evaluate_every is None:
            self._evaluate()
            # After the evaluation: the checkpoint of an epoch's last step includes its result.
            self._checkpoint()

    def _make_publisher(self) -> DeltaPublisher | None:
        if self.recipe.training.publish_every is None or self.folder is None:
            return None
        model = self.built.model
        assert isinstance(model, DistributedModelParallel)
        folder = self.folder.path / DELTAS
        progress = self.progress
        return DeltaPublisher(
            model, folder, run=self.folder.path.name, step=progress.step, after=progress.published
        )

    def _publish(self) -> None:
        """Write a delta. If that fails, it is reported, and the next delta contains the same rows.

        A delta precedes every checkpoint and every stored best model. Servers that start from one of them,
        and a run that resumes from it, then miss no step.
        """
        if self._publisher is not None:
            try:
                self._publisher.publish(self.progress.step)
            except CheckpointError as error:
                self._tell(Said(f"no delta was published: {error}"))
            self.progress.published = self._publisher.last

    def _checkpoint(self) -> None:
        if self._checkpoints is not None and self._checkpoints.is_due(self.progress.step):
            self._log_rest()  # a run that resumes here has lost these metrics
            self._publish()
            self._checkpoints.save(self.progress.step)

    def _one_step(self, batches: Iterator[Batch]) -> bool:
        """Train one step; return False if no data was left for it."""
        progress, training = self.progress, self.recipe.training
        self._rates.set(progress.step)
        left = self.dataset.train.num_samples - progress.position.sample
        num_samples = min(self._samples_per_step, left)  # fewer at the end of an epoch only
        try:
            with self._phases():
                outputs = self._step(batches, -(-num_samples // training.batch_size), num_samples)
        except StopIteration:
            return False
        self._window.add(outputs)
        if self._step.failure is not None and self._first_failure is None:
            self._first_failure = (progress.step + 1, self._step.failure)
        self._num_untold += sum(len(output.labels) for output in outputs)
        progress.advance(num_samples, self.dataset.train.num_samples)
        step = progress.step
        self._waits.stepped()
        self._tell(Stepped(step, num_samples))
        logs = step % training.log_every == 0
        evaluates = training.evaluate_every is not None and step % training.evaluate_every == 0
        # The last step of an epoch is saved after its evaluation.
        saves = progress.position.sample > 0 or training.evaluate_every is not None
        saves = saves and self._checkpoints is not None and self._checkpoints.is_due(step)
        ends_epoch = progress.position.sample == 0
        publishes = training.publish_every is not None and step % training.publish_every == 0
        # All ranks must know that the step succeeded before anything of it is reported or stored.
        agreed = self._stop.agreed(
            self.ranks,
            failed=self._step.failure is not None,
            at_once=logs or evaluates or saves or publishes or ends_epoch,
        )
        if agreed.failed:
            self._fail()
        if logs:
            self._log()
        if publishes:
            self._publish()
        if evaluates:
            self._evaluate()
        if self._profiler is not None:
            self._profiler.step()
        if saves:
            self._checkpoint()
        self.stopped = agreed.stop
        return True

    def _fail(self) -> None:
        """Raise the error that one of the ranks saw, on every rank."""
        found = [each for each in self.ranks.collect(self._first_failure) if each is not None]
        step, cause = min(found)
        latest = None
        if self._checkpoints is not None:
            self._checkpoints.wait()  # the newest may still be being written
            latest = self._checkpoints.latest()
        kept = f"The last good checkpoint is {latest}" if latest else "No checkpoint was saved before it"
        raise LossError(
            f"step {step}: {cause}. {kept}. Lower the learning rates (--tables.lr, --dense.lr), or clip the "
            "gradients (--training.clip-norm 1), and train again."
        )

    def _count(self) -> dict[str, float]:
        """Count the samples since the last call; return memory in MiB and CPU seconds, summed over the ranks.
        Collective.
        """
        num_samples, memory, cpu = self.ranks.sum([self._num_untold, *memory_and_cpu()])
        self.progress.num_samples += int(num_samples)
        self._num_untold = 0
        return {"peak_memory_mib": memory, "cpu_seconds": cpu}

    def _log(self) -> None:
        """Report a line of training metrics for the samples and the time since the last line."""
        used = self._count()
        samples, since = self._logged
        seconds = time.perf_counter() - since
        self.progress.seconds += seconds
        line = {
            "kind": "train",
            **self._where(),
            **self._window.take(self.ranks),
            "samples_per_second": (self.progress.num_samples - samples) / seconds,
            "lr": float(self.built.dense.param_groups[0]["lr"]),
            "table_lr": float(self.built.tables.param_groups[0]["lr"]),
            "dense_gradient_norm": gradient_norm(self.built.dense.params.values()),
            **used,
        }
        slowest = self._waits.take(self.ranks, seconds)
        waiting = ""
        if slowest is not None:
            line |= {"straggler": slowest.rank, "straggler_share": slowest.share}
            waiting = f"; {100 * slowest.share:.0f} % waiting for rank {slowest.rank}"
        _logger.info("step %d: loss %.6g%s", self.progress.step, line.get("loss", math.nan), waiting)
        self._tell(Logged(line))
        self._write_phases()
        self._start_clock()

    def _log_rest(self) -> None:
        """Report the samples since the last line, if there are any."""
        if not self._window.is_empty:
            self._log()

    def _start_clock(self) -> None:
        self._logged = (self.progress.num_samples, time.perf_counter())
        self._waits.start()

    def _where(self) -> dict[str, Any]:
        progress = self.progress
        epoch, sample = progress.position
        return {
            "step": progress.step,
            "epoch": epoch + sample / self.dataset.train.num_samples,
            "samples": progress.num_samples,
            "seconds": progress.seconds,
        }

    def _evaluate(self) -> None:
        self._log_rest()
        if self.dataset.validation is None:
            return
        self.validation = self._judge("validation", self.dataset.validation)
        self.weights_step = self._measured_step = self.progress.step
        found = quality(self.validation)
        best = self.early.improves(found, self.progress.step)
        if best:
            self._keep()
        self._tell(Evaluated({"kind": "validation", **self._where(), **self.validation}, best))
        self._start_clock()

    def _keep(self) -> None:
        self._publish()
        try:
            self._best.keep(self.progress)
            self._kept_step = self.progress.step
        except CheckpointError as error:
            assert self._checkpoints is not None
            self._checkpoints.failed(error)

    def _judge(self, data: str, reader: Reader) -> dict[str, float]:
        recipe = self.recipe
        outputs = outputs_of(self.built.model, reader, self.ranks, bf16=recipe.training.bf16)
        found = recipe.loss.metrics(*outputs, group=self.ranks.control)
        if isinstance(recipe.loss, BinaryCrossEntropy):
            self._histograms[data] = score_histograms(*outputs)
        if not math.isfinite(found.get("loss", 0.0)):
            raise LossError(
                f"step {self.progress.step}: the loss on the validation data is {found['loss']}. Lower the "
                "learning rates (--tables.lr, --dense.lr), or clip the gradients (--training.clip-norm 1)."
            )
        return found

    def _finish(self) -> None:
        """Restore the best weights and evaluate them on the test data. A stopped run evaluates nothing."""
        if not self.stopped and self._measured_step != self.progress.step:
            self._evaluate()
        self.weights_step = self.progress.step
        if self._kept_step != self.progress.step and self.dataset.validation is not None:
            step = self._best.restore()
            if step is not None and step != self.progress.step:
                self.weights_step = step
                self.validation = self._judge("validation", self.dataset.validation)
                by = title_of(leading_metric(self.validation) or "loss")
                self._tell(Said(f"took the weights of step {step}, the best by validation {by}"))
        if not self.stopped and self.dataset.test is not None:
            self.test = self._judge("test", self.dataset.test)
            line = {"kind": "test", **self._where(), "step": self.weights_step, **self.test}
            self._tell(Evaluated(line, False))
        for data, histograms in self._histograms.items():
            total = self.ranks.sum(histograms.flatten().tolist())
            self.curves[data] = curves_of(torch.tensor(total, dtype=torch.float64).view(histograms.shape))

    @contextmanager
    def _phases(self) -> Iterator[None]:
        """Record the time per phase in some steps, in the same ones on all ranks.

        If exchanges overlap with computation, the next step waits for each exchange and is recorded as well:
        the difference is the time that the overlap hides.
        """
        every, step = self.recipe.training.phases_every, self.progress.step
        place = step % every - every // 2 if every and self.folder is not None else -1
        # Not in the first steps, which allocate memory.
        if place != 0 and not (place == 1 and self._step.is_pipelined):
            yield
            return
        with record_phases(device=self.ranks.device, overlap=place == 0) as seconds:
            yield
        rank = self.ranks.rank
        times = self._phase_times if place == 0 else self._whole_times
        times += [PhaseTime(name, rank, value, step + 1) for name, value in seconds.items()]

    def _write_phases(self) -> None:
        every = self.recipe.training.phases_every
        if every and self.folder is not None:
            times = self._phase_times, self._whole_times
            self._phase_times, self._whole_times = [], []
            found = self.ranks.collect(times)
            if self.ranks.is_first:
                try:
                    write_phases(self.folder.phases, itertools.chain(*(each for each, _ in found)))
                    if self._step.is_pipelined:
                        write_phases(self.folder.whole_phases, itertools.chain(*(each for _, each in found)))
                except OSError as error:
                    _logger.warning("the time per phase is not kept: %s", error)

    def _tell(self, event: Event) -> None:
        if self._observer is not None:
            self._observer(event)

    def _started(self) -> Started:
        tables, dense = self.built.num_parameters()
        validation = self.dataset.validation
        return Started(
            recipe=self.recipe,
            folder=self.folder,
            dataset=self.dataset.name,
            num_samples=self.dataset.train.num_samples,
            num_validation=0 if validation is None else validation.num_samples,
            num_test=0 if self.dataset.test is None else self.dataset.test.num_samples,
            num_ranks=self.ranks.size,
            device=self.ranks.device.type,
            num_table_parameters=tables,
            num_dense_parameters=dense,
            plan=self.built.plan,
            first_step=self.progress.step,
            num_steps=self.num_steps,
        )
