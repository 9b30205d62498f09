"""Samples as NumPy arrays, before they become a `Batch` of tensors.

Shape legend: n samples, K keys, N IDs.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from meshrec.data.batch import Batch
from meshrec.sparse import KeyedJaggedTensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


class Ragged(NamedTuple):
    """IDs of n samples for one key, with optional weights.

    Sample i has the IDs ``values[offsets[i] : offsets[i + 1]]``.
    """

    values: Ints
    """IDs, int64 [N]. IDs before ``offsets[0]`` and after ``offsets[-1]`` belong to no sample; see `part`."""
    offsets: Ints
    """Start per sample, and the end of the last sample, int64 [n + 1]."""
    weights: Floats | None = None
    """Weight per ID, float32 [N]; None: no weights."""

    def part(self, first: int, last: int) -> "Ragged":
        """Return the samples ``first`` to ``last``, exclusive, as views: offsets need not start at 0."""
        return Ragged(self.values, self.offsets[first : last + 1], self.weights)

    def take(self, order: Ints) -> "Ragged":
        """Return copies of the samples at the indices ``order``, in this order; indices may repeat."""
        starts = self.offsets[order]
        lengths = self.offsets[order + 1] - starts
        # One ID per sample is the most common case, and needs no ranges.
        if _common_length(lengths) == 1:
            weights = None if self.weights is None else self.weights[starts]
            return Ragged(self.values[starts], np.arange(len(order) + 1, dtype=np.int64), weights)
        return self.ranges(starts, lengths)

    def ranges(self, starts: Ints, lengths: Ints) -> "Ragged":
        """Return n samples, where sample i has the IDs ``values[starts[i] : starts[i] + lengths[i]]``."""
        return gather_ranges(self.values, starts, lengths, self.weights)

    def weighted(self) -> "Ragged":
        """Return the same IDs, with weights of 1 if there are none."""
        return (
            self if self.weights is not None else self._replace(weights=np.ones(len(self.values), np.float32))
        )


class Samples(NamedTuple):
    """Samples from a source.

    Damaged rows stay in place as invalid samples until `to_batch`, so positions of later samples do not
    shift.

    Attributes:
        dense: dense values, float32 [n, num_dense].
        labels: labels, float32 [n], or [n, L] for L labels.
        ids: IDs per key, in key order.
        is_valid: whether a sample is valid, bool [n]; None: all samples are valid. All other fields of an
            invalid sample are meaningless.
        rows: row numbers, counted over all files, int64 [n]. None: the reader adds them later.
        weights: loss weight per sample, float32 [n]; None: all 1.
    """

    dense: Floats
    labels: Floats
    ids: tuple[Ragged, ...]
    is_valid: Bools | None = None
    rows: Ints | None = None
    weights: Floats | None = None

    def take(self, order: Ints) -> "Samples":
        """Return copies of the samples at the indices ``order``, in this order; indices may repeat."""
        return self._indexed(order, tuple(ragged.take(order) for ragged in self.ids))

    def part(self, first: int, last: int) -> "Samples":
        """Return the samples ``first`` to ``last``, exclusive, as views."""
        return self._indexed(slice(first, last), tuple(ragged.part(first, last) for ragged in self.ids))

    def _indexed(self, index: Ints | slice, ids: tuple[Ragged, ...]) -> "Samples":
        optional: tuple[Any, ...] = (self.is_valid, self.rows, self.weights)
        is_valid, rows, weights = (None if values is None else values[index] for values in optional)
        return Samples(self.dense[index], self.labels[index], ids, is_valid, rows, weights)

    def valid(self) -> "Samples":
        """Return only the valid samples, with ``is_valid`` None."""
        if self.is_valid is None or self.is_valid.all():
            return self._replace(is_valid=None)
        return self.take(np.flatnonzero(self.is_valid))._replace(is_valid=None)


def gather_ranges(values: Ints, starts: Ints, lengths: Ints, weights: Floats | None = None) -> Ragged:
    """Copy n ranges of an array: sample i of the result has ``values[starts[i] : starts[i] + lengths[i]]``.

    Ranges may overlap, and may be empty.

    Args:
        values: int32 or int64 [N], possibly a memory-mapped file.
        starts: index of the first value per range, int64 [n].
        lengths: number of values per range, int64 [n].
        weights: weight per value, float32 [N], or None.

    Returns:
        The n samples. ``values`` are int64, and ``offsets`` start at 0.
    """
    offsets = np.zeros(len(starts) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    # Equal lengths are common (one ID per sample), and a reshape is much faster than repeat.
    width = _common_length(lengths)
    if width is not None:
        index = (starts[:, None] + np.arange(width)).ravel()
    else:
        index = np.repeat(starts - offsets[:-1], lengths)
        index += np.arange(offsets[-1])
    gathered = values[index].astype(np.int64, copy=False)
    return Ragged(gathered, offsets, None if weights is None else weights[index])


def group_by_query(samples: Samples, query: int) -> Samples:
    """Reorder samples to make those with the same query contiguous.

    Queries are in the order of their first samples; samples of a query keep their order.

    Args:
        samples: samples with several labels.
        query: label column with the query; equal values are the same query.
    """
    # First sample per query, and the query per sample.
    _, first, of_query = np.unique(samples.labels[:, query], return_index=True, return_inverse=True)
    return samples.take(np.argsort(first[of_query], kind="stable"))


def concatenated(pieces: Sequence[Samples]) -> Samples:
    """Concatenate one or more pieces of samples with the same keys. A single piece is returned unchanged."""
    if len(pieces) == 1:
        return pieces[0]
    ids = []
    for ragged in zip(*(piece.ids for piece in pieces), strict=True):
        lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
        # A piece may be a view, whose offsets select some of the values.
        # Only these values belong to the piece.
        used = [slice(int(part.offsets[0]), int(part.offsets[-1])) for part in ragged]
        values = [part.values[rows] for part, rows in zip(ragged, used, strict=True)]
        weights = [p.weights[rows] for p, rows in zip(ragged, used, strict=True) if p.weights is not None]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids.append(Ragged(np.concatenate(values), offsets, np.concatenate(weights) if weights else None))
    is_valid = None
    if any(piece.is_valid is not None for piece in pieces):
        masks = [np.ones(len(p.labels), np.bool_) if p.is_valid is None else p.is_valid for p in pieces]
        is_valid = np.concatenate(masks)
    dense = np.concatenate([piece.dense for piece in pieces])
    labels = np.concatenate([piece.labels for piece in pieces])
    rows, weights = (_concatenated_or_none(pieces, name) for name in ("rows", "weights"))
    return Samples(dense, labels, tuple(ids), is_valid, rows, weights)


def _concatenated_or_none(pieces: Sequence[Samples], field: str) -> Any:
    """Concatenate an optional array field of all pieces; None unless all pieces have the field."""
    arrays = [getattr(piece, field) for piece in pieces]
    return None if any(array is None for array in arrays) else np.concatenate(arrays)


def regroup_into_windows(pieces: Iterable[Samples], skip: int, size: int) -> Generator[Samples, None, None]:
    """Regroup samples from pieces with any sizes into windows with ``size`` samples.

    Example: pieces with 3, 1 and 4 samples, skip 1 and size 4 give windows with 4 and 3 samples.

    Args:
        pieces: consecutive samples.
        skip: samples to skip at the start.
        size: samples per window; the last window may be smaller.
    """
    # Samples that do not fill a window yet, ``num`` in total.
    pending: list[Samples] = []
    num = 0
    for piece in pieces:
        num_piece = len(piece.labels)
        # Skip without copying: a piece before the first window is dropped as a whole.
        num_skipped = min(skip, num_piece)
        skip -= num_skipped
        if num_skipped == num_piece:
            continue
        pending.append(piece.part(num_skipped, num_piece) if num_skipped else piece)
        num += num_piece - num_skipped
        if num >= size:
            whole = concatenated(pending)
            for start in range(0, num - size + 1, size):
                yield whole.part(start, start + size) if num > size else whole
            # Samples behind the last full window wait for the next piece.
            num_left = num % size
            pending = [whole.part(num - num_left, num)] if num_left else []
            num = num_left
    if pending:
        yield concatenated(pending)


class Shape(NamedTuple):
    """Layout of `Samples`: which optional arrays they have, and the widths of the arrays."""

    num_dense: int
    """Dense values per sample."""
    num_keys: int
    """Number of keys: features with IDs."""
    num_labels: int = 1
    """1 for labels with shape [n], L for labels with shape [n, L]."""
    has_weights: bool = False
    """Whether samples have loss weights."""
    has_id_weights: bool = False
    """Whether IDs have weights."""
    query: int = 0
    """Label column with the query that groups samples for ranking. 0: none, because a query label is never
    the first label."""


def void_samples(num: int, shape: Shape) -> Samples:
    """Return ``num`` invalid samples without IDs, as placeholders for rows that are skipped or damaged."""
    none = np.zeros(0, np.float32) if shape.has_id_weights else None
    ids = Ragged(np.zeros(0, np.int64), np.zeros(num + 1, np.int64), none)
    return Samples(
        np.zeros((num, shape.num_dense), np.float32),
        np.zeros((num, shape.num_labels)[: 1 + (shape.num_labels > 1)], np.float32),
        # All keys share these arrays, because they have no IDs.
        (ids,) * shape.num_keys,
        np.zeros(num, np.bool_),
        weights=np.zeros(num, np.float32) if shape.has_weights else None,
    )


def to_batch(keys: Sequence[str], shape: Shape, pieces: Sequence[Samples]) -> Batch:
    """Concatenate the valid samples of all pieces into a batch of CPU tensors.

    Args:
        keys: keys of ``Batch.sparse``, in the order of ``Samples.ids``.
        shape: sample shape, needed for an empty batch.
        pieces: samples, in order; no piece gives an empty batch.
    """
    pieces = [piece.valid() for piece in pieces] or [
        void_samples(0, shape)._replace(rows=np.zeros(0, np.int64))
    ]
    num = sum(len(piece.labels) for piece in pieces)
    # KeyedJaggedTensor stores values key by key. Lengths are written in place, without an array per key and
    # piece, because every training step waits for its batch.
    lengths = np.empty((len(keys), num), dtype=np.int64)
    values, weights, per_key = [], [], []
    for key in range(len(keys)):
        first, total = 0, 0
        for piece in pieces:
            ragged = piece.ids[key]
            offsets = ragged.offsets
            start, stop, last = int(offsets[0]), int(offsets[-1]), first + len(offsets) - 1
            np.subtract(offsets[1:], offsets[:-1], out=lengths[key, first:last])
            values.append(ragged.values[start:stop])
            if ragged.weights is not None:
                weights.append(ragged.weights[start:stop])
            first, total = last, total + stop - start
        per_key.append(total)
    # Valid by construction, so skip the checks.
    sparse = KeyedJaggedTensor.unchecked(
        list(keys),
        torch.from_numpy(np.concatenate(values) if values else np.zeros(0, np.int64)),
        torch.from_numpy(np.concatenate(weights)) if weights else None,
        torch.from_numpy(lengths.reshape(-1)),
        stride=num,
        length_per_key=per_key,
    )
    dense = torch.from_numpy(np.concatenate([piece.dense for piece in pieces]))
    labels = torch.from_numpy(np.concatenate([piece.labels for piece in pieces]))
    rows, sample_weights = (_concatenated_or_none(pieces, name) for name in ("rows", "weights"))
    return Batch(
        dense,
        sparse,
        labels,
        None if rows is None else torch.from_numpy(rows),
        None if sample_weights is None else torch.from_numpy(sample_weights),
    )


def _common_length(lengths: Ints) -> int | None:
    """Return the length that all entries equal; None if lengths differ, or there are none."""
    if len(lengths) == 0:
        return None
    width = int(lengths[0])
    return width if bool((lengths == width).all()) else None
