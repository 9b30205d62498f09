"""A table larger than memory: a rectangle whose rows are in a file, with a cache of them in memory.

[Note: how rows come and go]

``resolve`` gives the IDs of a batch slots of the cache and returns at once. Rows that are not there are read
in the background, each once per batch, neighbours together; whoever looks them up waits for the batch's pin
first. So a pipeline that resolves one batch ahead reads while the batch before computes. Slots of batches in
flight are pinned. A changed row that has to leave is copied out of its slot at once, written in the
background, and taken from that copy if it is needed before it is written. Reads and writes have a thread
each, which keeps many requests in flight (``row_file.IN_FLIGHT``).

Results do not depend on any of this: a row has the same bits in its slot, in a copy, and in the file.
"""

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from meshrec.tables.index import Resolved
from meshrec.tables.row_cache import Misses, RowCache
from meshrec.tables.row_file import RowFileError, memory_for, places_in
from meshrec.tables.row_log import RowLog
from meshrec.tables.row_regions import FirstBlocks, RecordedRows
from meshrec.tables.streamed import streamed
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span

_STREAM_BYTES = 1 << 22
_MOST_WRITES = 4
"""The largest number of batches of rows on their way to the file. Further ones wait."""


class RowPartStart(NamedTuple):
    """A part of rows, with its initial value (for rows without first values of their own)."""

    part: RowPart
    value: float


class _Leaving(NamedTuple):
    """Rows that have left memory and are not in the file yet."""

    keys: Tensor
    """int64 [N], ascending."""
    rows: list[Tensor]
    written: "Future[None]"

    def without(self, keys: Tensor) -> "_Leaving":
        """Return the rows whose keys are not among ``keys``, which ascend."""
        stays = places_in(keys, self.keys) < 0
        return (
            self if stays.all() else self._replace(keys=self.keys[stays], rows=[p[stays] for p in self.rows])
        )

    def plus(self, keys: Tensor, rows: Sequence[Tensor]) -> "_Leaving":
        """Return the rows with others added, which replace rows with the same keys."""
        both = self.without(keys)
        ascending, order = torch.cat([both.keys, keys]).sort()
        joined = [torch.cat(pair)[order] for pair in zip(both.rows, rows, strict=True)]
        return self._replace(keys=ascending, rows=joined)


