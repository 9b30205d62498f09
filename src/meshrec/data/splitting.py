"""Split of rows into training, validation and test data, decided row by row."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.data.dataset import Paths, RowsOfFile
from meshrec.data.faults import DataError, Faults
from meshrec.data.hashing import hash_bytes, mix
from meshrec.data.samples import Bools, Ints, Samples, Shape, rewindowed
from meshrec.data.streaming import Source, StreamReader

Parts = npt.NDArray[np.int8]


class Part(IntEnum):
    """The part of the data that a row belongs to."""

    TRAIN = 0
    VALIDATION = 1
    TEST = 2


@dataclass(frozen=True, kw_only=True)
class Split:
    """A rule that takes validation and test rows out of the training data.

    Args:
        by: ``time``: the latest rows are test data, and those before them validation data. ``hash``: rows
            with the same value in a column, such as a user, are in the same part. ``random``: each row is
            drawn independently.
        column: a column of numbers or timestamps for ``time`` (None: rows are in the order of time), or any
            column for ``hash``.
        validation, test: shares in [0, 1), together below 1.
        seed: seed of ``hash`` and ``random``.

    Raises:
        ValueError: the shares are out of range, or a column is missing or not needed.
    """

    by: Literal["time", "hash", "random"] = "time"
    column: str | None = None
    validation: float = 0.1
    test: float = 0.1
    seed: int = 0

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
        """Return the `Part` of each row, block by block.

        Args:
            sizes: number of rows of each block.
            values_of: returns the column of a block as an Arrow array.

        Raises:
            DataError: the column has nulls, or its values have no order where one is needed.
        """
        starts = np.cumsum(sizes) - sizes
        if self.by == "time":
            return self._by_time(
                [self._times(block, starts, sizes, values_of) for block in range(len(sizes))]
            )
        found = []
        for block, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            if self.by == "random":
                hashes = mix(np.arange(start, start + size, dtype=np.uint64), seed=self.seed)
            else:
                hashes = mix(_hashes(values_of(block)), seed=self.seed)
            found.append(self._of_places((hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53))
        return found

    def parts_of(self, source: Source) -> list[Parts]:
        """Return the `Part` of each row of a source, block by block; see `parts`."""
        column = self.column or ""
        return self.parts(source.block_sizes, lambda block: source.column(block, column))

    def _of_places(self, places: npt.NDArray[np.float64]) -> Parts:
        """Return the parts of places in [0, 1): the last ones are test data, and those before them validation
        data.
        """
        test = places >= 1 - self.test
        validation = ~test & (places >= 1 - self.test - self.validation)
        return np.where(test, Part.TEST, np.where(validation, Part.VALIDATION, Part.TRAIN)).astype(np.int8)

    def _by_time(self, times: Sequence[npt.NDArray[Any]]) -> list[Parts]:
        """Return the parts by time. Rows of the same time are in the same part."""
        ordered = np.sort(np.concatenate(times))
        return [
            self._of_places(np.searchsorted(ordered, each, side="left") / max(len(ordered), 1))
            for each in times
        ]

    def _times(
        self, block: int, starts: Ints, sizes: Ints, values_of: Callable[[int], Any]
    ) -> npt.NDArray[Any]:
        if self.column is None:
            return np.arange(starts[block], starts[block] + sizes[block])
        import pyarrow as pa
        import pyarrow.compute as pc

        array = values_of(block)
        kind = array.type
        num_null = pc.sum(array.is_null(nan_is_null=True)).as_py() or 0
        if num_null or not (
            pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_temporal(kind)
        ):
            raise DataError(
                f"column {self.column!r} has type {kind} and {num_null} nulls: a split by time needs "
                "a number or a timestamp in every row."
            )
        if pa.types.is_temporal(kind):
            array = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
        return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _hashes(array: Any) -> npt.NDArray[np.uint64]:
    """Hash integers or texts. All nulls have the same hash."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_nested(array.type):
        raise DataError(f"a split by hash takes a column of single values, got {array.type}. Name another.")
    if pa.types.is_integer(array.type):
        numbers = pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64)
        return mix(numbers.view(np.uint64))
    return hash_bytes(array.cast(pa.large_string()))[1]


