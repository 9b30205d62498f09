"""Positions of IDs and output rows for each feature: index ranges for the plain torch kernels.

A bag is the list of IDs that a sample has for a key. A batch consists of blocks. A block is the message from
a source rank; without sharding there is a single block. All bags for the same key and block form a segment.
Bags are stored segment by segment, and segment ``s = block * K + key``. The tensor ``segments`` holds the bag
index where each segment starts, followed by the bag count.

Example: two ranks with two samples each and the keys a and b give four segments with two bags each, in
the order (rank 0, a), (rank 0, b), (rank 1, a), (rank 1, b). Then ``segments`` is [0, 2, 4, 6, 8].
"""

import itertools
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Shape legend: F features, K keys, R blocks, S = R * K segments, N IDs, B bags per segment, D width.

SUM, MEAN, NONE = 0, 1, 2
"""Pooling mode codes. The C++ and Triton kernels use the same numbers."""


class Lookups(NamedTuple):
    """A batch of IDs, and for each feature the table to read and the pooling mode.

    The TBE operators take these fields as arguments in this order (``tbe_forward`` without ``dims``). Several
    features may read the same key, and several features may read the same table.
    """

    values: Tensor
    """IDs of all bags, concatenated; int32 or int64 [N]."""
    offsets: Tensor
    """ID index where each bag starts, followed by N; int32 or int64 [number of bags + 1]."""
    per_sample_weights: Tensor | None
    """Weight per ID, float32 [N]. None: all weights are 1."""
    segments: Tensor | None
    """Bag index where each segment starts, followed by the bag count; int64 [S + 1] on the CPU.

    None: there is a single block, and all keys have the same number of bags.
    """
    num_keys: int
    """K, the number of keys in the batch."""
    keys: list[int]
    """Key that each feature reads, from 0 to K - 1; [F]."""
    tables: list[int]
    """Table that each feature reads, as an index into the weights; [F]."""
    pooling: list[int]
    """Pooling mode per feature: 0 SUM, 1 MEAN, 2 NONE (an output row per ID); [F]."""
    flat: bool
    """Whether the output is a vector: a ``[B, D]`` matrix per block and feature, row-major, end to end.

    False: the output is a single matrix ``[B, sum of D]``, in which each feature has D columns.
    """
    dims: list[int]
    """Width per feature: the column count in its table; [F]."""

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> tuple["Lookups", Sequence[Any]]:
        """Split the arguments of a TBE operator into the ``Lookups`` fields and the remaining arguments."""
        shared = len(cls._fields)
        return cls._make(arguments[:shared]), arguments[shared:]

    def of_tables(self, selected: Sequence[int]) -> "Lookups":
        """Return a copy that reads only the selected tables, and renumber these in the given order.

        Features of other tables get table number -1, which gradient and update operators skip. Selecting [3,
        1] renumbers table 3 to 0, table 1 to 1, and table 2 to -1.
        """
        # Selecting all tables is the common case. Avoid new lists on every step.
        if len(selected) > max(self.tables, default=-1) and all(
            map(operator.eq, selected, itertools.count())
        ):
            return self
        index = {table: position for position, table in enumerate(selected)}
        return self._replace(tables=[index.get(table, -1) for table in self.tables])

    def output_shape(self, out_size: int) -> list[int]:
        """Return the shape of the lookup output.

        Args:
            out_size: number of elements if ``flat``, else number of rows.
        """
        return [out_size] if self.flat else [out_size, sum(self.dims)]

    def layout(self) -> "OutputLayout":
        """Return the index ranges for each feature in each block; see `make_layout`."""
        return make_layout(
            self.offsets,
            self.segments,
            self.num_keys,
            self.keys,
            self.dims,
            pooling=self.pooling,
            flat=self.flat,
        )


class FeaturePiece(NamedTuple):
    """A feature's IDs, bag lengths and output range in one block. A block comes from one source rank."""

    feature: int
    ids: slice
    """Range of the IDs in ``Lookups.values``."""
    lengths_B: Tensor
    """ID count per bag, int64 [B]."""
    rows: slice
    """Range of output rows, if the output is 2-D."""
    columns: slice
    """Range of output columns, if the output is 2-D."""
    flat: slice
    """Range of output elements, if the output is 1-D."""

    def bag_of_id(self) -> Tensor:
        """Return the bag that each ID belongs to, as an index within this piece; int64 [ID count]."""
        return torch.repeat_interleave(self.lengths_B)

    def view_of(self, output: Tensor, dim: int) -> Tensor:
        """Return a view of the rows in the output (or in the output gradient) that belong to this piece.

        Returns:
            ``[bags, dim]``, or ``[ids, dim]`` for a feature without pooling.
        """
        if output.dim() == 1:
            return output[self.flat].view(-1, dim)
        return output[self.rows, self.columns]


class OutputLayout(NamedTuple):
    """All feature pieces, block by block, and the output size."""

    pieces: list[FeaturePiece]
    """First all features of block 0, then all features of block 1, etc."""
    out_size: int
    """Number of rows in a 2-D output, or number of elements in a 1-D output."""


