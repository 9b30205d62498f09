"""Delete runs. Only files written by MeshRec are deleted.

See [Note: what MeshRec deletes] in ``durable/removal.py``.
"""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from meshrec.checkpoint.finding import BEST, CHECKPOINTS
from meshrec.checkpoint.removing import remove_checkpoint
from meshrec.durable import is_below, remove_empty, remove_link, remove_named
from meshrec.runs.source import COPY
from meshrec.train.run_folder import (
    CONFIG,
    DELTAS,
    FILES,
    FINAL,
    JOINED,
    RunFolder,
    created_folder,
    is_run,
    run_marks,
)

# Names of marks, which prove that MeshRec created a folder. A copied run also has the original's mark.
_MARK = re.compile(r"\.meshrec-[0-9a-f]{16}")


def _written(names: str) -> re.Pattern[str]:
    """Return the pattern of durable files and of their temporary files, which a kill may leave.

    Args:
        names: pattern of the files' names.
    """
    return re.compile(rf"(?:{names})|\.(?:{names})\.[0-9a-f]{{16}}")


# Files of a delta: a description, the changed table rows, and the dense part.
_DELTA = _written(r"\d{8,18}\.(?:json|rows\.safetensors|dense\.safetensors)")
# Labelled rows and the state of their join.
_JOINED = _written(r"\d{16}\.arrow|_state\.pt|_lock")


def remove_run(folder: RunFolder) -> list[str]:
    """Delete a run's files, and its folder unless other files remain in it.

    If the path is a symbolic link to a run, delete only the link.

    Returns:
        Names of the remaining files, which MeshRec did not write.

    Raises:
        ValueError: the run is still running, or the folder is not a run.
    """
    path = folder.path
    # The run behind a link may belong to somebody else.
    if remove_link(path):
        return []
    if not is_run(path):
        raise ValueError(f"{path} is not a run: its {CONFIG} is of another program. Nothing was removed.")
    if folder.state().name == "running":
        raise ValueError(f"{path} is running; stop it first, then remove it.")
    # The refit is a run inside the run: it has checkpoints and marks too.
    final = RunFolder(path / FINAL)
    if not final.path.is_symlink() and is_run(final.path):
        remove_run(final)
    for name in (CHECKPOINTS, BEST):
        for checkpoint in _entries(path / name, "step-*"):
            remove_checkpoint(checkpoint)
        remove_empty(path / name)
    _remove_files(
        path / DELTAS, [entry.name for entry in _entries(path / DELTAS) if _DELTA.fullmatch(entry.name)]
    )
    _remove_files(
        path / JOINED, [entry.name for entry in _entries(path / JOINED) if _JOINED.fullmatch(entry.name)]
    )
    _remove_files(path / COPY, _source_files(folder))
    files = [entry.name for entry in _entries(path) if FILES.fullmatch(entry.name) and entry.name != CONFIG]
    remove_named(path, files)
    # The configuration proves that this is a run. Delete it last, so that an interrupted removal can be
    # repeated.
    remove_named(path, [CONFIG, *(entry.name for entry in _entries(path) if _MARK.fullmatch(entry.name))])
    return [] if remove_empty(path) else sorted(os.listdir(path))


def remove_unstarted(folder: RunFolder) -> None:
    """Delete the folder of a run without a configuration, because it failed before training.

    The folder is kept if it was not created for the run, or if it contains other files.
    """
    path = folder.path.resolve()
    # Retry for up to 0.4 seconds, because other ranks on this host may still write their failures there.
    for _ in range(20):
        marks = run_marks(path)
        if not marks or (path / CONFIG).exists():
            return
        remove_named(path, (entry.name for entry in _entries(path) if FILES.fullmatch(entry.name)))
        if {entry.name for entry in _entries(path)} <= {mark.path.name for mark in marks}:
            remove_named(path, [mark.path.name for mark in marks])
            if any(map(created_folder, marks)):
                remove_empty(path)
            return
        time.sleep(0.02)


def _source_files(folder: RunFolder) -> list[str]:
    """Return the relative paths of the files in the run's copy of the recipe source."""
    code = (folder.read_json(CONFIG) or {}).get("code") or {}
    return list(code.get("files", ()))


def _remove_files(folder: Path, names: list[str]) -> None:
    """Delete files in a folder, and then the folders that are left empty.

    If ``folder`` is a symbolic link, delete only the link.
    """
    if remove_link(folder):
        return
    remove_named(folder, names)
    # Deepest folders first, so that parents are empty when their turn comes.
    parents = {parent for name in names for parent in PurePosixPath(name).parents}
    for parent in sorted(parents, key=lambda path: len(path.parts), reverse=True):
        if parent == PurePosixPath() or is_below(folder, str(parent)):
            remove_empty(folder / parent)


def _entries(folder: Path, pattern: str = "*") -> Iterator[Path]:
    """List the entries of a folder, sorted. If the folder is a symbolic link, list nothing."""
    return iter(()) if folder.is_symlink() else iter(sorted(folder.glob(pattern)))
