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
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from meshrec.tables.cached.cache import Misses, RowCache, RowsInFlight
from meshrec.tables.cached.file import memory_for, positions_in
from meshrec.tables.cached.regions import InitialBlocks, InitializedPart, StoredRows
from meshrec.tables.cached.row_log import RowLog
from meshrec.tables.cached.transfers import RowTransfers, UncachedRows
from meshrec.tables.index import Resolved
from meshrec.tables.streamed import streamed_parts
from meshrec.tables.table import Rectangle, RowBlock, Span

_STREAM_BYTES = 1 << 22  # file bytes per block in ``stream``


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
        self._transfers = RowTransfers(stored.file, self._cache)
        self._new_rows = UncachedRows(
            torch.empty(0, dtype=torch.int64), memory_for(self.parts, 0, r.c1 - r.c0)
        )
        """Rows set by ``start_rows`` and neither in the cache nor in the file. A row leaves when a batch
        resolves it, or by ``load`` or ``drop``."""
        # Logs of open snapshots, from ``snapshot`` until ``end_snapshot``.
        self._logs: list[RowLog] = []
        # Guards everything above. Held by public methods, never by the reader or the writer thread.
        self._lock = threading.RLock()
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
            if self._transfers.last_read.done():
                self._transfers.finish_reads()
            slots = cache.find(keys)
            # Pin the hits before admission, which must not evict them.
            used = cache.use(slots)
            try:
                absent = slots < 0
                # Distinct and ascending, as the file and the cache require.
                missing = keys[absent].unique()
                self.counts.num_used += len(used)
                self.counts.num_read += len(missing)
                self._transfers.check_written()
                if regions := self.stored.unwritten(missing):
                    # A disk block at a region boundary has rows from both regions. A single thread must write
                    # it, so let the writer thread finish before this thread writes.
                    self._transfers.finish_writes()
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
                # The reader may still write an old row to the slot.
                self._transfers.wait_for_reads()
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
            for some in keys.split(self._rows_per_block) if self._logs else ():
                rows = self.rows_at(some)
                for log in self._logs:
                    log.append(some, rows, torch.arange(len(some)))

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
                    self._transfers.finish_reads()
                    self._transfers.finish_writes()
                    self._load(RowBlock(block.keys[rows], block.columns, parts))

    def snapshot(self) -> "FileSnapshot":
        """Start a snapshot of the present rows; see [Note: how a table in a file is frozen].

        Returns:
            The snapshot, which must be closed.

        Raises:
            RowFileError: the log cannot be written.
        """
        with self._lock:
            self._transfers.finish_reads()
            self.counts.num_snapshots += 1
            path, width = self.stored.file.path, self.rectangle.c1 - self.rectangle.c0
            path = path.with_name(f"{path.name}.log-{self.counts.num_snapshots}")
            # Rows used by batches in flight may change at any time, so log them now.
            log = RowLog(path, self.parts, width, num_slots=len(self._cache.keys))
            pinned = self._cache.pinned()
            log.append(self._cache.keys, self._cache.memory, log.mark_logged(pinned, pinned))
            self._logs.append(log)
            return FileSnapshot(self, log)

    def end_snapshot(self, log: RowLog) -> None:
        """Stop writing rows to the log of a snapshot. Called by ``FileSnapshot.close``."""
        with self._guard():
            self._logs = [other for other in self._logs if other is not log]
            # The reader may still have rows to write to the log.
            self._transfers.wait_for_reads()

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
            self._transfers.finish_reads()
            parts = memory_for(self.parts, len(keys), self.rectangle.c1 - self.rectangle.c0)
            absent = torch.ones(len(keys), dtype=torch.bool) if unneeded is None else ~unneeded
            slots = self._cache.find(keys)
            sources = [(slots, self._cache.memory)]
            # The newest version of a row first: cache, new rows, later victims, earlier victims, file.
            copies = (self._new_rows, *self._transfers.latest_victims())
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
        self._transfers.close()
        self.stored.file.close()

    def __reduce__(self) -> NoReturn:
        """Raise ValueError, because a copy or pickle of the table cannot include the file."""
        raise ValueError(
            f"{self._name} keeps its rows in a file, which is not copied along with a model. Save a "
            "checkpoint, and load it into another model."
        )

    @property
    def _rows_per_block(self) -> int:
        """Number of rows in a block of ``stream``."""
        return max(1, _STREAM_BYTES // self.stored.file.layout.record_bytes)

    def _guard(self) -> AbstractContextManager[Any]:
        """Return the lock as a context manager, or in a forked child one that does nothing."""
        # A thread of the parent may have held the lock at the fork, and would never release it in the child.
        return nullcontext() if self._transfers.is_in_child else self._lock

    def _admit(self, missing: Tensor) -> Misses:
        """Assign cache slots to missing keys. Start to write the evicted dirty rows to the file.

        Returns:
            The missing keys and the assigned slots. The caller must still read the rows into these slots.
        """
        # May evict: from here on, slots found earlier may hold other rows, except the pinned ones.
        misses = self._cache.admit(missing)
        if misses is None:
            num_pinned = int((self._cache.pins > 0).sum())
            raise ValueError(
                f"{self._name}: a batch needs {len(missing):,} rows that are not in memory, and of "
                f"{len(self._cache.keys):,} rows in the cache {num_pinned:,} are in use by "
                "batches in flight. Give FileRows more cache_rows or cache_bytes, or use smaller batches."
            )
        if len(misses.old_keys):
            self.counts.num_written += len(misses.old_keys)
            # Listed before the caller reads rows, so a victim that is needed at once is taken from the copy.
            self._transfers.start_write(misses.old_keys, misses.old_rows)
        return misses

    def _start_reads(self, misses: Misses | None, used: Tensor, train: bool) -> "Future[None]":
        """Bring a batch's rows to the assigned slots: copy rows from memory, and start to read the others.

        Also starts to log rows for open snapshots, which must happen before the batch changes them.

        Returns:
            A future which finishes when all reads so far have ended, including reads for earlier batches.
        """
        new = misses.slots if misses is not None else used[:0]
        logs = [(log, log.mark_logged(used, new, train=train)) for log in self._logs]
        reads = self._take_from_copies(misses) if misses is not None else None
        # With nothing to read or log, the batch needs to wait only for earlier batches.
        if reads is not None or any(len(slots) for _, slots in logs):
            self._transfers.start_read(reads, logs)
        return self._transfers.last_read

    def _take_from_copies(self, misses: Misses) -> Misses | None:
        """Fill the slots just assigned to keys whose rows are in memory outside the cache.

        These rows are new rows, and victims on their way to the file.

        Returns:
            The keys whose rows must be read from the file; None if there are none.
        """
        absent = torch.ones(len(misses.keys), dtype=torch.bool)
        for copy in (self._new_rows, *self._transfers.latest_victims()):
            # The victims evicted for these very keys cannot include them.
            if copy.keys is misses.old_keys:
                continue
            positions = positions_in(copy.keys, misses.keys)
            here = absent & (positions >= 0)
            if not here.any():
                continue
            # Wait: the reader may still write rows of an abandoned batch to these slots.
            self._transfers.wait_for_reads()
            for part, rows in zip(self._cache.memory, copy.rows, strict=True):
                part[misses.slots[here]] = rows[positions[here]]
            # New rows are not in the file, so the cache must write them when it evicts them.
            if copy is self._new_rows:
                self._cache.dirty[misses.slots[here]] = True
            absent &= ~here
        # New rows are in the cache now. Victims stay listed until they are written.
        self._new_rows = self._new_rows.without(misses.keys)
        return misses._replace(keys=misses.keys[absent], slots=misses.slots[absent]) if absent.any() else None

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
class FileSnapshot:
    """Rows of a ``FileTable`` as they were at a fixed moment; see [Note: how a table in a file is frozen].

    Args:
        table: the table.
        log: the rows changed since, in their old versions.
    """

    def __init__(self, table: FileTable, log: RowLog) -> None:
        self._table, self._log = table, log

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
        rows = self._table.rows_at(keys, self._log.contains(keys))
        self._log.restore(keys, rows)
        return rows

    def close(self) -> None:
        """End the snapshot: stop logging, and remove the log file."""
        self._table.end_snapshot(self._log)
        self._log.close()
