"""Interaction logs larger than memory: user histories are built on disk and read by memory mapping.

[Note: histories on disk]

The histories are built in three stages. Every stage writes a folder, and later runs reuse the folder as long
as the stage's inputs have not changed:

1. ``parts/`` holds the valid log rows as Arrow files, called parts, each from consecutive rows in a log file
   (see ``log_parts.py``). In a part, users and items are integers, or codes for the distinct values stored in
   the part. A new log file adds parts and leaves existing parts unchanged.
2. ``numbers-*/`` holds a number for every user and item in the log: 0, 1, 2, ... ordered by first appearance.
   It also holds the row count per user and item, which vocabularies are fitted on, and maps from the values
   in a part to these numbers.
3. ``sorted-*/`` holds item IDs, times and row numbers, sorted by user and time, as NumPy files. To sort with
   bounded memory, rows are first divided into buckets, each for a range of users. Then every bucket is
   sorted in memory.

A run also stores the results of passes over the whole sorted log, such as item counts, in ``derived-*/``.
Later runs with the same options map these files, and so start without a pass.

The results equal those of the in-memory functions `meshrec.data.logs.counted_rows`, `fit_log` and
`interactions`.
"""

import fcntl
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.exact_columns import as_integers
from meshrec.data.faults import DataError, Faults
from meshrec.data.features import Features, Key
from meshrec.data.features.features import FitState
from meshrec.data.features.sketches import Counts, RowSample
from meshrec.data.features.values import decoded, hashes_of, one_number, whole
from meshrec.data.interactions import Arrays
from meshrec.data.log_columns import ITEM, USER
from meshrec.data.log_parts import (
    FEATURE,
    MAX_RANGE,
    ROW,
    TIME,
    VERSION,
    LogFiles,
    LogParts,
    Progress,
    bounded_map,
    digest_of,
    encode_parts,
    num_threads,
)
from meshrec.data.logs import (
    ItemSample,
    LoggedUsers,
    SortedRows,
    check_any_rows,
    check_kinds,
    item_ids,
    log_features,
    logged_users,
    sorted_order,
    vocabulary_of,
    warn_of_unknown,
)
from meshrec.data.samples import Bools, Ints
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
from meshrec.durable.scratch import scratch_folder

# U users, N log rows, n rows in a part or bucket

_MANIFEST = "manifest.json"
_MAX_MANIFEST = 1 << 28
_SORT_BYTES = 128
"""Memory bytes per row while a bucket is sorted: two copies of the record, the sort keys, and the results."""
_DERIVED_VERSION = 1
"""Version of the arrays in `_DerivedArrays`. Raise it when `meshrec.data.next_items` computes others."""
# A bucket is a file. With at least num_rows // _MAX_BUCKETS rows per bucket, there are fewer than
# 2 * _MAX_BUCKETS buckets, so a bucket number fits uint16.
_MAX_BUCKETS = 1 << 15


