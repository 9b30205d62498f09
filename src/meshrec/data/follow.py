"""Unbounded data: a folder to which files are added while a model trains on them.

[Note: positions in a followed folder]
Rows have one order: files by name, and the rows of a file as stored. With W ranks and B samples per
batch, a step takes the next W * B rows of this order, and every rank an equal, consecutive part of them. A
step begins only when all of its rows exist. Which rows a step has depends therefore only on its first row
and on W * B, and not on the time at which files appear. A position is the first row that is not consumed.
A checkpoint that has the position of its weights resumes at this row, on any number of ranks, without losing
or repeating a row.

Rank 0 lists the folder, and tells all ranks how many steps are complete, and which files they read. The rank
of a row follows from its number. Every rank therefore encodes many of its rows at once, ahead of the steps.
"""

import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import override

from meshrec.comms.agreement import together
from meshrec.comms.collectives import gather_objects
from meshrec.comms.mesh import Axis
from meshrec.data.arrow import pa, records_of
from meshrec.data.batch import Batch
from meshrec.data.encoding import Encoding, RowOrigin
from meshrec.data.faults import DataError, Faults, NoRowsError, OnError, append_json_lines
from meshrec.data.locations import File, is_address, list_files, opened, suffix_of
from meshrec.data.order import LanePart
from meshrec.data.parquet import ParquetSource
from meshrec.data.samples import PermutedSamples, Samples, to_batch, void_samples
from meshrec.data.stores import StoreError, modification_time_of, version_of
from meshrec.data.streaming import Lane, background_thread
from meshrec.data.streams import Burst, ColumnTypes, Position, Stream
from meshrec.data.tables import ArrowSource

_log = logging.getLogger(__name__)

_PATTERNS = "*.parquet *.arrow *.ipc *.feather"
# First and last bytes of a complete file.
_PARQUET_MAGIC, _ARROW_MAGIC = b"PAR1", b"ARROW1"
# Rows per Arrow table while reading, times the rank count up to a maximum: a rank encodes its share of them.
_READ_ROWS, _MAX_READ_RANKS = 1 << 14, 8
# Steps that rank 0 announces at a time, so that the exchange between ranks costs little per step.
_MAX_STEPS = 64


class FilePosition(NamedTuple):
    """Position in a followed folder: the first row that is not consumed."""

    file: str = ""
    """Name of the file in the folder. All rows of files with smaller names are consumed."""
    row: int = 0
    """Number of consumed rows in the file."""
    num_rows: int = 0
    """Number of rows in the file."""
    version: str = ""
    """Version of the file, which must not change."""
    time: int = 0
    """Event time of rows without one, in microseconds since 1970: the file's modification time, or if the
    store has none, the time at which the file was listed."""


class _Plan(NamedTuple):
    """Complete steps, which rank 0 announces."""

    files: list[FilePosition]
    """Files to read from now on, after those of earlier plans, from these positions on."""
    positions: list[FilePosition]
    """Position after each step."""
    has_ended: bool = False
    """Whether following has ended. Then the plan has no steps."""


