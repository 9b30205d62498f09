"""Samples that fit in memory: shuffled as a whole."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from meshrec.data.batch import Batch
from meshrec.data.dataset import Position, Reader
from meshrec.data.order import Step, Stream, check_seed, generator, rank_slice, steps
from meshrec.data.samples import Floats, Ints, Samples, gather_ranges, to_batch


class Ranges(NamedTuple):
    """The ids of one key: of sample i, ``values[starts[i] : starts[i] + lengths[i]]``.

    Samples may share or overlap ranges: the last k movies of a user are a range of the user's movies.
    """

    values: Ints
    starts: Ints
    lengths: Ints

    def take(self, rows: Ints) -> "Ranges":
        """Of the samples at ``rows``."""
        return Ranges(self.values, self.starts[rows], self.lengths[rows])


class InMemoryReader(Reader):
    """Arrays as a reader.

    Args:
        dense: [n, num_dense].
        labels: [n].
        ids: the ranges of each key.
        seed: of the order.
        shuffle: without it, samples keep their order.

    Raises:
        ValueError: no samples, or arrays of different lengths.
    """

    def __init__(
        self, dense: Floats, labels: Floats, ids: Mapping[str, Ranges], *, seed: int, shuffle: bool = True
    ) -> None:
        check_seed(seed)
        sizes = {"dense": len(dense), "labels": len(labels)} | {k: len(v.starts) for k, v in ids.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"all arrays must have one entry per sample, got {sizes} entries.")
        if len(labels) == 0:
            raise ValueError("there are no samples to read: the arrays are empty.")
        self._dense, self._labels, self._ids = dense, labels, dict(ids)
        self._seed, self._shuffle = seed, shuffle

    @property
    def num_samples(self) -> int:
        """Samples of one epoch, over all ranks."""
        return len(self._labels)

    def batches(
        self,
        batch_size: int,
        *,
        position: Position = Position(),  # noqa: B008 - immutable
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """See :class:`Reader`."""
        plan = steps(self.num_samples, batch_size, position, rank, world_size, drop_last=drop_last)
        return self._batches(plan, position.epoch, rank, world_size)

    def _batches(self, plan: Iterator[Step], epoch: int, rank: int, world_size: int) -> Iterator[Batch]:
        order = np.arange(self.num_samples)
        if self._shuffle:
            order = generator(self._seed, Stream.BLOCKS, epoch).permutation(self.num_samples)
        for step in plan:
            begin, end = rank_slice(step.stop - step.start, rank, world_size)
            rows = order[step.start + begin : step.start + end]
            ids = tuple(
                gather_ranges(each.values, each.starts[rows], each.lengths[rows])
                for each in self._ids.values()
            )
            samples = Samples(self._dense[rows], self._labels[rows], ids)
            yield to_batch(tuple(self._ids), self._dense.shape[1], [samples])