def check_offsets(offsets: Tensor, num_ids: int) -> None:
    """Raise ValueError unless the offsets start at 0, never decrease, and end at ``num_ids``."""
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError("values and offsets must have one dimension, and offsets at least one entry.")
    # Reads the tensor: only the plain torch versions call this on a GPU.
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"offsets start at {first}, not at 0. Pass offsets made from the lengths.")
    # Checked before the last offset, because the message can name the bag.
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if falls.numel() > 0:
        bag = int(falls[0])
        raise ValueError(
            f"offsets fall from {int(offsets[bag])} to {int(offsets[bag + 1])} at bag {bag}. "
            "Offsets must never fall; call validate() on the input to find the key and sample."
        )
    if last != num_ids:
        raise ValueError(
            f"the lengths sum to {last} but there are {num_ids} values. "
            "Call validate() on the input to find the key and sample."
        )


def segment_bounds(num_bags: int, segments: Tensor | None, num_keys: int) -> list[int]:
    """Return the first bag index per segment, followed by the bag count: R * K + 1 integers.

    A segment consists of all bags for the same key and block. A batch has R blocks and K keys.

    Args:
        segments: bounds to check and return, int64 [R * K + 1] on the CPU. None: compute them for a single
            block (R = 1) in which all keys have the same bag count.

    Raises:
        ValueError: the bounds do not match the bag count or key count.
    """
    # On the CPU by contract, so tolist() does not synchronize.
    if segments is not None:
        bounds: list[int] = segments.tolist()
        if not bounds or num_keys == 0 or (len(bounds) - 1) % num_keys != 0:
            raise ValueError("segments must be an int64 CPU tensor with blocks * keys + 1 entries.")
        if bounds[0] != 0 or bounds[-1] != num_bags or any(low > high for low, high in pairwise(bounds)):
            raise ValueError(f"segments must rise from 0 to the number of bags ({num_bags}).")
        return bounds
    if num_keys == 0 or num_bags % num_keys != 0:
        raise ValueError(
            f"{num_bags} bags do not divide among {num_keys} keys. "
            "Pass the batch size of each key when they differ."
        )
    per_key = num_bags // num_keys
    return [key * per_key for key in range(num_keys + 1)]


def make_layout(
    offsets: Tensor,
    segments: Tensor | None,
    num_keys: int,
    keys: list[int],
    dims: list[int],
    *,
    pooling: list[int],
    flat: bool,
) -> OutputLayout:
    """Compute where the IDs and output rows of every feature are, block by block.

    Args:
        offsets: ID index where each bag starts, followed by N.
        segments: first bag index per segment (all bags for the same key and block), followed by the bag
            count. None: there is a single block, and all keys have the same number of bags.
        keys: key read by every feature, [F].
        dims: feature widths, [F].
        pooling: pooling mode codes, [F].

    Raises:
        ValueError: a width is below 1, NONE is used with a 2-D output, or features in a 2-D output have
            different batch sizes.
    """
    if NONE in pooling and not flat:
        raise ValueError("lookups that are not pooled have a flat output.")
    for feature, dim in enumerate(dims):
        if dim < 1:
            raise ValueError(f"feature {feature} is {dim} wide; every width is at least 1.")
    bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
    pieces: list[FeaturePiece] = []
    first_row = first_element = 0
    # A block has a segment per key.
    for first_segment in range(0, len(bounds) - 1, num_keys):
        # All features of a 2-D output share their rows, so the bag count of the first key is the row count.
        block_rows = bounds[first_segment + 1] - bounds[first_segment]
        column = 0
        for feature, (key, dim) in enumerate(zip(keys, dims, strict=True)):
            # Features may read the same key, so the bags are found through the key, not through the feature.
            low, high = bounds[first_segment + key], bounds[first_segment + key + 1]
            if not flat and high - low != block_rows:
                raise ValueError(
                    f"feature {feature} has {high - low} samples and the first key {block_rows}. "
                    "One output matrix needs one batch size; ask for a flat output otherwise."
                )
            # One more offset than bags: the last is the end of the last bag.
            offsets_B1 = offsets[low : high + 1].long()
            # On a GPU this synchronizes, which only the fallback can afford.
            ids = slice(int(offsets_B1[0]), int(offsets_B1[-1]))
            num_rows = ids.stop - ids.start if pooling[feature] == NONE else high - low
            end_element = first_element + num_rows * dim
            # rows and columns apply to a 2-D output, flat to a 1-D output. Both are always set.
            pieces.append(
                FeaturePiece(
                    feature=feature,
                    ids=ids,
                    lengths_B=offsets_B1.diff(),
                    rows=slice(first_row, first_row + block_rows),
                    columns=slice(column, column + dim),
                    flat=slice(first_element, end_element),
                )
            )
            # The next feature follows in the same rows (2-D), or after these elements (1-D).
            column, first_element = column + dim, end_element
        first_row += block_rows
    return OutputLayout(pieces, first_element if flat else first_row)
