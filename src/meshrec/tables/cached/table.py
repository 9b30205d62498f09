"""Table larger than memory: all rows are in a file, and the rows in use are also in a cache in memory.

A *slot* is a row position in the cache. A *dirty* row may differ from the file, because it was trained. A
*victim* is a row that the cache evicts to make room. A batch is *in flight* from ``resolve``, which looks up
the slots, until the pin is released; meanwhile the slots are *pinned* and cannot get other rows.

[Note: rows on their way to the cache]

``resolve`` assigns slots to the IDs of a batch and returns at once. A reader thread then reads the missing
rows from the file, rows next to each other in a single request. The lookup waits for the batch's pin before
it uses the rows. So a pipeline that resolves the next batch early reads while the present batch computes.

A dirty victim is copied out of its slot at once, and a writer thread writes the copy to the file. If the row
is needed before it is written, it is taken from the copy. Both threads keep many disk requests in flight
(``file.IN_FLIGHT``).

Results do not depend on any of this: a row has the same bits in a slot, in a copy, and in the file.

[Note: how a table in a file is frozen]

A snapshot must show every row as it was at the moment of the snapshot, while training continues. Every
snapshot has a log file. Before a batch changes a row for the first time after that moment, the unchanged row
is written to the log. (Rows used by batches in flight at that moment are logged at once.) So either the log
has the old row, or the row is unchanged and is where the table has it, in memory or in the file.

A background checkpoint reads the snapshot in a forked process. There, memory stays as it was at the fork,
while the parent continues to change the files. The process reads a row from the table's file first and looks
into the log afterward: if the row was overwritten during the read, it is in the log by then.
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

from meshrec.durable import CreatedPath
from meshrec.ops import records
from meshrec.tables.cached.cache import Misses, RowCache
from meshrec.tables.cached.file import RowFileError, memory_for, positions_in
from meshrec.tables.cached.regions import InitialBlocks, StoredRows
from meshrec.tables.index import Pin, Resolved
from meshrec.tables.streamed import streamed_parts
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span

_SECTOR = 512  # log entries are padded to whole disk sectors
_STREAM_BYTES = 1 << 22  # file bytes per block in ``stream``
# Greatest number of batches whose victims are being written. Further batches wait, which bounds the memory
# for copies of victims.
_MAX_PENDING_WRITES = 4


class InitializedPart(NamedTuple):
    """A row part (the weight or an optimizer state tensor), and its initial value if no other is given."""

    part: RowPart
    value: float


class _UncachedRows(NamedTuple):
    """Rows in memory outside the cache: victims being written to the file, or new rows not used yet.

    The file has no row, or an older version, under these keys.
    """

    keys: Tensor
    """Row keys, ascending, int64 [N]."""
    rows: list[Tensor]
    """Row values, one tensor with N rows per row part."""
    written: "Future[None]"
    """Finished when the rows of a victim are in the file. Unused for new rows."""

    def without(self, keys: Tensor) -> "_UncachedRows":
        """Return these rows without the rows under some keys, int64, ascending."""
        stays = positions_in(keys, self.keys) < 0
        return (
            self if stays.all() else self._replace(keys=self.keys[stays], rows=[p[stays] for p in self.rows])
        )

    def plus(self, keys: Tensor, rows: Sequence[Tensor]) -> "_UncachedRows":
        """Return these rows and other rows, which replace rows under the same keys.

        Args:
            keys: keys of the other rows, ascending, int64 [M].
            rows: values of the other rows, one tensor per row part.
        """
        both = self.without(keys)
        ascending, order = torch.cat([both.keys, keys]).sort()
        joined = [torch.cat(pair)[order] for pair in zip(both.rows, rows, strict=True)]
        return self._replace(keys=ascending, rows=joined)


@dataclasses.dataclass
class RowCounts:
    """Cache statistics of a table in a file, counted since the table was created.

    A row counts once per batch, even if the batch uses it several times.
    """

    num_used: int = 0
    """Rows that batches found in the cache."""
    num_read: int = 0
    """Rows that batches did not find in the cache."""
    num_written: int = 0
    """Dirty rows that the cache has evicted."""
    num_snapshots: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of the batches' rows that were in the cache, from 0 to 1."""
        return self.num_used / max(1, self.num_used + self.num_read)