@dataclasses.dataclass
class RowCounts:
    """Counts of the rows that a table has used, read and written so far."""

    num_used: int = 0
    """Distinct rows of batches that were in memory."""
    num_read: int = 0
    """Distinct rows of batches that were not."""
    num_written: int = 0
    """Changed rows that had to leave memory."""
    num_snapshots: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of the distinct rows of batches that were in memory."""
        return self.num_used / max(1, self.num_used + self.num_read)


class _Workers:
    """The thread that reads and the thread that writes, and the reads that failed."""

    def __init__(self) -> None:
        self.reader = ThreadPoolExecutor(1, "meshrec-rows-read")
        self.writer = ThreadPoolExecutor(1, "meshrec-rows-write")
        self.owner = os.getpid()  # a forked child has no threads
        self.failed: list[Misses] = []
        self.error: RowFileError | None = None

    def close(self) -> None:
        self.reader.shutdown()
        self.writer.shutdown()


class RowsInFlight:
    """The rows of one batch. Their slots are theirs as long as this object is alive."""

    def __init__(
        self, band: tuple[int, int, int], cache: RowCache, used: Tensor, arrival: "Future[None] | Exception"
    ) -> None:
        self._used, self._released, self._arrival = used, cache.released, arrival
        self.band, self.trace = band, cache.trace

    def wait(self) -> None:
        """Wait until the rows are in memory.

        Raises:
            RowFileError: they cannot be read, or rows that make room for them cannot be written.
            ValueError: the cache has no room for them.
        """
        if isinstance(self._arrival, Exception):
            raise self._arrival
        self._arrival.result()

    def __del__(self) -> None:
        self._released.append(self._used)


@final
class FileTable:
    """A rectangle of a table in a file; see [Note: how rows come and go].

    Args:
        rectangle: the rows and columns.
        starts: the parts of rows and of their optimizer state.
        stored: the rows in the file.
        num_slots: the number of rows in memory.
        name: what messages call the table.
    """

    def __init__(
        self,
        rectangle: Rectangle,
        starts: Sequence[RowPartStart],
        stored: RecordedRows,
        *,
        num_slots: int,
        name: str,
    ) -> None:
        self.rectangle, self._name = rectangle, name
        self.parts = [start.part for start in starts]
        r = rectangle
        self._cache = RowCache(self.parts, r.c1 - r.c0, num_slots=num_slots)
        self.stored = stored
        self._born = _Leaving(
            torch.empty(0, dtype=torch.int64), memory_for(self.parts, 0, r.c1 - r.c0), _done()
        )
        """Rows that a batch will bring to memory, which are not in the file."""
        self._leaving: deque[_Leaving] = deque()
        self._snapshots: list[RowLog] = []
        self._lock = threading.RLock()
        self._workers = _Workers()
        self._last_read: Future[None] = _done()
        self.counts = RowCounts()

    @property
    def index(self) -> "FileTable":
        """The table itself."""
        return self

    @property
    def rows(self) -> Tensor:
        """The rows in memory."""
        return self._cache.memory[0]

    @property
    def state(self) -> Sequence[Tensor]:
        """The optimizer state in memory."""
        return self._cache.memory[1:]

    @property
    def slot_keys(self) -> Tensor:
        """The key of each slot."""
        return self._cache.keys

    def begin_with(self, first: FirstBlocks) -> None:
        """Give rows that nobody has written yet their first values from ``first``, when they are needed."""
        self.stored.first = first

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the key whose row each of these slots has now."""
        return self._cache.keys[slots]

    @torch.no_grad()
    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Give each key a slot, and begin to bring its row there; the pin's ``wait`` waits for the rows."""
        with self._lock:
            cache = self._cache
            if self._last_read.done():
                self._settle_reads()
            slots = cache.find(keys)
            used = cache.use(slots)
            try:
                absent = slots < 0
                missing = keys[absent].unique()
                self.counts.num_used += len(used)
                self.counts.num_read += len(missing)
                self._check_written()
                if regions := self.stored.missing(missing):
                    self._settle_writes()  # blocks with rows of two regions are written by one thread only
                    self.stored.make(regions)
                misses = self._admitted(missing) if len(missing) else None
            except (RowFileError, ValueError) as error:
                return Resolved(slots.clamp_(min=0), RowsInFlight(self.rectangle[:3], cache, used, error))
            if misses is not None:
                slots[absent] = cache.find(keys[absent])
                used = torch.cat([used, misses.slots])
            if train:
                cache.dirty[used] = True
            arrival = self._brought(misses, used, train)
            return Resolved(slots, RowsInFlight(self.rectangle[:3], cache, used, arrival))

    @torch.no_grad()
    def begin(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Give keys new rows, whatever rows they had before; they need not have had any.

        Rows that are not in memory stay beside it until a batch resolves them, or ``drop``.

        Args:
            keys: int64 [N], ascending.
            rows: the parts of their rows.
        """
        with self._lock:
            slots = self._cache.find(keys)
            here = slots >= 0
            if here.any():
                self._last_read.exception()  # an old row may be on its way to the slot
                for part, values in zip(self._cache.memory, rows, strict=True):
                    part[slots[here]] = values[here]
                self._cache.dirty[slots[here]] = True
            if not here.all():
                self._born = self._born.plus(keys[~here], [values[~here] for values in rows])

    def drop(self, keys: Tensor) -> None:
        """Remove the rows of some keys, int64 [N] and ascending, which no batch in flight uses. Nothing reads
        them before ``begin`` or ``load`` gives them others.
        """
        with self._lock:
            self._cache.drop(keys)
            self._born = self._born.without(keys)

    def log(self, keys: Tensor) -> None:
        """Write rows that are about to be dropped or replaced to the logs of snapshots.

        Raises:
            RowFileError: a row cannot be read, or a log cannot be written.
        """
        with self._lock:
            for some in keys.split(self._rows_per_block) if self._snapshots else ():
                rows = self.rows_at(some)
                for log in self._snapshots:
                    log.append_rows(some, rows)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return a ``StreamedPart`` for each part."""
        return streamed(self)

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Stream the rows in blocks."""
        for first, end in self.spans(keys):
            yield self.block_of(range(first, end), self.rows_at(torch.arange(first, end)), columns)

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace rows, in memory and in the file.

        Raises:
            RowFileError: the file cannot be written or read.
        """
        for block in blocks:
            for begin in range(0, len(block.keys), self._rows_per_block):
                rows = slice(begin, begin + self._rows_per_block)
                parts = {name: part[rows] for name, part in block.parts.items()}
                with self._lock:
                    self._settle_reads()
                    self._settle_writes()
                    self._load(RowBlock(block.keys[rows], block.columns, parts))

    def snapshot(self) -> RowLog:
        """Return the rows as they are now; see [Note: how a table in a file is frozen] in ``row_log.py``."""
        with self._lock:
            self._settle_reads()
            self.counts.num_snapshots += 1
            path, width = self.stored.file.path, self.rectangle.c1 - self.rectangle.c0
            path = path.with_name(f"{path.name}.log-{self.counts.num_snapshots}")
            log = RowLog(self, path, (self.parts, width), len(self._cache.keys))
            pinned = self._cache.pinned()
            log.append(self._cache.keys, self._cache.memory, log.fresh(pinned, pinned))
            self._snapshots.append(log)
            return log

    def leave(self, snapshot: RowLog) -> None:
        """Stop writing to a snapshot's log."""
        with self._guard():
            self._snapshots = [each for each in self._snapshots if each is not snapshot]
            self._last_read.exception()  # a read on its way may write to the log

    def spans(self, keys: Span | None) -> Iterator[Span]:
        """Split keys into those of blocks of rows."""
        r, step = self.rectangle, self._rows_per_block
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        for begin in range(first, end, step):
            yield begin, min(begin + step, end)

    def block_of(self, keys: range, parts: Sequence[Tensor], columns: Span | None) -> RowBlock:
        """Return a block of rows, given by their parts."""
        c0, _ = self.rectangle.columns
        low, high = columns or self.rectangle.columns
        named = {
            part.name: tensor if part.per_row else tensor[:, low - c0 : high - c0]
            for part, tensor in zip(self.parts, parts, strict=True)
        }
        return RowBlock(keys, (low, high), named)

    @torch.no_grad()
    def rows_at(self, keys: Tensor, known: Tensor | None = None) -> list[Tensor]:
        """Return the parts of the rows of some keys as they are now.

        Args:
            keys: int64 [N], ascending.
            known: bool [N], the keys whose rows are not wanted; None: all are.
        """
        with self._guard():
            self._settle_reads()
            found = memory_for(self.parts, len(keys), self.rectangle.c1 - self.rectangle.c0)
            wanted = torch.ones(len(keys), dtype=torch.bool) if known is None else ~known
            slots = self._cache.find(keys)
            sources = [(slots, self._cache.memory)]
            copies = (self._born, *reversed(self._leaving))
            sources += [(places_in(each.keys, keys), each.rows) for each in copies]
            for places, rows in sources:
                here = wanted & (places >= 0)
                for to, part in zip(found, rows, strict=True):
                    to[here] = part[places[here]]
                wanted &= ~here
            left = wanted.nonzero()[:, 0]
            self.stored.read(keys[left], found, left)
            return found

    def close(self) -> None:
        """Stop the threads and remove the file."""
        self._workers.close()
        self.stored.file.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> "FileTable":
        raise ValueError(
            f"{self._name} keeps its rows in a file, which is not copied along with a model. Save a "
            f"checkpoint, "
            "and load it into another model."
        )

    @property
    def _rows_per_block(self) -> int:
        return max(1, _STREAM_BYTES // self.stored.file.layout.record_bytes)

    def _guard(self) -> AbstractContextManager[Any]:
        """Return the lock; a forked child, which reads alone, must not wait for it."""
        return self._lock if os.getpid() == self._workers.owner else nullcontext()

    def _settle_reads(self) -> None:
        """Wait for the rows on their way to memory, and free the slots of rows that could not be read."""
        if os.getpid() != self._workers.owner:
            return  # a snapshot was made before the fork, and waited
        self._last_read.exception()
        while self._workers.failed:
            self._cache.forget(self._workers.failed.pop())
        self._workers.error = None

    def _check_written(self) -> None:
        """Release rows that are in the file by now, and write again what could not be written.

        Raises:
            RowFileError: it still cannot.
        """
        if len(self._leaving) >= _MOST_WRITES:
            self._leaving[0].written.exception()
        while self._leaving and self._leaving[0].written.done():
            if self._leaving[0].written.exception() is not None:
                self._settle_writes()
                return
            self._leaving.popleft()

    def _settle_writes(self) -> None:
        """Wait until all changed rows that left memory are in the file.

        Raises:
            RowFileError: they cannot be written; they stay.
        """
        for each in self._leaving:
            each.written.exception()
        again = False
        while self._leaving:
            each = self._leaving[0]
            again |= each.written.exception() is not None
            if again:  # in their order: a later copy of a row goes last
                self._write(each.keys, each.rows)
            self._leaving.popleft()

    def _write(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        self.stored.file.write(keys, rows, torch.arange(len(keys)))

    def _admitted(self, missing: Tensor) -> Misses:
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
            self._leaving.append(_Leaving(misses.old_keys, misses.old_rows, written))
        return misses

    def _brought(self, misses: Misses | None, used: Tensor, train: bool) -> "Future[None]":
        """Begin to bring rows to their slots; return when all rows of this batch and those before are
        there."""
        new = misses.slots if misses is not None else used[:0]
        logs = [(log, log.fresh(used, new, train=train)) for log in self._snapshots]
        reads = self._from_copies(misses) if misses is not None else None
        if reads is not None or any(len(slots) for _, slots in logs):
            self._last_read = self._workers.reader.submit(self._bring, reads, logs)
        return self._last_read

    def _from_copies(self, misses: Misses) -> Misses | None:
        """Take rows that are not in the file yet from their copies; return the others."""
        wanted = torch.ones(len(misses.keys), dtype=torch.bool)
        for each in (self._born, *reversed(self._leaving)):
            if each.keys is misses.old_keys:
                continue
            places = places_in(each.keys, misses.keys)
            here = wanted & (places >= 0)
            if not here.any():
                continue
            self._last_read.exception()  # a read for a batch that was given up may go to these slots
            for part, rows in zip(self._cache.memory, each.rows, strict=True):
                part[misses.slots[here]] = rows[places[here]]
            if each is self._born:
                self._cache.dirty[misses.slots[here]] = True
            wanted &= ~here
        self._born = self._born.without(misses.keys)
        return misses._replace(keys=misses.keys[wanted], slots=misses.slots[wanted]) if wanted.any() else None

    def _bring(self, reads: Misses | None, logs: Sequence[tuple[RowLog, Tensor]]) -> None:
        """Read rows to their slots, and log rows before they change: the work of the reading thread."""
        workers, cache = self._workers, self._cache
        try:
            if workers.error is not None:
                raise workers.error  # a row of the batch before, which this one may need, has not come
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
        span = block.keys if isinstance(block.keys, range) else None
        keys = torch.arange(span.start, span.stop) if span is not None else block.keys
        assert isinstance(keys, Tensor)
        r, stored = self.rectangle, self.stored
        is_whole = block.columns == r.columns and all(part.name in block.parts for part in self.parts)
        self.log(keys)
        is_new = span is not None and is_whole  # then regions within it need no first values
        stored.make(stored.partly(span.start, span.stop) if span and is_new else stored.missing(keys))
        rows = memory_for(self.parts, len(keys), r.c1 - r.c0) if is_whole else self.rows_at(keys)
        low, high = block.columns[0] - r.c0, block.columns[1] - r.c0
        for part, tensor in zip(self.parts, rows, strict=True):
            if part.name in block.parts:
                (tensor if part.per_row else tensor[:, low:high]).copy_(block.parts[part.name])
        stored.file.write(keys, rows, torch.arange(len(keys)))
        if span is not None:
            stored.made_by(span.start, span.stop)
        self._born = self._born.without(keys)
        slots = self._cache.find(keys)
        here = slots >= 0
        for to, tensor in zip(self._cache.memory, rows, strict=True):
            to[slots[here]] = tensor[here]


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future