class Follow(Stream):
    """Rows of a growing folder of Parquet or Arrow IPC files, in batches for all ranks.

    Files are consumed in the order of their names, so writers name them by time or number. A file must not
    change after it got its name: write it under a name that starts with ``.`` or ``_``, and rename it. A
    file without a complete footer is not read, and the files after it wait for it. If ``features`` do not
    read event times (`meshrec.data.features.TimedFeatures`), events have the modification time of the file.

    See [Note: positions in a followed folder].

    Args:
        folder: folder, or its address in a store. Files may be in ``NAME=VALUE`` subfolders.
        features: fitted features that encode the rows.
        on_error: "raise" for damaged rows, or "skip" to count and omit them.
        set_aside: folder that receives omitted rows as JSON lines, a file per rank, with file name and row
            number, and the names of late files. After a resume, rows may be listed again. None: they are
            only counted.
        poll_seconds: seconds between listings of the folder while it has all been read.
        broken_seconds: seconds after which a file that stays incomplete counts as damaged.
        extend: called on rank 0 while there are not enough rows for a step. It may add files to the folder,
            and returns whether to look again.

    Attributes:
        faults: counts of omitted rows on this rank, by reason. Rank 0 also counts the rows of late files,
            which are not read: a file is late if it appears when a file with a larger name was read.

    Raises:
        ValueError: a number of seconds is not above 0, or ``folder`` is a file.

    Example::

        import pyarrow as pa
        import pyarrow.parquet as pq
        from pathlib import Path
        from meshrec.data.features import Features, Hashed, Label

        table = pa.table({"clicked": [0, 1, 1, 0], "user": ["a", "b", "a", "c"]})
        Path("events").mkdir()
        pq.write_table(table, "events/0001.parquet")
        user = Hashed(name="user", num_embeddings=100)
        features = Features(labels=(Label(column="clicked"),), features=(user,)).fit([table])
        for burst in Follow("events", features).bursts(2, stop=lambda: True):
            for batch, position in zip(burst.batches, burst.positions):
                print(batch.labels, position)
    """

    def __init__(
        self,
        folder: str | Path,
        features: Encoding,
        *,
        on_error: OnError = "raise",
        set_aside: Path | None = None,
        poll_seconds: float = 1.0,
        broken_seconds: float = 300.0,
        extend: Callable[[], bool] = lambda: False,
    ) -> None:
        for name, seconds in (("poll_seconds", poll_seconds), ("broken_seconds", broken_seconds)):
            if not seconds > 0:
                raise ValueError(f"{name} is {seconds}; it must be above 0. Take 1, for example.")
        if not is_address(folder) and Path(folder).is_file():
            raise ValueError(f"{folder} is a file; only a folder can be followed. Give its folder.")
        self.faults = Faults(on_error)
        self.column_types = ColumnTypes(features.columns())
        self._folder, self._set_aside = _Folder(folder, features, self.faults), set_aside
        self._poll_seconds, self._broken_seconds = poll_seconds, broken_seconds
        self._extend = extend

    @override
    def bursts(
        self,
        batch_size: int,
        *,
        position: Position | None = None,
        axis: Axis = Axis(),  # noqa: B008 - immutable
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Burst]:
        """Yield the steps whose rows all exist, at most 64 at a time; see `Stream.bursts`.

        ``position`` is a `FilePosition` as a dict.

        Raises:
            DataError: a row or file that this rank reads is damaged, or a file has changed or vanished.
            ValueError: ``batch_size`` is below 1, or ``position`` is that of another stream.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}. Take 1024, for example.")
        aside = None
        if self._set_aside is not None:
            self._set_aside.mkdir(parents=True, exist_ok=True)
            aside = self._set_aside / f"rank{axis.rank}.jsonl"
        if position is not None and position.keys() != set(FilePosition._fields):
            raise ValueError(f"{position} is not a position in a folder. Take that of the same stream.")
        start = FilePosition() if position is None else FilePosition(**position)
        planner = FilePlanner(self._folder, start, self._broken_seconds, aside)
        files: deque[FilePosition] = deque()
        reader = _RankReader(self._folder, self.column_types, aside, batch_size, axis)
        # Also if the consumer stops early, the thread ends, and then files are closed.
        with contextlib.closing(reader.windows(files)) as windows, background_thread() as thread:
            lane, num_read = Lane(windows, 0, thread), 0
            while not (plan := self._next_plan(planner, batch_size, axis, stop)).has_ended:
                files.extend(plan.files)
                num = len(plan.positions)
                batches = self._batches(lane, range(num_read, num_read + num * batch_size, batch_size))
                num_read += num * batch_size
                yield Burst([after._asdict() for after in plan.positions], batches)

    def _batches(self, lane: Lane, starts: range) -> Iterator[Batch]:
        """Yield the batches that start at some of this rank's samples, of ``starts.step`` samples each."""
        features = self._folder.features
        for start in starts:
            ranges = lane.read(LanePart(0, start, start + starts.step))
            yield to_batch(features.keys, features.shape, ranges)

    def _next_plan(
        self, planner: "FilePlanner", batch_size: int, axis: Axis, stop: Callable[[], bool]
    ) -> _Plan:
        """Return the next steps, on all ranks. If there are none, wait before that. Collective."""
        plan = _Plan([], [])
        with together(axis, "following a folder"):
            if axis.rank == 0:
                plan = planner.next_plan(batch_size * axis.size)
                if not plan.positions and self._extend():
                    # The first plan may have the file in which the reader starts.
                    later = planner.next_plan(batch_size * axis.size)
                    plan = _Plan([*plan.files, *later.files], later.positions)
                elif not plan.positions:
                    plan = plan._replace(has_ended=stop())
                    if not plan.has_ended:
                        time.sleep(self._poll_seconds)
        announced: _Plan = gather_objects(plan, axis, "following a folder")[0]
        return announced


