"""Delete checkpoints. Only files written by a save are deleted.

See [Note: what MeshRec deletes] in ``durable/removal.py``. The names of a save's files contain the random ID
of the save. Until the save is complete, its mark (a small file that names the save) tells the ID. Afterward,
the data file names in the manifest tell it, even if the manifest is damaged or from another version. All
other files in the folder belong to the user.
"""

import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from meshrec.checkpoint.manifest import FORMAT, MANIFEST
from meshrec.durable import (
    Mark,
    mark,
    open_regular,
    release,
    remove_empty,
    remove_link,
    remove_named,
    unlocked_marks,
)

KIND = "checkpoint"
"""Kind of the marks left in the folder by running saves."""
_DATA = re.compile(rb'"data-([0-9a-f]{8,64})-\d{5,}\.safetensors"')
_DATA_NAME = re.compile(r"data-[0-9a-f]{8,64}-\d{5,}\.safetensors")
# A manifest starts with the file names, so 64 KiB contain at least one.
_HEAD_BYTES = 1 << 16
_log = logging.getLogger(__name__)


def names_of(save: str) -> str:
    """Return a regular expression for the names of a save's files, except the manifest."""
    note = rf"note-{save}-\d{{5,}}"
    # Temporary files of ``write_durably``, which stay if the save is killed while it writes them.
    temporary = rf"\.manifest\.json\.{save}|\.{note}\.json\.[0-9a-f]+"
    return rf"data-{save}-\d{{5,}}\.safetensors|{note}\.(json|failed)|{temporary}"


def check_target(folder: Path) -> None:
    """Check that a save to a folder would not replace another program's file.

    Raises:
        ValueError: the folder has a ``manifest.json`` from another program, which would be replaced.
    """
    head = _read_manifest_start(folder)
    # With data files next to it, this is the damaged manifest of a checkpoint, which a resumed run must be
    # able to replace. An empty file, or one with NUL bytes only, may be left by a crash and be replaced too.
    has_data = any(_DATA_NAME.fullmatch(path.name) for path in folder.glob("data-*"))
    if head.strip(b"\0") and FORMAT.encode() not in head and not has_data:
        raise ValueError(
            f"{folder / MANIFEST} is not the manifest of a checkpoint, and a save would replace it. Save to "
            "another folder, or move the file away."
        )


def saves_in(folder: Path, *, current: str | None = None) -> set[str]:
    """Return the IDs of all saves with files in a folder: the finished save, and killed saves.

    Args:
        folder: checkpoint folder.
        current: ID of the caller's own save, which is left out.
    """
    head = _read_manifest_start(folder)
    named = {match.decode() for match in _DATA.findall(head)} if FORMAT.encode() in head else set()
    saves = named | {save_mark.id for save_mark in unlocked_marks(folder, KIND, moved=True, excluded=current)}
    return saves - {current}


def remove_saves(folder: Path, saves: set[str]) -> None:
    """Delete the files of the saves with these IDs, except the manifest."""
    for save in saves:
        Mark(folder, save, KIND).remove(names_of(save))


def remove_checkpoint(folder: Path) -> None:
    """Delete a checkpoint, finished or not. Delete the folder as well unless it contains other files.

    If ``folder`` is a symbolic link, only the link is deleted.
    """
    if remove_link(folder):
        return
    saves = saves_in(folder)
    # Without a save's ID, no file in the folder is known to be written by MeshRec.
    if not saves:
        return
    # Write marks, then remove the manifest, then the other files. After an interruption, the folder is not a
    # checkpoint any more, and the next removal finds the remaining files by the marks.
    for save in saves:
        with suppress(OSError):  # already marked, or the disk is full
            release(mark(folder, KIND, id=save)[1])
    remove_named(folder, [MANIFEST])
    remove_saves(folder, saves)
    if not remove_empty(folder):
        _log.warning("%s is kept: it has files which do not belong to its checkpoint", folder)


def _read_manifest_start(folder: Path) -> bytes:
    """Return the first 64 KiB of a folder's manifest; empty if it cannot be read."""
    with suppress(OSError, RuntimeError), open_regular(folder / MANIFEST) as descriptor:
        return os.pread(descriptor, _HEAD_BYTES, 0)
    return b""
