"""Splits that divide the rows of a data source into training, validation and test data."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from meshrec.data.arrow import pa, pc
from meshrec.data.dataset import RowsOfFile
from meshrec.data.exact_columns import as_integers
from meshrec.data.faults import DataError
from meshrec.data.hashing import hash_bytes, mix
from meshrec.data.samples import Bools, Ints, Samples, regroup_into_windows
from meshrec.data.shares import RowRange, row_ranges
from meshrec.data.streaming import Source

Parts = npt.NDArray[np.int8]
"""`Part` per row of a block, as integers."""


class Part(IntEnum):
    """Part of the data to which a row belongs."""

    TRAIN = 0
    VALIDATION = 1
    TEST = 2


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rule that takes validation and test rows from the training data.

    Args:
        by: ``time``: the latest rows are test data, preceded by validation data. ``hash``: rows with the same
            value in a column, such as a user, are in the same part. ``random``: rows are drawn independently.
        column: numeric or time column for ``time`` (None: rows are in time order), or any column for
            ``hash``.
        validation: share of rows for validation data, in [0, 1).
        test: share of rows for test data, in [0, 1), together with ``validation`` below 1.
        seed: seed for ``hash`` and ``random``.
        time_format: strptime format for string times; None: ISO 8601.

    Raises:
        ValueError: shares are out of range, or a column is missing or not needed.
    """

    by: Literal["time", "hash", "random"] = "time"
    column: str | None = None
    validation: float = 0.1
    test: float = 0.1
    seed: int = 0
    time_format: str | None = None

    def __post_init__(self) -> None:
        if min(self.validation, self.test) < 0 or self.validation + self.test >= 1:
            raise ValueError(
                f"a split's validation {self.validation} and test {self.test} must be shares in [0, 1), "
                "together below 1."
            )
        if (self.by == "hash" and self.column is None) or (self.by == "random" and self.column is not None):
            raise ValueError(
                f"a split by {self.by} got the column {self.column!r}: hash needs one, random takes none."
            )

    def parts(self, sizes: Ints, values_of: Callable[[int], Any]) -> list[Parts]:
        """Assign every row to a part.

        Args:
            sizes: row count per block.
            values_of: function mapping a block number to the values of ``column``, an Arrow array.

        Returns:
            The `Part` per row, int8, in an array per block.

        Raises:
            DataError: the column has nulls, or values without an order where required.
        """
        return self.parts_of_keys(self._keys(row_ranges(sizes), sizes, values_of))

    def parts_of(self, source: Source) -> list[Parts]:
        """Assign every row of a source to training, validation or test data; see `parts` for the result."""
        return self.parts_of_keys(self.keys_of(source, row_ranges(source.block_sizes)))

    def keys_of(self, source: Source, ranges: Sequence[RowRange]) -> list[npt.NDArray[Any]]:
        """Return the number by which a row is assigned to a part, for some rows of a source.

        Args:
            source: the source.
            ranges: the rows.

        Returns:
            An array per range, for `parts_of_keys`.

        Raises:
            DataError: as for `parts`.
        """
        column = self.column or ""
        return self._keys(ranges, source.block_sizes, lambda block: source.column(block, column))

    def _keys(
        self, ranges: Sequence[RowRange], sizes: Ints, values_of: Callable[[int], Any]
    ) -> list[npt.NDArray[Any]]:
        """Return the keys of some rows: times, or pseudo-random numbers in [0, 1). See `parts`."""
        if self.by == "time":
            starts = np.cumsum(sizes) - sizes
            return [
                self._times(rows.block, starts, sizes, values_of)[rows.start : rows.stop] for rows in ranges
            ]
        keys = []
        for block, start, stop, first_row in ranges:
            if self.by == "random":
                # A function of the row number, so the split does not depend on blocks or order of
                # reading. No column is read.
                hashes = mix(np.arange(first_row, first_row + stop - start, dtype=np.uint64), seed=self.seed)
            else:
                # Mixed with the seed, so another seed gives another split.
                hashes = mix(_hashes(values_of(block).slice(start, stop - start)), seed=self.seed)
            # The upper 53 bits, which float64 represents exactly.
            keys.append((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53)
        return keys

    def parts_of_keys(
        self,
        keys: Sequence[npt.NDArray[Any]],
        gather: Callable[[Any], list[Any]] = lambda item: [item],
    ) -> list[Parts]:
        """Assign rows to parts.

        Args:
            keys: keys of this rank's rows, from `keys_of`.
            gather: function that returns its argument on every rank, in rank order. It is collective. The
                default is for a single rank, which has all rows.

        Returns:
            The `Part` per row, int8, in an array per array in ``keys``.
        """
        if self.by == "time":
            return self._by_time(keys, gather)
        # Large pseudo-random numbers are test rows.
        parts = [self._by_quantile(numbers) for numbers in keys]
        if self.by == "random":
            shares = zip(Part, (1, self.validation, self.test), strict=True)
            used = {part for part, share in shares if share}
            # Few rows may leave a part empty by chance. Then it gets a share of rows in random order.
            if used - set().union(*gather({part for part in used if _has_rows(parts, part)})):
                return self._by_time(keys, gather)
        return parts

    def sources(self, source: Source) -> list[Source | None]:
        """Divide a source into sources for training, validation and test data.

        Returns:
            A source per `Part`; None for validation or test data with the share 0.

        Raises:
            ValueError: a part would be empty.
        """
        parts = self.parts_of(source)
        sources: list[Source | None] = []
        for part, share in zip(Part, (1.0, self.validation, self.test), strict=True):
            selected = SelectedRows(source, [block_parts == part for block_parts in parts])
            # A part with share 0 may be empty.
            if share and not selected.block_sizes.sum():
                raise ValueError(
                    f"the split by {self.by} leaves no rows for {part.name.lower()}: take a larger share."
                )
            sources.append(selected if share else None)
        return sources

    def _by_quantile(self, quantiles: npt.NDArray[np.float64]) -> Parts:
        """Return the `Part` per row. The highest quantiles are test data, and the next validation data."""
        test = quantiles >= 1 - self.test
        validation = ~test & (quantiles >= 1 - self.test - self.validation)
        return np.where(test, Part.TEST, np.where(validation, Part.VALIDATION, Part.TRAIN)).astype(np.int8)

    def _by_time(self, times: Sequence[npt.NDArray[Any]], gather: Callable[[Any], list[Any]]) -> list[Parts]:
        """Return the `Part` per row, by its rank in time. Rows with equal times are in the same part."""
        gathered = gather(np.concatenate(times) if times else np.zeros(0, np.int64))
        ordered = np.concatenate([of_rank for of_rank in gathered if len(of_rank)] or gathered)
        parts = [np.full(len(block), Part.TRAIN, np.int8) for block in times]
        for part, limit in ((Part.VALIDATION, 1 - self.test - self.validation), (Part.TEST, 1 - self.test)):
            # A row is in the part or a later one if this many rows are earlier.
            num_earlier = _first_rank(len(ordered), limit)
            if num_earlier:
                ordered.partition(num_earlier - 1)
            for block, block_parts in zip(times, parts, strict=True):
                block_parts[block > ordered[num_earlier - 1] if num_earlier else slice(None)] = part
        return parts

    def _times(
        self, block: int, starts: Ints, sizes: Ints, values_of: Callable[[int], Any]
    ) -> npt.NDArray[Any]:
        """Return a number per row in a block. Numbers from all blocks have the same order as the times.

        If the split has no column, rows are in time order, and the result has the row numbers.

        Args:
            starts: row number of the first row, per block.
            sizes: row count per block.
        """
        # Without a column, the rows are in time order, so a row number serves as the time.
        if self.column is None:
            return np.arange(starts[block], starts[block] + sizes[block])
        from meshrec.data.features.values import decoded, is_text, microseconds_of, whole

        array = decoded(whole(values_of(block)))
        kind = array.type
        num_null = pc.sum(array.is_null(nan_is_null=True)).as_py() or 0
        if num_null or not (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_decimal(kind)
            or pa.types.is_temporal(kind)
            or is_text(kind)
        ):
            raise DataError(
                f"column {self.column!r} has type {kind} and {num_null} nulls: a split by time needs "
                "a number or a time in every row."
            )
        if is_text(kind):
            try:
                return microseconds_of(array, "s", self.time_format)
            except DataError as error:
                raise DataError(f"column {self.column!r} of a split by time: {error}") from error
        if pa.types.is_decimal(kind):
            array = array.cast(pa.float64()) if kind.scale > 0 else as_integers(array)
        if pa.types.is_temporal(kind):
            # Integers have the same order as the times.
            array = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
        return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _hashes(array: Any) -> npt.NDArray[np.uint64]:
    """Return a hash per value, uint64 [n]. Nulls have the hash of 0 or the empty string.

    Numbers other than integers are hashed as strings.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_nested(array.type):
        raise DataError(f"a split by hash takes a column of single values, got {array.type}. Name another.")
    if pa.types.is_integer(array.type):
        # As int64, so all integer widths have the same hash.
        integers = pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64)
        return mix(integers.view(np.uint64))
    if pa.types.is_floating(array.type):
        array = pc.add(array, pa.scalar(0.0, array.type))  # -0.0 is 0.0
    is_binary = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
    return hash_bytes(array.cast(pa.large_binary() if is_binary else pa.large_string()))[1]


def _first_rank(num_rows: int, limit: float) -> int:
    """Return the smallest rank (in time order, from 0) that is at least ``limit`` times the row count."""
    rank = max(int(limit * num_rows) - 1, 0)  # not too large, whatever the rounding
    while rank < num_rows and rank / num_rows < limit:
        rank += 1
    return rank


def _has_rows(parts: Sequence[Parts], part: "Part") -> bool:
    """Return whether any row belongs to ``part``. ``parts`` has the part per row, an array per block."""
    return any((block == part).any() for block in parts)


class SelectedRows(Source):
    """Source with some rows of another source. Samples keep their row numbers in the original source.

    Args:
        source: original source.
        selected: mask for the rows to use, a bool array per block.
    """

    def __init__(self, source: Source, selected: Sequence[Bools]) -> None:
        self._source = source
        self.keys, self.shape = source.keys, source.shape
        self._selected = list(selected)
        # Row number at which a block of the original source starts.
        self._starts = np.cumsum(source.block_sizes) - source.block_sizes

    @property
    def files(self) -> Sequence[RowsOfFile]:
        return self._source.files

    @property
    def block_sizes(self) -> Ints:
        """Selected rows per block."""
        return np.array([int(mask.sum()) for mask in self._selected], dtype=np.int64)

    def column(self, block: int, name: str) -> Any:
        """Return a column of the selected rows."""
        return self._source.column(block, name).filter(pa.array(self._selected[block]))

    @override
    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Yield windows of selected rows.

        Reads the original source from its window with the first requested row, not from the start.
        """
        selected = self._selected[block]
        rows = np.flatnonzero(selected)
        if first * size >= len(rows):
            return
        # Window of the original source with the first requested row, and the selected rows before this
        # window.
        start_window = int(rows[first * size]) // size
        num_before = int(selected[: start_window * size].sum())
        yield from regroup_into_windows(
            self._pieces(block, start_window, size), first * size - num_before, size
        )

    def _pieces(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Yield the selected samples in every window of the original source, from window ``first`` on."""
        selected, start = self._selected[block], first * size
        for samples in self._source.windows(block, first, size):
            num = len(samples.labels)
            positions = np.flatnonzero(selected[start : start + num])
            if len(positions):
                rows = int(self._starts[block]) + start + np.arange(num, dtype=np.int64)
                yield samples._replace(rows=rows).take(positions)
            start += num
