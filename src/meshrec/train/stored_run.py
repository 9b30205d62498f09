"""Copy a run's small files to an object store and back, so that another host can continue the run."""

import fnmatch
import json
import logging
from pathlib import Path

from meshrec.checkpoint.stored import ObjectStore
from meshrec.train.run_folder import CONFIG, RunFolder

_logger = logging.getLogger("meshrec")
RUN_FILES = "run"
"""Folder in the store for a run's small files, next to the run's checkpoints."""
# Files that another host needs to continue the run, or to show it. Checkpoints are stored separately.
_VOCABULARIES = "*features.arrow"
_COPIED_PATTERNS = (_VOCABULARIES, "*.json", "*.jsonl", "*.html", "source/*", "events.out.tfevents.*")


def upload_run(folder: Path, store: ObjectStore) -> None:
    """Copy a run's small files to the store, except hidden files.

    A failure is only logged, because the files are copied again after the next checkpoint.
    """
    try:
        stored = store.names()
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if fnmatch.fnmatch(name, _VOCABULARIES) and name in stored:
                continue  # never changes, and may be large
            if (
                path.is_file()
                and not name.startswith(".")
                and any(fnmatch.fnmatch(name, pattern) for pattern in _COPIED_PATTERNS)
            ):
                store.put(path, name)
    except OSError as error:
        _logger.warning("the run's files could not be copied to %s: %s", store.address, error)


def download_run(name: str, runs: Path, store: ObjectStore) -> RunFolder | None:
    """Download a run's small files into a local run folder, unless the folder has the run already.

    Args:
        name: run name.
        runs: folder with all run folders.
        store: the object store.

    Returns:
        The local run folder, or None if the store does not have the run.
    """
    folder = RunFolder(runs / name)
    if not (folder.path / CONFIG).exists():
        stored = store.under(name).under(RUN_FILES)
        names = stored.names()
        # The configuration is uploaded with the first checkpoint; without it, the run cannot be continued.
        if CONFIG not in names:
            return None
        for file_name in sorted(
            names, key=lambda file_name: file_name == CONFIG
        ):  # last: it makes the folder a run
            stored.get(file_name, folder.path / file_name)
    return folder


def find_launched_run(launch: str, launch_file: str, store: ObjectStore) -> str | None:
    """Find the run that a launch created, and return the run name; None if the store has no such run.

    Args:
        launch: ID of the launch.
        launch_file: name of the file in which a run stores the launch ID.
        store: the object store.
    """
    for path in store.names():
        name, _, file = path.partition("/")
        if file == f"{RUN_FILES}/{launch_file}" and _read_launch_id(store, path) == launch:
            return name
    return None


def _read_launch_id(store: ObjectStore, name: str) -> str | None:
    """Return the launch ID in a stored file, or None if the file is damaged or does not have one."""
    try:
        entry = json.loads(store.read(name)).get("id")
    except (ValueError, AttributeError):  # not JSON, not UTF-8, or not an object
        return None
    return None if entry is None else str(entry)
