"""Row transfers between the file and the cache of a table, in background threads; see ``table.py``."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, final

import torch
from torch import Tensor

from meshrec.tables.cached.cache import Misses, RowCache
from meshrec.tables.cached.file import RowFile, RowFileError, positions_in
from meshrec.tables.cached.row_log import RowLog

# Greatest number of batches whose victims are being written. Further batches wait, which bounds the memory
# for copies of victims.
_MAX_PENDING_WRITES = 4


class UncachedRows(NamedTuple):
    """Rows in memory outside the cache: victims being written to the file, or new rows not used yet.

    The file has no row, or an older version, under these keys.
    """

    keys: Tensor
    """Row keys, ascending, int64 [N]."""
    rows: list[Tensor]
    """Row values, one tensor with N rows per row part."""

    def without(self, keys: Tensor) -> "UncachedRows":
        """Return these rows without the rows under some keys, int64, ascending."""
        stays = positions_in(keys, self.keys) < 0
        return (
            self if stays.all() else self._replace(keys=self.keys[stays], rows=[p[stays] for p in self.rows])
        )

    def plus(self, keys: Tensor, rows: Sequence[Tensor]) -> "UncachedRows":
        """Return these rows and other rows, which replace rows under the same keys.

        Args:
            keys: keys of the other rows, ascending, int64 [M].
            rows: values of the other rows, one tensor per row part.
        """
        both = self.without(keys)
        ascending, order = torch.cat([both.keys, keys]).sort()
        joined = [torch.cat(pair)[order] for pair in zip(both.rows, rows, strict=True)]
        return self._replace(keys=ascending, rows=joined)


class _PendingWrite(NamedTuple):
    """Victims that the writer thread is writing to the file."""

    victims: UncachedRows
    written: "Future[None]"
    """Finished when the rows are in the file."""


@final
class RowTransfers:
    """Two threads: one reads rows from a file to the cache, the other writes victims to the file.

    See [Note: rows on their way to the cache] in ``table.py``. The caller must not call several methods at
    the same time.

    Args:
        file: the file.
        cache: the cache.
    """

    def __init__(self, file: RowFile, cache: RowCache) -> None:
        self._file, self._cache = file, cache
        # A single thread each, so reads run in order, and so do writes.
        self._reader = ThreadPoolExecutor(1, "meshrec-rows-read")
        self._writer = ThreadPoolExecutor(1, "meshrec-rows-write")
        self._owner = os.getpid()
        self.last_read: Future[None] = _finished()
        """The most recent read. The reader runs reads in order, so when this one ends, all have ended."""
        # Rows that could not be read, and the error of the last failed read. Set by the reader thread,
        # cleared by ``finish_reads``.
        self._failed: list[Misses] = []
        self._error: RowFileError | None = None
        # In write order, until ``check_written`` or ``finish_writes``. If a row was evicted twice, the later
        # copy must reach the file last.
        self._writes: deque[_PendingWrite] = deque()

    @property
    def is_in_child(self) -> bool:
        """Whether this process was forked from the one that created the object. It then has no threads."""
        return os.getpid() != self._owner

    def latest_victims(self) -> Iterator[UncachedRows]:
        """Yield the victims that may not be in the file yet, those evicted last first."""
        for write in reversed(self._writes):
            yield write.victims

    def start_write(self, keys: Tensor, rows: list[Tensor]) -> None:
        """Start to write victims to the file.

        Args:
            keys: row keys, ascending, int64 [N].
            rows: one tensor with N rows per row part.
        """
        victims = UncachedRows(keys, rows)
        self._writes.append(_PendingWrite(victims, self._writer.submit(self._write, victims)))

    def start_read(self, reads: Misses | None, logs: Sequence[tuple[RowLog, Tensor]]) -> None:
        """Start to read rows from the file to slots, and then to log rows that a batch may change.

        Args:
            reads: keys to read, and their slots; None: none.
            logs: pairs of a log and the slots with the rows to write to it.
        """
        self.last_read = self._reader.submit(self._read_and_log, reads, logs)

    def wait_for_reads(self) -> None:
        """Wait until all reads have ended, with or without an error."""
        self.last_read.exception()

    def finish_reads(self) -> None:
        """Wait until all reads have ended, and free the slots of rows lost in a failed read."""
        if self.is_in_child:
            return  # the snapshot was made before the fork, and has waited
        self.wait_for_reads()
        while self._failed:
            self._cache.forget(self._failed.pop())
        self._error = None

    def check_written(self) -> None:
        """Drop the copies of victims that are in the file by now, and write those again that failed.

        Waits if too many batches' victims are being written.

        Raises:
            RowFileError: a write fails again.
        """
        # Wait for the oldest write only; later ones may still be running.
        if len(self._writes) >= _MAX_PENDING_WRITES:
            self._writes[0].written.exception()
        while self._writes and self._writes[0].written.done():
            if self._writes[0].written.exception() is not None:
                self.finish_writes()
                return
            self._writes.popleft()

    def finish_writes(self) -> None:
        """Wait until all victims are in the file. Writes that failed are tried again in this thread.

        Raises:
            RowFileError: rows cannot be written. They stay in memory.
        """
        for write in self._writes:
            write.written.exception()
        again = False
        while self._writes:
            victims, written = self._writes[0]
            again |= written.exception() is not None
            # After a failure, write all later victims again, too: a later copy of a row must be written last.
            if again:
                self._write(victims)
            self._writes.popleft()

    def close(self) -> None:
        """Stop the threads."""
        self._reader.shutdown()
        self._writer.shutdown()

    def _write(self, victims: UncachedRows) -> None:
        self._file.write(victims.keys, victims.rows, torch.arange(len(victims.keys)))

    def _read_and_log(self, reads: Misses | None, logs: Sequence[tuple[RowLog, Tensor]]) -> None:
        """Read rows from the file to slots, then log rows that a batch may change, in the reader thread."""
        cache = self._cache
        try:
            if self._error is not None:
                # An earlier read failed, and this batch may have found the missing row's slot as a hit.
                raise self._error
            # Reads come before the log: the log may need rows that are read here.
            if reads is not None:
                self._file.read(reads.keys, cache.memory, reads.slots)
            for log, slots in logs:
                log.append(cache.keys, cache.memory, slots)
        except RowFileError as error:
            self._error = error
            if reads is not None:
                self._failed.append(reads)
            raise


def _finished() -> "Future[None]":
    """Return a future that has finished without an error."""
    future: Future[None] = Future()
    future.set_result(None)
    return future
