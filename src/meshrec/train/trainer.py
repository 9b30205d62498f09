"""The trainer: it runs the steps, metrics, evaluations and checkpoints of a run, and ends it."""

from collections.abc import Iterator

from meshrec.checkpoint.stored import ObjectStore
from meshrec.data import Batch, Dataset, Reader, prefetch
from meshrec.data.balance import balanced_reader
from meshrec.metrics.named import leading_metric, title_of
from meshrec.ops.memory import frozen_objects
from meshrec.train.building import Built, build
from meshrec.train.evaluation import Scored, evaluate, score
from meshrec.train.judge import Judge
from meshrec.train.keeper import Keeper
from meshrec.train.observers import Evaluated, Event, Logged, Observer, Said, Started, Stepped
from meshrec.train.progress import Progress
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RunFolder
from meshrec.train.steps import MetricLines, Steps
from meshrec.train.stopping import StopRequest
from meshrec.train.watch import LossError


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
        built: the model and its optimizers.
        progress: the progress of the run.
        keeper: checkpoints, deltas and best weights, and the state that a checkpoint stores.
        judge: metrics of the weights that the run reports, and early stopping.
        stopped: whether `stop` ended the run.

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
        self.recipe, self.dataset, self.ranks = recipe, dataset, ranks
        self._observer = observer
        self._stop = stop or StopRequest()
        self.stopped = False
        self.built: Built = build(recipe, dataset, ranks)
        self.progress = Progress()
        self.judge = Judge(recipe, dataset, self.built.model, ranks)
        self.keeper = Keeper(
            self.built,
            self.progress,
            self.judge.early,
            training=recipe.training,
            ranks=ranks,
            folder=folder,
            keep=keep,
            store=store,
            tell=lambda text: self._tell(Said(text)),
        )
        self._steps = Steps(
            recipe, self.built, ranks, folder=folder, num_steps=self.num_steps, profile=profile
        )
        self._lines = MetricLines(recipe, self.built, ranks, self.progress, dataset.train.num_samples)

    @property
    def validation(self) -> dict[str, float]:
        """Validation metrics of the weights that the run reports."""
        return self.judge.validation

    @property
    def test(self) -> dict[str, float]:
        """Test metrics of these weights; empty before the end of the run."""
        return self.judge.test

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
        """Load the folder's newest intact checkpoint; return False if there is none. Collective."""
        folder = self.keeper.folder
        found = self.keeper.resume()
        if found and folder is not None and self.ranks.is_first:
            step = self.progress.step
            folder.forget_after(step, judged=self.judge.early.last_step == step)
        return found

    def run(self) -> dict[str, float]:
        """Train to the end, or until an early stop; return the validation metrics of the selected weights.

        Raises:
            LossError: the loss of a step is NaN or infinite on one of the ranks; raised on every rank.
        """
        self._tell(self._started())
        is_fitted = self._begins_with_fitted_weights()
        self.keeper.start()
        with frozen_objects(), self._steps.profiled():
            if is_fitted or self._owes_an_evaluation():
                self._evaluate()
            if is_fitted:
                self.judge.prefer_first()
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
        self._steps.phases.write()
        # Save before the best weights replace the last ones: training can continue only from the latter.
        self.keeper.finish()
        self._finish()
        return self.validation

    def evaluate(self, reader: Reader) -> dict[str, float]:
        """Return the metrics of other samples, such as ``dataset.open(paths, True)``. Collective."""
        bf16, loss = self.recipe.training.bf16, self.recipe.loss
        return evaluate(self.built.model, reader, self.ranks, bf16=bf16, loss=loss)

    def predict(self, reader: Reader) -> Iterator[Scored]:
        """Compute the logits of this rank's part of ``reader``, in order. Collective until the iterator is
        exhausted.
        """
        return score(self.built.model, reader, self.ranks, bf16=self.recipe.training.bf16)

    def _begins_with_fitted_weights(self) -> bool:
        start = self.recipe.model.start
        return self.progress.step == 0 and start(self.built.model, self.recipe, self.dataset, self.ranks)

    def _owes_an_evaluation(self) -> bool:
        """Return whether a resumed run was stopped between the end of an epoch and the evaluation of that
        epoch.
        """
        at_end = self.progress.step > 0 and self.progress.position.sample == 0
        between = (
            self.recipe.training.evaluate_every is None and self.judge.early.last_step < self.progress.step
        )
        return at_end and between and not self._is_over()

    @property
    def _samples_per_step(self) -> int:
        return self.recipe.training.batch_size * self.recipe.training.accumulate

    def _is_over(self) -> bool:
        return self.stopped or self.progress.step >= self.num_steps or self.judge.early.is_over

    def _epoch(self) -> None:
        """Train the rest of the epoch, or of the run."""
        training, ranks = self.recipe.training, self.ranks
        train = self.dataset.train
        if training.balance and ranks.size > 1:
            train = balanced_reader(self.dataset, self.recipe.model.attention_width)
        reader = train.batches(
            training.batch_size // ranks.size,
            position=self.progress.position,
            rank=ranks.rank,
            world_size=ranks.size,
        )
        with prefetch(reader, training.prefetch) as batches:
            self._lines.start_clock()
            try:
                while self._one_step(batches):
                    if self._is_over():
                        return
                    if self.progress.position.sample == 0:
                        break
            finally:
                self._steps.step.reset()  # batches in flight have not been trained on
        if training.evaluate_every is None:
            self._evaluate()
            # After the evaluation: the checkpoint of an epoch's last step includes its result.
            self._checkpoint()

    def _checkpoint(self) -> None:
        if self.keeper.is_due(self.progress.step):
            self._log_rest()  # a run that resumes here has lost these metrics
            self.keeper.save()

    def _one_step(self, batches: Iterator[Batch]) -> bool:
        """Train one step; return False if no data was left for it."""
        progress, training = self.progress, self.recipe.training
        left = self.dataset.train.num_samples - progress.position.sample
        num_samples = min(self._samples_per_step, left)  # fewer at the end of an epoch only
        try:
            self._steps.run(batches, num_samples, self._lines)
        except StopIteration:
            return False
        progress.advance(num_samples, self.dataset.train.num_samples)
        step = progress.step
        self._tell(Stepped(step, num_samples))
        logs = step % training.log_every == 0
        evaluates = training.evaluate_every is not None and step % training.evaluate_every == 0
        # The last step of an epoch is saved after its evaluation.
        saves = progress.position.sample > 0 or training.evaluate_every is not None
        saves = saves and self.keeper.is_due(step)
        ends_epoch = progress.position.sample == 0
        publishes = training.publish_every is not None and step % training.publish_every == 0
        # All ranks must know that the step succeeded before anything of it is reported or stored.
        agreed = self._stop.agreed(
            self.ranks,
            failed=self._steps.step.failure is not None,
            at_once=logs or evaluates or saves or publishes or ends_epoch,
        )
        if agreed.failed:
            self._fail()
        if logs:
            self._log()
        if publishes:
            self.keeper.publish()
        if evaluates:
            self._evaluate()
        self._steps.end_step()
        if saves:
            self._checkpoint()
        self.stopped = agreed.stop
        return True

    def _fail(self) -> None:
        """Raise the error that one of the ranks saw, on every rank."""
        found = [each for each in self.ranks.collect(self._steps.first_failure) if each is not None]
        step, cause = min(found)
        latest = self.keeper.latest()
        kept = f"The last good checkpoint is {latest}" if latest else "No checkpoint was saved before it"
        raise LossError(
            f"step {step}: {cause}. {kept}. Lower the learning rates (--tables.lr, --dense.lr), or clip the "
            "gradients (--training.clip-norm 1), and train again."
        )

    def _log(self) -> None:
        """Report a line of training metrics for the samples and the time since the last line."""
        self._tell(Logged(self._lines.take()))
        self._steps.phases.write()
        self._lines.start_clock()

    def _log_rest(self) -> None:
        """Report the samples since the last line, if there are any."""
        if not self._lines.is_empty:
            self._log()

    def _evaluate(self) -> None:
        self._log_rest()
        if self.dataset.validation is None:
            return
        is_best = self.judge.validate(self.progress.step)
        if is_best:
            self.keeper.keep_best()
        self._tell(Evaluated({"kind": "validation", **self._lines.where(), **self.validation}, is_best))
        self._lines.start_clock()

    def _finish(self) -> None:
        """Load the best weights and evaluate them on the test data. A stopped run evaluates nothing."""
        judge, step = self.judge, self.progress.step
        if not self.stopped and judge.last_step != step:
            self._evaluate()
        judge.weights_step = step
        best = None if self.dataset.validation is None else self.keeper.restore_best()
        if best is not None:
            judge.remeasure(best, step)
            by = title_of(leading_metric(judge.validation) or "loss")
            self._tell(Said(f"took the weights of step {best}, the best by validation {by}"))
        if not self.stopped and self.dataset.test is not None:
            judge.examine(step)
            line = {"kind": "test", **self._lines.where(), "step": judge.weights_step, **judge.test}
            self._tell(Evaluated(line, False))
        judge.draw_curves()

    def _tell(self, event: Event) -> None:
        if self._observer is not None:
            self._observer(event)

    def _started(self) -> Started:
        tables, dense = self.built.num_parameters()
        validation = self.dataset.validation
        return Started(
            recipe=self.recipe,
            folder=self.keeper.folder,
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
