"""Checkpoint folder of a run: find the latest intact checkpoint, remove old ones, save in the background."""

import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshrec.checkpoint.agreement import CheckpointError, DamagedCheckpointError, agreed, ranks_of
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.reading import read_manifest
from meshrec.checkpoint.removing import remove_checkpoint
from meshrec.checkpoint.saving import PendingSave, async_save, load, save
from meshrec.durable import remove_link

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{10,})")


class CheckpointManager:
    """Checkpoints of one run, named ``folder/step-0000000100``. All methods except ``latest`` are collective.

    Old checkpoints in the folder are deleted, including copies you put there: keep copies elsewhere. Other
    files are kept. A link to a checkpoint elsewhere is removed without touching its target.

    Args:
        folder: folder visible to all ranks; created when first needed.
        keep_last: number of checkpoints to keep, at least 1: the last saved checkpoint and earlier steps.
            After training returns to an earlier checkpoint, later steps stay until they are saved again.
        keep_every: also keep checkpoints whose step is a multiple of this.
        group: participating ranks (default: the default process group).

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
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(
                f"keep_last and keep_every must be at least 1, got {keep_last} and {keep_every}. Without "
                "checkpoints to keep, save none."
            )
        self.folder = Path(folder)
        self._keep_last, self._keep_every = keep_last, keep_every
        self._group = group
        # The background save, from `async_save` until the next `wait`.
        self._pending: PendingSave | None = None

    def path(self, step: int) -> Path:
        """Return a step's checkpoint path."""
        return self.folder / f"step-{step:010d}"

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Save, then remove old checkpoints; see ``checkpoint.save``.

        Raises:
            CheckpointError: the checkpoint cannot be written; raised on every rank. Older checkpoints remain,
                and training can continue.
        """
        self.wait()
        self._unlink(step)
        # Remove old checkpoints only after the new checkpoint is complete.
        path = save(self.path(step), state, step=step, group=self._group)
        if ranks_of(self._group).rank == 0:
            self._remove_old(step)
        return path

    def async_save(self, step: int, state: Mapping[str, Any]) -> PendingSave:
        """Save while training continues; see ``checkpoint.async_save``. Waits for a pending save first.

        Raises:
            CheckpointError: the pending save failed, or this save cannot start; raised on every rank.
        """
        self.wait()
        self._unlink(step)
        self._pending = async_save(
            self.path(step), state, step=step, group=self._group, after=lambda: self._remove_old(step)
        )
        return self._pending

    def wait(self) -> None:
        """Wait for the background save, if any.

        Raises:
            CheckpointError: the save failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, ascending. Reads only manifests and file sizes."""
        return [step for step, _ in self._complete()][::-1]

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint. Logs a warning for damaged or incomplete ones."""
        return next((path for _, path in self._complete()), None)

    def load(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Load a checkpoint; see ``checkpoint.load``."""
        load(path, state, group=self._group)

    def load_latest(self, state: Mapping[str, Any]) -> int | None:
        """Load the newest intact checkpoint and return the step; without checkpoints, return None.

        A damaged checkpoint is logged, and the previous checkpoint is tried.

        Raises:
            DamagedCheckpointError: checkpoints exist, but none is intact; raised on every rank.
        """
        axis = ranks_of(self._group)
        complete = agreed(axis, lambda: list(self._complete()), f"looking into {self.folder}")[0]
        damaged: list[str] = []
        for step, path in complete:
            try:
                self.load(path, state)
            except DamagedCheckpointError as error:
                damaged.append(str(error))
                if axis.rank == 0:
                    _log.warning("%s Trying the previous checkpoint.", error)
                continue
            return int(step)
        if damaged:
            reasons = " ".join(damaged)
            raise DamagedCheckpointError(
                f"no checkpoint in {self.folder} is intact, and nothing was loaded: {reasons}"
            )
        return None

    def remove_after(self, step: int) -> None:
        """Remove checkpoints of later steps, obsolete once training returns to ``step``."""
        if ranks_of(self._group).rank == 0:
            for later, path in self._folders():
                if later > step:
                    remove_checkpoint(path)

    def _unlink(self, step: int) -> None:
        """Remove a link at the save path, so that the save does not replace the link's target."""
        if ranks_of(self._group).rank == 0:
            remove_link(self.path(step))

    def _complete(self) -> Iterator[tuple[int, Path]]:
        """Yield complete checkpoints, newest first."""
        for step, path in sorted(self._folders(), reverse=True):
            try:
                read_manifest(path)
            except (CheckpointError, ValueError, OSError) as error:
                # A pending save has no manifest yet, which is not worth a warning.
                if (path / MANIFEST).exists() or not self._is_pending(path):
                    _log.warning("%s is ignored: %s", path, error)
                continue
            yield step, path

    def _folders(self) -> Iterator[tuple[int, Path]]:
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if match := _NAME.fullmatch(path.name):
                    yield int(match[1]), path

    def _is_pending(self, path: Path) -> bool:
        return self._pending is not None and self._pending.path == path

    def _remove_old(self, saved: int) -> None:
        """Remove complete checkpoints beyond the limits, and incomplete ones older than ``saved``."""
        steps = [s for s, path in sorted(self._folders()) if s <= saved and (path / MANIFEST).exists()]
        retained = set(steps[-self._keep_last :])
        if self._keep_every is not None:
            retained |= {step for step in steps if step % self._keep_every == 0}
        for step, path in self._folders():
            if step <= saved and step not in retained:
                remove_checkpoint(path)
