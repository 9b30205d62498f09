"""Rows of a stream that wait in memory: Arrow rows by index, indices by time, and impressions by key."""

from array import array
from typing import Any, NamedTuple

import numpy as np

from meshrec.data.arrow import pa
from meshrec.data.samples import Bools, Ints

# Rows up to which adjacent chunks are merged: large enough that few chunks are searched, small enough that a
# merge takes milliseconds.
_MAX_CHUNK_ROWS = 1 << 17


class _Chunk:
    """Rows with ascending indices, of which some have been released."""

    def __init__(self, indices: Ints, table: Any) -> None:
        self.indices, self.table = indices, table
        self.is_held = np.ones(len(indices), dtype=np.bool_)
        self.num_held = len(indices)

    def held(self) -> tuple[Ints, Any]:
        """Return indices and rows that are held."""
        if self.num_held == len(self.indices):
            return self.indices, self.table
        return self.indices[self.is_held], self.table.take(pa.array(np.flatnonzero(self.is_held)))


class HeldRows:
    """Arrow rows by index, until they are released.

    Small chunks are merged, and a chunk of which half was released is rewritten. Memory is therefore at most
    twice that of the held rows, and a row is copied a logarithmic number of times.
    """

    def __init__(self) -> None:
        # Ascending by index, and never empty.
        self._chunks: list[_Chunk] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the Arrow tables, including released rows that are still in memory."""
        return sum(chunk.table.nbytes for chunk in self._chunks)

    def append(self, indices: Ints, table: Any) -> None:
        """Hold rows with ascending indices above those of earlier rows.

        Args:
            indices: int64 [n].
            table: n rows, with the schema of earlier rows. Its memory is shared.
        """
        if len(indices) == 0:
            return
        self._chunks.append(_Chunk(indices, table))
        while len(self._chunks) > 1:
            left, right = self._chunks[-2:]
            num = left.num_held + right.num_held
            if left.num_held > 2 * right.num_held or num > _MAX_CHUNK_ROWS:
                return
            parts = [left.held(), right.held()]
            merged = pa.concat_tables([rows for _, rows in parts]).combine_chunks()
            self._chunks[-2:] = [_Chunk(np.concatenate([part for part, _ in parts]), merged)]

    def take(self, indices: Ints, columns: list[str] | None = None) -> Any:
        """Return held rows in the order of ``indices``.

        Args:
            indices: int64 [n]; each may occur more than once.
            columns: columns to return; None: all.
        """
        order = np.argsort(indices, kind="stable")
        parts = []
        for chunk, part in self._split(indices[order]):
            table = chunk.table if columns is None else chunk.table.select(columns)
            parts.append(table.take(pa.array(np.searchsorted(chunk.indices, part))))
        table = pa.concat_tables(parts)
        if (np.diff(order) == 1).all():
            return table.combine_chunks()
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return table.combine_chunks().take(pa.array(inverse))

    def release(self, indices: Ints) -> None:
        """Stop holding rows.

        Args:
            indices: indices of held rows, int64 [n], each once.
        """
        for chunk, part in self._split(np.sort(indices)):
            chunk.is_held[np.searchsorted(chunk.indices, part)] = False
            chunk.num_held -= len(part)
        self._chunks = [
            chunk if 2 * chunk.num_held > len(chunk.indices) else _Chunk(*chunk.held())
            for chunk in self._chunks
            if chunk.num_held
        ]

    def held(self) -> tuple[Ints, Any] | None:
        """Return indices, int64 [n] ascending, and a table of all held rows; None if there are none."""
        if not self._chunks:
            return None
        parts = [chunk.held() for chunk in self._chunks]
        table = pa.concat_tables([rows for _, rows in parts]).combine_chunks()
        return np.concatenate([indices for indices, _ in parts]), table

    def _split(self, indices: Ints) -> list[tuple[_Chunk, Ints]]:
        """Return the chunks of ascending indices, each with its share of them."""
        firsts = np.array([chunk.indices[0] for chunk in self._chunks], dtype=np.int64)
        bounds = [*np.searchsorted(indices, firsts).tolist(), len(indices)]
        return [
            (chunk, indices[start:stop])
            for chunk, start, stop in zip(self._chunks, bounds[:-1], bounds[1:], strict=True)
            if start < stop
        ]


class Timed(NamedTuple):
    """Row indices with their times, ascending by time and then by index."""

    times: Ints
    """int64 [n]."""
    indices: Ints
    """int64 [n]."""

    @staticmethod
    def sorted(times: Ints, indices: Ints) -> "Timed":
        """Sort rows by time; rows with equal times keep their order."""
        order = np.argsort(times, kind="stable")
        return Timed(times[order], indices[order])

    @staticmethod
    def concatenated(parts: list["Timed"]) -> "Timed":
        """Concatenate and sort. Each part has larger indices than the part before it."""
        if len(parts) == 1:
            return parts[0]
        empty = np.zeros(0, dtype=np.int64)
        return Timed.sorted(
            np.concatenate([empty, *(part.times for part in parts)]),
            np.concatenate([empty, *(part.indices for part in parts)]),
        )


class TimeQueue:
    """Row indices, taken in the order of their times.

    Short sorted runs are merged, so a row is sorted a logarithmic number of times, however many rows wait.
    """

    def __init__(self) -> None:
        self._runs: list[Timed] = []

    def __len__(self) -> int:
        return sum(len(run.times) for run in self._runs)

    def append(self, times: Ints, indices: Ints) -> None:
        """Add rows.

        Args:
            times: int64 [n].
            indices: int64 [n] ascending, above those of earlier rows.
        """
        if len(times):
            self._runs.append(Timed.sorted(times, indices))
        while len(self._runs) > 1 and len(self._runs[-2].times) <= 2 * len(self._runs[-1].times):
            self._runs[-2:] = [Timed.concatenated(self._runs[-2:])]

    def take_before(self, time: int) -> Timed:
        """Remove and return the rows whose times are below ``time``."""
        cuts = [int(np.searchsorted(run.times, time)) for run in self._runs]
        parts = [
            Timed(run.times[:cut], run.indices[:cut])
            for run, cut in zip(self._runs, cuts, strict=True)
            if cut
        ]
        self._runs = [
            Timed(run.times[cut:], run.indices[cut:])
            for run, cut in zip(self._runs, cuts, strict=True)
            if cut < len(run.times)
        ]
        return Timed.concatenated(parts)

    def rows(self) -> Timed:
        """Return all rows without removing them."""
        return Timed.concatenated(self._runs)


class PendingImpressions:
    """Impressions before the watermark whose windows have not ended, in the order of their times.

    An impression has a slot: its number in this order. The index of keys is a dictionary, which takes about
    half of the time of a join: it works for keys of any type, and needs no check for collisions of hashes.
    """

    def __init__(self) -> None:
        # Slot of the last impression by key.
        self.slot_of: dict[Any, int] = {}
        # By slot, from `first` on. Ended slots are removed from the front, when they are half of all.
        self.ends, self.indices, self.has_action = array("q"), array("q"), bytearray()
        self.keys: list[Any] = []
        # Slot of the first elements above, and the number of removed elements before the first live slot.
        self.first, self.num_ended = 0, 0

    def __len__(self) -> int:
        return len(self.ends) - self.num_ended

    def num_ending_before(self, time: int) -> int:
        """Return the number of slots whose windows end before ``time``."""
        if not len(self):
            return 0
        return int(np.searchsorted(np.frombuffer(self.ends, dtype=np.int64)[self.num_ended :], time))

    def remove(self, num: int) -> tuple[Ints, Ints, Bools]:
        """Remove the oldest ``num`` slots.

        Returns:
            - The end per window, int64 [num].
            - The impression number, int64 [num].
            - Whether there was an action, bool [num].
        """
        start, stop = self.num_ended, self.num_ended + num
        slot_of, first = self.slot_of, self.first
        for slot, key in enumerate(self.keys[start:stop], first + start):
            # A later impression with the same key has replaced it.
            if slot_of.get(key) == slot:
                del slot_of[key]
        removed = (
            np.array(self.ends[start:stop], dtype=np.int64),
            np.array(self.indices[start:stop], dtype=np.int64),
            np.array(self.has_action[start:stop], dtype=np.bool_),
        )
        self.num_ended = stop
        if 2 * stop > len(self.ends):
            for values in (self.ends, self.indices, self.has_action, self.keys):
                del values[:stop]
            self.first, self.num_ended = first + stop, 0
        return removed