class FollowedFiles(ABC):
    """Files of a followed folder, which are known by their names.

    Args:
        path: path or address.
        faults: raises for damaged rows and files, or counts them.
    """

    def __init__(self, path: str | Path, faults: Faults) -> None:
        self.path, self.faults = path, faults

    def names(self) -> set[str]:
        """List the files that have their final names: no part of it starts with "." or "_"."""
        files = list_files(self.path, _PATTERNS)
        if is_address(self.path):
            root = str(self.path).partition("?")[0].rstrip("/")
            names = {str(file).partition("?")[0][len(root) :].lstrip("/") for file in files}
        else:
            names = {Path(file).relative_to(self.path).as_posix() for file in files}
        return {name for name in names if not any(part.startswith((".", "_")) for part in name.split("/"))}

    def file(self, name: str) -> File:
        """Return the path or address of a file."""
        if not is_address(self.path):
            return Path(self.path) / name
        plain, question, options = str(self.path).partition("?")
        return f"{plain.rstrip('/')}/{name}{question}{options}"

    @abstractmethod
    def num_rows(self, name: str, faults: Faults) -> int:
        """Return the number of rows in a complete file; 0 if it is empty, or damaged and counted."""


class _Folder(FollowedFiles):
    """Followed folder with samples."""

    def __init__(self, path: str | Path, features: Encoding, faults: Faults) -> None:
        super().__init__(path, faults)
        self.features = features

    def source(self, name: str, faults: Faults) -> ParquetSource | ArrowSource:
        """Open a complete file as a source of samples."""
        file = self.file(name)
        if is_parquet(file):
            return ParquetSource([file], self.features, faults, dictionaries=True)
        return ArrowSource([(str(file), read_ipc(file, faults))], self.features, faults)

    @override
    def num_rows(self, name: str, faults: Faults) -> int:
        try:
            return int(self.source(name, faults).block_sizes.sum())
        except NoRowsError:
            return 0


