"""Logs with any size as histories on disk, read by memory mapping.

[Note: histories on disk]

Three stages, each kept in the folder and reused while its inputs are the same:

1. ``parts/``: the valid rows in each file as integers, next to the part's distinct values
   (``log_parts.py``). New files add parts; parts for other files stay.
2. ``numbers-*/``: a number for each user, in order of first appearance, and item counts, which vocabularies
   are fitted on. Maps translate part codes.
3. ``sorted-*/``: items, times and row numbers sorted by user and time, as numpy files. The sort divides the
   rows by user ranges into buckets that fit in memory, and then sorts each bucket.

All results equal those of `meshrec.data.logs.counted_rows`, `fit_log` and `interactions`.
"""

import fcntl
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
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
"""Memory to sort a row: the record twice, its keys, and the results."""
_MAX_BUCKETS = 1 << 15


def fit_histories(log: LogFiles, folder: Path, faults: Faults, *, users: bool, memory: int) -> Features:
    """Fit a log's vocabularies, as `fit_log` does on `counted_rows`.

    Args:
        log: files and options.
        folder: folder for the histories; created.
        faults: handles rows without user, item or time.
        users: whether users are a feature.
        memory: memory bytes for building, besides a few arrays per user and item.

    Raises:
        DataError: a file cannot be read, a column is missing, a row lacks a value, or no row remains.
    """
    with _numbered(log, folder, faults, memory) as numbered:
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
    """Return a log's sorted rows, as `interactions` does on `counted_rows`; build missing stages.

    Args:
        log: files and options.
        folder: folder for the histories; created.
        faults: handles rows without user, item or time.
        features: fitted features.
        hashed: hashed key feature for a table without a fixed row count; None: IDs are rows.
        seed: seed for shuffling ties.
        memory: memory bytes for building, besides a few arrays per user and item.

    Raises:
        DataError: as for `fit_histories`, or a column's kind differs from the fitted kind.
    """
    with _numbered(log, folder, faults, memory) as numbered:
        check_kinds(log.name, features, numbered.schema())
        item = vocabulary_of(features, ITEM)
        options = {
            "hashed": None if hashed is None else asdict(hashed),
            "seed": seed if log.columns.ties == "shuffle" else None,
        }
        path = folder / f"sorted-{digest_of([_options(log), options])}"
        vocabulary = hashlib.sha256(hashes_of(item.vocabulary).tobytes()).hexdigest()
        key = digest_of([numbered.key, vocabulary, item.rows, item.num_unseen])
        sorter = _Sorter(numbered, item, hashed, seed, memory)
        manifest = _stage(path, key, sorter.build, numbered.parts)
        warn_of_unknown(log.name, manifest["num_unknown"], manifest["num_rows"])
        arrays = (np.load(path / f"{name}.npy", mmap_mode="r") for name in SortedRows._fields)
        return logged_users(
            log.name,
            features,
            SortedRows(*arrays),
            numbered.values(USER),
            num_rows=numbered.parts.num_rows,
            hashed=hashed,
            sample=_read_sample(path) if log.columns.item_features else None,
        )


@contextmanager
def _numbered(log: LogFiles, folder: Path, faults: Faults, memory: int) -> Iterator["_Numbered"]:
    """Yield the user and item numbers. Other processes that build in the folder wait until the end."""
    parts_folder = folder / "parts"
    parts_folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        parts = encode_parts(log, parts_folder, faults, memory=memory)
        path = folder / f"numbers-{digest_of(_options(log))}"
        numbered = _Numbered(log, parts, path)
        _stage(path, numbered.key, numbered.build, parts)
        yield numbered


def _options(log: LogFiles) -> dict[str, Any]:
    """Return the options that the results depend on, besides the file contents."""
    paths = [str(log.paths)] if isinstance(log.paths, str | Path) else [str(path) for path in log.paths]
    return {"version": VERSION, "paths": paths, "columns": asdict(log.columns)}


