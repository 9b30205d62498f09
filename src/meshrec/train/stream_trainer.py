"""Train on a stream: on records that arrive while the model trains, without epochs and without an end.

[Note: exactly once]

A checkpoint has the weights after a step and the position of the stream after the same step. A position
determines all later steps, whatever the time at which records arrive. A run that continues from a checkpoint
therefore trains every later record once, and its weights are those of a run that was never interrupted.

Rank 0's clock decides when to log, publish and save. It announces this work together with the flags that the
ranks exchange after every step, so that all ranks do it after the same step, without further messages.
"""

import time
from collections.abc import Collection, Generator, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshrec.checkpoint.matching import Differences
from meshrec.data import Batch, Dataset, prefetch
from meshrec.data.streams import Burst, Stream
from meshrec.metrics import SlidingMetrics
from meshrec.metrics.drift import MAX_FROZEN_SECONDS, Drift, FeatureDrift
from meshrec.ops.memory import frozen_objects, return_freed_memory
from meshrec.ops.threads import at_most_threads
from meshrec.tables import set_event_time
from meshrec.train.alarms import Alarms
from meshrec.train.building import BuiltModel, build
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.observers import Event, Logged, Observer, Reported, Started, Stepped
from meshrec.train.precision import choose_precision
from meshrec.train.progress import StreamProgress
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import ModelConfig, Recipe
from meshrec.train.run_folder import RunFolder
from meshrec.train.step import Outputs
from meshrec.train.steps import MetricLines, Steps, num_threads
from meshrec.train.stopping import Agreement, StopRequest
from meshrec.train.stream_options import AfterRollBack, StreamOptions, advice
from meshrec.train.stream_saver import StreamSaver

if TYPE_CHECKING:
    from meshrec.checkpoint.stored import ObjectStore

WINDOWS = {"hour": 3600, "day": 86400}
"""Length of the windows of test-then-train metrics, in seconds of event time."""
_ALARM_SECONDS = WINDOWS["hour"]
"""Length of the window of alarms. What raised an alarm is in none of the weights from before."""
# Bits of the work that rank 0 announces.
_LOG, _PUBLISH, _SAVE = 1, 2, 4


