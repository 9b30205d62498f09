"""Samples as NumPy arrays, before they become a `Batch` of tensors.

Shape legend: n samples, K keys, N IDs.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from meshrec.data.batch import Batch
from meshrec.ops.jagged import concat_samples, permute_samples
from meshrec.sparse import KeyedJaggedTensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.int32] | Ints


class IdTable(NamedTuple):
    """IDs of consecutive integer codes, such as the positions in a dictionary."""

    ids: Ints
    """IDs, int64 [n], n > 0. Codes outside of the table have the last ID."""
    first: int = 0
    """Code of the first ID."""

    def of(self, codes: Codes) -> Ints:
        """Return the IDs of codes, int64 [N]."""
        # Unsigned, so that codes below the first are large, too.
        index = codes.astype(np.int64, copy=False).view(np.uint64) - np.uint64(self.first % (1 << 64))
        ids: Ints = self.ids.take(np.minimum(index, np.uint64(len(self.ids) - 1)).view(np.int64))
        return ids


class Ragged(NamedTuple):
    """IDs of n samples for one key, with optional weights.

    Sample i has the IDs ``values[offsets[i] : offsets[i + 1]]``.
    """

    codes: Codes
    """IDs, int64 [N]; or codes with a table of their IDs, int32 or int64 [N]. Those before ``offsets[0]`` and
    after ``offsets[-1]`` belong to no sample; see `part`."""
    offsets: Ints
    """Start per sample, and the end of the last sample, int64 [n + 1]."""
    weights: Floats | None = None
    """Weight per ID, float32 [N]; None: no weights."""
    table: IdTable | None = None
    """IDs of the codes, which a batch looks up. None: the codes are IDs."""

    @property
    def values(self) -> Ints:
        """IDs, int64 [N]."""
        return self.codes if self.table is None else self.table.of(self.codes)  # type: ignore[return-value]

    def part(self, first: int, last: int) -> "Ragged":
        """Return the samples ``first`` to ``last``, exclusive, as views: offsets need not start at 0."""
        return self._replace(offsets=self.offsets[first : last + 1])

    def take(self, order: Ints) -> "Ragged":
        """Return copies of the samples at the indices ``order``, in this order; indices may repeat."""
        starts = self.offsets[order]
        lengths = self.offsets[order + 1] - starts
        # One ID per sample is the most common case, and needs no ranges.
        if _common_length(lengths) == 1:
            weights = None if self.weights is None else self.weights[starts]
            return Ragged(self.codes[starts], np.arange(len(order) + 1, dtype=np.int64), weights, self.table)
        return self.ranges(starts, lengths)

    def ranges(self, starts: Ints, lengths: Ints) -> "Ragged":
        """Return n samples, where sample i has the IDs ``values[starts[i] : starts[i] + lengths[i]]``."""
        return gather_ranges(self.codes, starts, lengths, self.weights)._replace(table=self.table)

    def weighted(self) -> "Ragged":
        """Return the same IDs, with weights of 1 if there are none."""
        return (
            self if self.weights is not None else self._replace(weights=np.ones(len(self.codes), np.float32))
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
        times: event time per sample in microseconds since 1970, int64 [n]; None: unknown.
    """

    dense: Floats
    labels: Floats
    ids: tuple[Ragged, ...]
    is_valid: Bools | None = None
    rows: Ints | None = None
    weights: Floats | None = None
    times: Ints | None = None

    def take(self, order: Ints) -> "Samples":
        """Return copies of the samples at the indices ``order``, in this order; indices may repeat."""
        return self._indexed(order, tuple(ragged.take(order) for ragged in self.ids))

    def part(self, first: int, last: int) -> "Samples":
        """Return the samples ``first`` to ``last``, exclusive, as views."""
        return self._indexed(slice(first, last), tuple(ragged.part(first, last) for ragged in self.ids))

    def _indexed(self, index: Ints | slice, ids: tuple[Ragged, ...]) -> "Samples":
        optional: tuple[Any, ...] = (self.is_valid, self.rows, self.weights, self.times)
        selected = (None if values is None else values[index] for values in optional)
        return Samples(self.dense[index], self.labels[index], ids, *selected)


def gather_ranges(values: Codes, starts: Ints, lengths: Ints, weights: Floats | None = None) -> Ragged:
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


