"""Manage a run's checkpoints: save in the background, load the latest intact one, and remove old ones."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from meshrec.checkpoint.agreement import CheckpointError, DamagedCheckpointError, agreed, ranks_of
from meshrec.checkpoint.finding import step_name, step_of
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.reading import read_manifest
from meshrec.checkpoint.removing import remove_checkpoint
from meshrec.checkpoint.saving import PendingSave, async_save, load, save
from meshrec.comms.mesh import Axis
from meshrec.durable import remove_link, remove_scratch

if TYPE_CHECKING:
    from meshrec.checkpoint.stored import ObjectStore, StoredCheckpoints

_log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves, loads and removes a run's checkpoints, which are named ``folder/step-0000000100``.

    Saves, loads and ``wait`` are collective. After a save, old checkpoints in the folder are deleted,
    including copies put there by the user. Other files are kept. If a checkpoint is a symbolic link, only
    the link is deleted.

    Args:
        folder: folder accessible from all ranks, created when first needed. With ``store``, a folder on this
            host for temporary files.
        keep_last: number of checkpoints to keep, at least 1: the checkpoint saved last, and those of the
            steps before it. If training returns to an earlier step, checkpoints of later steps are kept until
            they are saved again.
        keep_every: also keep checkpoints whose step is a multiple of this number.
        group: participating ranks; None: the default process group.
        store: folder in an object store for the checkpoints, if hosts have no shared folder; see [Note: how a
            checkpoint reaches a store].

    Attributes:
        retained: steps whose checkpoints are kept as well. Set by the user at any time.

    Raises:
        ValueError: ``keep_last`` or ``keep_every`` is below 1.

    Example::

        model = torch.nn.Linear(4, 1)
        manager = CheckpointManager("checkpoints", keep_last=3)
        manager.save(100, {"model": model})
        assert manager.load_latest({"model": model}) == 100
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int = 3,
        keep_every: int | None = None,
        group: dist.ProcessGroup | None = None,
        store: "ObjectStore | None" = None,
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(
                f"keep_last and keep_every must be at least 1, got {keep_last} and {keep_every}. Without "
                "checkpoints to keep, save none."
            )
        self.folder = Path(folder)
        self._keep_last, self._keep_every = keep_last, keep_every
        self.retained: frozenset[int] = frozenset()
        self._group = group
        # Exactly one of both implementations is used for all accesses to existing checkpoints.
        self._stored: StoredCheckpoints | None = None
        if store is not None:
            from meshrec.checkpoint import stored

            self._stored = stored.StoredCheckpoints(store, self.folder)
        self._checkpoints = self._stored or _FolderCheckpoints(self.folder)
        # The background save and the step number, from `async_save` until the next `wait`.
        self._pending: PendingSave | None = None
        self._pending_step: int | None = None

    def path(self, step: int) -> Path:
        """Return the path at which a step's checkpoint is or would be saved in the folder."""
        return self.folder / step_name(step)

    def save(self, step: int, state: Mapping[str, Any]) -> Path | str:
        """Save a checkpoint, then remove old ones; see ``checkpoint.save``. Collective.

        Returns:
            Path of the checkpoint, or its address if the manager has a store.

        Raises:
            CheckpointError: the checkpoint cannot be written; raised on every rank. Older checkpoints are
                kept, and training can continue.
        """
        if self._stored is not None:
            # Only a background save uploads to a store, so start one and wait for it.
            self.async_save(step, state)
            self.wait()
            return self._stored.address(step)
        self.wait()
        self._remove_link(step)
        # Remove old checkpoints only after the new checkpoint is complete.
        path = save(self.path(step), state, step=step, group=self._group)
        if ranks_of(self._group).rank == 0:
            self._remove_old(step)
        return path

    def async_save(self, step: int, state: Mapping[str, Any]) -> PendingSave:
        """Start a save, and return while it is running; see ``checkpoint.async_save``. Collective.

        Waits for the previous background save first. Old checkpoints are removed when this save completes.

        Raises:
            CheckpointError: the previous save failed, or this one cannot start; raised on every rank.
        """
        self.wait()
        path, store = self.path(step), None
        if self._stored is None:
            self._remove_link(step)
        else:
            axis, store = ranks_of(self._group), self._stored.under(step)
            path = agreed(axis, self._stored.new_scratch, f"writing to {self.folder}")[axis.rank]
        try:
            self._pending = async_save(
                path, state, step=step, group=self._group, after=lambda: self._remove_old(step), store=store
            )
        except BaseException:
            # The path is a scratch folder only with a store; otherwise this does nothing.
            remove_scratch(path)
            raise
        # Needed by `_complete_steps`, to recognize the checkpoint that is being written.
        self._pending_step = step
        return self._pending

    def wait(self) -> None:
        """Wait until the background save has ended, if there is one. Collective.

        Raises:
            CheckpointError: the save failed.
        """
        # Reset the fields first, so that a failed save is reported only once.
        pending, self._pending, self._pending_step = self._pending, None, None
        if pending is not None:
            try:
                pending.wait()
            finally:
                remove_scratch(pending.path)  # does nothing for a save to the folder

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, ascending.

        Reads only manifests, headers and file sizes.
        """
        return list(self._complete_steps())[::-1]

    def latest(self) -> Path | str | None:
        """Return the newest complete checkpoint: its path, or its address if the manager has a store.

        Returns None if no checkpoint is complete. Logs a warning for every newer checkpoint that is
        damaged or incomplete.
        """
        step = next(self._complete_steps(), None)
        return None if step is None else self._checkpoints.address(step)

    def load(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Load a checkpoint; see ``checkpoint.load``."""
        load(path, state, group=self._group)

    def load_latest(self, state: Mapping[str, Any]) -> int | None:
        """Load the newest intact checkpoint, and return the step. Collective.

        If a checkpoint is damaged, log a warning and try the previous checkpoint. Without any checkpoint,
        load nothing and return None.

        Raises:
            DamagedCheckpointError: checkpoints exist, but none is intact; raised on every rank.
        """
        axis = ranks_of(self._group)
        damaged: list[str] = []
        # All ranks use rank 0's list, because they must try the same checkpoints in the same order.
        for step in agreed(axis, lambda: list(self._complete_steps()), f"looking into {self.folder}")[0]:
            try:
                # With a store, this downloads the checkpoint, and removes the download afterward.
                with self._checkpoints.opened(step, axis) as path:
                    self.load(path, state)
            except DamagedCheckpointError as error:
                # All ranks raise the same error, so all of them try the previous checkpoint.
                damaged.append(str(error))
                if axis.rank == 0:
                    _log.warning("%s Trying the previous checkpoint.", error)
                continue
            return step
        if damaged:
            reasons = " ".join(damaged)
            raise DamagedCheckpointError(
                f"no checkpoint in {self.folder} is intact, and nothing was loaded: {reasons}"
            )
        return None

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of all steps after ``step``, after training has returned to ``step``."""
        if ranks_of(self._group).rank == 0:
            for later in self._checkpoints.steps():
                if later > step:
                    self._checkpoints.remove(later)

    def _remove_link(self, step: int) -> None:
        """Remove a symbolic link at the save path, so the save does not overwrite the link's target."""
        if ranks_of(self._group).rank == 0:
            remove_link(self.path(step))

    def _complete_steps(self) -> Iterator[int]:
        """Yield the steps of complete checkpoints, newest first."""
        for step, has_manifest in sorted(self._checkpoints.steps().items(), reverse=True):
            try:
                if not has_manifest:
                    raise DamagedCheckpointError(f"it has no {MANIFEST}: the save did not finish.")
                self._checkpoints.check(step)
            except (CheckpointError, ValueError, OSError) as error:
                # A save in progress has no manifest yet, which is not worth a warning.
                if has_manifest or step != self._pending_step:
                    _log.warning("%s is ignored: %s", self._checkpoints.address(step), error)
                continue
            yield step

    def _remove_old(self, saved: int) -> None:
        """Remove the checkpoints of steps up to ``saved``, except for the checkpoints to keep.

        Complete checkpoints are kept according to ``keep_last``, ``keep_every`` and `retained`, incomplete
        ones never.
        Called on rank 0 only. After a background save, called in the thread that completed the checkpoint.
        """
        # Steps after ``saved`` are kept: training may have returned to an earlier step.
        steps = {step: complete for step, complete in self._checkpoints.steps().items() if step <= saved}
        complete_steps = sorted(step for step, is_complete in steps.items() if is_complete)
        retained = {*complete_steps[-self._keep_last :], *self.retained.intersection(complete_steps)}
        if self._keep_every is not None:
            retained |= {step for step in complete_steps if step % self._keep_every == 0}
        for step in steps.keys() - retained:
            self._checkpoints.remove(step)


class _FolderCheckpoints:
    """A run's checkpoints in a folder, with the same methods as `StoredCheckpoints`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def address(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self._folder / step_name(step)

    def steps(self) -> dict[int, bool]:
        """Return the steps with a checkpoint folder. The value is True if the folder has a manifest."""
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        steps = [step for step in map(step_of, names) if step is not None]
        return {step: (self.address(step) / MANIFEST).exists() for step in steps}

    def check(self, step: int) -> None:
        """Raise an error if a checkpoint's manifest, file sizes or headers are damaged.

        Tensor values are not verified.
        """
        read_manifest(self.address(step))

    def remove(self, step: int) -> None:
        """Remove a checkpoint, finished or not."""
        remove_checkpoint(self.address(step))

    @contextmanager
    def opened(self, step: int, _: Axis) -> Iterator[Path]:
        """Context manager that yields the folder of a step's checkpoint, from which ranks can read."""
        yield self.address(step)