def fit_histories(log: LogFiles, folder: Path, faults: Faults, *, users: bool, memory: int) -> Features:
    """Fit the vocabularies for a log on disk; build missing stages (see [Note: histories on disk]).

    The result equals that of `fit_log` for the rows from `counted_rows`.

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

    See [Note: histories on disk]. The result equals that of `interactions` for the rows from `counted_rows`.

    Args:
        log: log files, and the options deciding which rows are valid.
        folder: folder for the stages; created if missing.
        faults: raises or skips when a row lacks a user, item or time.
        features: fitted features, from `fit_histories`.
        hashed: feature hashing items to keys, for a hashed item table. None: an item ID is the row in a table
            with fixed size.
        seed: seed that orders a user's simultaneous rows, if ``log.columns.ties`` is "shuffle".
        memory: bytes to use while building, in addition to a few arrays per user and item.

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
        path = folder / f"sorted-{digest_of([_options(log), options])}"
        vocabulary = hashlib.sha256(hashes_of(item.vocabulary).tobytes()).hexdigest()
        # All inputs that item IDs depend on.
        key = digest_of([numbered.key, vocabulary, item.rows, item.num_unseen])
        sorter = _Sorter(numbered, item, hashed, seed, memory)
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
    store = _DerivedArrays(folder, digest_of([_options(log), options]), digest_of([_DERIVED_VERSION, key]))
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
def _locked_numbers(log: LogFiles, folder: Path, faults: Faults, memory: int) -> Iterator["_UserItemNumbers"]:
    """Build the first two stages if needed, and yield the user and item numbers.

    The folder is locked until the context ends; other processes that build in the same folder wait.
    """
    parts_folder = folder / "parts"
    parts_folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        parts = encode_parts(log, parts_folder, faults, memory=memory)
        path = folder / f"numbers-{digest_of(_options(log))}"
        numbered = _UserItemNumbers(log, parts, path)
        _build_if_stale(path, numbered.key, numbered.build, parts.names)
        yield numbered


def _options(log: LogFiles) -> dict[str, Any]:
    """Return the options that the histories depend on, in addition to the file contents."""
    paths = [str(log.paths)] if isinstance(log.paths, str | Path) else [str(path) for path in log.paths]
    return {"version": VERSION, "paths": paths, "columns": asdict(log.columns)}


class _UserItemNumbers:
    """Second stage in [Note: histories on disk]: a number for every user and item, and their row counts.

    The other methods read the stage folder, so `build` must have run, now or in an earlier process.

    Args:
        log: log files and options.
        parts: all log parts.
        path: folder for this stage.
    """

    def __init__(self, log: LogFiles, parts: LogParts, path: Path) -> None:
        self.log, self.parts, self.path = log, parts, path
        # Identifies the inputs of this stage: names of parts contain a digest over file content and options.
        self.key = digest_of([_options(log), parts.names])

    def values(self, name: str) -> Any:
        """Return the distinct user or item values by number, as a memory-mapped Arrow array.

        Value i belongs to the user or item with number i. ``name`` is `USER` or `ITEM`.
        """
        return self._table(name)["value"].combine_chunks()

    def counts(self, name: str) -> Ints:
        """Return the row count per user or item, int64, by number. ``name`` is `USER` or `ITEM`.

        Counts only rows whose user and item both reach the minimum counts.
        """
        counts: Ints = self._table(name)["count"].to_numpy()
        return counts

    def numbers(self, name: str, part: int, folder: Path | None = None) -> Ints:
        """Return the user number or item number for every row in a part.

        The number is -1 for a user or item that has no row left after infrequent users and items are
        omitted.

        Args:
            name: `USER` or `ITEM`.
            part: index of the part.
            folder: folder with the maps from values to numbers. None: the stage folder. While the stage is
                being built, this is the temporary folder.
        """
        folder = self.path if folder is None else folder
        column = self.parts.parts[part].table()[name].chunk(0)
        if (folder / f"{name}.npy").exists():
            # Integers in a small range: a single map for all parts, indexed by value - low.
            low, *_ = np.load(folder / f"{name}-low.npy")
            of_value = np.load(folder / f"{name}.npy", mmap_mode="r")
            numbers: Ints = of_value[column.to_numpy().astype(np.int64, copy=False) - low]
        else:
            # Other values: a map per part, indexed by the part's dictionary code.
            of_code = np.load(folder / f"{name}-{part}.npy", mmap_mode="r")
            numbers = of_code[column.dictionary_encode().indices.to_numpy()]
        return numbers

    def frequent_rows(self, part: int) -> tuple[pa.Table, Ints, Ints]:
        """Return the rows in a part whose user and item both reach the minimum counts.

        Args:
            part: index of the part.

        Returns:
            - The n rows, without the columns `USER` and `ITEM`.
            - The user number per row, [n].
            - The item number per row, [n].
        """
        table = self.parts.parts[part].table()
        users, items = (self.numbers(name, part) for name in (USER, ITEM))
        table = table.drop_columns([USER, ITEM])
        is_counted = (users >= 0) & (items >= 0)
        if is_counted.all():
            return table, users, items
        rows = np.flatnonzero(is_counted)
        return table.take(pa.array(rows)), users[rows], items[rows]

    def type_of(self, name: str) -> pa.DataType:
        """Return the Arrow type that represents a column in all parts; see `_common_type`."""
        return _read_table(self.path / "types.arrow").schema.field(name).type

    def schema(self) -> pa.Schema:
        """Return the Arrow types for the log columns that features read, under their names in the log."""
        columns = self.log.columns
        names = {columns.user: USER, columns.item: ITEM}
        names |= {name: FEATURE + name for name in columns.item_features}
        return pa.schema([(column, self.type_of(name)) for column, name in names.items()])

    def item_features(self, table: pa.Table) -> pa.Table:
        """Return the item feature columns of a part, cast to the types that represent all parts.

        Columns have their names in the log, without the prefix `FEATURE`.
        """
        columns = {
            name: _cast_to_common_type(table[FEATURE + name], self.type_of(FEATURE + name))
            for name in self.log.columns.item_features
        }
        return pa.table(columns)

    def _table(self, name: str) -> pa.Table:
        return _read_table(self.path / f"{name}.arrow")

    def _distinct(self, name: str) -> Iterator[Any]:
        """Yield an Arrow array per part that contains every distinct value in a column of the part."""
        return (part.distinct(name) for part in self.parts.parts)

    # -- building ----------------------------------------------------------------------------------------

    def build(self, folder: Path) -> dict[str, Any]:
        """Write the stage: number users and items ordered by first appearance, and count their rows.

        Args:
            folder: temporary folder, renamed to the stage folder afterwards.

        Returns:
            Additional manifest fields, of which this stage has none.
        """
        columns = self.log.columns
        num_parts = len(self.parts.parts)
        check_any_rows(self.log.name, num_parts)
        names = [USER, ITEM, *(FEATURE + name for name in columns.item_features)]
        types = pa.schema([(name, _common_type(self._distinct(name))) for name in names])
        _write_table(folder / "types.arrow", types.empty_table())

        def unified(name: str) -> Any:
            """Number users or items: write maps from values to numbers, and return the values by number."""
            kind = types.field(name).type
            # An array indexed by integer avoids hashing. It is possible only for a small range.
            values = self._number_by_lookup(name, kind, folder)
            return self._number_by_hashing(name, kind, folder) if values is None else values

        # Users and items are numbered at the same time, in two threads.
        values = dict(zip((USER, ITEM), bounded_map(unified, (USER, ITEM), 2), strict=True))
        counts = {name: np.zeros(len(values[name]), np.int64) for name in values}

        def user_and_item_numbers(part: int) -> dict[str, Ints]:
            """Return the user number and the item number for every row in a part, by name."""
            return {name: self.numbers(name, part, folder) for name in values}

        # All values in parts have a number so far: -1 appears only in `_renumber_frequent`.
        for numbers in bounded_map(user_and_item_numbers, range(num_parts), num_threads()):
            for name in counts:
                counts[name] += np.bincount(numbers[name], minlength=len(counts[name]))
        # Both masks use the same counts, so the result does not depend on whether users or items come
        # first.
        is_frequent = {
            USER: counts[USER] >= columns.min_user_count,
            ITEM: counts[ITEM] >= columns.min_item_count,
        }
        if not all(mask.all() for mask in is_frequent.values()):
            values, counts = self._renumber_frequent(folder, values, is_frequent)
        check_any_rows(self.log.name, int(counts[USER].sum()))
        for name in counts:
            _write_table(folder / f"{name}.arrow", pa.table({"value": values[name], "count": counts[name]}))
        return {}

    def _number_by_hashing(self, name: str, kind: pa.DataType, folder: Path) -> Any:
        """Return the distinct values from all parts, ordered by first appearance.

        Also writes a map per part, ``NAME-PART.npy``: the number for every dictionary code in the part.

        Args:
            name: `USER` or `ITEM`.
            kind: type that represents the values in all parts.
            folder: folder for the maps.
        """
        values = pa.array([], kind)
        pending: list[Any] = []  # distinct values of parts from ``first`` on, not merged into ``values`` yet
        first = 0
        # Parts are merged in log order, which gives numbers by first appearance.
        for part, distinct in enumerate(self._distinct(name)):
            pending.append(_cast_to_common_type(distinct.dictionary_encode().dictionary, kind))
            # Every merge hashes all merged values again, which takes quadratic time in total for a merge per
            # part. So merge only when there are at least as many pending values as merged ones.
            if sum(map(len, pending)) < len(values) and part + 1 < len(self.parts.parts):
                continue
            # One dictionary for all chunks: merged values keep their numbers, because they come first.
            encoded = pa.chunked_array([values, *pending]).dictionary_encode()
            values = encoded.chunk(0).dictionary
            for number, chunk in enumerate(encoded.chunks[-len(pending) :]):
                codes = pc.fill_null(chunk.indices, -1).to_numpy(zero_copy_only=False)
                np.save(folder / f"{name}-{first + number}.npy", codes)
            first, pending = part + 1, []
        return values

    def _number_by_lookup(self, name: str, kind: pa.DataType, folder: Path) -> Any:
        """Number integers in a small range without hashing, ordered by first appearance.

        Writes ``NAME.npy``, an array with the number for every integer from the smallest on, and the smallest
        integer in ``NAME-low.npy``.

        Args:
            name: `USER` or `ITEM`.
            kind: type of the result.
            folder: folder for the arrays.

        Returns:
            The distinct integers by number. None if values are not integers, or span more than `MAX_RANGE`.
        """
        columns = [part.table()[name].chunk(0) for part in self.parts.parts]
        if not all(pa.types.is_integer(column.type) for column in columns):
            return None
        ends = [pc.min_max(column) for column in columns]
        low = min(end["min"].as_py() for end in ends)
        size = max(end["max"].as_py() for end in ends) + 1 - low
        if size > MAX_RANGE:
            return None
        numbers = np.full(size, -1, np.int32)
        order: list[Ints] = []
        num = 0
        for column in columns:
            values = column.to_numpy().astype(np.int64, copy=False) - low
            # `pc.unique` keeps the order of first appearance.
            new = pc.unique(pa.array(values[numbers[values] < 0])).to_numpy()
            numbers[new] = np.arange(num, num + len(new))
            order.append(new + low)
            num += len(new)
        np.save(folder / f"{name}.npy", numbers)
        np.save(folder / f"{name}-low.npy", np.array([low]))
        return pa.array(np.concatenate(order)).cast(kind)

    def _renumber_frequent(
        self, folder: Path, values: dict[str, Any], is_frequent: dict[str, Bools]
    ) -> tuple[dict[str, Any], dict[str, Ints]]:
        """Omit rows with an infrequent user or item, and number the remaining users and items again.

        Rewrites the maps from values to numbers; omitted users and items get -1.

        Args:
            folder: folder with the maps.
            values: distinct values by old number, for `USER` and `ITEM`.
            is_frequent: whether a user or item reaches the minimum count, by old number.

        Returns:
            Distinct values and row counts by new number, for `USER` and `ITEM`.
        """
        # An omitted row may be the last one of a frequent user. That user gets no number either.
        renumbered = {name: np.full(len(mask), -1, np.int32) for name, mask in is_frequent.items()}
        order: dict[str, list[Ints]] = {name: [] for name in values}
        counts = {name: np.zeros(len(mask), np.int64) for name, mask in is_frequent.items()}
        num = dict.fromkeys(values, 0)
        for part in range(len(self.parts.parts)):
            numbers = {name: self.numbers(name, part, folder) for name in values}
            # Counted once, before any row is omitted: omitting rows does not make further users or items
            # infrequent.
            is_counted = is_frequent[USER][numbers[USER]] & is_frequent[ITEM][numbers[ITEM]]
            for name in values:
                frequent = numbers[name][is_counted]
                counts[name] += np.bincount(frequent, minlength=len(counts[name]))
                appeared = pc.unique(pa.array(frequent)).to_numpy()
                new = appeared[renumbered[name][appeared] < 0]
                renumbered[name][new] = np.arange(num[name], num[name] + len(new))
                order[name].append(new)
                num[name] += len(new)
        for name in values:
            paths = [folder / f"{name}.npy"]
            if not paths[0].exists():
                paths = [folder / f"{name}-{part}.npy" for part in range(len(self.parts.parts))]
            for path in paths:
                numbers_of_values = np.load(path)
                is_number = numbers_of_values >= 0
                numbers_of_values[is_number] = renumbered[name][numbers_of_values[is_number]]
                np.save(path, numbers_of_values)
        orders = {name: np.concatenate(order[name]) for name in values}
        return (
            {name: values[name].take(pa.array(orders[name])) for name in values},
            {name: counts[name][orders[name]] for name in values},
        )

    # -- fitting -----------------------------------------------------------------------------------------

    def fit(self, *, users: bool) -> Features:
        """Return the fitted vocabularies, with a user vocabulary only if ``users`` is true."""
        columns = self.log.columns
        features = log_features(columns, users=users)
        # Users and items are already counted. Only item features need a pass over the parts.
        names = [ITEM, USER] if users else [ITEM]
        counts = {name: Counts(self.values(name), pa.array(self.counts(name))) for name in names}
        num_rows = int(self.counts(USER).sum())
        sample = RowSample(pa.table({"": np.zeros(0, np.bool_)}), np.zeros(0, np.uint64))
        state = FitState(num_rows, sample, {})
        if columns.item_features:
            described = Features(labels=(), features=features.features[len(names) :])
            states = self._states(described)
            state = next(states)
            for other in states:
                state = state.merged(other)
        schema = self.schema()
        messages = features.wrong_columns(schema)
        if messages:
            raise ValueError(f"{messages[0]}.")
        return features.fitted(state._replace(counts={**counts, **state.counts}), schema)

    def _states(self, described: Features) -> Iterator[FitState]:
        """Yield the statistics from which the item features are fitted, part by part."""
        first = 0
        for part in range(len(self.parts.parts)):
            # Rows are numbered among counted rows, as in `fit_log`, so both draw the same sample.
            table = self.item_features(self.frequent_rows(part)[0])
            if table.num_rows:
                yield described.state_of(table, np.arange(first, first + table.num_rows))
            first += table.num_rows


class _Bucket(NamedTuple):
    """Temporary file with all rows of the users numbered ``start`` to ``stop``, exclusive."""

    path: Path
    """File with records in log order, see `_Sorter._record_type`."""
    start: int
    stop: int


@dataclass
class _Sorter:
    """Third stage in [Note: histories on disk]: sort rows by user, then by time.

    A user's simultaneous rows keep their log order, or are shuffled, as ``log.columns.ties`` says.
    """

    numbered: _UserItemNumbers
    item: Any
    """Fitted item vocabulary."""
    hashed: Key | None
    """Feature that hashes items to keys; None: item IDs are table rows."""
    seed: int
    """Seed that shuffles simultaneous rows."""
    memory: int
    """Bytes to use for sorting."""

    @functools.cached_property
    def ids(self) -> Ints:
        """Item ID in the item table, by item number."""
        return item_ids(self.item, self.numbered.values(ITEM), self.hashed)

    @functools.cached_property
    def has_seconds(self) -> bool:
        """Whether the field "time" of records has seconds; False: microseconds."""
        tables = (part.table() for part in self.numbered.parts.parts)
        return all(table.schema.field(TIME).type == pa.int32() for table in tables)

    @functools.cached_property
    def is_known(self) -> Bools:
        """Whether an item is in the fitted vocabulary, by item number."""
        is_known: Bools = self.item.lookup_values(self.numbered.values(ITEM)) >= 0
        return is_known

    def build(self, folder: Path) -> dict[str, Any]:
        """Write the arrays of `SortedRows`, and the item sample if the log has item features.

        Args:
            folder: temporary folder, renamed to the stage folder afterwards.

        Returns:
            Additional manifest fields. ``num_rows`` is the number of sorted rows, and ``num_unknown`` is the
            number of rows omitted because their item is not in the vocabulary.
        """
        parts, threads = self.numbered.parts, num_threads()
        counts_U = self.numbered.counts(USER)
        num_rows, num_users = int(counts_U.sum()), len(counts_U)
        # Every thread sorts a bucket, and the caller writes another one.
        max_rows = max(self.memory // (_SORT_BYTES * (threads + 1)), num_rows // _MAX_BUCKETS, 1)
        # A bucket has all rows of its users, so buckets are sorted independently. A user with more than
        # max_rows rows makes a larger bucket.
        bucket_of_user = ((np.cumsum(counts_U) - counts_U) // max_rows).astype(np.uint16)
        edges = np.searchsorted(bucket_of_user, np.arange(int(bucket_of_user[-1]) + 2))
        with scratch_folder(".histories", folder.parent) as scratch:
            buckets = [
                _Bucket(scratch / str(number), int(start), int(stop))
                for number, (start, stop) in enumerate(itertools.pairwise(edges))
            ]
            # Sorting starts when all parts are divided: any part may have rows for any bucket.
            num_sorted = self._divide(buckets, bucket_of_user, scratch)
            times = (parts.times[0] // 1_000_000, parts.times[1] // 1_000_000)
            offsets = np.zeros(num_users + 1, np.int64)
            with ExitStack() as files:
                writers = {
                    name: files.enter_context(_npy_writer(folder / f"{name}.npy", kind, num_sorted))
                    for name, kind in (
                        ("items", self._record_type()["item"]),
                        ("times", _integer_type(times)),
                        ("rows", self._record_type()["row"]),
                    )
                }
                progress = Progress("sorting the histories", num_sorted)
                # Buckets are sorted in threads, and written in user order.
                for bucket, rows in zip(buckets, bounded_map(self._sort, buckets, threads), strict=True):
                    # Row counts per user; their cumulative sum below gives the offsets.
                    offsets[bucket.start + 1 : bucket.stop + 1] = np.diff(rows.offsets)
                    for name, write in writers.items():
                        write(getattr(rows, name))
                    progress.add(len(rows.items))
        np.save(folder / "offsets.npy", np.cumsum(offsets))
        if self.numbered.log.columns.item_features:
            _write_table(folder / "sample.arrow", self._item_sample())
        return {"num_rows": num_sorted, "num_unknown": num_rows - num_sorted}

    def _item_sample(self) -> pa.Table:
        """Return the item features from the first log row with each item, sorted by item ID.

        The item ID is in the column with the empty name. Items outside the vocabulary are omitted.
        """
        is_seen = np.zeros(len(self.ids), np.bool_)
        tables = []
        for part in range(len(self.numbered.parts.parts)):
            rows, _, items = self.numbered.frequent_rows(part)
            known = np.flatnonzero(self.is_known[items])
            distinct, first = np.unique(items[known], return_index=True)
            # Rows with an item that no earlier part has.
            new = known[first[~is_seen[distinct]]]
            is_seen[distinct] = True
            features = self.numbered.item_features(rows.take(pa.array(new)))
            tables.append(features.append_column("", pa.array(self.ids[items[new]])))
        return pa.concat_tables(tables).sort_by("")

    def _record_type(self) -> "np.dtype[np.void]":
        """Return the structured dtype for a row in a bucket file, with integers as narrow as possible."""
        # Hashed keys cover the whole int64 range; 1 << 62 selects that type.
        max_id = self.item.rows if self.hashed is None else 1 << 62
        fields = [
            ("user", _integer_type((0, len(self.numbered.counts(USER))))),
            ("item", _integer_type((0, max_id))),
            ("time", np.dtype(np.int32 if self.has_seconds else np.int64)),
            ("row", _integer_type((0, self.numbered.parts.num_rows))),
        ]
        if self.numbered.log.columns.ties == "shuffle":
            fields.append(("tie", _integer_type((0, self.numbered.parts.num_rows))))
        return np.dtype(fields, align=True)

    def _divide(self, buckets: list[_Bucket], bucket_of_user: Any, scratch: Path) -> int:
        """Write all parts' rows to the bucket files, in log order.

        Args:
            buckets: all buckets; their files do not exist yet.
            bucket_of_user: bucket number per user, uint16 [U].
            scratch: folder for temporary files.

        Returns:
            The number of rows written, without rows whose item is not in the vocabulary.
        """
        parts = range(len(self.numbered.parts.parts))
        progress = Progress("dividing the log by users", self.numbered.parts.num_rows)
        ties = self._ties(scratch)
        num_rows = 0

        def records_of(part: int) -> Any:
            """Return a part's `frequent_rows` as records, without items outside the vocabulary."""
            rows, users, items = self.numbered.frequent_rows(part)
            records = np.empty(len(users), self._record_type())
            times = rows[TIME].to_numpy()
            if times.dtype == np.int32 and not self.has_seconds:
                times = times.astype(np.int64) * 1_000_000
            records["user"], records["item"], records["time"] = users, self.ids[items], times
            # Row numbers in a file may be int32, and row numbers in the log need not fit.
            rows_of_file = rows[ROW].to_numpy().astype(np.int64)
            records["row"] = rows_of_file + self.numbered.parts.parts[part].first_row
            return records if self.is_known.all() else records[self.is_known[items]]

        def with_ties() -> Iterator[Any]:
            """Yield the records part by part. If simultaneous rows are shuffled, set the field "tie".

            "tie" has the row's position in the random permutation from `_ties`.
            """
            # Results of bounded_map are in log order, so position i of ``ties`` is for the i-th written row.
            first = 0
            for records in bounded_map(records_of, parts, num_threads()):
                if ties is not None:
                    records["tie"] = ties[first : first + len(records)]
                first += len(records)
                yield records

        def sort_by_bucket(records: Any) -> tuple[Any, Ints]:
            """Return the records sorted by bucket, and the index after the last record of every bucket."""
            of_record = bucket_of_user[records["user"]]
            # A stable sort: rows of a bucket stay in log order, which decides between equal times.
            records = _take_records(records, np.argsort(of_record, kind="stable"))
            return records, np.cumsum(np.bincount(of_record, minlength=len(buckets)))

        for records, stops in bounded_map(sort_by_bucket, with_ties(), num_threads()):
            for bucket, start, stop in zip(buckets, [0, *stops[:-1]], stops, strict=True):
                # Opened even without rows, so every bucket has a file to sort.
                with bucket.path.open("ab") as file:
                    records[start:stop].tofile(file)
            num_rows += len(records)
            progress.add(len(records))
        return num_rows

    def _sort(self, bucket: _Bucket) -> SortedRows:
        """Return the rows in a bucket, sorted by user, time and tie.

        ``offsets`` in the result start at 0 for the bucket's first user; times are in seconds.
        """
        records = np.fromfile(bucket.path, self._record_type())
        keys = [records["tie"]] if "tie" in (self._record_type().names or ()) else []
        records = _take_records(records, sorted_order([*keys, records["time"], records["user"]]))
        counts = np.bincount(records["user"] - bucket.start, minlength=bucket.stop - bucket.start)
        return SortedRows(
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            items=records["item"],
            times=records["time"] if self.has_seconds else records["time"] // 1_000_000,
            rows=records["row"],
        )

    def _ties(self, scratch: Path) -> Any:
        """Return a random permutation that orders simultaneous rows, in a memory-mapped file.

        Equals the permutation in `interactions`. None if simultaneous rows keep their log order.
        """
        if self.numbered.log.columns.ties == "keep":
            return None
        num_rows = int(self.numbered.counts(ITEM)[self.is_known].sum())
        kind = _integer_type((0, self.numbered.parts.num_rows))
        ties = np.lib.format.open_memmap(scratch / "ties.npy", "w+", kind, (num_rows,))
        ties[:] = np.arange(num_rows)
        # NumPy shuffles subclasses of ndarray slowly, and a mapped file is such a subclass.
        np.random.default_rng(self.seed).shuffle(np.asarray(ties))
        return ties