class ChosenRows(Source):
    """Some rows of a source, which keep their row numbers.

    Args:
        source: the source.
        chosen: mask of the rows of each of its blocks.
    """

    def __init__(self, source: Source, chosen: Sequence[Bools]) -> None:
        self._source = source
        self._chosen = list(chosen)
        self._starts = np.cumsum(source.block_sizes) - source.block_sizes

    @property
    def keys(self) -> tuple[str, ...]:
        return self._source.keys

    @property
    def shape(self) -> Shape:
        return self._source.shape

    @property
    def files(self) -> Sequence[RowsOfFile]:
        return self._source.files

    @property
    def block_sizes(self) -> Ints:
        """Number of chosen rows of each block."""
        return np.array([int(each.sum()) for each in self._chosen], dtype=np.int64)

    def column(self, block: int, name: str) -> Any:
        """Return a column of the chosen rows."""
        import pyarrow as pa

        return self._source.column(block, name).filter(pa.array(self._chosen[block]))

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Yield windows of chosen rows, reading the source from the window that has the first of them."""
        chosen = self._chosen[block]
        rows = np.flatnonzero(chosen)
        if first * size >= len(rows):
            return
        begin = int(rows[first * size]) // size
        passed = int(chosen[: begin * size].sum())
        yield from rewindowed(self._pieces(block, begin, size), first * size - passed, size)

    def _pieces(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        chosen, at = self._chosen[block], first * size
        for samples in self._source.windows(block, first, size):
            num = len(samples.labels)
            here = np.flatnonzero(chosen[at : at + num])
            if len(here):
                rows = int(self._starts[block]) + at + np.arange(num, dtype=np.int64)
                yield samples._replace(rows=rows).take(here)
            at += num


class PartReaders(NamedTuple):
    """Readers of the parts of a dataset."""

    train: StreamReader
    validation: StreamReader | None
    test: StreamReader | None


def part_readers(
    open_source: Callable[[Paths], Source],
    train: Paths,
    validation: Paths | None,
    test: Paths | None,
    split: Split | None,
    *,
    seed: int,
    window: int,
    lanes: int,
    faults: Faults,
) -> PartReaders:
    """Open separate files for each part, or split one set of files.

    Args:
        open_source: opens files.
        train, validation, test, split, seed, window, lanes: as for `meshrec.data.parquet`.
        faults: handles damage.

    Raises:
        ValueError: both a split and files for its parts are given, or a part would be empty.
    """

    def reader(source: Source, *, shuffle: bool) -> StreamReader:
        return StreamReader(
            source, seed=seed, shuffle=shuffle, window=window, lanes=lanes, skipped=faults.skipped
        )

    if split is None:
        held_out = [
            None if paths is None else reader(open_source(paths), shuffle=False)
            for paths in (validation, test)
        ]
        return PartReaders(reader(open_source(train), shuffle=True), *held_out)
    if validation is not None or test is not None:
        raise ValueError(
            "a split takes validation and test out of the training data: give it, or their files."
        )
    source = open_source(train)
    parts = split.parts_of(source)
    shares = {Part.TRAIN: 1.0, Part.VALIDATION: split.validation, Part.TEST: split.test}
    found: list[StreamReader | None] = []
    for part, share in shares.items():
        chosen = ChosenRows(source, [each == part for each in parts])
        if share and not chosen.block_sizes.sum():
            raise ValueError(
                f"the split by {split.by} leaves no rows for {part.name.lower()}: take a larger share."
            )
        found.append(reader(chosen, shuffle=part is Part.TRAIN) if share else None)
    assert found[0] is not None
    return PartReaders(found[0], found[1], found[2])
