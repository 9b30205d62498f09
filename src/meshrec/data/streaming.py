"""Reader of data that does not fit in memory: blocks in shuffled order, with rows shuffled inside windows."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType
from typing import Any

import numpy as np

from meshrec.data.batch import Batch
from meshrec.data.dataset import Position, Reader, RowsOfFile
from meshrec.data.order import LanePart, Step, Stream, check_seed, generator, lane_parts, lane_sizes, steps
from meshrec.data.samples import Ints, Samples, Shape, to_batch, together


class Source(ABC):
    """Blocks of rows, each of which can be read from any window on.

    A block is a place at which a file can be entered: a row group, or a whole file.
    """

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """Names of the ID features."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Shape of the samples."""

    @property
    @abstractmethod
    def block_sizes(self) -> Ints:
        """Number of rows of each block."""

    @property
    @abstractmethod
    def files(self) -> Sequence[RowsOfFile]:
        """Files of the blocks, in order. Row numbers are consecutive over all of them."""

    @abstractmethod
    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Yield rows ``[first * size, (first + 1) * size)`` of a block, then the next ``size`` rows, to
        its end.
        """

    @abstractmethod
    def column(self, block: int, name: str) -> Any:
        """Return a column of a block as it is in the data: an Arrow array with one entry per row.

        Raises:
            DataError: there is no column of that name.
        """


class StreamReader(Reader):
    """Reader of the samples of a `Source`.

    Memory holds one window of each lane that a rank reads. A rank reads only its own lanes if the number of
    lanes is a multiple of the number of ranks, and the samples of a step are a multiple of the lanes.

    Args:
        source: source of the samples.
        seed: seed of the shuffle.
        shuffle: whether to shuffle. Otherwise samples come in the order of files and rows, and every rank
            reads all windows.
        window: number of rows that are shuffled among each other.
        lanes: number of places at which all ranks together read at the same time; 1 without ``shuffle``.
        skipped: number of damaged rows that the source has left out, by place and reason.

    Raises:
        ValueError: a size is below 1, or the source has no rows.
    """

    def __init__(
        self,
        source: Source,
        *,
        seed: int,
        shuffle: bool = True,
        window: int = 8192,
        lanes: int = 8,
        skipped: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        check_seed(seed)
        if window < 1 or lanes < 1:
            raise ValueError(f"window and lanes must be >= 1, got window {window} and lanes {lanes}.")
        self._source = source
        self._seed, self._shuffle, self._window = seed, shuffle, window
        self._num_samples = int(source.block_sizes.sum())
        if self._num_samples == 0:
            raise ValueError("there are no samples to read: every block is empty.")
        self.skipped = skipped
        self._lanes = min(lanes, self._num_samples) if shuffle else 1
        self._first_rows = np.cumsum(source.block_sizes) - source.block_sizes

    @property
    def num_samples(self) -> int:
        """Number of samples of one epoch over all ranks, including damaged rows that are skipped."""
        return self._num_samples

    @property
    def files(self) -> Sequence[RowsOfFile]:
        return self._source.files

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield columns as they are in the data, in the order of files and rows: Arrow arrays, one block at a
        time.

        Raises:
            DataError: there is no column of that name.
        """
        for block, size in enumerate(self._source.block_sizes):
            if size:
                yield {name: self._source.column(block, name) for name in names}

    def batches(
        self,
        batch_size: int,
        *,
        position: Position = Position(),  # noqa: B008 - immutable
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield batches as `Reader.batches` does. Batches are smaller by the damaged rows that are
        skipped.
        """
        plan = steps(self.num_samples, batch_size, position, rank, world_size, drop_last=drop_last)
        return self._batches(plan, position.epoch, rank, world_size)

    def _batches(self, plan: Iterator[Step], epoch: int, rank: int, world_size: int) -> Iterator[Batch]:
        order = self._block_order(epoch)
        starts = np.concatenate([[0], np.cumsum(lane_sizes(self._num_samples, self._lanes))])
        open_lanes: dict[int, _Lane] = {}
        with ExitStack() as stack:
            for step in plan:
                pieces: list[Samples] = []
                for part in lane_parts(step, self._lanes, rank, world_size):
                    if part.lane not in open_lanes:
                        base = int(starts[part.lane])
                        stream = self._windows_from(order, epoch, base + part.first)
                        stack.enter_context(closing(stream))
                        open_lanes[part.lane] = _Lane(stream, part.first)
                    pieces += open_lanes[part.lane].read(part)
                yield to_batch(self._source.keys, self._source.shape, pieces)

    def _block_order(self, epoch: int) -> Ints:
        num_blocks = len(self._source.block_sizes)
        if not self._shuffle:
            return np.arange(num_blocks, dtype=np.int64)
        return generator(self._seed, Stream.BLOCKS, epoch).permutation(num_blocks).astype(np.int64)

    def _windows_from(self, order: Ints, epoch: int, row: int) -> Generator[Samples, None, None]:
        """Yield shuffled windows to the end of the epoch, from row ``row`` of the order on."""
        size = self._window
        ends = np.cumsum(self._source.block_sizes[order])
        at = int(np.searchsorted(ends, row, side="right"))
        skip = row - (int(ends[at - 1]) if at else 0)
        for block in order[at:].tolist():
            first, skip_rows = divmod(skip, size)
            with closing(self._source.windows(block, first, size)) as windows:
                for number, samples in enumerate(windows, first):
                    num = len(samples.labels)
                    if samples.rows is None:
                        begin = int(self._first_rows[block]) + number * size
                        samples = samples._replace(rows=np.arange(begin, begin + num, dtype=np.int64))
                    if self._shuffle:
                        rng = generator(self._seed, Stream.WINDOW, epoch, block, number)
                        samples = samples.take(rng.permutation(num))
                        if self._source.shape.query:
                            samples = together(samples, self._source.shape.query)
                    yield samples.part(skip_rows, num)
                    skip_rows = 0
            skip = 0


def files_of(blocks: Sequence[tuple[str, int]]) -> list[RowsOfFile]:
    """Group (file, rows) pairs of blocks, in order, into files."""
    found: list[RowsOfFile] = []
    for name, rows in blocks:
        if found and found[-1].name == name:
            found[-1] = found[-1]._replace(num_rows=found[-1].num_rows + rows)
        else:
            first = found[-1].first_row + found[-1].num_rows if found else 0
            found.append(RowsOfFile(name, first, rows))
    return found


class _Lane:
    """Forward reader of one lane."""

    def __init__(self, windows: Iterator[Samples], at: int) -> None:
        self._windows = windows
        self._at = at
        self._rest: Samples | None = None

    def read(self, part: LanePart) -> list[Samples]:
        """Return the samples ``[first, last)`` of the lane, and skip those before them."""
        pieces = []
        while self._at < part.last:
            if self._rest is None:
                self._rest = next(self._windows)
            num = len(self._rest.labels)
            begin = min(max(0, part.first - self._at), num)
            end = min(part.last - self._at, num)
            if begin < end:
                pieces.append(self._rest.part(begin, end))
            self._rest = self._rest.part(end, num) if end < num else None
            self._at += end
        return pieces
