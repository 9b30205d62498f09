"""Save the checkpoints and deltas of a run on a stream, and roll the run and its servers back.

[Note: roll-back]

A roll-back has three states, all in the file `HOLD`, so that a kill at any time loses none of them:

1. Decided: `Hold.position` is set. The run must return to the checkpoint ``Hold.step``, and trains no more.
2. Rolled back: `Hold.delta` is set. This delta takes servers back to the weights of the checkpoint. It has
   the next number, and repeats every row in the deltas after the checkpoint. Later checkpoints still exist.
3. Left: `Hold.choice` is set. The user has resumed the run, which removes the later checkpoints and the file.

A resumed run continues in the state in which it ended. It leaves the second state only with a choice of the
user: otherwise, it would train the same records, and roll back again.
"""

from typing_extensions import override

from meshrec.checkpoint import Hold, read_hold
from meshrec.checkpoint.agreement import agreed, ranks_of
from meshrec.checkpoint.finding import HOLD
from meshrec.train.progress import StreamProgress
from meshrec.train.saver import CheckpointSaver
from meshrec.train.stream_options import AfterRollBack, check_roll_back


class StreamSaver(CheckpointSaver):
    """Saver of a run on a stream, which can roll it back. All methods are collective.

    See [Note: roll-back]. Arguments are those of `CheckpointSaver`.
    """

    _progress: StreamProgress

    @override
    def resume(self, after_roll_back: AfterRollBack | None = None) -> bool:
        """Load the checkpoint from which the run continues. Return whether there is one.

        It is the newest intact one, but that of a roll-back if there was one. If `is_rolling_back` then,
        `roll_back` must complete the roll-back.

        Args:
            after_roll_back: what to do with the records between the checkpoint and the alarm: train them
                again, or continue after them. None: the run was not rolled back.

        Raises:
            ValueError: the argument and the state of the run do not match; raised on every rank.
        """
        folder = self.folder
        if self._manager is None or folder is None:
            return False

        def read() -> Hold | None:
            """Return the hold on rank 0."""
            if not self._is_first:
                return None
            hold = read_hold(folder.path)
            check_roll_back(folder.name, hold, after_roll_back)
            return hold

        hold = agreed(ranks_of(self._group), read, f"reading {HOLD}")[0]
        if hold is None or not hold.is_roll_back:
            return super().resume()
        self._load_step(hold)
        if hold.delta is not None:
            self._leave(hold._replace(choice=hold.choice or after_roll_back))
        return True

    @property
    def is_rolling_back(self) -> bool:
        """Whether the run must be rolled back, or was. It must not train, then."""
        hold = self._progress.hold
        return hold is not None and hold.is_roll_back

    def start_roll_back(self, reason: str, window_seconds: float) -> bool:
        """Decide to return to the newest checkpoint from before a window, and hold back all deltas.

        Args:
            reason: the alarm, for messages.
            window_seconds: length of the window in event time, which ends with the newest event.

        Returns:
            Whether there is such a checkpoint. If not, nothing has changed.
        """
        # A save that fails takes its restore point away.
        self.wait()
        manager, progress = self._manager, self._progress
        if manager is None or progress.event_time is None:
            return False
        end = progress.event_time - round(1e6 * window_seconds)
        action = "looking for the checkpoint of a roll-back"
        complete = agreed(ranks_of(self._group), lambda: manager.steps() if self._is_first else [], action)[0]
        steps = [
            point.step
            for point in progress.restore_points
            if point.event_time <= end and point.step in complete
        ]
        if not steps:
            return False
        progress.hold = Hold(steps[-1], reason, position=progress.position)
        self.show_hold()
        return True

    def roll_back(self) -> Hold:
        """Return to the checkpoint, and publish a delta that takes servers back to its weights.

        Returns:
            The roll-back.

        Raises:
            CheckpointError: the checkpoint is damaged, or the delta cannot be written; raised on every rank.
                A resumed run tries again.
        """
        hold = self._progress.hold
        assert hold is not None
        # A resumed run has loaded the weights already.
        if self._progress.step != hold.step:
            self._load_step(hold)
            self.start_deltas()
        publisher = self._publisher
        assert publisher is not None
        publisher.publish(self._progress.step, event_time=self._progress.event_time)
        assert publisher.last is not None
        self._progress.published = publisher.last
        self._progress.hold = hold._replace(delta=publisher.last.number)
        self.show_hold()
        return self._progress.hold

    def save_restore_point(self, window_seconds: float) -> None:
        """Start to save a checkpoint in the background, and keep it for a roll-back as long as it is needed.

        Args:
            window_seconds: age that a checkpoint must have for a roll-back, in event time.
        """
        # If the last save has failed, its point must go, so that this one is not too recent.
        self.wait()
        # The point has the delta with which the checkpoint ends.
        self.publish()
        self._progress.add_restore_point(window_seconds)
        self._retain()
        self.save()

    def _load_step(self, hold: Hold) -> None:
        """Load the checkpoint of a roll-back."""
        manager, step = self._manager, hold.step
        assert manager is not None
        assert step is not None
        self._load(lambda: manager.load(manager.path(step), self.state))
        self._saved, self._progress.hold = step, hold
        self._retain()

    def _leave(self, hold: Hold) -> None:
        """Continue from the checkpoint of a roll-back, with the choice in ``hold``."""
        manager, progress = self._manager, self._progress
        assert manager is not None
        # Before the position changes, so that a kill cannot mix both choices.
        progress.hold = hold
        self.show_hold()
        progress.hold = None
        if hold.choice == "skip":
            progress.position = hold.position
            # Replaces the checkpoint atomically.
            manager.save(progress.step, self.state)
        manager.remove_after(progress.step)
        self.show_hold()
