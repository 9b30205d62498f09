"""Table larger than memory: all rectangle rows in a file, and a cache in memory.

[Note: rows on their way to the cache]

``resolve`` assigns cache slots to a batch's IDs and returns at once. Missing rows are read in the background,
once per batch, with neighbors together; the lookup first waits for the batch's pin. So a pipeline that
resolves a batch ahead reads while the previous batch computes. Slots used by batches in flight are pinned. A
dirty victim is copied out of its slot at once, written in the background, and taken from that copy if it is
needed before it is written. Reads and writes have separate threads, which keep many requests in flight
(``file.IN_FLIGHT``).

Results do not depend on any of this: a row has the same bits in its slot, in a copy, and in the file.

[Note: how a table in a file is frozen]

From the moment of the snapshot on, the first batch that may change a row first writes the unchanged row to
the snapshot's log. (Rows in use by batches in flight at that moment are logged at once.) So a row's state at
that moment is in the log; or else the row is unchanged, and is where the table has it, in memory or in the
file. A background checkpoint reads all this in a forked process, in which memory stays as at the fork while
training continues to change the files. It reads a row from the table's file first and checks the log
afterward: a row overwritten during the read is in the log by then.
"""

import dataclasses
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from meshrec.durable import Created
from meshrec.ops import records
from meshrec.tables.cached.cache import Misses, RowCache
from meshrec.tables.cached.file import RowFileError, memory_for, positions_in
from meshrec.tables.cached.regions import FirstBlocks, StoredRows
from meshrec.tables.index import Pin, Resolved
from meshrec.tables.streamed import streamed_parts
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span

_SECTOR = 512
_STREAM_BYTES = 1 << 22  # file bytes per stream block
_MOST_WRITES = 4
"""Maximum number of batches whose victims are being written. Further batches wait."""


class RowPartStart(NamedTuple):
    """A row part, and the initial value in rows without other initial values."""

    part: RowPart
    value: float


class _UncachedRows(NamedTuple):
    """Rows neither in the cache nor in the file: evicted and being written, or new."""

    keys: Tensor
    """int64 [N], ascending."""
    rows: list[Tensor]
    written: "Future[None]"  # done when the rows are in the file

    def without(self, keys: Tensor) -> "_UncachedRows":
        """Return these rows except those with the given keys, which ascend."""
        stays = positions_in(keys, self.keys) < 0
        return (
            self if stays.all() else self._replace(keys=self.keys[stays], rows=[p[stays] for p in self.rows])
        )

    def plus(self, keys: Tensor, rows: Sequence[Tensor]) -> "_UncachedRows":
        """Return these rows merged with new rows, which replace rows with the same keys."""
        both = self.without(keys)
        ascending, order = torch.cat([both.keys, keys]).sort()
        joined = [torch.cat(pair)[order] for pair in zip(both.rows, rows, strict=True)]
        return self._replace(keys=ascending, rows=joined)


@dataclasses.dataclass
class RowCounts:
    """Counters for rows used, read and written since the table was created."""

    num_used: int = 0
    """Distinct batch rows found in memory."""
    num_read: int = 0
    """Distinct batch rows not found in memory."""
    num_written: int = 0
    """Dirty rows evicted from memory."""
    num_snapshots: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of distinct batch rows found in memory."""
        return self.num_used / max(1, self.num_used + self.num_read)


class _Workers:
    """A table's reader thread and writer thread, and failed reads."""

    def __init__(self) -> None:
        self.reader = ThreadPoolExecutor(1, "meshrec-rows-read")
        self.writer = ThreadPoolExecutor(1, "meshrec-rows-write")
        self.owner = os.getpid()  # a forked child has no threads
        # Set by the reader thread, cleared by _finish_reads.
        self.failed: list[Misses] = []
        self.error: RowFileError | None = None

    def close(self) -> None:
        self.reader.shutdown()
        self.writer.shutdown()


