"""Log parts: the first stage in [Note: histories on disk] (``histories.py``).

A log file is divided into pieces, and every piece is encoded by one thread: a CSV file is a single piece, a
Parquet file has a piece per run of row groups. The valid rows of a piece are written to Arrow files, called
parts, together with a JSON record about the piece. File names contain a digest over the file content and the
options, so later builds find and reuse the parts of unchanged files.
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

from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.data.dataset import Paths
from meshrec.data.exact_columns import plain_table
from meshrec.data.faults import DataError, Faults, missing_column, rows_text
from meshrec.data.features.values import decoded, is_text, microseconds_of, whole
from meshrec.data.frames import read_csvs
from meshrec.data.locations import File, expand_tables, is_address, not_parquet
from meshrec.data.log_columns import ITEM, USER, LogColumns
from meshrec.data.logs import LogTable, valid_rows
from meshrec.data.parquet import open_parquet_file
from meshrec.data.partitions import Keys, partition_keys, with_keys
from meshrec.data.samples import Bools, Ints
from meshrec.data.stores import StoredFile, version_of
from meshrec.durable import DamageError, durable_file, read_regular, sealed, unsealed, write_durably
from meshrec.durable.digests import tree_hash_of
from meshrec.durable.files import open_regular

VERSION = 2
"""File format version. All file names depend on it, so files in another format are not read."""
TIME, ROW = "time", "row"
"""Columns of a part, in addition to `USER` and `ITEM`: time since 1970, and the row number in the log file. A
part whose times are all whole seconds has seconds as int32, if they fit. Other parts have microseconds as
int64."""
FEATURE = "feature:"
"""Prefix of item feature columns in a part."""
MAX_RANGE = 1 << 26
"""Limit for the range of integers. In a smaller range, a part stores the integers themselves, and they are
numbered by an array lookup. Other values are dictionary-encoded, and numbered by hashing."""
_LOG_TYPE = b"type"
"""Field metadata of integers stored as int32: the Arrow type in the log."""
_BYTES_PER_ROW = 256
"""Estimated memory to read and encode a row: two strings, a time, the codes, and hash tables of distinct
values."""
_MAX_ROWS, _MIN_ROWS = 1 << 22, 1 << 12
"""Bounds for the rows per part, whatever the memory."""
_MAX_RECORD = 1 << 20
"""Maximum bytes of a piece's JSON record that are read."""
_SECONDS_BETWEEN_LINES = 5.0
"""Seconds between two log lines about progress."""
_logger = logging.getLogger("meshrec")
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class Part(NamedTuple):
    """Arrow file with encoded rows from a log file."""

    path: Path
    first_row: int
    """Row number in the whole log for the file's first row. Add it to the column `ROW`."""

    def table(self) -> pa.Table:
        """Open the part as a memory-mapped table.

        The columns `USER` and `ITEM` are integers or dictionary arrays. The other columns are `TIME`, `ROW`,
        and the item features, whose names start with `FEATURE`.
        """
        return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()

    def distinct(self, name: str) -> Any:
        """Return an Arrow array that contains every distinct value in a column, in the type of the log.

        For a dictionary column, the array is the dictionary. Other columns are returned whole, so their
        values may be repeated.
        """
        table = self.table()
        (column,), field = table[name].chunks, table.schema.field(name)
        if pa.types.is_dictionary(column.type):
            return column.dictionary
        log_type = (field.metadata or {}).get(_LOG_TYPE)
        return column if log_type is None else column.cast(log_type.decode())


class LogParts(NamedTuple):
    """All parts of a log, in row order."""

    parts: tuple[Part, ...]
    num_rows: int
    """Rows in the log files, including rows that are not valid."""
    names: tuple[str, ...]
    """Names of all part files and records. They contain digests, and so identify the content."""
    times: tuple[int, int]
    """Earliest and latest time, in microseconds."""


@dataclass(frozen=True, kw_only=True)
class LogFiles:
    """Log files, and the options that decide which rows are valid."""

    name: str
    """Display name, for messages."""
    paths: Paths
    """Files, folders or patterns; see `meshrec.data.locations.expand`."""
    columns: LogColumns
    """Column names and row filters."""
    kinds: Mapping[str, str]
    """Known column kinds in CSV files; see `read_csvs`."""
    form: CsvFormat = DETECTED
    """Known CSV delimiter, decimal point and encoding."""


