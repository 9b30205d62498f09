"""Rows of a stream that wait in memory: Arrow rows by number, numbers by time, and impressions by key."""

from array import array
from typing import Any, NamedTuple

import numpy as np

from meshrec.data.arrow import pa
from meshrec.data.samples import Bools, Ints

# Rows up to which adjacent chunks are merged: large enough that few chunks are searched, small enough that a
# merge takes milliseconds.
_MAX_CHUNK_ROWS = 1 << 17


class _Chunk:
    """Rows with ascending numbers, of which some have been released."""

    def __init__(self, numbers: Ints, table: Any) -> None:
        self.numbers, self.table = numbers, table
        self.is_held = np.ones(len(numbers), dtype=np.bool_)
        self.num_held = len(numbers)

    def held(self) -> tuple[Ints, Any]:
        """Return numbers and rows that are held."""
        if self.num_held == len(self.numbers):
            return self.numbers, self.table
        return self.numbers[self.is_held], self.table.take(pa.array(np.flatnonzero(self.is_held)))


class HeldRows:
    """Arrow rows by number, until they are released.

    Small chunks are merged, and a chunk of which half was released is rewritten. Memory is therefore at most
    twice that of the held rows, and a row is copied a logarithmic number of times.
    """

    def __init__(self) -> None:
        # Ascending by number, and never empty.
        self._chunks: list[_Chunk] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of the Arrow tables, including released rows that are still in memory."""
        return sum(chunk.table.nbytes for chunk in self._chunks)

    def append(self, numbers: Ints, table: Any) -> None:
        """Hold rows with ascending numbers above those of earlier rows.

        Args:
            numbers: int64 [n].
            table: n rows, with the schema of earlier rows. Its memory is shared.
        """
        if len(numbers) == 0:
            return
        self._chunks.append(_Chunk(numbers, table))
        while len(self._chunks) > 1:
            left, right = self._chunks[-2:]
            num = left.num_held + right.num_held
            if left.num_held > 2 * right.num_held or num > _MAX_CHUNK_ROWS:
                return
            parts = [left.held(), right.held()]
            merged = pa.concat_tables([rows for _, rows in parts]).combine_chunks()
            self._chunks[-2:] = [_Chunk(np.concatenate([part for part, _ in parts]), merged)]

    def take(self, numbers: Ints, columns: list[str] | None = None) -> Any:
        """Return held rows in the order of ``numbers``.

        Args:
            numbers: int64 [n]; each may occur more than once.
            columns: columns to return; None: all.
        """
        order = np.argsort(numbers, kind="stable")
        parts = []
        for chunk, part in self._split(numbers[order]):
            table = chunk.table if columns is None else chunk.table.select(columns)
            parts.append(table.take(pa.array(np.searchsorted(chunk.numbers, part))))
        table = pa.concat_tables(parts)
        if (np.diff(order) == 1).all():
            return table.combine_chunks()
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return table.combine_chunks().take(pa.array(inverse))

    def release(self, numbers: Ints) -> None:
        """Stop holding rows.

        Args:
            numbers: numbers of held rows, int64 [n], each once.
        """
        for chunk, part in self._split(np.sort(numbers)):
            chunk.is_held[np.searchsorted(chunk.numbers, part)] = False
            chunk.num_held -= len(part)
        self._chunks = [
            chunk if 2 * chunk.num_held > len(chunk.numbers) else _Chunk(*chunk.held())
            for chunk in self._chunks
            if chunk.num_held
        ]

    def held(self) -> tuple[Ints, Any] | None:
        """Return numbers, int64 [n] ascending, and a table of all held rows; None if there are none."""
        if not self._chunks:
            return None
        parts = [chunk.held() for chunk in self._chunks]
        table = pa.concat_tables([rows for _, rows in parts]).combine_chunks()
        return np.concatenate([numbers for numbers, _ in parts]), table

    def _split(self, numbers: Ints) -> list[tuple[_Chunk, Ints]]:
        """Return the chunks of ascending numbers, each with its share of them."""
        firsts = np.array([chunk.numbers[0] for chunk in self._chunks], dtype=np.int64)
        bounds = [*np.searchsorted(numbers, firsts).tolist(), len(numbers)]
        return [
            (chunk, numbers[start:stop])
            for chunk, start, stop in zip(self._chunks, bounds[:-1], bounds[1:], strict=True)
            if start < stop
        ]


class Timed(NamedTuple):
    """Row numbers with their times, ascending by time and then by number."""

    times: Ints
    """int64 [n]."""
    numbers: Ints
    """int64 [n]."""

    @staticmethod
    def sorted(times: Ints, numbers: Ints) -> "Timed":
        """Sort rows by time; rows with equal times keep their order."""
        order = np.argsort(times, kind="stable")
        return Timed(times[order], numbers[order])

    @staticmethod
    def concatenated(parts: list["Timed"]) -> "Timed":
        """Concatenate and sort. Each part has larger numbers than the part before it."""
        if len(parts) == 1:
            return parts[0]
        empty = np.zeros(0, dtype=np.int64)
        return Timed.sorted(
            np.concatenate([empty, *(part.times for part in parts)]),
            np.concatenate([empty, *(part.numbers for part in parts)]),
        )


class TimeQueue:
    """Row numbers that are taken in the order of their times.

    Short sorted runs are merged, so a row is sorted a logarithmic number of times, however many rows wait.
    """

    def __init__(self) -> None:
        self._runs: list[Timed] = []

    def __len__(self) -> int:
        return sum(len(run.times) for run in self._runs)

    def append(self, times: Ints, numbers: Ints) -> None:
        """Add rows.

        Args:
            times: int64 [n].
            numbers: int64 [n] ascending, above those of earlier rows.
        """
        if len(times):
            self._runs.append(Timed.sorted(times, numbers))
        while len(self._runs) > 1 and len(self._runs[-2].times) <= 2 * len(self._runs[-1].times):
            self._runs[-2:] = [Timed.concatenated(self._runs[-2:])]

    def take_before(self, time: int) -> Timed:
        """Remove and return the rows whose times are below ``time``."""
        cuts = [int(np.searchsorted(run.times, time)) for run in self._runs]
        parts = [
            Timed(run.times[:cut], run.numbers[:cut])
            for run, cut in zip(self._runs, cuts, strict=True)
            if cut
        ]
        self._runs = [
            Timed(run.times[cut:], run.numbers[cut:])
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
        self.ends, self.numbers, self.has_action = array("q"), array("q"), bytearray()
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
            np.array(self.numbers[start:stop], dtype=np.int64),
            np.array(self.has_action[start:stop], dtype=np.bool_),
        )
        self.num_ended = stop
        if 2 * stop > len(self.ends):
            for values in (self.ends, self.numbers, self.has_action, self.keys):
                del values[:stop]
            self.first, self.num_ended = first + stop, 0
        return removed
