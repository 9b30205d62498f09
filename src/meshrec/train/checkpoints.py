"""When a run saves itself, and from where it goes on."""

from collections.abc import Callable, MutableMapping
from typing import Any

from meshrec.checkpoint import CheckpointError, CheckpointManager
from meshrec.checkpoint.finding import CHECKPOINTS
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Training
from meshrec.train.run_folder import RunFolder


class Checkpoints:
    """The checkpoints of one run. Collective, all of it.

    A save that fails, because the disk is full or the like, is told and does not end the run; older
    checkpoints are there, and the next save is a new try.

    Args:
        folder: of the run.
        training: says how often, and how many stay.
        ranks: of `join`.
        state: what `Trainer.state` holds.
        tell: takes a line for the user, on every rank.

    Attributes:
        failures: what went wrong with each save that failed.
    """

    def __init__(
        self,
        folder: RunFolder,
        training: Training,
        ranks: Ranks,
        state: MutableMapping[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        self._manager = CheckpointManager(
            folder.path / CHECKPOINTS, keep_last=training.keep_checkpoints, group=ranks.control
        )
        self._every, self._state, self._tell = training.checkpoint_every, state, tell
        self._saved: int | None = None
        self.failures: list[str] = []

    def resume(self) -> bool:
        """Loads the last sound checkpoint; False where there is none."""
        self._saved = self._manager.load_latest(self._state)
        return self._saved is not None

    def is_due(self, step: int) -> bool:
        """Whether there is to be a checkpoint of this step."""
        return self._every is not None and step % self._every == 0

    def save(self, step: int) -> None:
        """Saves in the background."""
        try:
            self._manager.async_save(step, self._state)
            self._saved = step
        except CheckpointError as error:
            self.failed(error)

    def finish(self, step: int) -> bool:
        """Waits for what is being saved, and saves the end, too; whether the end is on the disk."""
        self.wait()
        if self._saved != step:
            try:
                self._manager.save(step, self._state)
                self._saved = step
            except CheckpointError as error:
                self.failed(error)
        return self._saved == step

    def wait(self) -> None:
        """Waits for what is being saved."""
        try:
            self._manager.wait()
        except CheckpointError as error:
            self.failed(error)

    def latest(self) -> str | None:
        """The newest finished checkpoint's path, of this rank's view."""
        found = self._manager.latest()
        return None if found is None else str(found)

    def failed(self, error: CheckpointError) -> None:
        """Takes note of a save that failed."""
        self._saved = None
        self.failures.append(str(error))
        self._tell(f"no checkpoint was saved: {error}")
