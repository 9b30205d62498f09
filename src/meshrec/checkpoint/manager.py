"""A folder of checkpoints: finding the latest good one, removing old ones, and saving in the background."""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshrec.checkpoint.agreement import CheckpointError, DamagedCheckpointError, agreed, ranks_of
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.reading import read_manifest
from meshrec.checkpoint.saving import PendingSave, async_save, load, save

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{10,})")


class CheckpointManager:
    """Checkpoints of one run, as ``folder/step-0000000100``. All methods except ``latest`` are collective.

    Args:
        folder: a folder that all ranks see. It is made when it is first needed.
        keep_last: number of checkpoints to keep, at least 1: the one saved last, and those of the steps
            before it. If training went back to a checkpoint, those of later steps also stay until they are
            saved again.
        keep_every: also keep checkpoints whose step is a multiple of this.
        group: the ranks (default: all of the default process group).

    Raises:
        ValueError: ``keep_last`` or ``keep_every`` is below 1.
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
        self._pending: PendingSave | None = None

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self.folder / f"step-{step:010d}"

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Save, and remove old checkpoints; see ``checkpoint.save``.

        Raises:
            CheckpointError: the checkpoint cannot be written. It is raised on every rank; older checkpoints
                remain, and training can continue.
        """
        self.wait()
        path = save(self.path(step), state, step=step, group=self._group)
        if ranks_of(self._group).rank == 0:
            self._remove_old(step)
        return path

    def async_save(self, step: int, state: Mapping[str, Any]) -> PendingSave:
        """Save while training continues; see ``checkpoint.async_save``. Waits for the previous save if
        necessary.

        Raises:
            CheckpointError: the previous save failed, or this one cannot begin; raised on every rank.
        """
        self.wait()
        self._pending = async_save(
            self.path(step), state, step=step, group=self._group, after=lambda: self._remove_old(step)
        )
        return self._pending

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: the save failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints in ascending order. Only manifests and file sizes are
        read.
        """
        return [step for step, _ in self._complete()][::-1]

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint. A warning names those that are damaged or incomplete."""
        return next((path for _, path in self._complete()), None)

    def load(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Load one checkpoint; see ``checkpoint.load``."""
        load(path, state, group=self._group)

    def load_latest(self, state: Mapping[str, Any]) -> int | None:
        """Load the newest intact checkpoint. Return its step, or None without a checkpoint.

        If a checkpoint turns out to be damaged, a warning names it, and the one before it is loaded.

        Raises:
            DamagedCheckpointError: there are checkpoints, but none is intact; raised on every rank.
        """
        axis = ranks_of(self._group)
        found = agreed(axis, lambda: list(self._complete()), f"looking into {self.folder}")[0]
        damaged: list[str] = []
        for step, path in found:
            try:
                self.load(path, state)
            except DamagedCheckpointError as error:
                damaged.append(str(error))
                if axis.rank == 0:
                    _log.warning("%s The checkpoint before it is used.", error)
                continue
            return int(step)
        if damaged:
            reasons = " ".join(damaged)
            raise DamagedCheckpointError(
                f"no checkpoint in {self.folder} is sound, and the state is partly loaded: {reasons}"
            )
        return None

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which are obsolete when training has gone back to
        ``step``.
        """
        if ranks_of(self._group).rank == 0:
            for later, path in self._folders():
                if later > step:
                    _remove(path)

    def _complete(self) -> Iterator[tuple[int, Path]]:
        """Yield the complete checkpoints, newest first."""
        for step, path in sorted(self._folders(), reverse=True):
            try:
                read_manifest(path)
            except (CheckpointError, ValueError, OSError) as error:
                if (path / MANIFEST).exists() or not self._is_pending(path):
                    _log.warning("%s is passed over: %s", path, error)
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
        """Remove complete checkpoints that need not be kept, and incomplete ones from before ``saved``."""
        steps = [s for s, path in sorted(self._folders()) if s <= saved and (path / MANIFEST).exists()]
        kept = set(steps[-self._keep_last :])
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0}
        for step, path in self._folders():
            if step <= saved and step not in kept:
                _remove(path)


def _remove(path: Path) -> None:
    # Without its manifest it is no checkpoint any more, whenever the removal may be cut short.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