def _take_records(records: Any, order: Ints) -> Any:
    """Return the records at the positions ``order``.

    Records are viewed as rows of int32, which NumPy copies faster than structures.
    """
    words = records.view(np.int32).reshape(len(records), records.itemsize // 4)
    return words.take(order, axis=0).reshape(-1).view(records.dtype)


def _build_if_stale(
    path: Path, key: str, build: Callable[[Path], dict[str, Any]], parts: Sequence[str]
) -> dict[str, Any]:
    """Build a stage folder unless it is up to date, and return the folder's manifest.

    The caller holds the lock from `_lock`.

    Args:
        path: stage folder. A build for other inputs is replaced; log parts that no stage uses any more are
            deleted.
        key: digest over all inputs of the stage. The folder is up to date if its manifest has this key.
        build: writes the stage files into a temporary folder, and returns additional manifest fields.
        parts: names of the log parts that the stage reads, also after it was built.

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


def _read_table(path: Path) -> pa.Table:
    """Open an Arrow file as a memory-mapped table."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _write_table(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def _read_sample(path: Path) -> ItemSample:
    table = _read_table(path / "sample.arrow")
    return ItemSample(table[""].to_numpy(), table)


@contextmanager
def _npy_writer(path: Path, kind: "np.dtype[Any]", num_rows: int) -> Iterator[Callable[[Ints], None]]:
    """Create a NumPy file for a one-dimensional array, and yield a function that appends values to it.

    Args:
        path: the file.
        kind: dtype in the file; appended values are cast to it.
        num_rows: total number of values that will be appended.
    """
    with path.open("wb") as file:
        # The header has the shape, so the length must be known before the first value.
        header = {"descr": kind.str, "fortran_order": False, "shape": (num_rows,)}
        np.lib.format.write_array_header_1_0(file, header)
        yield lambda values: np.ascontiguousarray(values.astype(kind, copy=False)).tofile(file)


def _integer_type(bounds: tuple[int, int]) -> "np.dtype[Any]":
    """Return int32 if it can represent both bounds, inclusive, otherwise int64."""
    return np.dtype(np.int32 if bounds[0] >= -(1 << 31) and bounds[1] < 1 << 31 else np.int64)


def _common_type(arrays: Iterable[Any]) -> pa.DataType:
    """Return the Arrow type that `one_number` would give the concatenated arrays, without concatenating them.

    Integers and integral floats have an integer type. If any value has a fraction, the type is a float.

    Args:
        arrays: the same column from every part.
    """
    summaries = []
    for array in arrays:
        summary = array.slice(0, 0)
        is_integer = pa.types.is_integer(array.type)
        if is_integer or pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
            array = array.drop_null()
            if not is_integer:
                array = array.filter(pc.equal(array, array))  # without NaN
                fractions = array.filter(pc.not_equal(pc.floor(array), array))
                summary = pa.concat_arrays([summary, fractions.slice(0, 1)])
            # These values give the same type as the whole array: its extremes decide the width, and a value
            # with a fraction decides between integer and float.
            ends = pc.min_max(array)
            summary = pa.concat_arrays([summary, pa.array([ends["min"], ends["max"]], array.type)])
        summaries.append(pa.table({"": summary}))
    values = pa.concat_tables(summaries, promote_options="permissive")[""]
    return one_number(values.combine_chunks()).type


def _cast_to_common_type(array: Any, kind: pa.DataType) -> Any:
    """Cast an array from a part to ``kind``, the type from `_common_type` that represents all parts."""
    array = decoded(whole(array))
    if pa.types.is_floating(kind):
        return pc.add(array.cast(pa.float64()), 0.0)
    is_number = pa.types.is_floating(array.type) or pa.types.is_decimal(array.type)
    return (as_integers(array) if is_number else array).cast(kind)
