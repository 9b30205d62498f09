"""Samples before batching, as NumPy arrays.

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
    """IDs for a key, with optional weights. Sample i has ``values[offsets[i] : offsets[i + 1]]``."""

    values: Ints
    offsets: Ints
    weights: Floats | None = None

    def part(self, first: int, last: int) -> "Ragged":
        """Return samples ``[first, last)`` as views. Offsets do not start at 0."""
        return Ragged(self.values, self.offsets[first : last + 1], self.weights)

    def take(self, order: Ints) -> "Ragged":
        """Return the samples at ``order``."""
        starts = self.offsets[order]
        lengths = self.offsets[order + 1] - starts
        if _common_length(lengths) == 1:
            weights = None if self.weights is None else self.weights[starts]
            return Ragged(self.values[starts], np.arange(len(order) + 1, dtype=np.int64), weights)
        return self.ranges(starts, lengths)

    def ranges(self, starts: Ints, lengths: Ints) -> "Ragged":
        """Return a sample per range of values."""
        return gather_ranges(self.values, starts, lengths, self.weights)

    def weighted(self) -> "Ragged":
        """Return the same IDs, with weights of 1 if there are none."""
        return (
            self if self.weights is not None else self._replace(weights=np.ones(len(self.values), np.float32))
        )


class Samples(NamedTuple):
    """Samples from a source.

    Attributes:
        dense: dense values [n, num_dense].
        labels: labels [n], or [n, L] for L labels.
        ids: IDs per key.
        kept: whether a sample is valid; None: all are. Other fields of an invalid sample are meaningless.
        rows: row numbers over all files; None if known only to the reader.
        weights: sample weights; None: all 1.
    """

    dense: Floats
    labels: Floats
    ids: tuple[Ragged, ...]
    kept: Bools | None = None
    rows: Ints | None = None
    weights: Floats | None = None

    def take(self, order: Ints) -> "Samples":
        """Return the samples at ``order``."""
        return self._indexed(order, tuple(ragged.take(order) for ragged in self.ids))

    def part(self, first: int, last: int) -> "Samples":
        """Return samples ``[first, last)`` as views."""
        return self._indexed(slice(first, last), tuple(ragged.part(first, last) for ragged in self.ids))

    def _indexed(self, index: Ints | slice, ids: tuple[Ragged, ...]) -> "Samples":
        optional: tuple[Any, ...] = (self.kept, self.rows, self.weights)
        kept, rows, weights = (None if values is None else values[index] for values in optional)
        return Samples(self.dense[index], self.labels[index], ids, kept, rows, weights)

    def valid(self) -> "Samples":
        """Return only valid samples."""
        if self.kept is None or self.kept.all():
            return self._replace(kept=None)
        return self.take(np.flatnonzero(self.kept))._replace(kept=None)


def gather_ranges(values: Ints, starts: Ints, lengths: Ints, weights: Floats | None = None) -> Ragged:
    """Concatenate ``values[starts[i] : starts[i] + lengths[i]]`` for all i.

    Args:
        values: int32 or int64 [N].
        starts: first value per range, [n].
        lengths: values per range, [n].
        weights: weight per value, [N], or None.
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
    """Reorder samples so that queries are contiguous, in order of their first samples."""
    _, first, of_query = np.unique(samples.labels[:, query], return_index=True, return_inverse=True)
    return samples.take(np.argsort(first[of_query], kind="stable"))


def concatenated(pieces: Sequence[Samples]) -> Samples:
    """Concatenate at least one piece."""
    if len(pieces) == 1:
        return pieces[0]
    ids = []
    for ragged in zip(*(piece.ids for piece in pieces), strict=True):
        lengths = np.concatenate([np.diff(part.offsets) for part in ragged])
        # A piece may be a view, whose offsets select some of the values.
        used = [slice(int(part.offsets[0]), int(part.offsets[-1])) for part in ragged]
        values = [part.values[rows] for part, rows in zip(ragged, used, strict=True)]
        weights = [p.weights[rows] for p, rows in zip(ragged, used, strict=True) if p.weights is not None]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids.append(Ragged(np.concatenate(values), offsets, np.concatenate(weights) if weights else None))
    kept = None
    if any(piece.kept is not None for piece in pieces):
        masks = [np.ones(len(p.labels), np.bool_) if p.kept is None else p.kept for p in pieces]
        kept = np.concatenate(masks)
    dense = np.concatenate([piece.dense for piece in pieces])
    labels = np.concatenate([piece.labels for piece in pieces])
    rows, weights = (_concatenated_or_none(pieces, name) for name in ("rows", "weights"))
    return Samples(dense, labels, tuple(ids), kept, rows, weights)


def _concatenated_or_none(pieces: Sequence[Samples], field: str) -> Any:
    """Concatenate a field of all pieces; None unless every piece has it."""
    arrays = [getattr(piece, field) for piece in pieces]
    return None if any(array is None for array in arrays) else np.concatenate(arrays)


def rewindowed(pieces: Iterable[Samples], skip: int, size: int) -> Generator[Samples, None, None]:
    """Yield all samples after the first ``skip`` in windows of ``size``. The last window may be smaller.

    Args:
        pieces: samples in pieces with any size.
        skip: samples to skip.
        size: samples per window.
    """
    pending: list[Samples] = []
    num = 0
    for piece in pieces:
        num_piece = len(piece.labels)
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
            num_left = num % size
            pending = [whole.part(num - num_left, num)] if num_left else []
            num = num_left
    if pending:
        yield concatenated(pending)


class Shape(NamedTuple):
    """Sample shape.

    ``num_labels`` is 1 for labels [n], and L for labels [n, L]. ``has_weights`` refers to samples,
    ``has_id_weights`` to IDs. ``query`` is the label column that groups samples; 0: none.
    """

    num_dense: int
    num_keys: int
    num_labels: int = 1
    has_weights: bool = False
    has_id_weights: bool = False
    query: int = 0


def void_samples(num: int, shape: Shape) -> Samples:
    """Return ``num`` invalid samples."""
    none = np.zeros(0, np.float32) if shape.has_id_weights else None
    ids = Ragged(np.zeros(0, np.int64), np.zeros(num + 1, np.int64), none)
    return Samples(
        np.zeros((num, shape.num_dense), np.float32),
        np.zeros((num, shape.num_labels)[: 1 + (shape.num_labels > 1)], np.float32),
        (ids,) * shape.num_keys,
        np.zeros(num, np.bool_),
        weights=np.zeros(num, np.float32) if shape.has_weights else None,
    )


def to_batch(keys: Sequence[str], shape: Shape, pieces: Sequence[Samples]) -> Batch:
    """Concatenate the valid samples from all pieces, in order, into a batch.

    Args:
        keys: ID keys.
        shape: sample shape.
        pieces: samples.
    """
    pieces = [piece.valid() for piece in pieces] or [
        void_samples(0, shape)._replace(rows=np.zeros(0, np.int64))
    ]
    num = sum(len(piece.labels) for piece in pieces)
    # Filled in place, because batches are on the critical path of every step.
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
    """Return the common length, or None if lengths differ."""
    if len(lengths) == 0:
        return None
    width = int(lengths[0])
    return width if bool((lengths == width).all()) else None
