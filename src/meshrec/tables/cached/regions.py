"""Regions already written to a table's file, and initial values for all others."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from meshrec.tables.cached.file import RowFile, memory_for
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span

FirstBlocks = Callable[[Span], Iterable[RowBlock]]
"""Returns initial row values for a key interval."""


class StoredRows:
    """Rows in a file for a table that writes every row before reading it."""

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.first: FirstBlocks | None = None

    def missing(self, keys: Tensor) -> list[int]:
        """Return the regions to write before rows with these keys are read or written."""
        return []

    def make(self, regions: Iterable[int]) -> None:
        """Write regions with their initial values."""

    def mark_written(self, first: int, end: int) -> None:
        """Mark all rows in [first, end) as written."""

    def partly_covered(self, first: int, end: int) -> list[int]:
        """Return the regions to write before all rows in [first, end) are written."""
        return []

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read rows to their slots in ``parts``.

        Args:
            keys: int64 [N], ascending.
            parts: memory by part, indexed by slot.
            slots: int64 [N].
        """
        self.file.read(keys, parts, slots)


@final
class RowRegions(StoredRows):
    """Rows [r0, r1) in a file that stores only regions with requested rows.

    See [Note: the scratch file of a table] in ``file.py``.

    Args:
        file: the file.
        parts: row parts, with default initial values.
        rectangle: rows and columns.
        region_rows: rows per region. Regions start at multiples, counted from the table's row 0.
    """

    def __init__(
        self,
        file: RowFile,
        parts: Sequence[tuple[RowPart, float]],
        rectangle: Rectangle,
        region_rows: int,
    ) -> None:
        super().__init__(file)
        self._parts, self._rectangle = list(parts), rectangle
        self._region_rows = region_rows
        self._offset = rectangle.r0 // region_rows
        self._is_written = torch.zeros(-(-rectangle.r1 // region_rows) - self._offset, dtype=torch.bool)
        # ``first`` supplies initial values; None: the defaults in ``parts``.

    def missing(self, keys: Tensor) -> list[int]:
        """Return the keys' regions that are not yet in the file."""
        regions = keys.div(self._region_rows, rounding_mode="floor").unique() - self._offset
        unwritten: list[int] = regions[~self._is_written[regions]].tolist()
        return unwritten

    def make(self, regions: Iterable[int]) -> None:
        """Write regions with their initial values.

        Raises:
            RowFileError: the disk is full, or fails.
        """
        for number in regions:
            first, end = self._span(number)
            rows = self.first_rows(first, end)
            self.file.write(torch.arange(first, end), rows, torch.arange(end - first))
            # Only after the write succeeded: a failed region is written again.
            self._is_written[number] = True

    def mark_written(self, first: int, end: int) -> None:
        """Mark all rows in [first, end) as written."""
        for number in self._within(first, end):
            start, last = self._span(number)
            # Regions at either end may be covered only partly.
            self._is_written[number] |= first <= start and last <= end

    def partly_covered(self, first: int, end: int) -> list[int]:
        """Return the unwritten regions only partly covered by [first, end)."""
        spans = [(number, *self._span(number)) for number in self._within(first, end)]
        return [
            number
            for number, start, last in spans
            if not self._is_written[number] and (start < first or end < last)
        ]

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read rows, possibly still with initial values, to their slots in ``parts``.

        Args:
            keys: int64 [N], ascending.
            parts: memory by part, indexed by slot.
            slots: int64 [N].

        Raises:
            RowFileError: a record is damaged, or the disk fails.
        """
        regions = keys.div(self._region_rows, rounding_mode="floor") - self._offset
        on_file = self._is_written[regions]
        self.file.read(keys[on_file], parts, slots[on_file])
        # Compute unwritten regions without writing them: a snapshot may read in a forked process.
        for number in regions[~on_file].unique().tolist():
            first, end = self._span(number)
            rows = self.first_rows(first, end)
            selected = regions == number
            for part, values in zip(parts, rows, strict=True):
                part[slots[selected]] = values[keys[selected] - first]

    def first_rows(self, first: int, end: int) -> list[Tensor]:
        """Return initial row parts for [first, end)."""
        width = self._rectangle.c1 - self._rectangle.c0
        parts = memory_for([part for part, _ in self._parts], end - first, width)
        for (_, value), tensor in zip(self._parts, parts, strict=True):
            tensor.fill_(value)
        names = {part.name: tensor for (part, _), tensor in zip(self._parts, parts, strict=True)}
        for block in self.first((first, end)) if self.first is not None else ():
            assert isinstance(block.keys, range)
            for name, values in block.parts.items():
                names[name][block.keys.start - first : block.keys.stop - first] = values
        return parts

    def _span(self, number: int) -> Span:
        start = (number + self._offset) * self._region_rows
        r = self._rectangle
        return max(start, r.r0), min(start + self._region_rows, r.r1)

    def _within(self, first: int, end: int) -> Iterator[int]:
        yield from range(
            first // self._region_rows - self._offset, -(-end // self._region_rows) - self._offset
        )
