"""The small files of a run in an object store, with which the run can continue on another host."""

import fnmatch
import json
import logging
from pathlib import Path

from meshrec.checkpoint.stored import ObjectStore
from meshrec.train.run_folder import CONFIG, RunFolder

_logger = logging.getLogger("meshrec")
RUN = "run"
"""The folder of a run's small files, beside those of its checkpoints."""
_KEPT = ("*.json", "*.jsonl", "*.html", "source/*", "events.out.tfevents.*")


def upload_run(folder: Path, store: ObjectStore) -> None:
    """Copy the small files of a run to the store. A failure is logged; the next checkpoint tries again."""
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if (
                path.is_file()
                and not name.startswith(".")
                and any(fnmatch.fnmatch(name, each) for each in _KEPT)
            ):
                store.put(path, name)
    except OSError as error:
        _logger.warning("the run's files could not be copied to %s: %s", store.address, error)


def download_run(name: str, runs: Path, store: ObjectStore) -> RunFolder | None:
    """Fetch the small files of a run into its folder, unless it is there; None if the store has no such
    run.
    """
    folder = RunFolder(runs / name)
    if not (folder.path / CONFIG).exists():
        kept = store.under(name).under(RUN)
        names = kept.names()
        if CONFIG not in names:
            return None
        for each in sorted(names, key=lambda each: each == CONFIG):  # last: it makes the folder a run
            kept.get(each, folder.path / each)
    return folder


def stored_launch(launch: str, launch_file: str, store: ObjectStore) -> str | None:
    """Return the name of the run that a launch has made in a store; None if there is none."""
    for each in store.names():
        name, _, rest = each.partition("/")
        if rest == f"{RUN}/{launch_file}" and _launch_in(store, each) == launch:
            return name
    return None


def _launch_in(store: ObjectStore, name: str) -> str | None:
    try:
        found = json.loads(store.read(name)).get("id")
    except (json.JSONDecodeError, AttributeError):
        return None
    return None if found is None else str(found)
