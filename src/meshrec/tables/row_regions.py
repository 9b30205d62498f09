"""The rows that a file has, and the first values of the others."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from meshrec.tables.row_file import RowFile, memory_for
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span

FirstBlocks = Callable[[Span], Iterable[RowBlock]]
"""A function that gives the first values of the rows of some keys."""


class RecordedRows(Protocol):
    """The rows in the file of a table."""

    file: RowFile
    first: FirstBlocks | None

    def missing(self, keys: Tensor) -> list[int]:
        """Return the regions of some keys that must be made before a row in them is read or written."""

    def make(self, regions: Iterable[int]) -> None:
        """Write regions with their first values."""

    def made_by(self, first: int, end: int) -> None:
        """Record that all rows of [first, end) have been written."""

    def partly(self, first: int, end: int) -> list[int]:
        """Return the regions that must be made before all rows of [first, end) are written."""

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read rows to their slots of ``parts``."""


@final
class EveryRow:
    """Rows that their table writes before it reads them. They have no first values in the file.

    Args:
        file: the file.
    """

    def __init__(self, file: RowFile) -> None:
        self.file = file
        self.first: FirstBlocks | None = None
        self.read = file.read

    def missing(self, keys: Tensor) -> list[int]:
        """Return no region."""
        return []

    def make(self, regions: Iterable[int]) -> None:
        """Make no region: there are none."""

    def made_by(self, first: int, end: int) -> None:
        """Record nothing, because no row is read before it is written."""

    def partly(self, first: int, end: int) -> list[int]:
        """Return no region."""
        return []


@final
class RowRegions:
    """Rows [r0, r1) in a file that holds only the regions in which a row was needed; see [Note: what the file
    of a table is worth] in ``row_file.py``.

    Args:
        file: the file.
        parts: the parts of a row, with the value of each part in a row that nobody gave a first value.
        rectangle: the rows and columns.
        region_rows: the number of rows of a region. Regions begin at its multiples, counted from row 0 of the
            table.
    """

    def __init__(
        self,
        file: RowFile,
        parts: Sequence[tuple[RowPart, float]],
        rectangle: Rectangle,
        region_rows: int,
    ) -> None:
        self.file, self._parts, self._rectangle = file, list(parts), rectangle
        self._region_rows = region_rows
        self._offset = rectangle.r0 // region_rows
        self._is_written = torch.zeros(-(-rectangle.r1 // region_rows) - self._offset, dtype=torch.bool)
        self.first: FirstBlocks | None = None
        """Gives the first values; None: those of ``parts``."""

    def missing(self, keys: Tensor) -> list[int]:
        """Return the regions of some keys that are not in the file yet."""
        numbers = keys.div(self._region_rows, rounding_mode="floor").unique() - self._offset
        found: list[int] = numbers[~self._is_written[numbers]].tolist()
        return found

    def make(self, regions: Iterable[int]) -> None:
        """Write regions with their first values.

        Raises:
            RowFileError: the disk is full, or fails.
        """
        for number in regions:
            first, end = self._span(number)
            rows = self.first_rows(first, end)
            self.file.write(torch.arange(first, end), rows, torch.arange(end - first))
            self._is_written[number] = True

    def made_by(self, first: int, end: int) -> None:
        """Record that all rows of [first, end) have been written."""
        for number in self._within(first, end):
            begin, last = self._span(number)
            self._is_written[number] |= first <= begin and last <= end

    def partly(self, first: int, end: int) -> list[int]:
        """Return the regions that are not yet in the file and that [first, end) only partly covers."""
        spans = [(number, *self._span(number)) for number in self._within(first, end)]
        return [
            number
            for number, begin, last in spans
            if not self._is_written[number] and (begin < first or end < last)
        ]

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read rows, which may have their first values still, to their slots of ``parts``.

        Raises:
            RowFileError: a record is damaged, or the disk fails.
        """
        numbers = keys.div(self._region_rows, rounding_mode="floor") - self._offset
        on_file = self._is_written[numbers]
        self.file.read(keys[on_file], parts, slots[on_file])
        for number in numbers[~on_file].unique().tolist():
            first, end = self._span(number)
            rows = self.first_rows(first, end)
            chosen = numbers == number
            for part, values in zip(parts, rows, strict=True):
                part[slots[chosen]] = values[keys[chosen] - first]

    def first_rows(self, first: int, end: int) -> list[Tensor]:
        """Return the parts of rows [first, end) as they are before anybody writes to them."""
        width = self._rectangle.c1 - self._rectangle.c0
        found = memory_for([part for part, _ in self._parts], end - first, width)
        for (_, value), tensor in zip(self._parts, found, strict=True):
            tensor.fill_(value)
        names = {part.name: tensor for (part, _), tensor in zip(self._parts, found, strict=True)}
        for block in self.first((first, end)) if self.first is not None else ():
            assert isinstance(block.keys, range)
            for name, values in block.parts.items():
                names[name][block.keys.start - first : block.keys.stop - first] = values
        return found

    def _span(self, number: int) -> Span:
        begin = (number + self._offset) * self._region_rows
        r = self._rectangle
        return max(begin, r.r0), min(begin + self._region_rows, r.r1)

    def _within(self, first: int, end: int) -> Iterator[int]:
        yield from range(
            first // self._region_rows - self._offset, -(-end // self._region_rows) - self._offset
        )