class _Piece(NamedTuple):
    """Consecutive rows of a log file, encoded by one thread: a whole CSV file, or some Parquet row groups."""

    name: str
    """Digest over the file's content and the options; equal for all pieces of a file."""
    file: File
    keys: Keys
    """Values of the partition columns."""
    file_first_row: int
    """Row number in the whole log for the file's first row (not in the piece)."""
    num_rows: int
    """Rows in the piece."""
    groups: range
    """Parquet row groups; empty for a CSV file."""
    table: pa.Table | None
    """All CSV rows; None for a Parquet file."""
    metadata: Any
    """Parquet footer, parsed once for all pieces; None for a CSV file."""
    version: str | None
    """Version of a Parquet file in a store; None for other files."""


def encode_parts(log: LogFiles, folder: Path, faults: Faults, *, memory: int) -> LogParts:
    """Write the parts for all log files; reuse parts that are in the folder already.

    Args:
        log: log files, and the options deciding which rows are valid.
        folder: existing folder for the parts.
        faults: raises or skips when a row lacks a user, item or time.
        memory: bytes to use for reading and encoding. A Parquet row group with more rows than fit takes more.

    Raises:
        DataError: a file cannot be read, a column is missing, or a row lacks a value.
    """
    threads = num_threads()
    # Every thread holds a block in memory.
    max_rows = min(max(memory // (threads * _BYTES_PER_ROW), _MIN_ROWS), _MAX_ROWS)
    pieces, num_rows = _pieces(log, folder, max_rows)
    progress = Progress("reading the log", num_rows)
    records = []

    def encode(piece: _Piece) -> dict[str, Any]:
        """Write a piece's parts, and return the record from `_encode_piece`."""
        return _encode_piece(log, piece, folder, max_rows)

    for piece, record in zip(pieces, bounded_map(encode, pieces, threads), strict=True):
        records.append(record)
        progress.add(piece.num_rows)
    # Reused pieces report their rows too, because records hold the counts.
    _report(log, [*zip(pieces, records, strict=True)], num_rows, faults)
    # Blocks were checked one by one. Now compare all of them.
    if len({record["zoned"] for record in records} - {None}) > 1:
        raise DataError(f"{log.name}: column {log.columns.time!r}: write all times with a zone, or none.")
    times = [record["times"] for record in records if record["times"]]
    return LogParts(
        parts=tuple(
            Part(folder / _part_name(piece, number), piece.file_first_row)
            for piece, record in zip(pieces, records, strict=True)
            for number in range(record["parts"])
        ),
        num_rows=num_rows,
        names=tuple(
            name
            for piece, record in zip(pieces, records, strict=True)
            for name in (_record_file_name(piece), *(_part_name(piece, k) for k in range(record["parts"])))
        ),
        times=(min(low for low, _ in times), max(high for _, high in times)) if times else (0, 0),
    )


def _pieces(log: LogFiles, folder: Path, max_rows: int) -> tuple[list[_Piece], int]:
    """Divide all log files into pieces.

    Args:
        max_rows: maximum rows per Parquet piece, unless a row group is larger.

    Raises:
        DataError: a file cannot be read, or a log column is in none of the files.
    """
    files, text = expand_tables(log.paths)
    keys = partition_keys(files, log.kinds)
    # Before the first read: a change after this point is an error.
    versions = {file: version_of(str(file)) if is_address(file) else None for file in files}
    digests = _Digests(folder, versions)
    options = {"version": VERSION, "columns": asdict(log.columns)}
    # Options that do not change which rows are valid: parts are reused if only these differ.
    for name in ("ties", "min_user_count", "min_item_count"):
        del options["columns"][name]  # type: ignore[attr-defined]
    tables: list[pa.Table | None] = [None] * len(files)
    if text:
        csvs = read_csvs(files, log.kinds, log.form)
        for file, version in versions.items():
            if version is not None:
                StoredFile(str(file), version).close()
        # read_csvs infers column types from all files together, so a new file may change the rows of others.
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
            file_pieces = [_Piece(name, file, keys[file], first, table.num_rows, range(0), table, None, None)]
        else:
            file_pieces, columns = _pieces_of_parquet(
                name, file, keys[file], first, max_rows=max_rows, version=versions[file]
            )
            names |= dict.fromkeys(columns)
        pieces += file_pieces
        first += sum(piece.num_rows for piece in file_pieces)
    digests.save()
    for column in log.columns.names():
        if column not in names:
            raise missing_column(log.name, column, [*names])
    return pieces, first


def _pieces_of_parquet(
    name: str, file: File, keys: Keys, first_row: int, *, max_rows: int, version: str | None
) -> tuple[list[_Piece], list[str]]:
    """Divide a Parquet file into pieces, each with consecutive row groups.

    Args:
        first_row: row number in the whole log for the file's first row.
        max_rows: maximum rows per piece, unless a row group is larger.
    """
    try:
        with open_parquet_file(file, version) as opened:
            metadata, columns = opened.metadata, [*opened.schema_arrow.names, *keys]
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{not_parquet(file, error)}. Repair the file.") from error
    pieces, start, num_rows = [], 0, 0
    sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    for group, size in enumerate(sizes):
        num_rows += size
        # End the piece before the next row group would make it too large.
        if group + 1 == len(sizes) or num_rows + sizes[group + 1] > max_rows:
            groups = range(start, group + 1)
            pieces.append(_Piece(name, file, keys, first_row, num_rows, groups, None, metadata, version))
            start, num_rows = group + 1, 0
    return pieces, columns


def _encode_piece(log: LogFiles, piece: _Piece, folder: Path, max_rows: int) -> dict[str, Any]:
    """Write a piece's parts, unless its record exists, and return the record.

    A record has the fields ``parts`` (part file count), ``missing`` (by column: how many rows lack a value,
    and the first such row in the file), ``times`` (earliest and latest, in microseconds) and ``zoned``
    (whether string times have a time zone; None for other times).

    Args:
        log: log files and options.
        piece: the piece.
        folder: folder for the part files and the record.
        max_rows: maximum rows per part.
    """
    path = folder / _record_file_name(piece)
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
    # Written last: a record proves that all parts of the piece are complete.
    write_durably(path, sealed(record))
    return record


def _blocks(log: LogFiles, piece: _Piece, max_rows: int) -> Iterator[pa.Table]:
    """Yield a piece's rows, at most ``max_rows`` at a time, with all log columns.

    A column missing from the file is null.
    """
    names = log.columns.names()
    if piece.table is not None:
        tables = (piece.table.slice(start, max_rows) for start in range(0, piece.num_rows, max_rows))
        yield from (_with_columns(table, names) for table in tables)
        return
    try:
        # Requests to a store take long, so its files are read in few of them.
        options = {"metadata": piece.metadata, "pre_buffer": is_address(piece.file)}
        with open_parquet_file(piece.file, piece.version, **options) as opened:
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
    """Encode the valid rows in a block of rows as a part table; None if no row is valid.

    Args:
        record: record of the piece, updated in place; see `_encode_piece`.
    """
    columns = log.columns

    def check(valid: Bools, good: Bools, column: str) -> None:
        """Count rows without a value in ``record``, and mark them as invalid.

        They are reported later, for all pieces together.

        Args:
            valid: whether a row is valid so far; modified in place.
            good: whether a row has a value in the column.
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
        # The first time stands for the block: parsing fails later for a mixture within a block. A date such
        # as 2024-05-01 ends like a zone, but has no colon.
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
    user, user_field = _encode_values(USER, decoded(whole(rows[columns.user])))
    item, item_field = _encode_values(ITEM, decoded(whole(rows[columns.item])))
    encoded = {
        TIME: _encode_times(microseconds, low, high),
        ROW: pa.array((rows["row"].to_numpy() + first_row).astype(kind)),
    }
    encoded |= {FEATURE + name: whole(rows[name]) for name in columns.item_features}
    others = pa.table(encoded)
    return pa.table([user, item, *others.columns], schema=pa.schema([user_field, item_field, *others.schema]))


def _encode_values(name: str, values: Any) -> tuple[Any, pa.Field]:
    """Encode users or items as integers, if their range is below `MAX_RANGE`, or as a dictionary array.

    Returns:
        The column, and its field ``name``. Integers that fit are int32; then the field names the log's type.
    """
    if pa.types.is_integer(values.type):
        low, high = (pc.min_max(values)[end].as_py() for end in ("min", "max"))
        if high - low < MAX_RANGE and high < 1 << 63:
            if low < -(1 << 31) or high >= 1 << 31:
                return values, pa.field(name, values.type)
            return values.cast(pa.int32()), pa.field(name, pa.int32(), metadata={_LOG_TYPE: str(values.type)})
    values = values.dictionary_encode()
    return values, pa.field(name, values.type)


def _encode_times(microseconds: Ints, low: int, high: int) -> Any:
    """Return the column `TIME` for times between ``low`` and ``high``, in microseconds."""
    if low >= -(10**6 << 31) and high < 10**6 << 31:
        seconds, fractions = np.divmod(microseconds, 10**6)
        if not fractions.any():
            return pa.array(seconds.astype(np.int32))
    return pa.array(microseconds)


def _report(
    log: LogFiles, encoded: list[tuple[_Piece, dict[str, Any]]], num_rows: int, faults: Faults
) -> None:
    """Report rows without user, item or time, with one message per column for the whole log.

    Messages equal those of `filter_log`.
    """
    for column in log.columns.required():
        missing = [
            (record["missing"][column][0], piece.file_first_row + record["missing"][column][1])
            for piece, record in encoded
            if column in record["missing"]
        ]
        if missing:
            num = sum(count for count, _ in missing)
            text = f"{log.name}: column {column!r} has no value in row {min(row for _, row in missing)}"
            text += f" ({rows_text(num)} of {num_rows})"
            faults.report(text, num, file=log.name, every_row=num == num_rows > 1)


class _Digests:
    """Digests for log files, cached in ``sources.json``.

    For a local file, the digest is a hash of the content. It is computed again only if the file's size,
    modification time, status change time or inode has changed. For a file in a store such as S3, the digest
    covers address and version.

    Args:
        folder: folder for the cache.
        versions: version by file, None for local files; see `version_of`.
    """

    def __init__(self, folder: Path, versions: Mapping[File, str | None]) -> None:
        self._path, self._versions = folder / "sources.json", versions
        try:
            # Entries of earlier builds, by real path: size, two times, inode, digest.
            self._stored = unsealed(self._path.read_bytes(), self._path.name, required=True)
        except (OSError, DamageError):
            self._stored = {}
        # Entries of files in this build. `save` adds them to the earlier ones.
        self._current: dict[str, Any] = {}

    def of(self, file: File) -> str:
        """Return a digest for a local file's content, or for address and version of a file in a store."""
        if self._versions[file] is not None:
            # Without the address's options, such as the number of retries.
            return digest_of([str(file).partition("?")[0], self._versions[file]])
        path = os.path.realpath(file)
        with open_regular(Path(path)) as descriptor:
            status = os.fstat(descriptor)
            state = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
            entry = self._stored.get(path)
            if entry is None or entry[:-1] != state:
                entry = [*state, tree_hash_of(descriptor, status.st_size, str(file))]
        self._current[path] = entry
        return f"{status.st_size}-{entry[-1]}"

    def save(self) -> None:
        """Write ``sources.json``, unless no digest has changed."""
        if any(self._stored.get(path) != entry for path, entry in self._current.items()):
            write_durably(self._path, sealed({**self._stored, **self._current}))


# File names: DIGEST.json and DIGEST-NUMBER.arrow, where a Parquet piece's row groups follow the digest.
def _record_file_name(piece: _Piece) -> str:
    return f"{_piece_name(piece)}.json"


def _part_name(piece: _Piece, number: int) -> str:
    return f"{_piece_name(piece)}-{number}.arrow"


def _piece_name(piece: _Piece) -> str:
    return piece.name + (f"-{piece.groups.start}-{piece.groups.stop}" if piece.groups else "")


def digest_of(value: Any) -> str:
    """Return a digest with 32 hexadecimal digits for a value with only JSON types."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def num_threads() -> int:
    """Return the number of threads for encoding and sorting: the available CPUs, at most 4.

    Memory is divided among threads, so more threads would work on smaller blocks.
    """
    return min(len(os.sched_getaffinity(0)), 4)


def bounded_map(
    function: Callable[[_Task], _Result], tasks: Iterable[_Task], threads: int
) -> Iterator[_Result]:
    """Yield ``function(task)`` for every task, in order, computed in threads.

    A new task is started only when the caller takes a result, so at most ``threads`` results are in memory
    in addition to the caller's.

    Args:
        function: called in a thread.
        tasks: iterated in the caller's thread, as results are taken.
        threads: maximum thread count.
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
    """Progress of a slow step, logged every few seconds with an estimate of the remaining time.

    Args:
        step: description at a log line's start, such as "reading the log".
        num_rows: total rows of the step.
    """

    def __init__(self, step: str, num_rows: int) -> None:
        # ``_done`` counts finished rows; ``_last`` is when the last line was logged.
        self._step, self._num_rows, self._done = step, num_rows, 0
        self._start = self._last = time.monotonic()

    def add(self, num_rows: int) -> None:
        """Add to the number of finished rows, and log it if the last log line is old enough."""
        self._done += num_rows
        now = time.monotonic()
        if now - self._last > _SECONDS_BETWEEN_LINES:
            self._last = now
            seconds = (now - self._start) * (self._num_rows - self._done) / max(self._done, 1)
            message = "%s: %.1f of %.1f million rows, about %.0f s left"
            _logger.info(message, self._step, self._done / 1e6, self._num_rows / 1e6, seconds)