class StreamTrainer:
    """Trainer of a recipe's model on a stream. All ranks call it together.

    The options of the recipe about epochs, evaluations and intervals in steps are not used. A step is
    evaluated before it is trained: the predictions of its forward pass are made before the update. For a
    single binary label, metrics lines have metrics of these predictions over `WINDOWS`.

    See [Note: exactly once].

    Args:
        recipe: the recipe.
        dataset: describes the samples; its readers are used only for planning.
        stream: the stream.
        ranks: the ranks, from `join`.
        name: display name of the stream.
        options: intervals, and how long files are kept.
        folder: run folder; None: nothing is stored.
        observer: called with the events of the run. May be given on some ranks only.
        stop: the user's request to stop.
        profile: whether to record a profiler trace for a few steps.
        store: object store for checkpoints; None: they are saved in the run folder.
        drift: windows of feature values; None: no drift is computed.
        after_roll_back: choice about the records until the alarm, "reread" or "skip"; None: the run was not
            rolled back.

    Attributes:
        built: the model and the optimizers.
        progress: progress of the training.
        saver: saves checkpoints and deltas.
        stopped: whether a stop request ended the run.
        num_steps: step at which the run ends, ``training.max_steps``; None: never.
        precision: precision of the dense part.

    Raises:
        ValueError: the recipe cannot train on a stream, or not on these ranks; raised on every rank.
    """

    def __init__(
        self,
        recipe: Recipe,
        dataset: Dataset,
        stream: Stream,
        ranks: Ranks,
        *,
        name: str = "stream",
        options: StreamOptions = StreamOptions(),  # noqa: B008 - immutable
        folder: RunFolder | None = None,
        observer: Observer | None = None,
        stop: StopRequest | None = None,
        profile: bool = False,
        store: "ObjectStore | None" = None,
        drift: FeatureDrift | None = None,
        after_roll_back: AfterRollBack | None = None,
    ) -> None:
        # Check before the model is allocated.
        recipe.check(ranks.size)
        check_recipe(recipe, options)
        self.recipe, self.dataset, self.ranks, self.stopped = recipe, dataset, ranks, False
        self._stream, self._name, self._options, self._observer = stream, name, options, observer
        self._stop = stop or StopRequest()
        self.num_steps = recipe.training.max_steps
        self.built: BuiltModel = build(recipe, dataset, ranks)
        self.progress = StreamProgress()
        self._lines = StreamLines(recipe, self.built, ranks, self.progress, drift)
        self.saver = StreamSaver(
            self.built,
            self.progress,
            {"windows": self._lines},
            every=None,
            keep_last=recipe.training.keep_checkpoints,
            publishes=options.delta_seconds is not None,
            ranks=ranks,
            folder=folder,
            store=store,
            tell=lambda text: self._notify(Reported(text)),
        )
        self.precision = choose_precision(recipe.training.dense_precision, ranks)
        self._steps = Steps(
            recipe,
            self.built,
            ranks,
            folder=folder,
            num_steps=self.num_steps or 0,
            profile=profile,
            bf16=self.precision.bf16,
        )
        self._run, self._after_roll_back = "" if folder is None else folder.path.name, after_roll_back
        self._alarms = Alarms(options, self.progress, self._run, self._notify if ranks.is_first else None)
        # On rank 0 only: when work is due, and when the last step ended, of time.monotonic.
        self._clock: _Clock | None = _Clock(options) if ranks.is_first else None
        self._last_step = time.monotonic()
        self._is_warm = False

    @property
    def rolled_back_because(self) -> str | None:
        """Sentences that say why the run was rolled back, and how to continue; None if it was not."""
        hold, event_time = self.progress.hold, self.progress.event_time
        if hold is None or hold.delta is None or event_time is None:
            return None
        until = datetime.fromtimestamp(event_time / 1e6, timezone.utc)
        return (
            f"the run was rolled back to step {hold.step:,}, with events until {until:%Y-%m-%d %H:%M:%S} "
            f"UTC, because {hold.reason}. Delta {hold.delta} takes servers back to these weights, and "
            f"training has stopped. {advice(self._run)}"
        )

    @property
    def ended_because(self) -> str:
        """Sentence that says why training ended."""
        step = self.progress.step
        if (text := self.rolled_back_because) is not None:
            return text
        if self.stopped:
            return f"training stopped at step {step:,}, as requested."
        if self.num_steps is not None and step >= self.num_steps:
            return f"training made all {self.num_steps:,} steps."
        return (
            f"training ended at step {step:,}: no records came for {self._options.stop_when_idle:g} seconds."
        )

    def resume(self) -> bool:
        """Load the checkpoint in the run folder from which the run continues. Collective.

        Returns:
            Whether there is one.

        Raises:
            ValueError: the run was rolled back, and ``after_roll_back`` is None, or the other way around.
        """
        folder, is_resumed = self.saver.folder, self.saver.resume(self._after_roll_back)
        if self._options.on_alarm != "roll-back":
            self.progress.restore_points = []
        is_training = is_resumed and not self.saver.is_rolling_back
        if is_training and folder is not None and self.ranks.is_first:
            folder.remove_lines_after(self.progress.step, evaluated=False)
        # Also the checkpoint from before the first step may have the weights of another run.
        self._is_warm = self._is_warm or is_resumed
        return is_resumed

    def warm_start(
        self, weights: Path, last: Path, *, fresh_tables: Collection[str] = (), tables_only: bool = False
    ) -> Differences:
        """Start from another run's weights and optimizer state; see `Trainer.warm_start`. Collective.

        Args:
            weights: checkpoint with the weights.
            last: checkpoint with the optimizer state.
            fresh_tables: names of tables that keep their initial values.
            tables_only: whether all parameters other than tables keep their initial values.
        """
        self._is_warm = True
        return self.saver.load_matching(weights, last, fresh_tables=fresh_tables, tables_only=tables_only)

    def run(self) -> None:
        """Train until a stop request, the last step, or the end of the stream. Collective.

        Raises:
            LossError: a loss is NaN or infinite on any rank; raised on every rank.
            DataError: a record is damaged; see `Stream.bursts`.
        """
        self._notify(self._started())
        for text in self._remarks():
            self._notify(Reported(text))
        # Tables have no clock of their own: a resumed run sets the time of the checkpoint.
        set_event_time(self.built.model, (self.progress.event_time or 0) // 1_000_000)
        self._alarms.drop_disabled()
        if not self._alarms.has_drift:
            self._lines.unfreeze(accept=True)
        self._apply_alarms()
        # Also without a change: the run may have been killed during a hold that its checkpoint does not have.
        self.saver.show_hold()
        self.saver.start_deltas()
        self._last_step = time.monotonic()
        self._lines.start_clock()
        threads = num_threads(self.recipe, self.ranks)
        # With frozen objects, garbage collections during training do not visit the model again.
        with frozen_objects(), self._steps.profiled(), at_most_threads(threads):
            self._train()
        # The stream may have ended on a request to rank 0, or because it was idle.
        self._finish_step(self._stop.exchange(self.ranks, at_once=True))
        self._log()
        self._steps.phases.write()
        if self.saver.is_rolling_back:
            self._roll_back()
        self.saver.finish()
        self._report_delta()
        self._alarms.close()

    def _roll_back(self) -> None:
        """Return to the checkpoint from before an alarm, take the servers there, and report it.

        The end of the run shows the text on the screen.
        """
        hold = self.saver.roll_back()
        text = self.rolled_back_because
        assert text is not None
        self._alarms.report("roll-back", text, self.progress.step, {"delta": hold.delta})

    def _train(self) -> None:
        """Train the bursts of the stream until the run ends."""
        bursts = self._stream.bursts(
            # The division is exact: `Recipe.check` rejects batch sizes that the ranks cannot share equally.
            self.recipe.training.batch_size // self.ranks.size,
            position=self.progress.position,
            axis=self.ranks.axis,
            stop=self._ends_stream,
        )
        try:
            while not self._is_over:
                burst = next(bursts, None)
                if burst is None:
                    return
                self._train_burst(burst)
                # Also without steps, work may be due.
                due = 0 if self._clock is None else self._clock.due()
                self._finish_step(self._stop.exchange(self.ranks, due=due, at_once=True))
        finally:
            if isinstance(bursts, Generator):
                bursts.close()

    def _train_burst(self, burst: Burst) -> None:
        """Train the steps of a burst, until the run ends."""
        if not burst.positions:
            return
        with prefetch(burst.batches, self.recipe.training.prefetch) as batches:
            # The ranks have waited for records, and not for one another.
            self._lines.restart_waits()
            try:
                for position in burst.positions:
                    self._train_step(batches, position)
                    if self._is_over:
                        return
            finally:
                # The next burst has another iterator.
                self._steps.step.reset()

    def _train_step(self, batches: Iterator[Batch], position: dict[str, Any]) -> None:
        """Run a training step, and the work that is due after it.

        Args:
            batches: this rank's batches.
            position: position in the stream after the step.
        """
        progress, num_samples = self.progress, self.recipe.training.batch_size
        self._steps.run(batches, num_samples, self._lines)
        progress.step, progress.position = progress.step + 1, position
        self._last_step = time.monotonic()
        self._notify(Stepped(progress.step, num_samples))
        due = 0 if self._clock is None else self._clock.due()
        failed = self._steps.step.failure is not None
        self._finish_step(self._stop.exchange(self.ranks, failed=failed, due=due))
        self._steps.end_step()

    def _finish_step(self, agreed: Agreement) -> None:
        """Do the work that the ranks have agreed on. Collective.

        Raises:
            LossError: a step failed on any rank.
        """
        if agreed.due:
            # The flags were those of the step before. Its results must be known before they are stored.
            agreed = agreed.merged(self._stop.finish())
        if agreed.failed:
            self._steps.raise_first_failure(self.saver.latest)
        if agreed.due & (_LOG | _SAVE):
            self._log()
        # A roll-back must not have to undo more weights.
        can_save = not (self.saver.is_current or self.saver.is_rolling_back)
        if agreed.due & _SAVE and can_save:
            if self._options.on_alarm == "roll-back" and not self._alarms.reason:
                self.saver.save_restore_point(_ALARM_SECONDS)
            else:
                self.saver.save()
            self._remove_old()
        elif agreed.due & _PUBLISH:
            self._lines.newest_event()
            self.saver.publish()
        self._report_delta()
        if agreed.due:
            return_freed_memory()
        self.stopped = self.stopped or agreed.stop

    @property
    def _is_over(self) -> bool:
        """Whether the run ends now. Equal on all ranks."""
        is_last = self.num_steps is not None and self.progress.step >= self.num_steps
        return self.stopped or is_last or self.saver.is_rolling_back

    def _ends_stream(self) -> bool:
        """Return whether the stream ends although records may follow. Called on rank 0, if it waits."""
        limit = self._options.stop_when_idle
        is_idle = limit is not None and time.monotonic() - self._last_step > limit
        return is_idle or self._stop.signal is not None

    def _log(self) -> None:
        """Report a metrics line, if there were steps since the last line. Collective."""
        if not self._lines.is_empty:
            line = self._lines.take_line()
            self._notify(Logged(line))
            frozen_seconds = self._lines.frozen_seconds
            self._alarms.check(line, self._lines.drifts, drift_seconds=frozen_seconds)
            if self._alarms.has_drift:
                self._lines.freeze()
            else:
                self._lines.unfreeze(accept=frozen_seconds > MAX_FROZEN_SECONDS)
            self._apply_alarms()
            self._lines.start_clock()

    def _apply_alarms(self) -> None:
        """Hold back deltas while an alarm lasts, or start to roll back, if the options say so."""
        if self.saver.is_rolling_back:
            return
        reason = "" if self._options.on_alarm == "log" else self._alarms.reason
        is_held = self.progress.hold is not None
        if reason and not is_held:
            text = "deltas are held back: servers keep their weights until the alarm ends"
            if self._options.on_alarm == "roll-back":
                if self.saver.start_roll_back(reason, _ALARM_SECONDS):
                    return
                text = f"no checkpoint is from an hour before, so the run is not rolled back, and {text}"
            self.saver.hold(reason)
            self._notify(Reported(text))
        elif is_held and not reason:
            self.saver.release()
            self._notify(Reported("deltas are published again: the alarm has ended"))

    def _report_delta(self) -> None:
        """Report a metrics line about a new delta, if there is one."""
        published = self.saver.take_published()
        if published is not None:
            now = time.time()
            line = {
                "kind": "delta",
                "step": self.progress.step,
                "time": int(now),
                "delta": published.number,
                # From the newest event to the moment at which servers see it.
                "freshness": now - (self.progress.event_time or 0) / 1e6,
            }
            self._notify(Logged(line))

    def _remove_old(self) -> None:
        """Remove deltas and metrics lines that are no longer kept, and records of the stream."""
        options, now = self._options, time.time()
        oldest = self.saver.oldest_progress
        # Before the first step, the position is None.
        if oldest is not None and oldest["position"] is not None:
            self._stream.on_checkpoint(oldest["position"])
        if options.keep_delta_hours is not None:
            self.saver.remove_deltas_before(now - 3600 * options.keep_delta_hours)
        if options.keep_metric_days is not None and self.saver.folder is not None and self.ranks.is_first:
            self.saver.folder.remove_lines_before(now - 86400 * options.keep_metric_days)

    def _remarks(self) -> Iterator[str]:
        """Yield remarks for the user before the first step."""
        if self.precision.reason is not None:
            yield self.precision.reason
        is_new = not self.progress.step and not self._is_warm
        if is_new and type(self.recipe.model).start is not ModelConfig.start:
            yield (
                f"{type(self.recipe.model).__name__} could fit initial weights to data, but a stream has "
                "none before the first step. --from RUN starts from the weights of a run"
            )

    def _notify(self, event: Event) -> None:
        """Pass an event to the observer, if there is one."""
        if self._observer is not None:
            self._observer(event)

    def _started(self) -> Started:
        """Return the event that announces the start of the run."""
        tables, dense = self.built.num_parameters()
        return Started(
            recipe=self.recipe,
            folder=self.saver.folder,
            dataset=self._name,
            num_samples=None,
            num_validation=0,
            num_test=0,
            num_ranks=self.ranks.size,
            device=self.ranks.device.type,
            num_table_parameters=tables,
            num_dense_parameters=dense,
            plan=self.built.plan,
            first_step=self.progress.step,
            num_steps=self.num_steps,
        )


class StreamLines(MetricLines):
    """Collector of training steps on a stream, with test-then-train metrics over windows in event time.

    Args:
        recipe: the recipe.
        built: the model and the optimizers.
        ranks: the ranks, from `join`.
        progress: progress of the run.
        drift: windows of feature values; None: no drift is computed.

    Attributes:
        windows: metrics over `WINDOWS`, without samples unless the loss is that of a single binary label.
        drifts: drift by feature at the last line.
    """

    def __init__(
        self,
        recipe: Recipe,
        built: BuiltModel,
        ranks: Ranks,
        progress: StreamProgress,
        drift: FeatureDrift | None = None,
    ) -> None:
        super().__init__(recipe, built, ranks, progress, self._times)
        self._stream_progress, self._all_ranks = progress, ranks
        self._is_binary = isinstance(recipe.loss, BinaryCrossEntropy)
        self.windows, self._drift = SlidingMetrics(WINDOWS), drift
        self.drifts: dict[str, Drift] = {}
        # Newest event on this rank, in microseconds since 1970.
        self._newest = 0

    def add(self, outputs: list[Outputs]) -> None:
        """Add the outputs of a step."""
        super().add(outputs)
        for output in outputs:
            if output.times is not None and len(output.times):
                self._newest = max(self._newest, int(output.times.max()))
                if self._is_binary:
                    self.windows.add(output.logits, output.labels, output.weights, output.times)
                if self._drift is not None and output.batch is not None:
                    self._drift.add(output.batch.sparse, output.batch.dense, output.times)

    def newest_event(self) -> None:
        """Set the event time of the progress to the newest one on any rank. Collective."""
        progress = self._stream_progress
        progress.event_time = max(progress.event_time or 0, *self._all_ranks.collect(self._newest))

    def take_line(self) -> dict[str, Any]:
        """Return a metrics line for the steps since the last line, and start the next line. Collective."""
        self.newest_event()
        line = {**super().take_line(), **self.windows.compute(self._all_ranks.collect)}
        if self._drift is not None:
            self.drifts = self._drift.compute(self._all_ranks.collect)
            if self.drifts:
                feature = max(self.drifts, key=lambda name: self.drifts[name].psi)
                line |= {"drift": self.drifts[feature].psi, "drift_feature": feature}
        return line

    @property
    def frozen_seconds(self) -> float:
        """Event time since `freeze`; 0 without it."""
        return 0.0 if self._drift is None else self._drift.frozen_seconds

    def freeze(self) -> None:
        """Compare feature values with those from before now until `unfreeze`."""
        if self._drift is not None:
            self._drift.freeze()

    def unfreeze(self, *, accept: bool) -> None:
        """End `freeze`; see `FeatureDrift.unfreeze`."""
        if self._drift is not None:
            self._drift.unfreeze(accept=accept)

    def state_dict(self) -> dict[str, Any]:
        """Return the windows of metrics and of feature values until the last line."""
        values = {} if self._drift is None else {"values": self._drift.state_dict()}
        return {**self.windows.state_dict(), **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the windows. Checkpoints of earlier releases have none of feature values."""
        self.windows.load_state_dict(state)
        if self._drift is not None and "values" in state:
            self._drift.load_state_dict(state["values"])

    def _times(self) -> dict[str, float]:
        """Return the time now, the newest event time, and its age, in seconds."""
        now, event_time = time.time(), (self._stream_progress.event_time or 0) / 1e6
        return {"time": int(now), "event_time": int(event_time), "lag": now - event_time}


class _Clock:
    """Rank 0's clock, which decides when work is due.

    Args:
        options: has the intervals.
    """

    def __init__(self, options: StreamOptions) -> None:
        self._seconds: Mapping[int, float] = {
            _LOG: options.log_seconds,
            _SAVE: 60 * options.checkpoint_minutes,
            **({} if options.delta_seconds is None else {_PUBLISH: options.delta_seconds}),
        }
        now = time.monotonic()
        self._next = {work: now + seconds for work, seconds in self._seconds.items()}

    def due(self) -> int:
        """Return the bits of the work that is due, and set the next time of this work."""
        now, bits = time.monotonic(), 0
        for work, at in self._next.items():
            if now >= at:
                bits |= work
                self._next[work] = now + self._seconds[work]
        return bits


def check_recipe(recipe: Recipe, options: StreamOptions) -> None:
    """Check that a recipe can train on a stream.

    Raises:
        ValueError: an option of the recipe needs data that ends; the message names it.
    """
    training = recipe.training
    if training.accumulate != 1:
        raise ValueError(
            f"training.accumulate is {training.accumulate}, and a step of a stream has a single batch. Set a "
            "larger training.batch_size instead."
        )
    if recipe.schedule.decay != "constant" and training.max_steps is None:
        raise ValueError(
            f"schedule.decay is {recipe.schedule.decay!r}, which needs a number of steps, and a stream has "
            "no end. Take --schedule.decay constant, or end the run with --training.max-steps."
        )
    if options.delta_seconds is not None and not recipe.placement.sharded:
        raise ValueError(
            "deltas need sharded tables, also on one rank. Leave placement.sharded True, or write no deltas: "
            "--delta-seconds none."
        )