class _Workers:
    """The reader thread and the writer thread of a table, and the reads that failed."""

    def __init__(self) -> None:
        # A single thread each, so reads run in order, and so do writes.
        self.reader = ThreadPoolExecutor(1, "meshrec-rows-read")
        self.writer = ThreadPoolExecutor(1, "meshrec-rows-write")
        # A forked child compares this with its process ID: it has no threads.
        self.owner = os.getpid()
        # Rows that could not be read, and the error of the last failed read. Set by the reader thread,
        # cleared by ``FileTable._finish_reads``.
        self.failed: list[Misses] = []
        self.error: RowFileError | None = None

    def close(self) -> None:
        self.reader.shutdown()
        self.writer.shutdown()


class RowsInFlight(Pin):
    """Keeps the cache slots used by a batch from getting other rows.

    The batch's rows may still be on their way from the file to these slots; see ``wait``.

    Args:
        band: table number, first row and end row of the table's rectangle.
        cache: the cache.
        used: distinct slots used by the batch, int64.
        arrival: future which finishes when the rows are in the cache, or an error for ``wait`` to raise.
    """

    def __init__(
        self, band: tuple[int, int, int], cache: RowCache, used: Tensor, arrival: "Future[None] | Exception"
    ) -> None:
        # ``_released`` is the cache's list, emptied by the next ``RowCache.use``.
        self._used, self._released, self._arrival = used, cache.released, arrival
        self.band, self.trace = band, cache.trace

    def wait(self) -> None:
        """Wait until all rows of the batch are in the cache.

        Raises:
            RowFileError: rows cannot be read, or victims cannot be written.
            ValueError: the cache has no room for the batch.
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
    """A table rectangle with all rows in a file and some of them in a cache in memory.

    See [Note: rows on their way to the cache]. The key of a row is its number in the whole table, or, in a
    hashed table, its slot in the hash index.

    Args:
        rectangle: row and column intervals of the table.
        initialized_parts: row parts with initial values: ``weight`` first, then optimizer state.
        stored: the file.
        num_slots: cached row count.
        name: table name in messages.
    """

    is_growable = False

    def __init__(
        self,
        rectangle: Rectangle,
        initialized_parts: Sequence[InitializedPart],
        stored: StoredRows,
        *,
        num_slots: int,
        name: str,
    ) -> None:
        self.rectangle, self._name = rectangle, name
        self.parts = [start.part for start in initialized_parts]
        r = rectangle
        # Cache and file live as long as the table. ``stored.initial_blocks`` is set later, by
        # ``set_initial_rows``.
        self._cache = RowCache(self.parts, r.c1 - r.c0, num_slots=num_slots)
        self.stored = stored
        self._new_rows = _UncachedRows(
            torch.empty(0, dtype=torch.int64), memory_for(self.parts, 0, r.c1 - r.c0), _finished()
        )
        """Rows set by ``start_rows`` and neither in the cache nor in the file. A row leaves when a batch
        resolves it, or by ``load`` or ``drop``."""
        # Victims being written, in write order, until ``_check_written`` or ``_finish_writes``. If a row was
        # evicted twice, the later copy must reach the file last.
        self._victims: deque[_UncachedRows] = deque()
        # Open snapshots, from ``snapshot`` until ``end_snapshot``.
        self._snapshots: list[RowLog] = []
        # Guards the cache and the lists above. Held by public methods, never by the two worker threads.
        self._lock = threading.RLock()
        self._workers = _Workers()
        # The most recent read. The reader runs reads in order, so when this one ends, all have ended.
        self._last_read: Future[None] = _finished()
        self.counts = RowCounts()

    @property
    def index(self) -> "FileTable":
        """Index from keys to slots: the table itself."""
        return self

    @property
    def rows(self) -> Tensor:
        """Weights of the cached rows, indexed by slot."""
        return self._cache.memory[0]

    @property
    def state(self) -> Sequence[Tensor]:
        """Optimizer state of the cached rows, indexed by slot."""
        return self._cache.memory[1:]

    @property
    def slot_keys(self) -> Tensor:
        """Key of the row in each slot, int64; -1 for a free slot."""
        return self._cache.keys

    def set_initial_rows(self, initial_blocks: InitialBlocks) -> None:
        """Set the function for initial rows. The table calls it when rows are first needed."""
        self.stored.initial_blocks = initial_blocks

    def keys_at(self, slots: Tensor) -> Tensor:
        """Return the keys of the rows that are in these slots now, int64; -1 for a free slot."""
        return self._cache.keys[slots]

    @torch.no_grad()
    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Assign slots to the keys of a batch, pin them, and start to read missing rows in the background.

        Errors are raised by the pin's ``wait``, not here.

        Args:
            keys: row keys, int64 [N]; may repeat.
            train: whether the rows will be updated.

        Returns:
            The slots, int64 [N], and a pin (``RowsInFlight``) to wait for before the rows are used.
        """
        with self._lock:
            cache = self._cache
            # Does not wait here; frees the slots of reads that failed.
            if self._last_read.done():
                self._finish_reads()
            slots = cache.find(keys)
            # Pin the hits before admission, which must not evict them.
            used = cache.use(slots)
            try:
                absent = slots < 0
                # Distinct and ascending, as the file and the cache require.
                missing = keys[absent].unique()
                self.counts.num_used += len(used)
                self.counts.num_read += len(missing)
                self._check_written()
                if regions := self.stored.unwritten(missing):
                    # A disk block at a region boundary has rows from both regions. A single thread must write
                    # it, so let the writer thread finish before this thread writes.
                    self._finish_writes()
                    self.stored.write_initial(regions)
                misses = self._admit(missing) if len(missing) else None
            except Exception as error:
                # The pin's ``wait`` raises the error, where all ranks learn of it. Until then, the slots are
                # placeholders within the cache.
                return Resolved(slots.clamp_(min=0), RowsInFlight(self.rectangle[:3], cache, used, error))
            # Search again, because ``missing`` has each key only once.
            if misses is not None:
                slots[absent] = cache.find(keys[absent])
                used = torch.cat([used, misses.slots])
            if train:
                # Set before the update, because the cache cannot see when the update changes the rows.
                cache.dirty[used] = True
            arrival = self._start_reads(misses, used, train)
            return Resolved(slots, RowsInFlight(self.rectangle[:3], cache, used, arrival))

    @torch.no_grad()
    def start_rows(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Set the rows under some keys to new values, without reading or writing the file.

        Rows already in the cache are replaced there. Other rows are kept in memory outside the cache, until a
        batch resolves them.

        Args:
            keys: row keys, ascending, int64 [N].
            rows: new values, one tensor with N rows per row part.
        """
        with self._lock:
            slots = self._cache.find(keys)
            here = slots >= 0
            if here.any():
                # The reader may still write an old row to the slot. ``exception`` waits without raising.
                self._last_read.exception()
                for part, values in zip(self._cache.memory, rows, strict=True):
                    part[slots[here]] = values[here]
                self._cache.dirty[slots[here]] = True
            if not here.all():
                self._new_rows = self._new_rows.plus(keys[~here], [values[~here] for values in rows])

    def drop(self, keys: Tensor) -> None:
        """Forget the rows under some keys, which then have no defined value until ``start_rows`` or ``load``.

        Args:
            keys: row keys, ascending, int64 [N]. No batch in flight may use them.
        """
        with self._lock:
            self._cache.drop(keys)
            self._new_rows = self._new_rows.without(keys)

    def log(self, keys: Tensor) -> None:
        """Write the present rows under some keys to the logs of all open snapshots.

        Must be called before the rows are dropped or replaced.

        Args:
            keys: row keys, ascending, int64 [N].

        Raises:
            RowFileError: a row cannot be read, or a log cannot be written.
        """
        with self._lock:
            for some in keys.split(self._rows_per_block) if self._snapshots else ():
                rows = self.rows_at(some)
                for log in self._snapshots:
                    log.append_rows(some, rows)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the row parts by name, as ``StreamedPart`` tensors, which read values on demand."""
        return streamed_parts(self)

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield copies of the present rows in blocks with ascending keys.

        Args:
            columns: table columns to return; None: all.
            keys: key interval to return; None: all.
        """
        for first, end in self.spans(keys):
            yield self.make_block(range(first, end), self.rows_at(torch.arange(first, end)), columns)

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace rows, or some parts and columns of rows, in the file and in the cache.

        Args:
            blocks: new values.

        Raises:
            RowFileError: the file cannot be written or read.
        """
        # Split large blocks, so the copies stay small.
        for block in blocks:
            for start in range(0, len(block.keys), self._rows_per_block):
                rows = slice(start, start + self._rows_per_block)
                parts = {name: part[rows] for name, part in block.parts.items()}
                with self._lock:
                    self._finish_reads()
                    self._finish_writes()
                    self._load(RowBlock(block.keys[rows], block.columns, parts))

    def snapshot(self) -> "RowLog":
        """Start a snapshot of the present rows; see [Note: how a table in a file is frozen].

        Returns:
            The snapshot's log, from which the rows are read. It must be closed.

        Raises:
            RowFileError: the log cannot be written.
        """
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
        """Stop writing rows to the log of a snapshot. Called by ``RowLog.close``."""
        with self._guard():
            self._snapshots = [log for log in self._snapshots if log is not snapshot]
            # The reader may still have rows to write to the log. ``exception`` waits without raising.
            self._last_read.exception()

    def spans(self, keys: Span | None) -> Iterator[Span]:
        """Split a key interval into the intervals of single blocks in ``stream``.

        Args:
            keys: key interval, of which only the part inside the rectangle counts; None: all keys.
        """
        r, step = self.rectangle, self._rows_per_block
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        for start in range(first, end, step):
            yield start, min(start + step, end)

    def make_block(self, keys: range, parts: Sequence[Tensor], columns: Span | None) -> RowBlock:
        """Return a row block with views of some columns.

        Args:
            keys: consecutive row keys.
            parts: rows with all columns in the rectangle, one tensor per row part.
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
        """Return copies of the present rows under some keys, wherever they are: in memory or in the file.

        Args:
            keys: row keys, ascending, int64 [N].
            unneeded: whether the row under each key may be left out, bool [N]. The result has undefined
                values there. None: all rows are needed.

        Returns:
            One tensor with N rows per row part.

        Raises:
            RowFileError: a row cannot be read.
        """
        with self._guard():
            self._finish_reads()
            parts = memory_for(self.parts, len(keys), self.rectangle.c1 - self.rectangle.c0)
            absent = torch.ones(len(keys), dtype=torch.bool) if unneeded is None else ~unneeded
            slots = self._cache.find(keys)
            sources = [(slots, self._cache.memory)]
            # The newest version of a row first: cache, new rows, later victims, earlier victims, file.
            copies = (self._new_rows, *reversed(self._victims))
            sources += [(positions_in(copy.keys, keys), copy.rows) for copy in copies]
            for positions, rows in sources:
                here = absent & (positions >= 0)
                for to, part in zip(parts, rows, strict=True):
                    to[here] = part[positions[here]]
                absent &= ~here
            # All remaining rows come from the file in a single call, which reads neighbors together.
            left = absent.nonzero()[:, 0]
            self.stored.read(keys[left], parts, left)
            return parts

    def close(self) -> None:
        """Stop the worker threads and remove the file. The table cannot be used afterward."""
        self._workers.close()
        self.stored.file.close()

    def __reduce__(self) -> NoReturn:
        """Raise ValueError, because a copy or pickle of the table cannot include the file."""
        raise ValueError(
            f"{self._name} keeps its rows in a file, which is not copied along with a model. Save a "
            f"checkpoint, "
            "and load it into another model."
        )

    @property
    def _rows_per_block(self) -> int:
        """Number of rows in a block of ``stream``."""
        return max(1, _STREAM_BYTES // self.stored.file.layout.record_bytes)

    def _guard(self) -> AbstractContextManager[Any]:
        """Return the lock as a context manager, or in a forked child one that does nothing."""
        # A thread of the parent may have held the lock at the fork, and would never release it in the child.
        return self._lock if os.getpid() == self._workers.owner else nullcontext()

    def _finish_reads(self) -> None:
        """Wait until all reads have ended, and free the slots of rows lost in a failed read."""
        if os.getpid() != self._workers.owner:
            return  # the snapshot was made before the fork, and has waited
        self._last_read.exception()
        while self._workers.failed:
            self._cache.forget(self._workers.failed.pop())
        self._workers.error = None

    def _check_written(self) -> None:
        """Drop the copies of victims that are in the file by now, and write those again that failed.

        Waits if too many batches' victims are being written.

        Raises:
            RowFileError: a write fails again.
        """
        # Wait for the oldest write only; later ones may still be running.
        if len(self._victims) >= _MAX_PENDING_WRITES:
            self._victims[0].written.exception()
        while self._victims and self._victims[0].written.done():
            if self._victims[0].written.exception() is not None:
                self._finish_writes()
                return
            self._victims.popleft()

    def _finish_writes(self) -> None:
        """Wait until all victims are in the file. Writes that failed are tried again in this thread.

        Raises:
            RowFileError: rows cannot be written. They stay in memory, in ``_victims``.
        """
        for victims in self._victims:
            victims.written.exception()
        again = False
        while self._victims:
            victims = self._victims[0]
            again |= victims.written.exception() is not None
            # After a failure, write all later victims again, too: a later copy of a row must be written last.
            if again:
                self._write(victims.keys, victims.rows)
            self._victims.popleft()

    def _write(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Write rows to the file.

        Args:
            keys: row keys, ascending, int64 [N].
            rows: one tensor with N rows per row part.
        """
        self.stored.file.write(keys, rows, torch.arange(len(keys)))

    def _admit(self, missing: Tensor) -> Misses:
        """Assign cache slots to missing keys. Start to write the evicted dirty rows to the file.

        Args:
            missing: distinct keys of rows that are not in the cache, ascending, int64.

        Returns:
            The missing keys and the assigned slots. The caller must still read the rows into these slots.

        Raises:
            ValueError: the cache is too small, because batches in flight pin too many slots.
        """
        # May evict: from here on, slots found earlier may hold other rows, except the pinned ones.
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
            # Listed before the caller reads rows, so a victim that is needed at once is taken from the copy.
            written = self._workers.writer.submit(self._write, misses.old_keys, misses.old_rows)
            self._victims.append(_UncachedRows(misses.old_keys, misses.old_rows, written))
        return misses

    def _start_reads(self, misses: Misses | None, used: Tensor, train: bool) -> "Future[None]":
        """Bring a batch's rows to the assigned slots: copy rows from memory, and start to read the others.

        Also starts to log rows for open snapshots, which must happen before the batch changes them.

        Args:
            misses: keys just assigned slots; None: none.
            used: distinct slots that the batch uses, int64.
            train: whether the batch may change the rows.

        Returns:
            A future which finishes when all reads so far have ended, including reads for earlier batches.
        """
        new = misses.slots if misses is not None else used[:0]
        logs = [(log, log.mark_logged(used, new, train=train)) for log in self._snapshots]
        reads = self._take_from_copies(misses) if misses is not None else None
        # With nothing to read or log, the batch needs to wait only for earlier batches.
        if reads is not None or any(len(slots) for _, slots in logs):
            self._last_read = self._workers.reader.submit(self._read_and_log, reads, logs)
        return self._last_read

    def _take_from_copies(self, misses: Misses) -> Misses | None:
        """Fill the slots just assigned to keys whose rows are in memory outside the cache.

        These rows are new rows, and victims on their way to the file.

        Args:
            misses: keys just assigned slots.

        Returns:
            The keys whose rows must be read from the file; None if there are none.
        """
        absent = torch.ones(len(misses.keys), dtype=torch.bool)
        for copy in (self._new_rows, *reversed(self._victims)):
            # The victims evicted for these very keys cannot include them.
            if copy.keys is misses.old_keys:
                continue
            positions = positions_in(copy.keys, misses.keys)
            here = absent & (positions >= 0)
            if not here.any():
                continue
            # Wait: the reader may still write rows of an abandoned batch to these slots.
            self._last_read.exception()
            for part, rows in zip(self._cache.memory, copy.rows, strict=True):
                part[misses.slots[here]] = rows[positions[here]]
            # New rows are not in the file, so the cache must write them when it evicts them.
            if copy is self._new_rows:
                self._cache.dirty[misses.slots[here]] = True
            absent &= ~here
        # New rows are in the cache now. Victims stay listed until they are written.
        self._new_rows = self._new_rows.without(misses.keys)
        return misses._replace(keys=misses.keys[absent], slots=misses.slots[absent]) if absent.any() else None

    def _read_and_log(self, reads: Misses | None, logs: "Sequence[tuple[RowLog, Tensor]]") -> None:
        """Read rows from the file to slots, then log rows that a batch may change. Runs in the reader thread.

        Args:
            reads: keys to read, and their slots; None: none.
            logs: pairs of a log and the slots with the rows to write to it.
        """
        workers, cache = self._workers, self._cache
        try:
            if workers.error is not None:
                # An earlier read failed, and this batch may have found the missing row's slot as a hit.
                raise workers.error
            # Reads come before the log: the log may need rows that are read here.
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
        """Replace the rows in a block, in the file and in the cache. No reads or writes may be in flight."""
        span = block.keys if isinstance(block.keys, range) else None
        keys = torch.arange(span.start, span.stop) if span is not None else block.keys
        assert isinstance(keys, Tensor)
        r, stored = self.rectangle, self.stored
        is_whole = block.columns == r.columns and all(part.name in block.parts for part in self.parts)
        # Open snapshots need the old rows.
        self.log(keys)
        # If the block has whole rows, regions inside it need no initial values.
        is_new = span is not None and is_whole
        stored.write_initial(
            stored.partly_covered(span.start, span.stop) if span and is_new else stored.unwritten(keys)
        )
        # A block with only some parts or columns changes the present rows.
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
    """Snapshot of a table in a file: a log with the old versions of rows changed since.

    An entry in the log is a key and the row under this key. See [Note: how a table in a file is frozen].

    Args:
        table: the table.
        path: new file for the log.
        parts: the row parts, and the number of columns.
        num_slots: number of slots in the table's cache.
    """

    def __init__(
        self, table: FileTable, path: Path, parts: tuple[Sequence[RowPart], int], num_slots: int
    ) -> None:
        # From ``FileTable.snapshot`` until ``close``. Only the writing process appends entries.
        self._table, self._path, self._parts = table, path, parts
        # Whether the row now in a slot is in the log, or about to be written to it.
        self._is_logged = torch.zeros(num_slots, dtype=torch.bool)
        # Number of entries written, for the writing process; keys of the entries read so far, for the reading
        # process.
        self._num_rows, self._seen = 0, torch.empty(0, dtype=torch.int64)
        # Per entry: key (8 bytes), row parts, and checksum (4 bytes), padded to whole sectors.
        kinds, width = parts
        record = 8 + sum((1 if part.per_row else width) * part.dtype.itemsize for part in kinds) + 4
        self._layout = records.RecordLayout(0, 1, -(-record // _SECTOR) * _SECTOR, record, 0)
        self._file, created = CreatedPath.create_file(path, 0o600)
        self._end = weakref.finalize(self, _remove, self._file, created, os.getpid())

    def mark_logged(self, slots: Tensor, new: Tensor, *, train: bool = True) -> Tensor:
        """Select the slots whose rows must be logged before a batch changes them, and mark them as logged.

        Args:
            slots: distinct slots used by the batch, int64.
            new: slots that have just been assigned to other keys, so their marks are cleared first, int64.
            train: whether the batch may change rows. If not, no slot is selected.

        Returns:
            The selected slots, int64.
        """
        self._is_logged[new] = False
        unlogged = slots[~self._is_logged[slots]] if train else slots[:0]
        self._is_logged[unlogged] = True
        return unlogged

    def append(self, keys: Tensor, memory: Sequence[Tensor], slots: Tensor) -> None:
        """Append the rows in some slots to the log.

        Args:
            keys: row key per slot of the whole memory, int64.
            memory: memory per row part, indexed by slot.
            slots: slots with the rows to write, int64.

        Raises:
            RowFileError: the disk is full, or fails.
        """
        # An entry's number is its position in the file.
        entries = torch.arange(self._num_rows, self._num_rows + len(slots))
        # Entries are written in order: a reader takes the file size as the number of complete entries.
        failures = records.write(self._file, self._layout, entries, [keys, *memory], slots)
        if len(failures):
            cause = os.strerror(int(failures[0, 1]))
            raise RowFileError(
                f"cannot write to {self._path}, the log of rows that change while a checkpoint is written: "
                f"{cause}. Nothing was changed by this step; free space on that disk and go on."
            )
        self._num_rows += len(slots)

    def append_rows(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Append rows to the log.

        Args:
            keys: row keys, int64 [N].
            rows: one tensor with N rows per row part.
        """
        self.append(keys, rows, torch.arange(len(keys)))

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows as they were at the snapshot, in blocks; see ``tables.table.TableSnapshot``."""
        for first, end in self._table.spans(keys):
            parts = self.rows_at(torch.arange(first, end))
            yield self._table.make_block(range(first, end), parts, columns)

    def rows_at(self, keys: Tensor) -> list[Tensor]:
        """Return the rows under some keys as they were at the snapshot.

        Args:
            keys: row keys, ascending, int64 [N].

        Returns:
            One tensor with N rows per row part.

        Raises:
            RowFileError: a row or a log entry is damaged.
        """
        # Read the table before looking into the log again: rows overwritten meanwhile are in the log by then.
        # A first look into the log only saves reads: logged rows need not be read from the table.
        parts = self._table.rows_at(keys, self._entries(keys) >= 0)
        entries = self._entries(keys)
        logged = (entries >= 0).nonzero()[:, 0]
        # The log is a record file, whose reader takes ascending entry numbers.
        logged = logged[entries[logged].argsort()]
        for part, values in zip(parts, self._read(entries[logged])[1], strict=True):
            part[logged] = values
        return parts

    def close(self) -> None:
        """End the snapshot: stop logging, and remove the log file."""
        self._table.end_snapshot(self)
        self._end()

    def _entries(self, keys: Tensor) -> Tensor:
        """Return the number of the first log entry per key, int64 [N]; -1 for keys without an entry."""
        # The file is missing if the snapshot was closed.
        with suppress(FileNotFoundError):
            self._read_new_entries()
        positions = positions_in(keys, self._seen)
        here = (positions >= 0).nonzero()[:, 0]
        none = len(self._seen)
        # A row may be logged again after it left the cache and changed. Only the first entry has the old row.
        first_entries = torch.full_like(keys, none).scatter_reduce_(0, positions[here], here, "amin")
        return torch.where(first_entries < none, first_entries, -1)

    def _read_new_entries(self) -> None:
        """Read the keys of the log entries written since the last call, and append them to ``_seen``."""
        count = os.stat(self._path).st_size // self._layout.block_bytes
        entries = torch.arange(len(self._seen), count)
        if len(entries):
            new_keys, _ = self._read(entries)
            self._seen = torch.cat([self._seen, new_keys])

    def _read(self, entries: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Read log entries by number, int64 [N].

        Returns:
            Row keys, int64 [N], and rows, one tensor with N rows per row part.
        """
        kinds, width = self._parts
        keys, rows = torch.empty(len(entries), dtype=torch.int64), memory_for(kinds, len(entries), width)
        if len(entries):
            # Open by path: the reader may be a forked process in which the parent's files are closed.
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


def _remove(file: int, created: CreatedPath, owner: int) -> None:
    """Close and remove the log file. Does nothing in a forked child."""
    if os.getpid() == owner:
        os.close(file)
        created.remove()


def _finished() -> "Future[None]":
    """Return a future that has finished without an error."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
