"""The training loop: steps, metrics, evaluations and checkpoints."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshrec.checkpoint.matching import Differences
from meshrec.data import Batch, Dataset, Reader, prefetch
from meshrec.metrics.named import leading_metric, metric_title
from meshrec.ops.memory import frozen_objects
from meshrec.ops.threads import at_most_threads
from meshrec.train.building import BuiltModel, build
from meshrec.train.evaluation import Scored, evaluate, score
from meshrec.train.observers import Evaluated, Event, Logged, Observer, Reported, Started, Stepped
from meshrec.train.precision import LossCheck, check_loss, choose_precision
from meshrec.train.progress import Progress
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import RunFolder
from meshrec.train.saver import CheckpointSaver
from meshrec.train.steps import MetricLines, Steps, num_threads
from meshrec.train.stopping import StopRequest
from meshrec.train.weights_evaluator import WeightsEvaluator

if TYPE_CHECKING:
    from meshrec.checkpoint.stored import ObjectStore


class Trainer:
    """Trainer of a recipe's model on a dataset. Every rank has a trainer, and all ranks call it together.

    Args:
        recipe: the recipe.
        dataset: the dataset loaded from ``recipe.data``.
        ranks: the ranks, from `join`.
        folder: run folder; None: nothing is stored.
        observer: called with the events of the run. May be given on some ranks only.
        stop: the user's request to stop, which ends the run early.
        profile: whether to record a profiler trace for a few steps.
        keep: whether to save checkpoints. If False, every rank keeps its part of the best weights in memory.
        store: object store for checkpoints; None: they are saved in the run folder.

    Attributes:
        built: the model and the optimizers.
        progress: progress of the training.
        saver: saves checkpoints, deltas and best weights.
        evaluator: has the metrics for the reported weights, and early stopping.
        stopped: whether a stop request ended the run.
        precision: precision of the dense part in training.
        loss_check: for bf16, the loss for the reported weights in both precisions; None before the end.

    Raises:
        ValueError: the recipe cannot run on these ranks; raised on every rank.
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
        store: "ObjectStore | None" = None,
    ) -> None:
        # Check before the model is allocated.
        recipe.check(ranks.size)
        self.recipe, self.dataset, self.ranks = recipe, dataset, ranks
        self._observer = observer
        self._stop = stop or StopRequest()
        self.stopped = False
        # Set by `warm_start`.
        self._is_warm = False
        training = recipe.training
        self._samples_per_step = training.batch_size * training.accumulate
        self.steps_per_epoch = -(-dataset.train.num_samples // self._samples_per_step)
        """Number of steps per epoch. An epoch's last step may have fewer samples."""
        self.num_scheduled_steps = training.epochs * self.steps_per_epoch
        """Number of steps in the learning rate schedule."""
        if training.max_steps is not None:
            self.num_scheduled_steps = min(self.num_scheduled_steps, training.max_steps)
        self.num_steps = self.num_scheduled_steps
        """Number of steps in the whole run, unless it is stopped early."""
        if training.end_step is not None:
            self.num_steps = min(self.num_steps, training.end_step)
        self.built: BuiltModel = build(recipe, dataset, ranks)
        self.progress = Progress()
        self.evaluator = WeightsEvaluator(recipe, dataset, self.built.model, ranks)
        self.saver = CheckpointSaver(
            self.built,
            self.progress,
            {"early_stopping": self.evaluator.early},
            every=training.checkpoint_every,
            keep_last=training.keep_checkpoints,
            publishes=training.publish_every is not None,
            ranks=ranks,
            folder=folder,
            keep=keep,
            store=store,
            tell=lambda text: self._notify(Reported(text)),
        )
        self.precision = choose_precision(recipe.training.dense_precision, ranks)
        self.loss_check: LossCheck | None = None
        self._steps = Steps(
            recipe,
            self.built,
            ranks,
            folder=folder,
            num_steps=self.num_scheduled_steps,
            profile=profile,
            bf16=self.precision.bf16,
        )
        self._lines = MetricLines(recipe, self.built, ranks, self.progress, self._epoch_field)

    @property
    def validation(self) -> dict[str, float]:
        """Validation metrics for the reported weights."""
        return self.evaluator.validation

    @property
    def test(self) -> dict[str, float]:
        """Test metrics for the reported weights; empty before the run ends."""
        return self.evaluator.test

    @property
    def ended_because(self) -> str:
        """Sentence that says why training ended, or would end now."""
        step = self.progress.step
        if self.stopped:
            return f"training stopped at step {step:,}, as requested."
        metric = metric_title(leading_metric(self.validation) or "loss")
        reason = self.evaluator.early.reason(metric)
        if reason is None:
            return f"training made all {self.num_steps:,} steps."
        return f"training stopped at step {step:,} of {self.num_steps:,}: {reason}"

    def resume(self) -> bool:
        """Load the newest intact checkpoint in the run folder. Return whether there is one. Collective."""
        folder = self.saver.folder
        is_resumed = self.saver.resume()
        if is_resumed and folder is not None and self.ranks.is_first:
            step = self.progress.step
            folder.remove_lines_after(step, evaluated=self.evaluator.early.last_step == step)
        return is_resumed

    def warm_start(
        self, weights: Path, last: Path, *, fresh_tables: Collection[str] = (), tables_only: bool = False
    ) -> Differences:
        """Start from another run's weights and optimizer state instead of initial weights. Collective.

        Args:
            weights: checkpoint with the weights.
            last: checkpoint with the optimizer state. If it is not of the same step as ``weights``, the rows
                of hashed tables start without optimizer state.
            fresh_tables: names of tables that keep their initial values.
            tables_only: whether all parameters other than tables keep their initial values.

        Returns:
            The differences between this model and the checkpoint.

        Raises:
            ValueError: a table has another width than in the checkpoint; raised on every rank.
        """
        self._is_warm = True
        return self.saver.load_matching(weights, last, fresh_tables=fresh_tables, tables_only=tables_only)

    def run(self) -> dict[str, float]:
        """Train to the end or until an early stop, and load the best weights into the model. Collective.

        Returns:
            Validation metrics for the reported weights.

        Raises:
            LossError: a loss is NaN or infinite on any rank; raised on every rank.
            ValueError: all training rows were skipped as damaged; raised on every rank.
        """
        self._notify(self._started())
        if self.precision.reason is not None:
            self._notify(Reported(self.precision.reason))
        is_fitted = self._fit_initial_weights()
        self.saver.start_deltas()
        # With frozen objects, garbage collections during training do not visit the model again.
        with frozen_objects(), self._steps.profiled(), at_most_threads(num_threads(self.recipe, self.ranks)):
            if is_fitted or (self._is_warm and not self.progress.step) or self._needs_evaluation():
                self._evaluate()
            if is_fitted:
                self.evaluator.favor_current()
            while not self._is_over():
                self._train_epoch()
        # The flags of a step are read in the next step, so those of the last step are still unread.
        if self._stop.finish().failed:
            self._steps.raise_first_failure(self.saver.latest)
        self._log_remaining()
        if self.progress.step and not self.progress.num_samples:
            raise ValueError(
                f"nothing was trained: all rows of {self.dataset.name!r} were left out as damaged, see the "
                "warnings. Repair the data."
            )
        self._steps.phases.write()
        # Save before the best weights replace the last weights, because training continues from the last
        # ones.
        self.saver.finish()
        self._finish()
        return self.validation

    def evaluate(self, reader: Reader) -> dict[str, float]:
        """Evaluate the model on other samples, such as ``dataset.open(paths, True)``. Collective."""
        return evaluate(self.built.model, reader, self.ranks, loss=self.recipe.loss)

    def predict(self, reader: Reader) -> Iterator[Scored]:
        """Compute logits for this rank's share of a reader's samples, in order; see `evaluation.score`.

        Collective: every rank must exhaust the iterator.
        """
        return score(self.built.model, reader, self.ranks)

    def _epoch_field(self) -> dict[str, float]:
        """Return the epoch for metrics lines, with a fraction."""
        epoch, sample = self.progress.position
        return {"epoch": epoch + sample / self.dataset.train.num_samples}

    def _fit_initial_weights(self) -> bool:
        """Fit initial weights before the first step, if the model supports it. Return whether it did."""
        if self.progress.step or self._is_warm:
            return False
        options = self.recipe.model.start(self.built.model, self.recipe, self.dataset, self.ranks)
        self.progress.start_options = options or {}
        return options is not None

    def _needs_evaluation(self) -> bool:
        """Return whether a resumed run must evaluate first.

        The checkpoint may have been saved at the end of an epoch, but before the evaluation with which the
        epoch ends. A run that is already over does not evaluate again.
        """
        at_end = self.progress.step > 0 and self.progress.position.sample == 0
        between = (
            self.recipe.training.evaluate_every is None
            and self.evaluator.early.last_step < self.progress.step
        )
        return at_end and between and not self._is_over()

    def _is_over(self) -> bool:
        """Return whether training ends now: by a stop request, after the last step, or by early stopping."""
        return self.stopped or self.progress.step >= self.num_steps or self.evaluator.early.is_over

    def _train_epoch(self) -> None:
        """Train until the end of the epoch or of the run."""
        training, ranks = self.recipe.training, self.ranks
        train = self.dataset.train
        if training.balance and ranks.size > 1:
            from meshrec.data.balance import balanced_reader

            train = balanced_reader(self.dataset, self.recipe.model.attention_width)
        # The division is exact: `Recipe.check` rejects batch sizes that the ranks cannot share equally.
        reader = train.batches(
            training.batch_size // ranks.size,
            position=self.progress.position,
            rank=ranks.rank,
            world_size=ranks.size,
        )
        with prefetch(reader, training.prefetch) as batches:
            self._lines.start_clock()
            try:
                while self._train_step(batches):
                    if self._is_over():
                        return
                    if self.progress.position.sample == 0:
                        break
            finally:
                # Drop batches that were read ahead. The next epoch reads from the position of trained
                # samples.
                self._steps.step.reset()
        if training.evaluate_every is None:
            self._evaluate()
            # Save after the evaluation, so that the checkpoint includes the result.
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Save a checkpoint if one is due at this step."""
        if self.saver.is_due(self.progress.step):
            # Metrics that are not reported before the checkpoint would be missing after a resume from it.
            self._log_remaining()
            self.saver.save()

    def _train_step(self, batches: Iterator[Batch]) -> bool:
        """Run a training step, and the work that is due after it. Return False if no data was left."""
        progress, training = self.progress, self.recipe.training
        in_epoch = self.dataset.train.num_samples
        num_samples = min(
            self._samples_per_step, in_epoch - progress.position.sample
        )  # fewer at the end of an epoch only
        try:
            self._steps.run(batches, num_samples, self._lines)
        except StopIteration:
            return False
        progress.advance(num_samples, in_epoch)
        step = progress.step
        self._notify(Stepped(step, num_samples))
        logs = step % training.log_every == 0
        evaluates = training.evaluate_every is not None and step % training.evaluate_every == 0
        # Without `evaluate_every`, an epoch's last step is saved by `_train_epoch`, after the
        # evaluation.
        saves = progress.position.sample > 0 or training.evaluate_every is not None
        saves = saves and self.saver.is_due(step)
        ends_epoch = progress.position.sample == 0
        publishes = training.publish_every is not None and step % training.publish_every == 0
        # All ranks must know that the step succeeded before results are reported or stored.
        agreed = self._stop.exchange(
            self.ranks,
            failed=self._steps.step.failure is not None,
            at_once=logs or evaluates or saves or publishes or ends_epoch,
        )
        if agreed.failed:
            self._steps.raise_first_failure(self.saver.latest)
        if logs:
            self._log()
        if publishes:
            self.saver.publish()
        if evaluates:
            self._evaluate()
        # A profiled step thus includes its logging and evaluation, but not its checkpoint.
        self._steps.end_step()
        if saves:
            self._checkpoint()
        # Set last, so that the work that is due at this step is still done.
        self.stopped = agreed.stop
        return True

    def _log(self) -> None:
        """Report a training metrics line for the steps since the last line. Collective."""
        self._notify(Logged(self._lines.take_line()))
        self._steps.phases.write()
        self._lines.start_clock()

    def _log_remaining(self) -> None:
        """Report a training metrics line, if there were steps since the last line. Collective."""
        if not self._lines.is_empty:
            self._log()

    def _evaluate(self) -> None:
        """Evaluate the current weights on the validation data, and save them if they are the best so far.

        Collective. Without validation data, only report training metrics.
        """
        # First, so that the metrics of the steps before the evaluation come before it in the log.
        self._log_remaining()
        if self.dataset.validation is None:
            return
        is_best = self.evaluator.validate(self.progress.step)
        if is_best:
            self.saver.save_best()
        self._notify(
            Evaluated({"kind": "validation", **self._lines.step_fields(), **self.validation}, is_best)
        )
        # The time of the evaluation must not count as training time.
        self._lines.start_clock()

    def _finish(self) -> None:
        """Load the best weights, and evaluate them on test data unless the run was stopped. Collective."""
        evaluator, step = self.evaluator, self.progress.step
        if not self.stopped and evaluator.last_step != step:
            self._evaluate()
        # Replaced below if earlier weights are better.
        evaluator.weights_step = step
        # Without validation data, the last weights are the reported weights.
        best = None if self.dataset.validation is None else self.saver.restore_best()
        if best is not None:
            evaluator.reevaluate(best, step)
            by = metric_title(leading_metric(evaluator.validation) or "loss")
            why = ""
            if best == 0 and step:
                why = (
                    f": what was fitted before the first step (the model's linear part and trees) was not "
                    f"improved by {step:,} steps of training. More epochs would not help"
                )
            self._notify(Reported(f"took the weights of step {best}, the best by validation {by}{why}"))
        self._notify(Reported(self.ended_because))
        if not self.stopped and self.dataset.test is not None:
            evaluator.evaluate_test(step)
            line = {
                "kind": "test",
                **self._lines.step_fields(),
                "step": evaluator.weights_step,
                **evaluator.test,
            }
            self._notify(Evaluated(line, False))
        evaluator.compute_curves()
        if self.precision.bf16 and not self.stopped:
            self._check_precision()

    def _check_precision(self) -> None:
        """Compute the loss for the reported weights in bf16 and in fp32, and report both. Collective."""
        # Training data serves, too, because only the two precisions are compared.
        reader = self.dataset.train if self.dataset.validation is None else self.dataset.validation
        self.loss_check = check_loss(self.built.model, reader, self.ranks, self.recipe.loss)
        if self.loss_check is not None:
            _, rounded, exact = self.loss_check
            self._notify(
                Reported(
                    f"the loss in bf16 is {rounded:.6f}, and in fp32 {exact:.6f}, on "
                    f"{self.loss_check.samples:,} samples"
                )
            )

    def _notify(self, event: Event) -> None:
        """Pass an event to the observer, if there is one."""
        if self._observer is not None:
            self._observer(event)

    def _started(self) -> Started:
        """Return the event that announces the start of the run."""
        tables, dense = self.built.num_parameters()
        validation = self.dataset.validation
        return Started(
            recipe=self.recipe,
            folder=self.saver.folder,
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
