"""The checkpoints of a run: when they are saved, and which one a resumed run loads."""

from collections.abc import Callable, MutableMapping
from typing import Any

from meshrec.checkpoint import CheckpointError, CheckpointManager
from meshrec.checkpoint.finding import BEST, CHECKPOINTS
from meshrec.checkpoint.stored import ObjectStore, StoredCheckpoints
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Training
from meshrec.train.run_folder import RunFolder
from meshrec.train.stored_run import RUN, upload_run


class Checkpoints:
    """The checkpoints of one run. All methods are collective.

    A save that fails, for example because the disk is full, is reported and does not end the run. Older
    checkpoints remain, and the next save tries again.

    Args:
        folder: folder of the run.
        training: tells how often to save, and how many checkpoints to keep.
        ranks: the ranks, from `join`.
        state: the objects to save, from `Trainer.state`.
        tell: prints a line for the user; called on every rank.
        store: where checkpoints go; if none, into the folder.

    Attributes:
        best: the manager of the best weights.
        failures: messages of the saves that failed.
    """

    def __init__(
        self,
        folder: RunFolder,
        training: Training,
        ranks: Ranks,
        state: MutableMapping[str, Any],
        tell: Callable[[str], None],
        *,
        store: ObjectStore | None = None,
    ) -> None:
        self._manager = _manager(folder, CHECKPOINTS, store, training.keep_checkpoints, ranks)
        self.best = _manager(folder, BEST, store, 1, ranks)
        self._mirror = None if store is None or not ranks.is_first else (folder.path, store.under(RUN))
        self._every, self._state, self._tell = training.checkpoint_every, state, tell
        self._saved: int | None = None
        self.failures: list[str] = []

    def resume(self) -> bool:
        """Load the last intact checkpoint; return False if there is none."""
        self._saved = self._manager.load_latest(self._state)
        return self._saved is not None

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint of this step is due."""
        return self._every is not None and step % self._every == 0

    def save(self, step: int) -> None:
        """Save in the background."""
        try:
            self._manager.async_save(step, self._state)
            self._saved = step
            self._copy_small_files()
        except CheckpointError as error:
            self.failed(error)

    def finish(self, step: int) -> bool:
        """Wait for pending saves, and save the final state. Return whether the final state is on disk."""
        self.wait()
        if self._saved != step:
            try:
                self._manager.save(step, self._state)
                self._saved = step
                self._copy_small_files()
            except CheckpointError as error:
                self.failed(error)
        return self._saved == step

    def wait(self) -> None:
        """Wait for pending saves."""
        try:
            self._manager.wait()
        except CheckpointError as error:
            self.failed(error)

    def latest(self) -> str | None:
        """Return the path of the newest finished checkpoint, as this rank sees it."""
        found = self._manager.latest()
        return None if found is None else str(found)

    def _copy_small_files(self) -> None:
        """Copy the run's small files to the store, on the first rank, so that another host can continue."""
        if self._mirror is not None:
            upload_run(*self._mirror)

    def failed(self, error: CheckpointError) -> None:
        """Record a save that failed."""
        self._saved = None
        self.failures.append(str(error))
        self._tell(f"no checkpoint was saved: {error}")


def _manager(
    folder: RunFolder, name: str, store: ObjectStore | None, keep_last: int, ranks: Ranks
) -> CheckpointManager | StoredCheckpoints:
    if store is None:
        return CheckpointManager(folder.path / name, keep_last=keep_last, group=ranks.control)
    local = folder.path / ".staged" / name
    return StoredCheckpoints(store.under(name), local, keep_last=keep_last, group=ranks.control)