class RowsInFlight(Pin):
    """Pin on a batch's rows in a cache. Some rows may still be being read."""

    def __init__(
        self, band: tuple[int, int, int], cache: RowCache, used: Tensor, arrival: "Future[None] | Exception"
    ) -> None:
        self._used, self._released, self._arrival = used, cache.released, arrival
        self.band, self.trace = band, cache.trace

    def wait(self) -> None:
        """Wait until the rows are in memory.

        Raises:
            RowFileError: rows cannot be read, or victims cannot be written.
            ValueError: the cache has no room.
        """
        if isinstance(self._arrival, Exception):
            raise self._arrival
        self._arrival.result()

    def release(self) -> None:
        """Release the slots. The cache removes the pins when the next batch starts."""
        if not self.is_released:
            self.is_released = True
            self._released.append(self._used)

    def __del__(self) -> None:
        self.release()  # for a batch dropped without an update


@final
class FileTable:
    """A table rectangle with rows in a file; see [Note: rows on their way to the cache].

    Args:
        rectangle: rows and columns.
        starts: row parts and optimizer state.
        stored: the rows in the file.
        num_slots: row count in memory.
        name: table name in messages.
    """

    is_growable = False

    def __init__(
        self,
        rectangle: Rectangle,
        starts: Sequence[RowPartStart],
        stored: StoredRows,
        *,
        num_slots: int,
        name: str,
    ) -> None:
        self.rectangle, self._name = rectangle, name
        self.parts = [start.part for start in starts]
        r = rectangle
        self._cache = RowCache(self.parts, r.c1 - r.c0, num_slots=num_slots)
        self.stored = stored
        self._new_rows = _UncachedRows(
            torch.empty(0, dtype=torch.int64), memory_for(self.parts, 0, r.c1 - r.c0), _finished()
        )
        """Rows set by ``start_rows``, neither in memory nor in the file."""
        # Victims being written, in write order: a later copy of a row must reach the file last.
        self._victims: deque[_UncachedRows] = deque()
        # Open snapshots, from ``snapshot`` until ``end_snapshot``.
        self._snapshots: list[RowLog] = []
        self._lock = threading.RLock()
        self._workers = _Workers()
        # The reader runs reads in order, so the last read's end is the end of all reads.
        self._last_read: Future[None] = _finished()
        self.counts = RowCounts()

    @property
    def index(self) -> "FileTable":
        """The table itself, which is also the index."""
        return self

    @property
    def rows(self) -> Tensor:
        """Memory for cached rows."""
        return self._cache.memory[0]

    @property
    def state(self) -> Sequence[Tensor]:
        """Memory for cached optimizer state."""
        return self._cache.memory[1:]

    @property
    def slot_keys(self) -> Tensor:
        """Key per slot."""
        return self._cache.keys

    def set_initial_rows(self, first: FirstBlocks) -> None:
        """Set the function for initial rows. It is called when rows are first needed."""
        self.stored.first = first

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the keys with rows in these slots now."""
        return self._cache.keys[slots]

    @torch.no_grad()
    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Assign slots to keys, and start to bring the rows there. The pin's ``wait`` waits for the rows."""
        with self._lock:
            cache = self._cache
            if self._last_read.done():
                self._finish_reads()
            slots = cache.find(keys)
            # Pin the hits before admission, which must not evict them.
            used = cache.use(slots)
            try:
                absent = slots < 0
                missing = keys[absent].unique()
                self.counts.num_used += len(used)
                self.counts.num_read += len(missing)
                self._check_written()
                if regions := self.stored.unwritten(missing):
                    self._finish_writes()  # a single thread must write blocks with rows from two regions
                    self.stored.write_initial(regions)
                misses = self._admit(missing) if len(missing) else None
            except Exception as error:  # raised when the rows are waited for, on all ranks
                return Resolved(slots.clamp_(min=0), RowsInFlight(self.rectangle[:3], cache, used, error))
            if misses is not None:
                slots[absent] = cache.find(keys[absent])
                used = torch.cat([used, misses.slots])
            if train:
                # Before the update, which will change these rows.
                cache.dirty[used] = True
            arrival = self._start_reads(misses, used, train)
            return Resolved(slots, RowsInFlight(self.rectangle[:3], cache, used, arrival))

    @torch.no_grad()
    def start_rows(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Set new rows for keys, replacing any previous rows.

        Rows not in memory are kept separately until a batch resolves them, or until ``drop``.

        Args:
            keys: int64 [N], ascending.
            rows: one tensor per part.
        """
        with self._lock:
            slots = self._cache.find(keys)
            here = slots >= 0
            if here.any():
                self._last_read.exception()  # an old row may be in flight to the slot
                for part, values in zip(self._cache.memory, rows, strict=True):
                    part[slots[here]] = values[here]
                self._cache.dirty[slots[here]] = True
            if not here.all():
                self._new_rows = self._new_rows.plus(keys[~here], [values[~here] for values in rows])

    def drop(self, keys: Tensor) -> None:
        """Remove rows by key, int64 [N], ascending. No batch in flight may use them.

        They must not be read before ``start_rows`` or ``load`` has replaced them.
        """
        with self._lock:
            self._cache.drop(keys)
            self._new_rows = self._new_rows.without(keys)

    def log(self, keys: Tensor) -> None:
        """Write rows to all snapshot logs, before they are dropped or replaced.

        Raises:
            RowFileError: a row cannot be read, or a log cannot be written.
        """
        with self._lock:
            for some in keys.split(self._rows_per_block) if self._snapshots else ():
                rows = self.rows_at(some)
                for log in self._snapshots:
                    log.append_rows(some, rows)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parts by name, as ``StreamedPart`` tensors."""
        return streamed_parts(self)

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows in blocks."""
        for first, end in self.spans(keys):
            yield self.make_block(range(first, end), self.rows_at(torch.arange(first, end)), columns)

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace rows, in memory and in the file.

        Raises:
            RowFileError: the file cannot be written or read.
        """
        for block in blocks:
            for start in range(0, len(block.keys), self._rows_per_block):
                rows = slice(start, start + self._rows_per_block)
                parts = {name: part[rows] for name, part in block.parts.items()}
                with self._lock:
                    self._finish_reads()
                    self._finish_writes()
                    self._load(RowBlock(block.keys[rows], block.columns, parts))

    def snapshot(self) -> "RowLog":
        """Snapshot the present rows; see [Note: how a table in a file is frozen]."""
        with self._lock:
            self._finish_reads()
            self.counts.num_snapshots += 1
            path, width = self.stored.file.path, self.rectangle.c1 - self.rectangle.c0
            path = path.with_name(f"{path.name}.log-{self.counts.num_snapshots}")
            # Rows used by batches in flight may change at any time, so log them now.
            log = RowLog(self, path, (self.parts, width), len(self._cache.keys))
            pinned = self._cache.pinned()
            log.append(self._cache.keys, self._cache.memory, log.mark_logged(pinned, pinned))
            self._snapshots.append(log)
            return log

    def end_snapshot(self, snapshot: "RowLog") -> None:
        """Stop writing to a snapshot's log."""
        with self._guard():
            self._snapshots = [log for log in self._snapshots if log is not snapshot]
            self._last_read.exception()  # a read in flight may write to the log

    def spans(self, keys: Span | None) -> Iterator[Span]:
        """Yield the intervals, one per block, into which a key interval is split."""
        r, step = self.rectangle, self._rows_per_block
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        for start in range(first, end, step):
            yield start, min(start + step, end)

    def make_block(self, keys: range, parts: Sequence[Tensor], columns: Span | None) -> RowBlock:
        """Return a row block, given rows with all columns.

        Args:
            keys: consecutive keys.
            parts: rows, one tensor per part.
            columns: table columns to include; None: all.
        """
        c0, _ = self.rectangle.columns
        low, high = columns or self.rectangle.columns
        named = {
            part.name: tensor if part.per_row else tensor[:, low - c0 : high - c0]
            for part, tensor in zip(self.parts, parts, strict=True)
        }
        return RowBlock(keys, (low, high), named)

    @torch.no_grad()
    def rows_at(self, keys: Tensor, unneeded: Tensor | None = None) -> list[Tensor]:
        """Return the present rows by key, one tensor per part, wherever they are.

        Args:
            keys: int64 [N], ascending.
            unneeded: bool [N], keys whose rows are not needed: the result has arbitrary values there.
        """
        with self._guard():
            self._finish_reads()
            parts = memory_for(self.parts, len(keys), self.rectangle.c1 - self.rectangle.c0)
            absent = torch.ones(len(keys), dtype=torch.bool) if unneeded is None else ~unneeded
            slots = self._cache.find(keys)
            sources = [(slots, self._cache.memory)]
            # Newest copy first, then the file.
            copies = (self._new_rows, *reversed(self._victims))
            sources += [(positions_in(copy.keys, keys), copy.rows) for copy in copies]
            for positions, rows in sources:
                here = absent & (positions >= 0)
                for to, part in zip(parts, rows, strict=True):
                    to[here] = part[positions[here]]
                absent &= ~here
            left = absent.nonzero()[:, 0]
            self.stored.read(keys[left], parts, left)
            return parts

    def close(self) -> None:
        """Stop the threads and remove the file."""
        self._workers.close()
        self.stored.file.close()

    def __reduce__(self) -> NoReturn:
        """Raise ValueError: copying and pickling call this."""
        raise ValueError(
            f"{self._name} keeps its rows in a file, which is not copied along with a model. Save a "
            f"checkpoint, "
            "and load it into another model."
        )

    @property
    def _rows_per_block(self) -> int:
        """Rows per stream block."""
        return max(1, _STREAM_BYTES // self.stored.file.layout.record_bytes)

    def _guard(self) -> AbstractContextManager[Any]:
        """Return the lock; a forked child, which reads alone, must not wait for it."""
        return self._lock if os.getpid() == self._workers.owner else nullcontext()

    def _finish_reads(self) -> None:
        """Wait until all reads have ended, and free slots for rows that could not be read."""
        if os.getpid() != self._workers.owner:
            return  # a snapshot was made before the fork, and waited
        self._last_read.exception()
        while self._workers.failed:
            self._cache.forget(self._workers.failed.pop())
        self._workers.error = None

    def _check_written(self) -> None:
        """Forget victims already in the file, and retry failed writes.

        Raises:
            RowFileError: a write fails again.
        """
        if len(self._victims) >= _MOST_WRITES:
            self._victims[0].written.exception()
        while self._victims and self._victims[0].written.done():
            if self._victims[0].written.exception() is not None:
                self._finish_writes()
                return
            self._victims.popleft()

    def _finish_writes(self) -> None:
        """Wait until all victims are in the file.

        Raises:
            RowFileError: rows cannot be written. They stay in memory.
        """
        for leaving in self._victims:
            leaving.written.exception()
        again = False
        while self._victims:
            leaving = self._victims[0]
            again |= leaving.written.exception() is not None
            if again:  # in order: a later copy of a row goes last
                self._write(leaving.keys, leaving.rows)
            self._victims.popleft()

    def _write(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Write rows to the file."""
        self.stored.file.write(keys, rows, torch.arange(len(keys)))

    def _admit(self, missing: Tensor) -> Misses:
        """Assign slots to keys without one, and start to write dirty victims.

        Raises ValueError if full.
        """
        misses = self._cache.admit(missing)
        if misses is None:
            raise ValueError(
                f"{self._name}: a batch needs {len(missing):,} rows that are not in memory, and of "
                f"{len(self._cache.keys):,} rows in the cache {self._cache.num_pinned:,} are in use by "
                f"batches "
                "in flight. Give FileRows more cache_rows or cache_bytes, or use smaller batches."
            )
        if len(misses.old_keys):
            self.counts.num_written += len(misses.old_keys)
            written = self._workers.writer.submit(self._write, misses.old_keys, misses.old_rows)
            self._victims.append(_UncachedRows(misses.old_keys, misses.old_rows, written))
        return misses

    def _start_reads(self, misses: Misses | None, used: Tensor, train: bool) -> "Future[None]":
        """Start to bring a batch's rows to slots.

        The returned future covers all earlier batches too.
        """
        new = misses.slots if misses is not None else used[:0]
        logs = [(log, log.mark_logged(used, new, train=train)) for log in self._snapshots]
        reads = self._take_from_copies(misses) if misses is not None else None
        if reads is not None or any(len(slots) for _, slots in logs):
            self._last_read = self._workers.reader.submit(self._read_and_log, reads, logs)
        return self._last_read

    def _take_from_copies(self, misses: Misses) -> Misses | None:
        """Copy rows not in the file to slots. Returns the rows to read, or None."""
        absent = torch.ones(len(misses.keys), dtype=torch.bool)
        for copy in (self._new_rows, *reversed(self._victims)):
            if copy.keys is misses.old_keys:
                continue
            positions = positions_in(copy.keys, misses.keys)
            here = absent & (positions >= 0)
            if not here.any():
                continue
            self._last_read.exception()  # a read for an abandoned batch may go to these slots
            for part, rows in zip(self._cache.memory, copy.rows, strict=True):
                part[misses.slots[here]] = rows[positions[here]]
            if copy is self._new_rows:
                self._cache.dirty[misses.slots[here]] = True
            absent &= ~here
        self._new_rows = self._new_rows.without(misses.keys)
        return misses._replace(keys=misses.keys[absent], slots=misses.slots[absent]) if absent.any() else None

    def _read_and_log(self, reads: Misses | None, logs: "Sequence[tuple[RowLog, Tensor]]") -> None:
        """Read rows to slots, and log rows about to change. Runs in the reader thread."""
        workers, cache = self._workers, self._cache
        try:
            if workers.error is not None:
                raise workers.error  # a previous batch's row, which this batch may need, is missing
            if reads is not None:
                self.stored.file.read(reads.keys, cache.memory, reads.slots)
            for log, slots in logs:
                log.append(cache.keys, cache.memory, slots)
        except RowFileError as error:
            workers.error = error
            if reads is not None:
                workers.failed.append(reads)
            raise

    def _load(self, block: RowBlock) -> None:
        """Replace a block's rows, in memory and in the file."""
        span = block.keys if isinstance(block.keys, range) else None
        keys = torch.arange(span.start, span.stop) if span is not None else block.keys
        assert isinstance(keys, Tensor)
        r, stored = self.rectangle, self.stored
        is_whole = block.columns == r.columns and all(part.name in block.parts for part in self.parts)
        # Snapshots need the old rows.
        self.log(keys)
        is_new = span is not None and is_whole  # then regions within it need no initial values
        stored.write_initial(
            stored.partly_covered(span.start, span.stop) if span and is_new else stored.unwritten(keys)
        )
        rows = memory_for(self.parts, len(keys), r.c1 - r.c0) if is_whole else self.rows_at(keys)
        low, high = block.columns[0] - r.c0, block.columns[1] - r.c0
        for part, tensor in zip(self.parts, rows, strict=True):
            if part.name in block.parts:
                (tensor if part.per_row else tensor[:, low:high]).copy_(block.parts[part.name])
        stored.file.write(keys, rows, torch.arange(len(keys)))
        if span is not None:
            stored.mark_written(span.start, span.stop)
        self._new_rows = self._new_rows.without(keys)
        slots = self._cache.find(keys)
        here = slots >= 0
        for to, tensor in zip(self._cache.memory, rows, strict=True):
            to[slots[here]] = tensor[here]


@final
class RowLog:
    """Log of rows changed since a snapshot; see [Note: how a table in a file is frozen].

    Args:
        table: table.
        path: new file for the log.
        parts: row parts, and column count.
        num_slots: slots in the table's cache.
    """

    def __init__(
        self, table: FileTable, path: Path, parts: tuple[Sequence[RowPart], int], num_slots: int
    ) -> None:
        self._table, self._path, self._parts = table, path, parts
        # Whether the row in a slot is in the log.
        self._is_logged = torch.zeros(num_slots, dtype=torch.bool)
        # Entry count written, and keys of entries read.
        self._num_rows, self._seen = 0, torch.empty(0, dtype=torch.int64)
        kinds, width = parts
        record = 8 + sum((1 if part.per_row else width) * part.dtype.itemsize for part in kinds) + 4
        self._layout = records.RecordLayout(0, 1, -(-record // _SECTOR) * _SECTOR, record, 0)
        self._file, created = Created.file(path, 0o600)
        self._end = weakref.finalize(self, _remove, self._file, created, os.getpid())

    def mark_logged(self, slots: Tensor, new: Tensor, *, train: bool = True) -> Tensor:
        """Return the slots to log before a batch changes the rows, and mark them as logged.

        Args:
            slots: slots used by the batch.
            new: slots that have just got another row.
            train: whether the batch may change rows.
        """
        self._is_logged[new] = False
        unlogged = slots[~self._is_logged[slots]] if train else slots[:0]
        self._is_logged[unlogged] = True
        return unlogged

    def append(self, keys: Tensor, memory: Sequence[Tensor], slots: Tensor) -> None:
        """Write the rows at some slots to the log.

        Args:
            keys: key per slot.
            memory: memory per part, indexed by slot.
            slots: slots to write.

        Raises:
            RowFileError: the disk is full, or fails.
        """
        entries = torch.arange(self._num_rows, self._num_rows + len(slots))
        # In order: the file never has a later row without all earlier rows.
        failures = records.write(self._file, self._layout, entries, [keys, *memory], slots)
        if len(failures):
            cause = os.strerror(int(failures[0, 1]))
            raise RowFileError(
                f"cannot write to {self._path}, the log of rows that change while a checkpoint is written: "
                f"{cause}. Nothing was changed by this step; free space on that disk and go on."
            )
        self._num_rows += len(slots)

    def append_rows(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Write rows outside slots to the log."""
        self.append(keys, rows, torch.arange(len(keys)))

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows at the snapshot's moment; see ``tables.table.TableSnapshot``."""
        for first, end in self._table.spans(keys):
            parts = self.rows_at(torch.arange(first, end))
            yield self._table.make_block(range(first, end), parts, columns)

    def rows_at(self, keys: Tensor) -> list[Tensor]:
        """Return the rows by key (int64 [N], ascending) at the snapshot's moment, one tensor per part.

        Raises:
            RowFileError: a row or a log entry is damaged.
        """
        # The table first, the log afterward: see the note.
        parts = self._table.rows_at(keys, self._entries(keys) >= 0)
        entries = self._entries(keys)
        logged = (entries >= 0).nonzero()[:, 0]
        logged = logged[entries[logged].argsort()]
        for part, values in zip(parts, self._read(entries[logged])[1], strict=True):
            part[logged] = values
        return parts

    def close(self) -> None:
        """Stop logging, and remove the log."""
        self._table.end_snapshot(self)
        self._end()

    def _entries(self, keys: Tensor) -> Tensor:
        """Return the first log entry per key; -1 for keys without an entry."""
        with suppress(FileNotFoundError):
            self._read_new_entries()
        positions = positions_in(keys, self._seen)
        here = (positions >= 0).nonzero()[:, 0]
        none = len(self._seen)
        # The first entry counts: later entries have rows changed after the mark.
        first_entries = torch.full_like(keys, none).scatter_reduce_(0, positions[here], here, "amin")
        return torch.where(first_entries < none, first_entries, -1)

    def _read_new_entries(self) -> None:
        """Read keys from log entries written since the last call."""
        count = os.stat(self._path).st_size // self._layout.block_bytes
        entries = torch.arange(len(self._seen), count)
        if len(entries):
            new_keys, _ = self._read(entries)
            self._seen = torch.cat([self._seen, new_keys])

    def _read(self, entries: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return keys and rows from log entries."""
        kinds, width = self._parts
        keys, rows = torch.empty(len(entries), dtype=torch.int64), memory_for(kinds, len(entries), width)
        if len(entries):
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                here = torch.arange(len(entries))
                failures = records.read(file, self._layout, entries, [keys, *rows], here)
            finally:
                os.close(file)
            if len(failures):
                raise RowFileError(
                    f"{self._path}, the log of rows that change while a checkpoint is written, is damaged at "
                    f"entry {int(entries[failures[0, 0]])}. The checkpoint before this one stays; check the "
                    f"disk."
                )
        return keys, rows


def _remove(file: int, created: Created, owner: int) -> None:
    """Close and remove the log, in the process that created it."""
    if os.getpid() == owner:
        os.close(file)
        created.remove()


def _finished() -> "Future[None]":
    """Return a finished future."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
