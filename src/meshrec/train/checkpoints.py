"""When a run saves itself, and from where it goes on."""

from collections.abc import Callable, MutableMapping
from typing import Any

from meshrec.checkpoint import CheckpointError, CheckpointManager
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Training
from meshrec.train.run_folder import CHECKPOINTS, RunFolder


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

    def resume(self) -> bool:
        """Loads the last sound checkpoint; False where there is none."""
        self._saved = self._manager.load_latest(self._state)
        return self._saved is not None

    def after_step(self, step: int) -> None:
        """Saves in the background, if it is time."""
        if self._every is None or step % self._every:
            return
        try:
            self._manager.async_save(step, self._state)
            self._saved = step
        except CheckpointError as error:
            self._failed(error)

    def finish(self, step: int) -> None:
        """Waits for what is being saved, and saves the end, too."""
        try:
            self._manager.wait()
        except CheckpointError as error:
            self._failed(error)
        if self._saved == step:
            return
        try:
            self._manager.save(step, self._state)
            self._saved = step
        except CheckpointError as error:
            self._failed(error)

    def _failed(self, error: CheckpointError) -> None:
        self._saved = None
        self._tell(f"no checkpoint was saved: {error}")
