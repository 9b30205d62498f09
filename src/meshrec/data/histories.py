"""Interaction logs larger than memory: user histories are built on disk and read by memory mapping.

[Note: histories on disk]

The histories are built in three stages. Every stage writes a folder, and later runs reuse the folder as long
as the stage's inputs have not changed:

1. ``parts/`` holds the valid log rows as Arrow files, called parts, each from consecutive rows in a log file
   (see ``log_parts.py``). In a part, users and items are integers, or codes for the distinct values stored in
   the part. A new log file adds parts and leaves existing parts unchanged.
2. ``numbers-*/`` holds a number for every user and item in the log: 0, 1, 2, ... ordered by first appearance
   (see ``log_numbers.py``). It also holds the row count per user and item, which vocabularies are fitted on,
   and maps from the values in a part to these numbers.
3. ``sorted-*/`` holds item IDs, times and row numbers, sorted by user and time, as NumPy files (see
   ``sorted_log.py``). To sort with bounded memory, rows are first divided into buckets, each for a range of
   users. Then every bucket is sorted in memory.

A run also stores the results of passes over the whole sorted log, such as item counts, in ``derived-*/``.
Later runs with the same options map these files, and so start without a pass.

The results equal those of the in-memory functions `meshrec.data.logs.filter_log`, `fit_log` and
`interactions`.
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshrec.data.faults import DataError, Faults
from meshrec.data.features import Features, Key
from meshrec.data.features.values import hashes_of
from meshrec.data.interactions import Arrays
from meshrec.data.log_columns import ITEM, USER
from meshrec.data.log_numbers import UserItemNumbers, options_of, read_table
from meshrec.data.log_parts import LogFiles, digest_of, encode_parts
from meshrec.data.logs import (
    ItemSample,
    LoggedUsers,
    SortedRows,
    check_kinds,
    logged_users,
    vocabulary_of,
    warn_of_unknown,
)
from meshrec.data.sorted_log import LogSorter
from meshrec.durable import (
    DamageError,
    durable_folder,
    read_regular,
    remove_empty,
    remove_named,
    sealed,
    unsealed,
    write_durably,
)

_MANIFEST = "manifest.json"
_MAX_MANIFEST = 1 << 28
_DERIVED_VERSION = 1
"""Version of the arrays in `_DerivedArrays`. Raise it when `meshrec.data.next_items` computes others."""


def fit_histories(log: LogFiles, folder: Path, faults: Faults, *, users: bool, memory: int) -> Features:
    """Fit the vocabularies for a log on disk; build missing stages (see [Note: histories on disk]).

    The result equals that of `fit_log` for the rows from `filter_log`.

    Args:
        log: log files, and the options deciding which rows are valid.
        folder: folder for the stages; created if missing.
        faults: raises or skips when a row lacks a user, item or time.
        users: whether users are a feature, too.
        memory: bytes to use while building, in addition to a few arrays per user and item.

    Raises:
        DataError: a file cannot be read, a column is missing, a row lacks a value, or no row remains.
    """
    with _locked_numbers(log, folder, faults, memory) as numbered:
        return numbered.fit(users=users)


def open_histories(
    log: LogFiles,
    folder: Path,
    faults: Faults,
    features: Features,
    *,
    hashed: Key | None,
    seed: int,
    memory: int,
) -> LoggedUsers:
    """Return the memory-mapped interactions in a log on disk; build missing stages.

    See [Note: histories on disk]. The result equals that of `interactions` for the rows from `filter_log`.

    Args:
        log, folder, faults, memory: as for `fit_histories`.
        features: fitted features, from `fit_histories`.
        hashed: feature hashing items to keys, for a hashed item table. None: an item ID is the row in a table
            with fixed size.
        seed: seed that orders a user's simultaneous rows, if ``log.columns.ties`` is "shuffle".

    Returns:
        The interactions, and the user values by user number.

    Raises:
        DataError: as for `fit_histories`, or a column's kind differs from the fitted kind.
    """
    with _locked_numbers(log, folder, faults, memory) as numbered:
        check_kinds(log.name, features, numbered.schema())
        item = vocabulary_of(features, ITEM)
        options = {
            "hashed": None if hashed is None else asdict(hashed),
            "seed": seed if log.columns.ties == "shuffle" else None,
        }
        # Other options have another folder, so runs with different options do not replace each other's build.
        path = folder / f"sorted-{digest_of([options_of(log), options])}"
        vocabulary = hashlib.sha256(hashes_of(item.vocabulary).tobytes()).hexdigest()
        # All inputs that item IDs depend on.
        key = digest_of([numbered.key, vocabulary, item.rows, item.num_unseen])
        sorter = LogSorter(numbered, item, hashed, seed, memory)
        manifest = _build_if_stale(path, key, sorter.build, numbered.parts.names)
        warn_of_unknown(log.name, manifest["num_unknown"], manifest["num_rows"])
        arrays = (np.load(path / f"{name}.npy", mmap_mode="r") for name in SortedRows._fields)
        logged = logged_users(
            log.name,
            features,
            SortedRows(*arrays),
            numbered.values(USER),
            num_rows=numbered.parts.num_rows,
            hashed=hashed,
            sample=_read_sample(path) if log.columns.item_features else None,
        )
    store = _DerivedArrays(folder, digest_of([options_of(log), options]), digest_of([_DERIVED_VERSION, key]))
    return logged._replace(log=replace(logged.log, store=store))


@dataclass(frozen=True)
class _DerivedArrays:
    """Stored results of passes over a sorted log; see `meshrec.data.interactions.Interactions.derived`."""

    folder: Path
    """Folder of the histories."""
    name: str
    """Digest over the options of the log."""
    key: str
    """Digest over the content of the sorted log."""

    def __call__(self, options: Any, compute: Callable[[], Arrays]) -> Arrays:
        """Return memory-mapped arrays, which are computed and stored if they are missing or stale.

        Args:
            options: everything that the arrays depend on, besides the log; JSON types.
            compute: returns the arrays by name.
        """

        def build(folder: Path) -> dict[str, Any]:
            arrays = compute()
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", array)
            return {"arrays": [*arrays]}

        path = self.folder / f"derived-{digest_of([self.name, options])}"
        # Other ranks wait for the first one instead of computing the same arrays.
        with _lock(self.folder):
            names = _build_if_stale(path, self.key, build, ())["arrays"]
            return {name: np.asarray(np.load(path / f"{name}.npy", mmap_mode="r")) for name in names}


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Context: lock the folder of histories. Other processes that build in it wait."""
    with (folder / "lock").open("ab") as lock:
        # Closing the file at the end of the context releases the lock.
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _locked_numbers(log: LogFiles, folder: Path, faults: Faults, memory: int) -> Iterator[UserItemNumbers]:
    """Build the first two stages if needed, and yield the user and item numbers.

    The folder is locked until the context ends; other processes that build in the same folder wait.
    """
    parts_folder = folder / "parts"
    parts_folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        parts = encode_parts(log, parts_folder, faults, memory=memory)
        path = folder / f"numbers-{digest_of(options_of(log))}"
        numbered = UserItemNumbers(log, parts, path)
        _build_if_stale(path, numbered.key, numbered.build, parts.names)
        yield numbered