class _Numbered:
    """User and item numbers in a log, and the stage that computes them.

    Args:
        log: files and options.
        parts: all parts.
        path: stage folder.
    """

    def __init__(self, log: LogFiles, parts: LogParts, path: Path) -> None:
        self.log, self.parts, self.path = log, parts, path
        self.key = digest_of([_options(log), parts.names])

    def values(self, name: str) -> Any:
        """Return the distinct `USER` or `ITEM` values by number, mapped."""
        return self._table(name)["value"].combine_chunks()

    def counts(self, name: str) -> Ints:
        """Return how many counted rows every user or item has."""
        counts: Ints = self._table(name)["count"].to_numpy()
        return counts

    def numbers(self, name: str, part: int, folder: Path | None = None) -> Ints:
        """Return the user or item for each row in a part, -1 for omitted ones.

        Args:
            name: `USER` or `ITEM`.
            part: part position.
            folder: map folder; None: the stage's folder.
        """
        folder = self.path if folder is None else folder
        column = self.parts.parts[part].table()[name].chunk(0)
        if (folder / f"{name}.npy").exists():
            low, *_ = np.load(folder / f"{name}-low.npy")
            of_value = np.load(folder / f"{name}.npy", mmap_mode="r")
            numbers: Ints = of_value[column.to_numpy().astype(np.int64, copy=False) - low]
        else:
            of_code = np.load(folder / f"{name}-{part}.npy", mmap_mode="r")
            numbers = of_code[column.dictionary_encode().indices.to_numpy()]
        return numbers

    def counted(self, part: int) -> tuple[pa.Table, Ints, Ints]:
        """Return a part's rows whose user and item are both frequent.

        Args:
            part: part position.

        Returns:
            The n rows without their `USER` and `ITEM` columns, the user numbers [n], and the item
            numbers [n].
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
        """Return a part column's type over all files, as `one_number` makes it."""
        return _read_table(self.path / "types.arrow").schema.field(name).type

    def schema(self) -> pa.Schema:
        """Return the types for columns read by features."""
        columns = self.log.columns
        names = {columns.user: USER, columns.item: ITEM}
        names |= {name: FEATURE + name for name in columns.item_features}
        return pa.schema([(column, self.type_of(name)) for column, name in names.items()])

    def item_features(self, table: pa.Table) -> pa.Table:
        """Return the item feature columns for rows in a part, with their types over all files."""
        columns = {
            name: _converted(table[FEATURE + name], self.type_of(FEATURE + name))
            for name in self.log.columns.item_features
        }
        return pa.table(columns)

    def _table(self, name: str) -> pa.Table:
        return _read_table(self.path / f"{name}.arrow")

    def _distinct(self, name: str) -> Iterator[Any]:
        """Yield a column's values, part by part."""
        for part in self.parts.parts:
            for chunk in part.table()[name].chunks:
                yield chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk

    # -- building ----------------------------------------------------------------------------------------

    def build(self, folder: Path) -> dict[str, Any]:
        """Number users and items in order of first appearance, and write all part maps."""
        columns = self.log.columns
        num_parts = len(self.parts.parts)
        check_any_rows(self.log.name, num_parts)
        names = [USER, ITEM, *(FEATURE + name for name in columns.item_features)]
        types = pa.schema([(name, _common_type(self._distinct(name))) for name in names])
        _write_table(folder / "types.arrow", types.empty_table())

        def unified(name: str) -> Any:
            kind = types.field(name).type
            values = self._numbered_integers(name, kind, folder)
            return self._unified(name, kind, folder) if values is None else values

        values = dict(zip((USER, ITEM), bounded_map(unified, (USER, ITEM), 2), strict=True))
        counts = {name: np.zeros(len(values[name]), np.int64) for name in values}

        def counted(part: int) -> dict[str, Ints]:
            return {name: self.numbers(name, part, folder) for name in values}

        for numbers in bounded_map(counted, range(num_parts), num_threads()):
            for name in counts:
                counts[name] += np.bincount(numbers[name], minlength=len(counts[name]))
        is_frequent = {
            USER: counts[USER] >= columns.min_user_count,
            ITEM: counts[ITEM] >= columns.min_item_count,
        }
        if not all(mask.all() for mask in is_frequent.values()):
            values, counts = self._frequent(folder, values, is_frequent)
        check_any_rows(self.log.name, int(counts[USER].sum()))
        for name in counts:
            _write_table(folder / f"{name}.arrow", pa.table({"value": values[name], "count": counts[name]}))
        return {}

    def _unified(self, name: str, kind: pa.DataType, folder: Path) -> Any:
        """Return the distinct values from all parts in first-appearance order; write the part maps."""
        values = pa.array([], kind)
        pending: list[Any] = []
        first = 0
        for part, distinct in enumerate(self._distinct(name)):
            pending.append(_converted(distinct.dictionary_encode().dictionary, kind))
            # Hashing all values again for every part would take quadratic time.
            if sum(map(len, pending)) < len(values) and part + 1 < len(self.parts.parts):
                continue
            encoded = pa.chunked_array([values, *pending]).dictionary_encode()
            values = encoded.chunk(0).dictionary
            for number, chunk in enumerate(encoded.chunks[-len(pending) :]):
                codes = pc.fill_null(chunk.indices, -1).to_numpy(zero_copy_only=False)
                np.save(folder / f"{name}-{first + number}.npy", codes)
            first, pending = part + 1, []
        return values

    def _numbered_integers(self, name: str, kind: pa.DataType, folder: Path) -> Any:
        """Return the distinct values in first-appearance order, if they are integers in a small range.

        Writes an array with a number per integer. Returns None for other values.
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
            new = pc.unique(pa.array(values[numbers[values] < 0])).to_numpy()
            numbers[new] = np.arange(num, num + len(new))
            order.append(new + low)
            num += len(new)
        np.save(folder / f"{name}.npy", numbers)
        np.save(folder / f"{name}-low.npy", np.array([low]))
        return pa.array(np.concatenate(order)).cast(kind)

    def _frequent(
        self, folder: Path, values: dict[str, Any], is_frequent: dict[str, Bools]
    ) -> tuple[dict[str, Any], dict[str, Ints]]:
        """Number the users and items in rows whose user and item are frequent; rewrite the part maps."""
        renumbered = {name: np.full(len(mask), -1, np.int32) for name, mask in is_frequent.items()}
        order: dict[str, list[Ints]] = {name: [] for name in values}
        counts = {name: np.zeros(len(mask), np.int64) for name, mask in is_frequent.items()}
        num = dict.fromkeys(values, 0)
        for part in range(len(self.parts.parts)):
            numbers = {name: self.numbers(name, part, folder) for name in values}
            is_counted = is_frequent[USER][numbers[USER]] & is_frequent[ITEM][numbers[ITEM]]
            for name in values:
                counted = numbers[name][is_counted]
                counts[name] += np.bincount(counted, minlength=len(counts[name]))
                appeared = pc.unique(pa.array(counted)).to_numpy()
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
        """Return the fitted vocabularies; ``users``: whether users are a feature."""
        columns = self.log.columns
        features = log_features(columns, users=users)
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
        first = 0
        for part in range(len(self.parts.parts)):
            table = self.item_features(self.counted(part)[0])
            if table.num_rows:
                yield described.state_of(table, np.arange(first, first + table.num_rows))
            first += table.num_rows


class _Bucket(NamedTuple):
    """A user range, and the file with their rows."""

    path: Path
    start: int
    stop: int


@dataclass
class _Sorter:
    """The stage that sorts rows by user, time, and row number or random ties."""

    numbered: _Numbered
    item: Any
    hashed: Key | None
    seed: int
    memory: int

    @functools.cached_property
    def ids(self) -> Ints:
        """IDs by item."""
        return item_ids(self.item, self.numbered.values(ITEM), self.hashed)

    @functools.cached_property
    def is_known(self) -> Bools:
        """Whether each item is in the vocabulary."""
        is_known: Bools = self.item.lookup_values(self.numbered.values(ITEM)) >= 0
        return is_known

    def build(self, folder: Path) -> dict[str, Any]:
        """Write the arrays of `SortedRows`."""
        parts, threads = self.numbered.parts, num_threads()
        counts_U = self.numbered.counts(USER)
        num_rows, num_users = int(counts_U.sum()), len(counts_U)
        max_rows = max(self.memory // (_SORT_BYTES * (threads + 1)), num_rows // _MAX_BUCKETS, 1)
        # A user's rows are in one bucket, so that buckets sort independently.
        bucket_of_user = ((np.cumsum(counts_U) - counts_U) // max_rows).astype(np.uint16)
        edges = np.searchsorted(bucket_of_user, np.arange(int(bucket_of_user[-1]) + 2))
        with scratch_folder(".histories", folder.parent) as scratch:
            buckets = [
                _Bucket(scratch / str(number), int(start), int(stop))
                for number, (start, stop) in enumerate(itertools.pairwise(edges))
            ]
            num_kept = self._divide(buckets, bucket_of_user, scratch)
            times = (parts.times[0] // 1_000_000, parts.times[1] // 1_000_000)
            offsets = np.zeros(num_users + 1, np.int64)
            with ExitStack() as files:
                writers = {
                    name: files.enter_context(_npy_writer(folder / f"{name}.npy", kind, num_kept))
                    for name, kind in (
                        ("items", self._record_type()["item"]),
                        ("times", _integer_type(times)),
                        ("rows", self._record_type()["row"]),
                    )
                }
                progress = Progress("sorting the histories", num_kept)
                for bucket, rows in zip(buckets, bounded_map(self._sort, buckets, threads), strict=True):
                    offsets[bucket.start + 1 : bucket.stop + 1] = np.diff(rows.offsets)
                    for name, write in writers.items():
                        write(getattr(rows, name))
                    progress.add(len(rows.items))
        np.save(folder / "offsets.npy", np.cumsum(offsets))
        if self.numbered.log.columns.item_features:
            _write_table(folder / "sample.arrow", self._item_sample())
        return {"num_rows": num_kept, "num_unknown": num_rows - num_kept}

    def _item_sample(self) -> pa.Table:
        """Return the first row for each item with rows: its ID, ascending, and item features."""
        is_seen = np.zeros(len(self.ids), np.bool_)
        tables = []
        for part in range(len(self.numbered.parts.parts)):
            rows, _, items = self.numbered.counted(part)
            known = np.flatnonzero(self.is_known[items])
            distinct, first = np.unique(items[known], return_index=True)
            new = known[first[~is_seen[distinct]]]
            is_seen[distinct] = True
            features = self.numbered.item_features(rows.take(pa.array(new)))
            tables.append(features.append_column("", pa.array(self.ids[items[new]])))
        return pa.concat_tables(tables).sort_by("")

    def _record_type(self) -> "np.dtype[np.void]":
        max_id = self.item.rows if self.hashed is None else 1 << 62
        fields = [
            ("user", _integer_type((0, len(self.numbered.counts(USER))))),
            ("item", _integer_type((0, max_id))),
            ("time", np.dtype(np.int64)),
            ("row", _integer_type((0, self.numbered.parts.num_rows))),
        ]
        if self.numbered.log.columns.ties == "shuffle":
            fields.append(("tie", _integer_type((0, self.numbered.parts.num_rows))))
        # Aligned records have a multiple of eight bytes, if a field has eight.
        return np.dtype(fields, align=True)

    def _divide(self, buckets: list[_Bucket], bucket_of_user: Any, scratch: Path) -> int:
        """Append the rows from all parts to their users' buckets, and return the row count."""
        parts = range(len(self.numbered.parts.parts))
        progress = Progress("dividing the log by users", self.numbered.parts.num_rows)
        ties = self._ties(scratch)
        num_rows = 0

        def records_of(part: int) -> Any:
            rows, users, items = self.numbered.counted(part)
            records = np.empty(len(users), self._record_type())
            records["user"], records["item"], records["time"] = users, self.ids[items], rows[TIME]
            # Row numbers in a file may be int32, and row numbers in the log need not fit.
            rows_of_file = rows[ROW].to_numpy().astype(np.int64)
            records["row"] = rows_of_file + self.numbered.parts.parts[part].first_row
            return records if self.is_known.all() else records[self.is_known[items]]

        def with_ties() -> Iterator[Any]:
            first = 0
            for records in bounded_map(records_of, parts, num_threads()):
                if ties is not None:
                    records["tie"] = ties[first : first + len(records)]
                first += len(records)
                yield records

        def divided(records: Any) -> tuple[Any, Ints]:
            of_record = bucket_of_user[records["user"]]
            # Stable: rows with equal times keep their order.
            records = _taken(records, np.argsort(of_record, kind="stable"))
            return records, np.cumsum(np.bincount(of_record, minlength=len(buckets)))

        for records, stops in bounded_map(divided, with_ties(), num_threads()):
            for bucket, start, stop in zip(buckets, [0, *stops[:-1]], stops, strict=True):
                with bucket.path.open("ab") as file:
                    records[start:stop].tofile(file)
            num_rows += len(records)
            progress.add(len(records))
        return num_rows

    def _sort(self, bucket: _Bucket) -> SortedRows:
        """Return a bucket's rows by user, time and tie, and the bucket's user offsets."""
        records = np.fromfile(bucket.path, self._record_type())
        keys = [records["tie"]] if "tie" in (self._record_type().names or ()) else []
        # Most logs have whole seconds, which take fewer bits to sort.
        seconds, fraction = np.divmod(records["time"], 1_000_000)
        order = _sorted_order([*keys, fraction, seconds, records["user"]])
        records = _taken(records, order)
        counts = np.bincount(records["user"] - bucket.start, minlength=bucket.stop - bucket.start)
        return SortedRows(
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            items=records["item"],
            times=seconds[order],
            rows=records["row"],
        )

    def _ties(self, scratch: Path) -> Any:
        """Return the random row order within equal times, in a mapped file; None: they keep their order."""
        if self.numbered.log.columns.ties == "keep":
            return None
        num_rows = int(self.numbered.counts(ITEM)[self.is_known].sum())
        kind = _integer_type((0, self.numbered.parts.num_rows))
        ties = np.lib.format.open_memmap(scratch / "ties.npy", "w+", kind, (num_rows,))
        ties[:] = np.arange(num_rows)
        # The generator is slow for subclasses of arrays, such as mapped files.
        np.random.default_rng(self.seed).shuffle(np.asarray(ties))
        return ties


