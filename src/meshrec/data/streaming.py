"""Reader for data larger than memory: blocks are read in shuffled order, and rows are shuffled in windows."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
from typing_extensions import override

from meshrec.data.batch import Batch
from meshrec.data.dataset import Position, Reader, RowsOfFile
from meshrec.data.order import LanePart, Step, Stream, check_seed, generator, lane_parts, lane_sizes, steps
from meshrec.data.samples import Ints, PermutedSamples, SampleRange, Samples, Shape, group_by_query, to_batch


class Source(ABC):
    """Data as blocks of rows, which can be read in any order.

    A block is a unit that can be read without the rows before it, such as a Parquet row group or a whole text
    file. Within a block, rows are read in windows: consecutive rows that are in memory together. A subclass
    sets ``blocks``, or overrides ``block_sizes`` and ``files``.
    """

    keys: tuple[str, ...]
    """ID feature names."""
    shape: Shape
    """Layout of the samples."""
    blocks: Sequence[tuple[str, int]]
    """File name and row count per block, file by file."""

    @property
    def block_sizes(self) -> Ints:
        """Rows per block."""
        return np.array([num_rows for _, num_rows in self.blocks], dtype=np.int64)

    @property
    def files(self) -> Sequence[RowsOfFile]:
        """Files of the blocks, in order. Row numbers are consecutive over all of them."""
        files: list[RowsOfFile] = []
        first_row = 0
        for name, group in itertools.groupby(self.blocks, key=lambda block: block[0]):
            num_rows = sum(rows for _, rows in group)
            files.append(RowsOfFile(name, first_row, num_rows))
            first_row += num_rows
        return files

    @abstractmethod
    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Yield a block's windows from window ``first`` to the end. The last window may be smaller.

        Window w has the rows ``[w * size, (w + 1) * size)`` of the block.

        Args:
            block: block number.
            first: number of the first window to yield.
            size: rows per window.
        """

    @abstractmethod
    def column(self, block: int, name: str) -> Any:
        """Return a block's column as stored, before encoding: an Arrow array with an entry per row.

        Args:
            block: block number.
            name: column name.

        Raises:
            DataError: the source lacks the column.
        """


MAX_CACHED_VALUES = 1 << 21
"""Maximum size of a source whose encoded rows stay in memory: rows times features, about 40 MB."""


class CachedWindows(Source):
    """Small source whose windows stay in memory, so that later epochs and evaluations need not encode them.

    Args:
        source: original source.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self.keys, self.shape = source.keys, source.shape
        # All windows of a block, by block number and window size. Set by the first read.
        self._windows: dict[tuple[int, int], list[Samples]] = {}

    @staticmethod
    def fits(source: Source) -> bool:
        """Return whether a source is small enough to stay in memory."""
        num_features = source.shape.num_dense + source.shape.num_keys
        return int(source.block_sizes.sum()) * num_features <= MAX_CACHED_VALUES

    @property
    def block_sizes(self) -> Ints:
        return self._source.block_sizes

    @property
    def files(self) -> Sequence[RowsOfFile]:
        return self._source.files

    @override
    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Yield a block's windows from window ``first`` to the end."""
        windows = self._windows.get((block, size))
        if windows is None:
            # Assigned when complete: the prefetch thread may read the same block at the same time.
            windows = self._windows[block, size] = list(self._source.windows(block, 0, size))
        yield from windows[first:]

    def column(self, block: int, name: str) -> Any:
        return self._source.column(block, name)