def group_by_query(order: Ints, samples: Samples, query: int) -> Ints:
    """Reorder sample indices to make samples with the same query contiguous.

    Queries are in the order of their first samples; samples of a query keep their order.

    Args:
        order: indices of the samples, int64 [n].
        samples: samples with several labels.
        query: label column with the query; equal values are the same query.
    """
    # First sample per query, and the query per sample.
    _, first, of_query = np.unique(samples.labels[order, query], return_index=True, return_inverse=True)
    return order[np.argsort(first[of_query], kind="stable")]


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
        # Codes of different dictionaries differ, so look up their IDs.
        table = ragged[0].table if all(part.table is ragged[0].table for part in ragged) else None
        codes = (part.values if table is None else part.codes for part in ragged)
        values = [values[rows] for values, rows in zip(codes, used, strict=True)]
        weights = [p.weights[rows] for p, rows in zip(ragged, used, strict=True) if p.weights is not None]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids.append(
            Ragged(np.concatenate(values), offsets, np.concatenate(weights) if weights else None, table)
        )
    is_valid = None
    if any(piece.is_valid is not None for piece in pieces):
        masks = [np.ones(len(p.labels), np.bool_) if p.is_valid is None else p.is_valid for p in pieces]
        is_valid = np.concatenate(masks)
    dense = np.concatenate([piece.dense for piece in pieces])
    labels = np.concatenate([piece.labels for piece in pieces])
    optional = (_concatenated_or_none(pieces, name) for name in ("rows", "weights", "times"))
    return Samples(dense, labels, tuple(ids), is_valid, *optional)


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


class PermutedSamples:
    """Samples in the order in which batches take them, as tensors.

    Args:
        samples: the samples, with at least one key.
        order: indices of the samples, int64 [n]; None: all, in their order.
    """

    def __init__(self, samples: Samples, order: Ints | None = None) -> None:
        order = np.arange(len(samples.labels), dtype=np.int64) if order is None else order
        optional = {name: getattr(samples, name) for name in ("rows", "weights", "times")}
        self.optional = [name for name, field in optional.items() if field is not None]
        """Names of the optional fields at the end of ``fields``."""
        fields = [samples.dense, samples.labels, *(optional[name] for name in self.optional)]
        self.num = len(order)
        self.values, self.offsets, self.weights, self.fields = permute_samples(
            _tensor(order),
            [_tensor(field) for field in fields],
            [_tensor(ragged.codes) for ragged in samples.ids],
            [_tensor(ragged.offsets) for ragged in samples.ids],
            [_tensor(ragged.weights) for ragged in samples.ids if ragged.weights is not None],
            [_NONE if ragged.table is None else _tensor(ragged.table.ids) for ragged in samples.ids],
            [0 if ragged.table is None else ragged.table.first for ragged in samples.ids],
        )
        self.has_weights = samples.ids[0].weights is not None
        # None: all samples are valid.
        is_valid = None if samples.is_valid is None else samples.is_valid[order]
        self._is_valid = None if is_valid is None or is_valid.all() else is_valid

    def ranges(self, start: int, stop: int) -> list["SampleRange"]:
        """Return the samples ``start`` to ``stop``, exclusive, without invalid samples."""
        if self._is_valid is None:
            return [SampleRange(self, start, stop)]
        edges = np.flatnonzero(np.diff(self._is_valid[start:stop], prepend=False, append=False)) + start
        return [SampleRange(self, first, last) for first, last in edges.reshape(-1, 2).tolist()]


class SampleRange(NamedTuple):
    """The samples ``start`` to ``stop``, exclusive."""

    samples: PermutedSamples
    start: int
    stop: int


def to_batch(keys: Sequence[str], shape: Shape, ranges: Sequence[SampleRange]) -> Batch:
    """Concatenate samples to a batch of CPU tensors.

    Args:
        keys: keys of ``Batch.sparse``, in the order of ``Samples.ids``.
        shape: sample shape, needed for an empty batch.
        ranges: samples, in order; none give an empty batch.
    """
    if not ranges:
        empty = np.zeros(0, np.int64)
        none = PermutedSamples(void_samples(0, shape)._replace(rows=empty, times=empty))
        ranges = [SampleRange(none, 0, 0)]
    pieces = [samples for samples, _, _ in ranges]
    values, lengths, id_weights, totals, fields = concat_samples(
        [start for _, start, _ in ranges],
        [stop for _, _, stop in ranges],
        len(keys),
        [field for fields in zip(*[piece.fields for piece in pieces], strict=True) for field in fields],
        [piece.values for piece in pieces],
        [piece.offsets for piece in pieces],
        [piece.weights for piece in pieces] if pieces[0].has_weights else [],
    )
    dense, labels, *optional = fields
    # Valid by construction, so skip the checks.
    sparse = KeyedJaggedTensor.unchecked(
        list(keys),
        values,
        id_weights if pieces[0].has_weights else None,
        lengths,
        stride=len(labels),
        length_per_key=totals.tolist(),
    )
    return Batch(dense, sparse, labels, **dict(zip(pieces[0].optional, optional, strict=True)))


_NONE = torch.zeros(0, dtype=torch.int64)


class _Writable:
    """Array interface that presents a read-only array as one that may be written."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array  # keeps the memory alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor that is only read: a view, unless the array is not contiguous."""
    array = np.ascontiguousarray(array)
    # torch takes only arrays that may be written; arrays from Arrow may not.
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


def _common_length(lengths: Ints) -> int | None:
    """Return the length that all entries equal; None if lengths differ, or there are none."""
    if len(lengths) == 0:
        return None
    width = int(lengths[0])
    return width if bool((lengths == width).all()) else None
