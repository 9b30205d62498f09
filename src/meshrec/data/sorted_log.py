"""Sort a log by user and time: the third stage in [Note: histories on disk] (``histories.py``)."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshrec.data.features import Key
from meshrec.data.log_columns import ITEM, USER
from meshrec.data.log_numbers import UserItemNumbers, write_table
from meshrec.data.log_parts import ROW, TIME, Progress, bounded_map, num_threads
from meshrec.data.logs import SortedRows, item_ids, sorted_order
from meshrec.data.samples import Bools, Ints
from meshrec.durable.scratch import scratch_folder

# U users, n rows in a part or bucket

_SORT_BYTES = 128
"""Memory bytes per row while a bucket is sorted: two copies of the record, the sort keys, and the results."""
# A bucket is a file. With at least num_rows // _MAX_BUCKETS rows per bucket, there are fewer than
# 2 * _MAX_BUCKETS buckets, so a bucket number fits uint16.
_MAX_BUCKETS = 1 << 15


class _Bucket(NamedTuple):
    """Temporary file with all rows of the users numbered ``start`` to ``stop``, exclusive."""

    path: Path
    """File with records in log order, see `LogSorter._record_type`."""
    start: int
    stop: int


@dataclass
class LogSorter:
    """Third stage in [Note: histories on disk]: sort rows by user, then by time.

    A user's simultaneous rows keep their log order, or are shuffled, as ``log.columns.ties`` says.
    """

    numbered: UserItemNumbers
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
    def is_in_vocabulary(self) -> Bools:
        """Whether an item is in the fitted vocabulary, by item number."""
        is_in_vocabulary: Bools = self.item.lookup_values(self.numbered.values(ITEM)) >= 0
        return is_in_vocabulary

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
            write_table(folder / "sample.arrow", self._item_sample())
        return {"num_rows": num_sorted, "num_unknown": num_rows - num_sorted}

    def _item_sample(self) -> pa.Table:
        """Return the item features from the first log row with each item, sorted by item ID.

        The item ID is in the column with the empty name. Items outside the vocabulary are omitted.
        """
        is_seen = np.zeros(len(self.ids), np.bool_)
        tables = []
        for part in range(len(self.numbered.parts.parts)):
            rows, _, items = self.numbered.frequent_rows(part)
            listed = np.flatnonzero(self.is_in_vocabulary[items])
            distinct, first = np.unique(items[listed], return_index=True)
            # Rows with an item that no earlier part has.
            new = listed[first[~is_seen[distinct]]]
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
            return records if self.is_in_vocabulary.all() else records[self.is_in_vocabulary[items]]

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
        """Return the rows in a bucket, sorted by user, then by time.

        A user's simultaneous rows keep the log's order, or have a random order if ``log.columns.ties`` is
        "shuffle". In the result, ``offsets`` start at 0 for the bucket's first user. Times are in seconds.
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
        num_rows = int(self.numbered.counts(ITEM)[self.is_in_vocabulary].sum())
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


@contextmanager
def _npy_writer(path: Path, kind: "np.dtype[Any]", num_rows: int) -> Iterator[Callable[[Ints], None]]:
    """Create a NumPy file for a one-dimensional array, and yield a function that appends values to it.

    Args:
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
