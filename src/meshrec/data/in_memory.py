"""Reader of samples in memory, shuffled globally."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from meshrec.data.batch import Batch
from meshrec.data.dataset import Position, Reader, RowsOfFile, locate
from meshrec.data.faults import DataError, rows_text
from meshrec.data.order import Step, Stream, check_seed, generator, rank_slice, steps
from meshrec.data.samples import Floats, Ints, Samples, Shape, gather_ranges, to_batch


class Ranges(NamedTuple):
    """IDs of a key. Sample i has ``values[starts[i] : starts[i] + lengths[i]]``.

    Ranges may overlap: a user's last k movies are a range within all of the user's movies.
    """

    values: Ints
    starts: Ints
    lengths: Ints

    def take(self, rows: Ints) -> "Ranges":
        """Return the ranges of the samples at ``rows``."""
        return Ranges(self.values, self.starts[rows], self.lengths[rows])


class InMemoryReader(Reader):
    """Reader of NumPy arrays.

    Args:
        dense: dense values [n, num_dense].
        labels: labels [n], or [n, L] for L labels.
        ids: ranges per key.
        rows: source row numbers [n]; 0, 1, ... by default.
        files: files the row numbers refer to; a single file "memory" by default.
        seed: shuffle seed.
        shuffle: whether to shuffle.
        label_range: allowed labels. Binary cross-entropy takes [0, 1]. None: any value, including NaN for no
            label.

    Raises:
        ValueError: no samples, array lengths differ, or a label is out of range.
    """

    def __init__(
        self,
        dense: Floats,
        labels: Floats,
        ids: Mapping[str, Ranges],
        *,
        rows: Ints | None = None,
        files: Sequence[RowsOfFile] = (),
        seed: int,
        shuffle: bool = True,
        label_range: tuple[float, float] | None = (0.0, 1.0),
    ) -> None:
        check_seed(seed)
        sizes = {"dense": len(dense), "labels": len(labels)} | {k: len(v.starts) for k, v in ids.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"all arrays must have one entry per sample, got {sizes} entries.")
        if len(labels) == 0:
            raise ValueError("there are no samples to read: the arrays are empty.")
        self._rows = np.arange(len(labels), dtype=np.int64) if rows is None else rows
        self._files = tuple(files) or (RowsOfFile("memory", 0, len(labels)),)
        if label_range is not None:
            outside = ~((labels >= label_range[0]) & (labels <= label_range[1]))
            bad = outside.reshape(len(labels), -1).any(axis=1)
            if bad.any():
                at = int(bad.argmax())
                location = locate(self._files, torch.tensor([int(self._rows[at])]))
                raise DataError(
                    f"{self._files[int(location.file_B)].name}: row {int(location.row_B)} has the label "
                    f"{labels[at][outside[at]].flat[0]:g}, outside {list(label_range)}, which the loss takes "
                    f"({rows_text(int(bad.sum()))} of {len(labels)}). Make labels of it, or pass label_range."
                )
        self._dense, self._labels, self._ids = dense, labels, dict(ids)
        self._seed, self._shuffle = seed, shuffle
        self._share: Callable[[Ints, int], list[Ints]] | None = None
        self._lengths = np.zeros(0, np.int64)

    def balanced(self, keys: Sequence[str], share: Callable[[Ints, int], list[Ints]]) -> "InMemoryReader":
        """Return a reader for the same samples that balances steps among ranks by some keys' lengths.

        Args:
            keys: keys whose lengths are summed per sample.
            share: maps the sample lengths in a step and the rank count to sample positions per rank,
                as `meshrec.data.balance.balanced_shares`.
        """
        reader = copy.copy(self)
        reader._share = share
        reader._lengths = np.sum([self._ids[key].lengths for key in keys], axis=0)
        return reader

    @property
    def num_samples(self) -> int:
        """Samples per epoch, over all ranks."""
        return len(self._labels)

    @property
    def files(self) -> Sequence[RowsOfFile]:
        """Files the row numbers refer to."""
        return self._files

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
        plan = steps(self.num_samples, batch_size, position, rank, world_size, drop_last=drop_last)
        return self._batches(plan, position.epoch, rank, world_size)

    def _batches(self, plan: Iterator[Step], epoch: int, rank: int, world_size: int) -> Iterator[Batch]:
        order = np.arange(self.num_samples)
        if self._shuffle:
            # A function of (seed, epoch) only, so that a resumed or resized run sees the same order.
            order = generator(self._seed, Stream.BLOCKS, epoch).permutation(self.num_samples)
        for step in plan:
            rows = order[step.start : step.stop]
            if self._share is None or world_size == 1:
                rows = rows[slice(*rank_slice(len(rows), rank, world_size))]
            else:
                rows = rows[self._share(self._lengths[rows], world_size)[rank]]
            ids = tuple(
                gather_ranges(ranges.values, ranges.starts[rows], ranges.lengths[rows])
                for ranges in self._ids.values()
            )
            samples = Samples(self._dense[rows], self._labels[rows], ids, rows=self._rows[rows])
            shape = Shape(self._dense.shape[1], len(self._ids), self._labels[:1].size)
            yield to_batch(tuple(self._ids), shape, [samples])
