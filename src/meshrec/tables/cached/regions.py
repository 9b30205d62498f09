"""Regions (blocks of consecutive rows) in a table's file. A region gets initial values on first use."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from meshrec.tables.cached.file import RowFile, memory_for
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span

InitialBlocks = Callable[[Span], Iterable[RowBlock]]
"""Function returning blocks with the initial rows in a key interval."""


class InitializedPart(NamedTuple):
    """A row part (the weight or an optimizer state tensor), and its initial value if no other is given."""

    part: RowPart
    value: float


class StoredRows:
    """Rows in a file, for tables which write every row before they read it.

    A hashed table is such a table. The file has no regions to initialize, so the methods for regions do
    nothing. The subclass ``RowRegions`` overrides these methods for other tables.

    Args:
        file: the file.
    """

    def __init__(self, file: RowFile) -> None:
        self.file = file
        # Returns initial rows. Set by ``FileTable.set_initial_rows`` before rows are used; None: the default
        # values of the row parts.
        self.initial_blocks: InitialBlocks | None = None

    def unwritten(self, keys: Tensor) -> list[int]:
        """Return the numbers of the regions to initialize before rows with these keys are read or written."""
        return []

    def write_initial(self, regions: Iterable[int]) -> None:
        """Write initial values to the regions with these numbers."""

    def mark_written(self, first: int, end: int) -> None:
        """Record that the file has all rows in [first, end)."""

    def partly_covered(self, first: int, end: int) -> list[int]:
        """Return the numbers of the unwritten regions of which only a part lies in [first, end)."""
        return []

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read rows from the file to slots in memory.

        Args:
            keys: row keys, ascending, int64 [N].
            parts: memory to fill, one tensor per row part, indexed by slot.
            slots: slot for the row under each key, int64 [N].
        """
        self.file.read(keys, parts, slots)


@final
class RowRegions(StoredRows):
    """Rows of a table rectangle (a row interval times a column interval) in a file.

    The file consists of regions. A region gets initial values when one of its rows is first used. A new table
    therefore needs no time and no disk space for unused rows. See
    [Note: the scratch file of a table] in ``file.py``.

    Args:
        file: the file.
        parts: row parts with default initial values.
        rectangle: row and column intervals.
        region_rows: rows per region. In the whole table, regions start at row 0, ``region_rows``,
            ``2 * region_rows``, ...
    """

    def __init__(
        self,
        file: RowFile,
        parts: Sequence[InitializedPart],
        rectangle: Rectangle,
        region_rows: int,
    ) -> None:
        super().__init__(file)
        # Fixed for this object's life. Only ``_is_written`` and ``initial_blocks`` change.
        self._parts, self._rectangle = list(parts), rectangle
        self._region_rows = region_rows
        # Number of the first region overlapping the rectangle, counted in the whole table. Elsewhere in
        # this class, region numbers count from this region.
        self._offset = rectangle.r0 // region_rows
        # Whether the file has a region, by region number.
        # Flags are set by ``write_initial`` and ``mark_written``, and never cleared.
        self._is_written = torch.zeros(-(-rectangle.r1 // region_rows) - self._offset, dtype=torch.bool)

    def unwritten(self, keys: Tensor) -> list[int]:
        """Return the numbers of the regions which contain the given rows and are not in the file yet."""
        regions = keys.div(self._region_rows, rounding_mode="floor").unique() - self._offset
        unwritten: list[int] = regions[~self._is_written[regions]].tolist()
        return unwritten

    def write_initial(self, regions: Iterable[int]) -> None:
        """Write initial values to all rows of some regions.

        Raises:
            RowFileError: the disk is full, or fails.
        """
        for number in regions:
            first, end = self._span(number)
            # One region at a time, which bounds the memory for initial values.
            rows = self.initial_rows(first, end)
            self.file.write(torch.arange(first, end), rows, torch.arange(end - first))
            # Only after a successful write, so a failed region is written again.
            self._is_written[number] = True

    def mark_written(self, first: int, end: int) -> None:
        """Record that the file has all rows in [first, end), after these were loaded."""
        for number in self._within(first, end):
            start, last = self._span(number)
            # The interval may cover only a part of the regions at its ends.
            self._is_written[number] |= first <= start and last <= end

    def partly_covered(self, first: int, end: int) -> list[int]:
        """Return the numbers of the unwritten regions of which only a part lies in [first, end).

        Before the interval is loaded, these regions must be initialized. Regions inside it need not be.
        """
        spans = [(number, *self._span(number)) for number in self._within(first, end)]
        return [
            number
            for number, start, last in spans
            if not self._is_written[number] and (start < first or end < last)
        ]

    @override
    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read rows to slots in memory. Rows in regions not in the file get their initial values.

        Raises:
            RowFileError: a record is damaged, or the disk fails.
        """
        regions = keys.div(self._region_rows, rounding_mode="floor") - self._offset
        on_file = self._is_written[regions]
        self.file.read(keys[on_file], parts, slots[on_file])
        # Compute initial values without writing them: a forked process that reads a snapshot must not write.
        for number in regions[~on_file].unique().tolist():
            first, end = self._span(number)
            rows = self.initial_rows(first, end)
            selected = regions == number
            for part, values in zip(parts, rows, strict=True):
                part[slots[selected]] = values[keys[selected] - first]

    def initial_rows(self, first: int, end: int) -> list[Tensor]:
        """Return the initial values of rows [first, end), one tensor per row part."""
        width = self._rectangle.c1 - self._rectangle.c0
        parts = memory_for([part for part, _ in self._parts], end - first, width)
        for (_, value), tensor in zip(self._parts, parts, strict=True):
            tensor.fill_(value)
        names = {part.name: tensor for (part, _), tensor in zip(self._parts, parts, strict=True)}
        for block in self.initial_blocks((first, end)) if self.initial_blocks is not None else ():
            assert isinstance(block.keys, range)
            for name, values in block.parts.items():
                names[name][block.keys.start - first : block.keys.stop - first] = values
        return parts

    def _span(self, number: int) -> Span:
        """Return the first and end row of a region, as far as it lies in the rectangle."""
        start = (number + self._offset) * self._region_rows
        r = self._rectangle
        return max(start, r.r0), min(start + self._region_rows, r.r1)

    def _within(self, first: int, end: int) -> Iterator[int]:
        """Yield the numbers of all regions overlapping the rows [first, end)."""
        yield from range(
            first // self._region_rows - self._offset, -(-end // self._region_rows) - self._offset
        )
