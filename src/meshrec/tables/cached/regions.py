"""Which regions in a table's file are written, and initial values for all others."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from meshrec.tables.cached.file import RowFile, memory_for
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span

FirstBlocks = Callable[[Span], Iterable[RowBlock]]
"""Returns blocks with the initial rows in a key interval."""


class StoredRows:
    """Rows in a file, for a table that writes every row before reading it."""

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.first: FirstBlocks | None = None  # set by FileTable.set_initial_rows

    def unwritten(self, keys: Tensor) -> list[int]:
        """Return the regions to write before rows with these keys are read or written."""
        return []

    def write_initial(self, regions: Iterable[int]) -> None:
        """Write initial values to regions."""

    def mark_written(self, first: int, end: int) -> None:
        """Record that all rows in [first, end) are written."""

    def partly_covered(self, first: int, end: int) -> list[int]:
        """Return the unwritten regions that [first, end) covers only partly."""
        return []

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read rows to slots in memory.

        Args:
            keys: row keys, int64 [N], ascending.
            parts: memory per part, indexed by slot.
            slots: slot per row, int64 [N].
        """
        self.file.read(keys, parts, slots)


@final
class RowRegions(StoredRows):
    """Rows [r0, r1) in a file in which only regions with requested rows are written.

    See [Note: the scratch file of a table] in ``file.py``.

    Args:
        file: file.
        parts: row parts, with default initial values.
        rectangle: rows and columns.
        region_rows: rows per region. Regions start at multiples of it, counted from row 0 of the table.
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
        self._offset = rectangle.r0 // region_rows  # the first region's number in the table
        self._is_written = torch.zeros(-(-rectangle.r1 // region_rows) - self._offset, dtype=torch.bool)
        # ``first`` supplies initial values; None: the defaults in ``parts``.

    def unwritten(self, keys: Tensor) -> list[int]:
        """Return the regions that contain these rows and are not yet written to the file.

        Args:
            keys: row keys, int64 [N].

        Returns:
            Region indices, ascending, from the first region with rows of this table shard.
        """
        regions = keys.div(self._region_rows, rounding_mode="floor").unique() - self._offset
        unwritten: list[int] = regions[~self._is_written[regions]].tolist()
        return unwritten

    def write_initial(self, regions: Iterable[int]) -> None:
        """Write initial values to regions.

        Raises:
            RowFileError: the disk is full, or fails.
        """
        for number in regions:
            first, end = self._span(number)
            rows = self.initial_rows(first, end)
            self.file.write(torch.arange(first, end), rows, torch.arange(end - first))
            # Only after the write succeeded: a failed region is written again.
            self._is_written[number] = True

    def mark_written(self, first: int, end: int) -> None:
        """Record that all rows in [first, end) are written."""
        for number in self._within(first, end):
            start, last = self._span(number)
            # Regions at either end may be covered only partly.
            self._is_written[number] |= first <= start and last <= end

    def partly_covered(self, first: int, end: int) -> list[int]:
        """Return the unwritten regions that [first, end) covers only partly."""
        spans = [(number, *self._span(number)) for number in self._within(first, end)]
        return [
            number
            for number, start, last in spans
            if not self._is_written[number] and (start < first or end < last)
        ]

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read rows to slots in memory. Rows in unwritten regions get initial values.

        Args:
            keys: row keys, int64 [N], ascending.
            parts: memory per part, indexed by slot.
            slots: slot per row, int64 [N].

        Raises:
            RowFileError: a record is damaged, or the disk fails.
        """
        regions = keys.div(self._region_rows, rounding_mode="floor") - self._offset
        on_file = self._is_written[regions]
        self.file.read(keys[on_file], parts, slots[on_file])
        # Compute unwritten regions without writing them: a snapshot may read in a forked process.
        for number in regions[~on_file].unique().tolist():
            first, end = self._span(number)
            rows = self.initial_rows(first, end)
            selected = regions == number
            for part, values in zip(parts, rows, strict=True):
                part[slots[selected]] = values[keys[selected] - first]

    def initial_rows(self, first: int, end: int) -> list[Tensor]:
        """Return initial values for rows [first, end), one tensor per part."""
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
        """Return a region's rows, [first, end)."""
        start = (number + self._offset) * self._region_rows
        r = self._rectangle
        return max(start, r.r0), min(start + self._region_rows, r.r1)

    def _within(self, first: int, end: int) -> Iterator[int]:
        """Yield the regions containing any of the rows [first, end)."""
        yield from range(
            first // self._region_rows - self._offset, -(-end // self._region_rows) - self._offset
        )
