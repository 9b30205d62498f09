"""Readers with random access to samples: any sample can be read by its number, so shuffling is global."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self, override

from meshrec.data.batch import Batch
from meshrec.data.dataset import Position, Reader, RowsOfFile, locate
from meshrec.data.faults import DataError, rows_text
from meshrec.data.order import Step, Stream, check_seed, generator, rank_slice, steps
from meshrec.data.samples import Floats, Ints, PermutedSamples, Samples, Shape, gather_ranges, to_batch


class Ranges(NamedTuple):
    """IDs of n samples for one key, as ranges of a shared array.

    Sample i has the IDs ``values[starts[i] : starts[i] + lengths[i]]``. Ranges may overlap. For example, the
    histories of one user's samples are ranges within the movies the user rated.
    """

    values: Ints
    """IDs, [N]."""
    starts: Ints
    """First ID's index in ``values``, per sample, int64 [n]."""
    lengths: Ints
    """Number of IDs per sample, int64 [n]."""

    def take(self, rows: Ints) -> "Ranges":
        """Return the ranges of the samples with the indices ``rows``."""
        return Ranges(self.values, self.starts[rows], self.lengths[rows])


class IndexedSamples(ABC):
    """Mixin that implements `Reader.batches` for readers with random access to samples.

    Samples are numbered from 0. An epoch shuffles all sample numbers, and a subclass returns the samples with
    given numbers as a batch.

    Args:
        seed: shuffle seed.
        shuffle: whether to shuffle; otherwise samples are ordered by number.
    """

    def __init__(self, *, seed: int, shuffle: bool) -> None:
        check_seed(seed)
        self._seed, self._shuffle = seed, shuffle
        # Both are set only in copies made by `balanced`. None: ranks take equal slices of a step.
        self._share: Callable[[Ints, int], list[Ints]] | None = None
        self._balanced_keys: Sequence[str] = ()

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Samples per epoch, over all ranks."""

    @abstractmethod
    def lengths(self, key: str, samples: Ints) -> Ints:
        """Return the number of IDs per sample for a key, int64 [len(samples)]."""

    @abstractmethod
    def batch(self, samples: Ints) -> Batch:
        """Return some samples, in the given order, as a batch."""

    def balanced(self, keys: Sequence[str], share: Callable[[Ints, int], list[Ints]]) -> Self:
        """Return a copy of the reader that assigns samples to ranks by length, for equal work per rank.

        A step has the same samples as before. Only their assignment to ranks changes.

        Args:
            keys: keys such as the history. A sample's length is the number of IDs it has for these keys.
            share: function such as `meshrec.data.balance.balanced_shares`. It gets the length per sample in a
                step and the rank count. For every rank, it returns the indices of the rank's samples in the
                step.
        """
        reader = copy.copy(self)
        reader._share, reader._balanced_keys = share, keys
        return reader

    def batches(
        self,
        batch_size: int,
        *,
        position: Position = Position(),  # noqa: B008 - immutable
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield this rank's batches for an epoch.

        Args:
            batch_size, position, rank, world_size, drop_last: see `Reader.batches`.
        """
        plan = steps(self.num_samples, batch_size, position, rank, world_size, drop_last=drop_last)
        return self._batches(plan, position.epoch, rank, world_size)

    def _batches(self, plan: Iterator[Step], epoch: int, rank: int, world_size: int) -> Iterator[Batch]:
        # Every rank computes the same order and the same shares, so ranks need not communicate.
        order = self._order(epoch) if self._shuffle else None
        for step in plan:
            samples = np.arange(*step) if order is None else order[step.start : step.stop].astype(np.int64)
            if self._share is None or world_size == 1:
                samples = samples[slice(*rank_slice(len(samples), rank, world_size))]
            else:
                lengths = np.sum([self.lengths(key, samples) for key in self._balanced_keys], axis=0)
                samples = samples[self._share(lengths, world_size)[rank]]
            yield self.batch(samples)

    def _order(self, epoch: int) -> "npt.NDArray[np.integer[Any]]":
        """Return all sample numbers in the shuffled order of an epoch, int32 or int64 [num_samples]."""
        # Logs may have billions of samples, and this array is the only one with an entry for each of them.
        kind: type[np.integer[Any]] = np.int32 if self.num_samples <= 1 << 31 else np.int64
        order: npt.NDArray[np.integer[Any]] = np.arange(self.num_samples, dtype=kind)
        # A function of (seed, epoch) only, so a resumed or resized run sees the same order.
        generator(self._seed, Stream.BLOCKS, epoch).shuffle(order)
        return order


class InMemoryReader(IndexedSamples, Reader):
    """Reader for samples in NumPy arrays.

    Args:
        dense: dense values, float32 [n, num_dense].
        labels: labels, float32 [n], or [n, L] for L labels.
        ids: IDs by key, with n ranges.
        rows: row number per sample in the source, int64 [n]; 0, 1, ... by default.
        files: files that the row numbers refer to, see `Reader.files`; one file "memory" by default.
        seed: shuffle seed.
        shuffle: whether to shuffle.
        label_range: smallest and largest allowed label. The default is for binary cross-entropy. None: any
            value, including NaN for a sample without a label.

    Raises:
        ValueError: the arrays are empty, array lengths differ, or a label is out of range.
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
        super().__init__(seed=seed, shuffle=shuffle)
        sizes = {"dense": len(dense), "labels": len(labels)} | {k: len(v.starts) for k, v in ids.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"all arrays must have one entry per sample, got {sizes} entries.")
        if len(labels) == 0:
            raise ValueError("there are no samples to read: the arrays are empty.")
        # Row numbers refer to ``_files``; by default, rows are numbered by sample.
        self._rows = np.arange(len(labels), dtype=np.int64) if rows is None else rows
        self._files = tuple(files) or (RowsOfFile("memory", 0, len(labels)),)
        if label_range is not None:
            # Negated, so NaN counts as outside, too.
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

    @property
    def num_samples(self) -> int:
        """Sample count, over all ranks."""
        return len(self._labels)

    @property
    def files(self) -> Sequence[RowsOfFile]:
        """Files that ``Batch.rows`` refers to."""
        return self._files

    @override
    def lengths(self, key: str, samples: Ints) -> Ints:
        return self._ids[key].lengths[samples]

    @override
    def batch(self, samples: Ints) -> Batch:
        ids = tuple(
            gather_ranges(ranges.values, ranges.starts[samples], ranges.lengths[samples])
            for ranges in self._ids.values()
        )
        rows = Samples(self._dense[samples], self._labels[samples], ids, rows=self._rows[samples])
        shape = Shape(self._dense.shape[1], len(self._ids), self._labels[:1].size)
        return to_batch(tuple(self._ids), shape, PermutedSamples(rows).ranges(0, len(samples)))
