"""Encoded log parts: the valid file rows as integers, in Arrow files next to their values.

Each part is encoded on its own, and named after the file content and the options. Later builds reuse
all parts from unchanged files; see [Note: histories on disk].
"""

import hashlib
import itertools
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.arrow import pa_fs
from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.data.dataset import Paths
from meshrec.data.exact_columns import plain_table
from meshrec.data.faults import DataError, Faults, rows_text
from meshrec.data.features.values import decoded, is_text, microseconds_of, whole
from meshrec.data.frames import read_csvs
from meshrec.data.locations import File, expand_tables, is_address, not_parquet
from meshrec.data.log_columns import ITEM, USER, LogColumns
from meshrec.data.logs import LogTable, valid_rows
from meshrec.data.nearest import missing_column
from meshrec.data.parquet import open_parquet_file
from meshrec.data.partitions import Keys, partition_keys, with_keys
from meshrec.data.samples import Bools
from meshrec.durable import DamageError, durable_file, read_regular, sealed, unsealed, write_durably
from meshrec.durable.digests import tree_hash_of
from meshrec.durable.files import open_regular

VERSION = 1
"""In all names: files from other versions are not read."""
TIME, ROW = "time", "row"
"""Columns of a part besides `USER` and `ITEM`: microseconds since 1970, and row number in the file."""
FEATURE = "feature:"
"""Prefix of item feature columns in a part."""
MAX_RANGE = 1 << 26
"""Integers in a smaller range are numbered by an array with a number per value, without hashing."""
_BYTES_PER_ROW = 256
"""Memory to read and encode a row: two strings, a time, the codes, and hash tables of distinct values."""
_MAX_ROWS, _MIN_ROWS = 1 << 22, 1 << 12
_MAX_RECORD = 1 << 20
_SECONDS_BETWEEN_LINES = 5.0
_logger = logging.getLogger("meshrec")
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class Part(NamedTuple):
    """An Arrow file with encoded rows."""

    path: Path
    first_row: int
    """Log row number for row 0 in the source file."""

    def table(self) -> pa.Table:
        """Return the mapped columns: `USER` and `ITEM`, integers or dictionaries, `TIME`, `ROW`, features."""
        return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()


class LogParts(NamedTuple):
    """All log parts, in row order."""

    parts: tuple[Part, ...]
    num_rows: int
    """Rows in the files, including omitted rows."""
    names: tuple[str, ...]
    """Files of the parts, which identify the content."""
    times: tuple[int, int]
    """Earliest and latest time, in microseconds."""


@dataclass(frozen=True, kw_only=True)
class LogFiles:
    """Log files, and the options that decide which rows are valid."""

    name: str
    paths: Paths
    columns: LogColumns
    kinds: Mapping[str, str]
    """Known kinds of columns in CSV files."""
    form: CsvFormat = DETECTED


class _Piece(NamedTuple):
    """File rows encoded by one thread."""

    name: str
    file: File
    keys: Keys
    first_row: int
    num_rows: int
    groups: range
    """Row groups in a Parquet file."""
    table: pa.Table | None
    """Rows in a CSV file."""
    metadata: Any