class FilePlanner:
    """Planner of the next steps on rank 0, from the files that a followed folder has.

    Args:
        folder: the folder.
        position: first row that is not consumed.
        broken_seconds: as for `Follow`.
        set_aside: file that receives the names of late files; None: they are only counted.
    """

    def __init__(
        self, folder: FollowedFiles, position: FilePosition, broken_seconds: float, set_aside: Path | None
    ) -> None:
        self._folder, self._broken_seconds, self._set_aside = folder, broken_seconds, set_aside
        # First row that is in no step yet.
        self._position = position
        # Names of the files after `_position`, ascending; from the last listing.
        self._pending: list[str] = []
        # All names of the last listing; None before the first.
        self._known: set[str] | None = None
        # Start of a complete file, by name, until a step has its rows.
        self._starts: dict[str, FilePosition] = {}
        # Size of the incomplete file that is next, and when it got this size, of time.monotonic.
        self._incomplete: tuple[str, int, float] | None = None

    def next_plan(self, num: int) -> _Plan:
        """Return the next steps with ``num`` rows each; none if there are not enough rows yet.

        Raises:
            DataError: the file of the first position has changed or vanished.
        """
        plan = _Plan([], [])
        if self._known is None:
            self._refresh()
            if self._position.row < self._position.num_rows:
                check_version(self._folder.file(self._position.file), self._position.version)
                plan.files.append(self._position)
        if not self._add_steps(plan, num):
            self._refresh()
            self._add_steps(plan, num)
        return plan

    def next_file(self) -> FilePosition | None:
        """Return the first row of the file after the position, and move there; None if it is not complete."""
        for _ in range(2):
            start = self._start_of(self._pending[0]) if self._pending else None
            if start is not None:
                self._position = start
                del self._pending[0], self._starts[start.file]
                return start
            self._refresh()
        return None

    def _add_steps(self, plan: _Plan, num: int) -> bool:
        """Add the next steps with ``num`` rows each to a plan, and return whether there are any."""
        while len(plan.positions) < _MAX_STEPS and self._add_step(plan, num):
            pass
        return bool(plan.positions)

    def _add_step(self, plan: _Plan, num: int) -> bool:
        """Add the next step to a plan, and return whether there are enough rows."""
        position, stop = self._position, self._position.row + num
        names, files = iter(self._pending), []
        while stop > position.num_rows:
            name = next(names, None)
            start = None if name is None else self._start_of(name)
            if start is None:
                return False
            stop -= position.num_rows
            position = start
            files.append(start)
        self._position = position._replace(row=stop)
        plan.files.extend(file for file in files if file.num_rows)
        plan.positions.append(self._position)
        self._pending = list(names)
        for file in files:
            del self._starts[file.file]
        return True

    def _refresh(self) -> None:
        """List the folder, and report files that are late."""
        names = self._folder.names()
        # In the first listing, files before the position have been consumed.
        new = set() if self._known is None else names - self._known
        for name in sorted(name for name in new if name <= self._position.file):
            num = 0
            with contextlib.suppress(DataError):
                num = self._folder.num_rows(name, Faults("skip"))
            message = (
                f"{name} in {self._folder.path} is late: {self._position.file} was read before it appeared"
            )
            self._folder.faults.report(message, num, name, is_allowed=True)
            if self._set_aside is not None:
                append_json_lines(self._set_aside, [{"file": name, "row": None, "problem": "late"}])
        self._known = names
        self._pending = sorted(name for name in names if name > self._position.file)

    def _start_of(self, name: str) -> FilePosition | None:
        """Return the position of a file's first row; None if the file is not complete yet."""
        if name not in self._starts:
            file = self._folder.file(name)
            version = _version(file)
            if not self._is_complete(file, name):
                return None
            num_rows = self._folder.num_rows(name, self._folder.faults)
            self._starts[name] = FilePosition(name, 0, num_rows, version, _modified(file))
        return self._starts[name]

    def _is_complete(self, file: File, name: str) -> bool:
        """Return whether a file has its last bytes, or has been incomplete for so long that it is damaged."""
        magic = _PARQUET_MAGIC if is_parquet(file) else _ARROW_MAGIC
        with opened(file) as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(max(0, size - len(magic)))
            if size > 2 * len(magic) and content.read(len(magic)) == magic:
                return True
        if self._incomplete is None or self._incomplete[:2] != (name, size):
            self._incomplete = (name, size, time.monotonic())
            _log.info("%s is not complete yet: waiting for it", file)
        return time.monotonic() - self._incomplete[2] > self._broken_seconds


