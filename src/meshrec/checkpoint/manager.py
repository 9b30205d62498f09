"""A folder of checkpoints: which is the latest good one, which are kept, and one save in the background."""

import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshrec.checkpoint.agreement import CheckpointError, DamagedCheckpointError, agreed, ranks_of
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.saving import PendingSave, async_save, load, save
from meshrec.checkpoint.storage import read_manifest

_log = logging.getLogger(__name__)
_NAME = re.compile(r"step-(\d{10,})")


class CheckpointManager:
    """Checkpoints of one run, as ``folder/step-0000000100``. All methods but ``latest`` are collective.

    Args:
        folder: a folder that all ranks see; it is made when it is needed.
        keep_last: how many to keep, at least 1: the one saved last, and those of the steps before it. Where
            training went back to a checkpoint, those of later steps stay as well, until they are saved again.
        keep_every: also keep those whose step is a multiple of it.
        group: the ranks (default: all of the default process group).
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
        """Where the checkpoint of a step is."""
        return self.folder / f"step-{step:010d}"

    def save(self, step: int, state: Mapping[str, Any]) -> Path:
        """Saves, and removes what need not be kept; see ``checkpoint.save``.

        Raises:
            CheckpointError: on every rank, when it cannot be written; older checkpoints are untouched, and
                the training can go on.
        """
        self.wait()
        path = save(self.path(step), state, step=step, group=self._group)
        if ranks_of(self._group).rank == 0:
            self._remove_old(step)
        return path

    def async_save(self, step: int, state: Mapping[str, Any]) -> PendingSave:
        """Saves while the training goes on; see ``checkpoint.async_save``. Waits for the one before, if need
        be.

        Raises:
            CheckpointError: on every rank, when the save before this one failed, or this one cannot begin.
        """
        self.wait()
        self._pending = async_save(
            self.path(step), state, step=step, group=self._group, after=lambda: self._remove_old(step)
        )
        return self._pending

    def wait(self) -> None:
        """Waits for the save in the background, if there is one. CheckpointError when it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, rising; looks at manifests and sizes only."""
        return [step for step, _ in self._complete()][::-1]

    def latest(self) -> Path | None:
        """The newest complete checkpoint; a warning names those that are damaged or not finished."""
        return next((path for _, path in self._complete()), None)

    def load(self, path: str | Path, state: Mapping[str, Any]) -> None:
        """Loads one checkpoint; see ``checkpoint.load``."""
        load(path, state, group=self._group)

    def load_latest(self, state: Mapping[str, Any]) -> int | None:
        """Loads the newest checkpoint whose data is sound, and gives its step; None where there is none.

        One that turns out to be damaged is named in a warning, and the one before it is loaded.

        Raises:
            DamagedCheckpointError: on every rank, when there are checkpoints but none is sound.
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
        """Removes the checkpoints of later steps, which a training that went back does otherwise."""
        if ranks_of(self._group).rank == 0:
            for later, path in self._folders():
                if later > step:
                    _remove(path)

    def _complete(self) -> Iterator[tuple[int, Path]]:
        """From the newest on."""
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
        """Removes complete checkpoints that need not be kept, and unfinished ones from before ``saved``."""
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