def _build_if_stale(
    path: Path, key: str, build: Callable[[Path], dict[str, Any]], parts: Sequence[str]
) -> dict[str, Any]:
    """Build a stage folder unless it is up to date, and return the folder's manifest.

    The caller holds the lock from `_lock`.

    Raises:
        DataError: the folder exists, but has no readable manifest, so MeshRec may not have created it.
    """
    old = _read_manifest(path)
    if old is not None and old["key"] == key and _is_intact(path, old):
        return old
    if old is None and path.exists():
        raise DataError(f"{path} has no {_MANIFEST} that can be read. Delete it, or name another folder.")
    with durable_folder(path) as folder:
        fields = build(folder)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        manifest = {"key": key, "files": sizes, "parts": [*parts], **fields}
        write_durably(folder / _MANIFEST, sealed(manifest))
        # Only now: until here an error leaves the old build intact. The rename at the end of durable_folder
        # needs an empty folder, or none.
        if old is not None:
            remove_named(path, [*old["files"], _MANIFEST])
            remove_empty(path)
    if old is not None:
        manifests = (_read_manifest(stage) for stage in path.parent.iterdir())
        used = {name for other in manifests if other is not None for name in other["parts"]}
        remove_named(path.parent / "parts", [name for name in old["parts"] if name not in used])
    return manifest


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a stage folder; None if it is missing or damaged."""
    with suppress(OSError, DamageError):
        return unsealed(read_regular(path / _MANIFEST, _MAX_MANIFEST), _MANIFEST, required=True)
    return None


def _is_intact(path: Path, manifest: dict[str, Any]) -> bool:
    """Return whether all files of a stage exist with the sizes in the manifest."""
    with suppress(OSError):
        return all((path / name).stat().st_size == size for name, size in manifest["files"].items())
    return False


def _read_sample(path: Path) -> ItemSample:
    table = read_table(path / "sample.arrow")
    return ItemSample(table[""].to_numpy(), table)