def _taken(records: Any, order: Ints) -> Any:
    """Return records in an order. As integer rows they are copied faster than as structures."""
    words = records.view(np.int64).reshape(len(records), records.itemsize // 8)
    return words.take(order, axis=0).reshape(-1).view(records.dtype)


def _sorted_order(keys: list[Ints]) -> Ints:
    """Return the stable order by integer keys, as np.lexsort does: the last key is the primary one.

    A radix sort of digits that leave room for positions in 64 bits: np.sort is about ten times as fast as
    np.argsort, because it is vectorized.
    """
    num_rows = len(keys[0])
    bits = max(num_rows - 1, 1).bit_length()
    width = 63 - bits
    positions = np.arange(num_rows)
    order = None
    for key in keys:
        values = key.astype(np.int64) - int(key.min(initial=0 if not num_rows else int(key[0])))
        if (values[1:] >= values[:-1]).all() and order is None:
            continue  # usual for the times of a log
        for shift in range(0, int(values.max(initial=0)).bit_length(), width):
            packed = values if order is None else values[order]
            packed = (packed >> shift & (1 << width) - 1) << bits
            packed |= positions
            packed.sort()
            packed &= (1 << bits) - 1
            order = packed if order is None else order[packed]
    return positions if order is None else order


def _stage(path: Path, key: str, build: Callable[[Path], dict[str, Any]], parts: LogParts) -> dict[str, Any]:
    """Return the manifest of a stage's folder; build the folder unless it has the key.

    Args:
        path: the folder. An older build in it is replaced, with the parts that only this build used.
        key: digest over all inputs to the content.
        build: writes files into a folder, and returns manifest fields.
        parts: the parts that the content depends on.
    """
    old = _read_manifest(path)
    if old is not None and old["key"] == key and _is_intact(path, old):
        return old
    if old is None and path.exists():
        raise DataError(f"{path} has no {_MANIFEST} that can be read. Delete it, or name another folder.")
    with durable_folder(path) as folder:
        fields = build(folder)
        sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
        manifest = {"key": key, "files": sizes, "parts": [*parts.names], **fields}
        write_durably(folder / _MANIFEST, sealed(manifest))
        if old is not None:
            remove_named(path, [*old["files"], _MANIFEST])
            remove_empty(path)
    if old is not None:
        manifests = (_read_manifest(stage) for stage in path.parent.iterdir())
        used = {name for other in manifests if other is not None for name in other["parts"]}
        remove_named(path.parent / "parts", [name for name in old["parts"] if name not in used])
    return manifest


def _read_manifest(path: Path) -> dict[str, Any] | None:
    """Return a stage's manifest, or None if there is none, or if it is damaged."""
    with suppress(OSError, DamageError):
        return unsealed(read_regular(path / _MANIFEST, _MAX_MANIFEST), _MANIFEST, required=True)
    return None


def _is_intact(path: Path, manifest: dict[str, Any]) -> bool:
    """Return whether all files in a stage have the sizes they were written with."""
    with suppress(OSError):
        return all((path / name).stat().st_size == size for name, size in manifest["files"].items())
    return False


def _read_table(path: Path) -> pa.Table:
    """Return a mapped Arrow file."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _write_table(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def _read_sample(path: Path) -> ItemSample:
    table = _read_table(path / "sample.arrow")
    return ItemSample(table[""].to_numpy(), table)


@contextmanager
def _npy_writer(path: Path, kind: "np.dtype[Any]", num_rows: int) -> Iterator[Callable[[Ints], None]]:
    """Yield a function that appends to a numpy file of known length."""
    with path.open("wb") as file:
        header = {"descr": kind.str, "fortran_order": False, "shape": (num_rows,)}
        np.lib.format.write_array_header_1_0(file, header)
        yield lambda values: np.ascontiguousarray(values.astype(kind, copy=False)).tofile(file)


def _integer_type(bounds: tuple[int, int]) -> "np.dtype[Any]":
    """Return int32 if it holds the bounds, else int64."""
    return np.dtype(np.int32 if bounds[0] >= -(1 << 31) and bounds[1] < 1 << 31 else np.int64)


def _common_type(arrays: Iterable[Any]) -> pa.DataType:
    """Return the type that `one_number` would give the concatenated arrays.

    Integers and integral floats become integers. If any value has a fraction, all become floats.

    Args:
        arrays: an array per part, read one at a time.
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
            # Types depend on the extremes, and on whether there is a fraction.
            ends = pc.min_max(array)
            summary = pa.concat_arrays([summary, pa.array([ends["min"], ends["max"]], array.type)])
        summaries.append(pa.table({"": summary}))
    values = pa.concat_tables(summaries, promote_options="permissive")[""]
    return one_number(values.combine_chunks()).type


def _converted(array: Any, kind: pa.DataType) -> Any:
    """Return a part's array with the type over all files, see `_common_type`."""
    array = decoded(whole(array))
    if pa.types.is_floating(kind):
        return pc.add(array.cast(pa.float64()), 0.0)
    is_number = pa.types.is_floating(array.type) or pa.types.is_decimal(array.type)
    return (as_integers(array) if is_number else array).cast(kind)