class _RankReader:
    """Reader of this rank's rows, file by file."""

    def __init__(
        self, folder: _Folder, types: ColumnTypes, set_aside: Path | None, batch_size: int, axis: Axis
    ) -> None:
        self._folder, self._types, self._set_aside = folder, types, set_aside
        self._batch_size, self._axis = batch_size, axis

    def windows(self, files: deque[FilePosition]) -> Generator[PermutedSamples, None, None]:
        """Yield this rank's samples without end; an empty window if there is nothing to read yet.

        Args:
            files: files to read, from these positions on, which are removed. More may be added at any time.
        """
        void = void_samples(0, self._folder.features.shape)
        empty = PermutedSamples(void._replace(times=np.zeros(0, np.int64)))
        # Rows in all steps before the file.
        num_before = 0
        while True:
            if not files:
                yield empty
                continue
            start = files.popleft()
            for samples in self._read(start, num_before):
                if samples.times is None:
                    times = np.full(len(samples.labels), start.time, np.int64)
                    samples = samples._replace(times=times)
                yield PermutedSamples(samples)
            num_before += start.num_rows - start.row

    def _read(self, start: FilePosition, num_before: int) -> Generator[Samples, None, None]:
        """Yield this rank's samples of a file; ``num_before`` rows of the steps are before it."""
        folder, file = self._folder, self._folder.file(start.file)
        check_version(file, start.version)
        size = _READ_ROWS * min(self._axis.size, _MAX_READ_RANKS)
        source = folder.source(start.file, folder.faults)
        self._types.add(source.arrow_schema)
        for first, num, table in _tables(source, start.row, size):
            rows = np.arange(max(first, start.row), first + num, dtype=np.int64)
            ranks = (num_before + rows - start.row) // self._batch_size % self._axis.size
            rows = rows[ranks == self._axis.rank]
            if len(rows) == 0:
                continue
            if isinstance(table, DataError):
                folder.faults.report(str(table), len(rows), str(file))
                yield void_samples(len(rows), folder.features.shape)
                continue
            # A slice is a view.
            is_slice = rows[-1] - rows[0] + 1 == len(rows)
            index = rows - first
            part = table.slice(index[0], len(rows)) if is_slice else table.take(pa.array(index))
            samples = folder.features.encode(part, RowOrigin(str(file), rows, str(file)), folder.faults)
            if self._set_aside is not None and samples.is_valid is not None and not samples.is_valid.all():
                omitted = np.flatnonzero(~samples.is_valid)
                values = zip(rows[omitted].tolist(), records_of(part.take(pa.array(omitted))), strict=True)
                items = [{"file": start.file, "row": row, "values": value} for row, value in values]
                append_json_lines(self._set_aside, items)
            yield samples


def _tables(
    source: ParquetSource | ArrowSource, row: int, size: int
) -> Generator[tuple[int, int, Any], None, None]:
    """Yield the tables that have the rows from ``row`` on: row number of the first row, row count and table.

    Instead of a table that cannot be read, yield the error.
    """
    end = 0
    for block, num_rows in enumerate(source.block_sizes.tolist()):
        first, end = end, end + num_rows
        if end <= row:
            continue
        try:
            for table in source.tables(block, size):
                yield first, table.num_rows, table
                first += table.num_rows
            if first < end:
                raise DataError(
                    f"{source.blocks[block][0]} has fewer rows than its footer says. Write it anew."
                )
        except StoreError:
            # The rows are not damaged: the store is away.
            raise
        except DataError as error:
            yield first, end - first, error


def read_ipc(file: File, faults: Faults) -> Any:
    """Read an Arrow IPC file; an empty table if it is damaged and counted."""
    try:
        if is_address(file):
            with opened(file) as content:
                return pa.ipc.open_file(pa.py_buffer(content.read())).read_all()
        return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    except (pa.ArrowException, OSError) as error:
        faults.report(f"{file}: it is no Arrow IPC file that can be read: {error}", 0, str(file))
        return pa.table({})


def is_parquet(file: File) -> bool:
    return suffix_of(file) == ".parquet"


def _version(file: File) -> str:
    """Return the version of a file: in a store, as the store has it; else size and modification time."""
    if is_address(file):
        return version_of(str(file))
    try:
        about = Path(file).stat()
    except FileNotFoundError as error:
        raise DataError(f"{file} has vanished. Put it back, or start without a position.") from error
    return f"{about.st_size} bytes, {about.st_mtime_ns} ns"


def _modified(file: File) -> int:
    """Return the modification time of a file in microseconds since 1970; for some stores, the time now."""
    if is_address(file):
        return modification_time_of(str(file)) or time.time_ns() // 1000
    return Path(file).stat().st_mtime_ns // 1000


def check_version(file: File, version: str) -> None:
    """Raise DataError if a file has another version, or has vanished."""
    now = _version(file)
    if now != version:
        raise DataError(
            f"{file} has changed since it was first read: {version} before, {now} now. Put the earlier file "
            "back, and write new rows to new files."
        )