def encode_parts(log: LogFiles, folder: Path, faults: Faults, *, memory: int) -> LogParts:
    """Encode a log's files without parts in a folder yet.

    Args:
        log: files and options.
        folder: existing folder for the parts.
        faults: handles rows without user, item or time.
        memory: memory bytes for reading and encoding; a larger row group takes more.

    Raises:
        DataError: a file cannot be read, a column is missing, or a row lacks a value.
    """
    threads = num_threads()
    max_rows = min(max(memory // (threads * _BYTES_PER_ROW), _MIN_ROWS), _MAX_ROWS)
    pieces, num_rows = _pieces(log, folder, max_rows)
    progress = Progress("reading the log", num_rows)
    records = []

    def encode(piece: _Piece) -> dict[str, Any]:
        return _encode_piece(log, piece, folder, max_rows)

    for piece, record in zip(pieces, bounded_map(encode, pieces, threads), strict=True):
        records.append(record)
        progress.add(piece.num_rows)
    _report(log, [*zip(pieces, records, strict=True)], num_rows, faults)
    if len({record["zoned"] for record in records} - {None}) > 1:
        raise DataError(f"{log.name}: column {log.columns.time!r}: write all times with a zone, or none.")
    times = [record["times"] for record in records if record["times"]]
    return LogParts(
        parts=tuple(
            Part(folder / _part_name(piece, number), piece.first_row)
            for piece, record in zip(pieces, records, strict=True)
            for number in range(record["parts"])
        ),
        num_rows=num_rows,
        names=tuple(
            name
            for piece, record in zip(pieces, records, strict=True)
            for name in (_record_name(piece), *(_part_name(piece, k) for k in range(record["parts"])))
        ),
        times=(min(low for low, _ in times), max(high for _, high in times)) if times else (0, 0),
    )


def _pieces(log: LogFiles, folder: Path, max_rows: int) -> tuple[list[_Piece], int]:
    """Return the pieces from all files, and the total row count."""
    files, text = expand_tables(log.paths)
    keys = partition_keys(files, log.kinds)
    digests = _Digests(folder)
    options = {"version": VERSION, "columns": asdict(log.columns)}
    # Shuffling and counts do not change which rows are valid.
    for name in ("ties", "min_user_count", "min_item_count"):
        del options["columns"][name]  # type: ignore[attr-defined]
    tables: list[pa.Table | None] = [None] * len(files)
    if text:
        csvs = read_csvs(files, log.kinds, log.form)
        # All files decide together about column types.
        options |= {"form": asdict(log.form), "types": [str(table.schema.types) for table in csvs]}
        tables = [*csvs]
    pieces: list[_Piece] = []
    first, names = 0, dict[str, None]()
    for file, table in zip(files, tables, strict=True):
        name = digest_of(
            [
                options,
                digests.of(file),
                {key: [str(value), str(value.type)] for key, value in keys[file].items()},
            ]
        )
        if table is not None:
            names |= dict.fromkeys(table.column_names)
            file_pieces = [_Piece(name, file, keys[file], first, table.num_rows, range(0), table, None)]
        else:
            file_pieces, columns = _pieces_of_parquet(name, file, keys[file], first, max_rows)
            names |= dict.fromkeys(columns)
        pieces += file_pieces
        first += sum(piece.num_rows for piece in file_pieces)
    digests.save()
    for column in log.columns.names():
        if column not in names:
            raise missing_column(log.name, column, [*names])
    return pieces, first


def _pieces_of_parquet(
    name: str, file: File, keys: Keys, first_row: int, max_rows: int
) -> tuple[list[_Piece], list[str]]:
    """Divide a Parquet file into pieces with consecutive row groups; also return all column names."""
    try:
        with open_parquet_file(file) as opened:
            metadata, columns = opened.metadata, [*opened.schema_arrow.names, *keys]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{not_parquet(file, error)}. Repair the file.") from error
    pieces, start, num_rows = [], 0, 0
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    for group, size in enumerate(sizes):
        num_rows += size
        if group + 1 == len(sizes) or num_rows + sizes[group + 1] > max_rows:
            groups = range(start, group + 1)
            pieces.append(_Piece(name, file, keys, first_row, num_rows, groups, None, metadata))
            start, num_rows = group + 1, 0
    return pieces, columns


def _encode_piece(log: LogFiles, piece: _Piece, folder: Path, max_rows: int) -> dict[str, Any]:
    """Write a piece's parts, unless they exist, and return the record about them."""
    path = folder / _record_name(piece)
    try:
        return unsealed(read_regular(path, _MAX_RECORD), path.name, required=True)
    except (OSError, DamageError):
        pass  # encode the piece again
    record: dict[str, Any] = {"parts": 0, "missing": {}, "zoned": None, "times": None}
    first = (
        0
        if piece.metadata is None
        else sum(piece.metadata.row_group(number).num_rows for number in range(piece.groups.start))
    )
    for table in _blocks(log, piece, max_rows):
        encoded = _encode_block(log, table, first, piece, record)
        first += table.num_rows
        if encoded is None:
            continue
        with (
            durable_file(folder / _part_name(piece, record["parts"])) as file,
            pa.ipc.new_file(file, encoded.schema) as writer,
        ):
            writer.write_table(encoded)
        record["parts"] += 1
    write_durably(path, sealed(record))
    return record


def _blocks(log: LogFiles, piece: _Piece, max_rows: int) -> Iterator[pa.Table]:
    """Yield a piece's rows with all log columns; null where the file lacks a column."""
    names = log.columns.names()
    if piece.table is not None:
        tables = (piece.table.slice(start, max_rows) for start in range(0, piece.num_rows, max_rows))
        yield from (_with_columns(table, names) for table in tables)
        return
    try:
        with open_parquet_file(piece.file, metadata=piece.metadata, pre_buffer=False) as opened:
            stored = [name for name in names if name in opened.schema_arrow.names]
            for batch in opened.iter_batches(max_rows, [*piece.groups], stored, use_threads=False):
                table = with_keys(plain_table(pa.Table.from_batches([batch])), piece.keys)
                yield _with_columns(table, names)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{not_parquet(piece.file, error)}. Repair the file.") from error


def _with_columns(table: pa.Table, names: list[str]) -> pa.Table:
    for name in names:
        if name not in table.column_names:
            table = table.append_column(name, pa.nulls(table.num_rows))
    return table.select(names)


def _encode_block(
    log: LogFiles, table: pa.Table, first_row: int, piece: _Piece, record: dict[str, Any]
) -> pa.Table | None:
    """Return a block's valid rows, or None if there are none.

    Args:
        log: files and options.
        table: the block.
        first_row: first row's number, in the file.
        piece: the piece that has the block.
        record: updated with missing values, the time range, and whether times have a zone.
    """
    columns = log.columns

    def check(valid: Bools, good: Bools, column: str) -> None:
        """Record rows without a value in a column.

        Args:
            valid: valid row mask, modified.
            good: mask for rows with a value.
            column: column name.
        """
        bad = valid & ~good
        if bad.any():
            count, row = record["missing"].get(column, (0, first_row + int(bad.argmax())))
            record["missing"][column] = [count + int(bad.sum()), row]
            valid &= good

    rows = valid_rows(LogTable(log.name, table, columns), check)
    if not rows.num_rows:
        return None
    times = decoded(whole(rows[columns.time]))
    if is_text(times.type):
        zoned = pc.match_substring_regex(times.slice(0, 1), r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)\s*$")[0].as_py()
        zoned = zoned and pc.match_substring_regex(times.slice(0, 1), ":")[0].as_py()
        if record["zoned"] not in (None, zoned):
            raise DataError(f"{log.name}: column {columns.time!r}: write all times with a zone, or none.")
        record["zoned"] = zoned
    microseconds = microseconds_of(times, columns.time_unit)
    low, high = int(microseconds.min()), int(microseconds.max())
    before = record["times"] or (low, high)
    record["times"] = [min(low, before[0]), max(high, before[1])]
    kind = np.int32 if first_row + table.num_rows < 1 << 31 else np.int64
    encoded = {
        USER: _compact(decoded(whole(rows[columns.user]))),
        ITEM: _compact(decoded(whole(rows[columns.item]))),
        TIME: pa.array(microseconds),
        ROW: pa.array((rows["row"].to_numpy() + first_row).astype(kind)),
    }
    encoded |= {FEATURE + name: whole(rows[name]) for name in columns.item_features}
    return pa.table(encoded)


def _compact(values: Any) -> Any:
    """Return values as a dictionary, or integers in a small range as they are."""
    if pa.types.is_integer(values.type):
        ends = pc.min_max(values)
        if ends["max"].as_py() - ends["min"].as_py() < MAX_RANGE and ends["max"].as_py() < 1 << 63:
            return values
    return values.dictionary_encode()


def _report(
    log: LogFiles, encoded: list[tuple[_Piece, dict[str, Any]]], num_rows: int, faults: Faults
) -> None:
    """Report rows without user, item or time, as `counted_rows` does."""
    for column in log.columns.required():
        missing = [
            (record["missing"][column][0], piece.first_row + record["missing"][column][1])
            for piece, record in encoded
            if column in record["missing"]
        ]
        if missing:
            num = sum(count for count, _ in missing)
            text = f"{log.name}: column {column!r} has no value in row {min(row for _, row in missing)}"
            text += f" ({rows_text(num)} of {num_rows})"
            faults.report(text, num, file=log.name, every_row=num == num_rows > 1)


class _Digests:
    """Source file digests, computed again only for files whose size, times or inode changed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "sources.json"
        try:
            self._known = unsealed(self._path.read_bytes(), self._path.name, required=True)
        except (OSError, DamageError):
            self._known = {}
        self._found: dict[str, Any] = {}

    def of(self, file: File) -> str:
        """Return a digest for a file's content, or for size and time for a file in a store."""
        if is_address(file):
            filesystem, path = pa_fs.FileSystem.from_uri(str(file))
            info = filesystem.get_file_info(path)
            return digest_of([str(file), info.size, info.mtime_ns])
        path = os.path.realpath(file)
        with open_regular(Path(path)) as descriptor:
            status = os.fstat(descriptor)
            state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            known = self._known.get(path)
            if known is None or known[:-1] != state:
                known = [*state, tree_hash_of(descriptor, status.st_size, str(file))]
        self._found[path] = known
        return f"{status.st_size}-{known[-1]}"

    def save(self) -> None:
        """Store the digests."""
        if any(self._known.get(path) != entry for path, entry in self._found.items()):
            write_durably(self._path, sealed({**self._known, **self._found}))


def _record_name(piece: _Piece) -> str:
    return f"{_piece_name(piece)}.json"


def _part_name(piece: _Piece, number: int) -> str:
    return f"{_piece_name(piece)}-{number}.arrow"


def _piece_name(piece: _Piece) -> str:
    return piece.name + (f"-{piece.groups.start}-{piece.groups.stop}" if piece.groups else "")


def digest_of(value: Any) -> str:
    """Return a short digest for a plain JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def num_threads() -> int:
    """Return the number of threads to encode and sort with. More would need more memory."""
    return min(len(os.sched_getaffinity(0)), 4)


def bounded_map(
    function: Callable[[_Task], _Result], tasks: Iterable[_Task], threads: int
) -> Iterator[_Result]:
    """Map with threads, in order. At most ``threads`` results wait for the caller, which bounds memory.

    Args:
        function: called for every task.
        tasks: consumed as results are taken.
        threads: thread count.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="histories") as pool:
        remaining = iter(tasks)
        futures = deque(pool.submit(function, task) for task in itertools.islice(remaining, threads))
        try:
            while futures:
                result = futures.popleft().result()
                futures.extend(pool.submit(function, task) for task in itertools.islice(remaining, 1))
                yield result
        finally:
            for future in futures:
                future.cancel()


class Progress:
    """Logs a slow step's progress, with an estimate of the remaining time."""

    def __init__(self, step: str, num_rows: int) -> None:
        self._step, self._num_rows, self._done = step, num_rows, 0
        self._start = self._last = time.monotonic()

    def add(self, num_rows: int) -> None:
        """Count finished rows."""
        self._done += num_rows
        now = time.monotonic()
        if now - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            seconds = (now - self._start) * (self._num_rows - self._done) / max(self._done, 1)
            message = "%s: %.1f of %.1f million rows, about %.0f s left"
            _logger.info(message, self._step, self._done / 1e6, self._num_rows / 1e6, seconds)