class StreamReader(Reader):
    """Reader that streams the samples of a `Source`, with bounded memory.

    To shuffle, the reader permutes the blocks, and the rows within every window. The permuted data is cut
    into lanes, and samples are taken from all lanes in turn; see `meshrec.data.order`. A rank has one window
    in memory for every lane it reads. If the lane count is a multiple of the rank count, and the samples per
    step are a multiple of the lanes, ranks read disjoint lanes.

    Args:
        source: source of the samples.
        seed: shuffle seed.
        shuffle: whether to shuffle. Otherwise samples are in file and row order, and every rank reads all
            windows.
        window: number of consecutive rows that are shuffled among each other.
        lanes: number of lanes, over all ranks. Without ``shuffle``, there is always a single lane.
        skipped: damaged rows omitted by the source so far, counted by location and reason.

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
        self._source = CachedWindows(source) if CachedWindows.fits(source) else source
        self._seed, self._shuffle, self._window = seed, shuffle, window
        # Includes damaged rows, which are omitted only when batches are made, so positions do not depend on
        # damage.
        self._num_samples = int(source.block_sizes.sum())
        if self._num_samples == 0:
            raise ValueError("there are no samples to read: every block is empty.")
        self.skipped = skipped
        # One lane keeps file order. More lanes than samples would leave lanes empty.
        self._lanes = min(lanes, self._num_samples) if shuffle else 1
        # Row number at which a block starts, over all files, for sources whose samples lack row numbers.
        self._first_rows = np.cumsum(source.block_sizes) - source.block_sizes

    @property
    def num_samples(self) -> int:
        """Samples per epoch over all ranks, including skipped damaged rows."""
        return self._num_samples

    @property
    def files(self) -> Sequence[RowsOfFile]:
        return self._source.files

    def columns(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield columns as stored, before encoding, block by block in file order.

        Args:
            names: column names.

        Yields:
            Arrow arrays by column name, with an entry per row of the block.

        Raises:
            DataError: the source lacks the column.
        """
        for block, size in enumerate(self._source.block_sizes):
            if size:
                yield {name: self._source.column(block, name) for name in names}

    @override
    def batches(
        self,
        batch_size: int,
        *,
        position: Position = Position(),  # noqa: B008 - immutable
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield this rank's batches for an epoch; see `Reader.batches`.

        Damaged rows are omitted, so a batch may have fewer samples than ``batch_size``.
        """
        plan = steps(self.num_samples, batch_size, position, rank, world_size, drop_last=drop_last)
        return self._batches(plan, position.epoch, rank, world_size)

    def _batches(self, plan: Iterator[Step], epoch: int, rank: int, world_size: int) -> Iterator[Batch]:
        order = self._block_order(epoch)
        # Row in epoch order at which a lane starts, and at the end the number of rows.
        starts = np.cumsum([0, *lane_sizes(self._num_samples, self._lanes)]).tolist()
        # Lanes that this rank reads. A lane is opened at its first use and stays open until the epoch ends.
        open_lanes: dict[int, Lane] = {}
        # Also if the consumer stops in the middle of an epoch, the thread ends, and then files are closed.
        with ExitStack() as files, background_thread() as thread:
            for step in plan:
                ranges: list[SampleRange] = []
                for part in lane_parts(step, self._lanes, rank, world_size):
                    lane = open_lanes.get(part.lane)
                    if lane is None:
                        start, stop = starts[part.lane : part.lane + 2]
                        windows = self._windows_from(order, epoch, start + part.first, stop)
                        files.enter_context(closing(windows))
                        lane = open_lanes[part.lane] = Lane(windows, part.first, thread)
                    ranges += lane.read(part)
                yield to_batch(self._source.keys, self._source.shape, ranges)

    def _block_order(self, epoch: int) -> Ints:
        """Return all block numbers in the order of an epoch, int64."""
        num_blocks = len(self._source.block_sizes)
        if not self._shuffle:
            return np.arange(num_blocks, dtype=np.int64)
        return generator(self._seed, Stream.BLOCKS, epoch).permutation(num_blocks).astype(np.int64)

    def _windows_from(
        self, order: Ints, epoch: int, row: int, stop: int
    ) -> Generator[PermutedSamples, None, None]:
        """Yield the samples from a row on, window by window.

        Args:
            row: first row to yield, counted in the order of the epoch.
            stop: end of the rows to yield. The last window may continue beyond it.
        """
        size = self._window
        # End of every block, in epoch order.
        ends = np.cumsum(self._source.block_sizes[order])
        first_block = int(np.searchsorted(ends, row, side="right"))
        skip = row - (int(ends[first_block - 1]) if first_block else 0)
        for block in order[first_block:].tolist():
            # A window is shuffled as a whole, so its first rows are skipped only after shuffling.
            first, skip_rows = divmod(skip, size)
            with closing(self._source.windows(block, first, size)) as windows:
                for number, samples in enumerate(windows, first):
                    num = len(samples.labels)
                    if samples.rows is None:
                        first_row = int(self._first_rows[block]) + number * size
                        samples = samples._replace(rows=np.arange(first_row, first_row + num, dtype=np.int64))
                    of_window = np.arange(num, dtype=np.int64)
                    if self._shuffle:
                        # Seeded per window, so a resumed run shuffles the same windows alike.
                        rng = generator(self._seed, Stream.WINDOW, epoch, block, number)
                        of_window = rng.permutation(num)
                        if self._source.shape.query:
                            of_window = group_by_query(of_window, samples, self._source.shape.query)
                    yield PermutedSamples(samples, of_window[skip_rows:])
                    row += num - skip_rows
                    if row >= stop:
                        return
                    skip_rows = 0
            skip = 0


@contextmanager
def background_thread() -> Iterator[ThreadPoolExecutor]:
    """Run a background thread. When the context ends, tasks that have not started are cancelled."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="meshrec-reader")
    try:
        yield thread
    finally:
        thread.shutdown(cancel_futures=True)


class Lane:
    """Sequential reader of a lane: a contiguous range of an epoch's samples (see `meshrec.data.order`).

    While the samples of a window are read, the background thread decodes the next window.

    Args:
        windows: samples of the lane from ``position`` on. The iterator may continue beyond the lane.
        position: number of the first sample to read, counted from the lane's start.
        thread: background thread, shared by all lanes, so that sources are read by one thread.
    """

    def __init__(self, windows: Iterator[PermutedSamples], position: int, thread: ThreadPoolExecutor) -> None:
        self._windows, self._thread = windows, thread
        # Number of the next sample, in the lane.
        self._position = position
        # The current window, and the lane's number of its first sample; None: the next window must be read.
        self._window: PermutedSamples | None = None
        self._window_start = position
        self._next_window = thread.submit(next, windows, None)

    def read(self, part: LanePart) -> list[SampleRange]:
        """Return the samples of a lane part, in one or more ranges. Skips samples before the part."""
        ranges = []
        while self._position < part.last:
            if self._window is None:
                self._window, self._window_start = self._next_window.result(), self._position
                assert self._window is not None, "the source has fewer rows than its blocks say"
                self._next_window = self._thread.submit(next, self._windows, None)
            num = self._window.num
            start = min(max(0, part.first - self._window_start), num)
            end = min(part.last - self._window_start, num)
            if start < end:
                ranges += self._window.ranges(start, end)
            self._position = self._window_start + end
            # A window may be longer than a part, so it stays until all of its samples are read.
            if end == num:
                self._window = None
        return ranges
