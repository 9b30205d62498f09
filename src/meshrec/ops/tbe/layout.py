"""Index ranges for IDs, bags and output rows per feature, shared by the plain torch kernels.

Bags are ordered by segment: segment ``s = block * K + key`` holds the bags for one key in one block. A block
is the message from one source rank; a single process has one block. ``segments`` holds the first
bag index per segment. With two ranks and keys a and b, the bags are: rank 0 a, rank 0 b, rank 1 a, rank 1 b.
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
"""Feature pooling mode codes, as in the kernels."""


class Lookups(NamedTuple):
    """Jagged ID batch, with table and pooling per feature: the first arguments to all TBE ops."""

    values: Tensor
    """int32 or int64 [N]."""
    offsets: Tensor
    """int32 or int64: first ID index per bag, followed by N."""
    per_sample_weights: Tensor | None
    """float32 [N]."""
    segments: Tensor | None
    """First bag index per segment, followed by the bag count; int64 [S + 1] on the CPU.

    None: one block, in which all keys have equally many bags.
    """
    num_keys: int
    keys: list[int]
    """[F]: key read by the feature."""
    tables: list[int]
    """[F]: table read by the feature, as an index into the weights."""
    pooling: list[int]
    """[F]: 0 SUM, 1 MEAN, 2 NONE."""
    flat: bool
    """Whether the output is 1-D (``[B, D]`` blocks, feature by feature) instead of ``[B, sum of D]``."""
    dims: list[int]
    """[F]: feature width."""

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> tuple["Lookups", Sequence[Any]]:
        """Split operator arguments into ``Lookups`` and the arguments after them."""
        shared = len(cls._fields)
        return cls._make(arguments[:shared]), arguments[shared:]

    def of_tables(self, selected: Sequence[int]) -> "Lookups":
        """Return lookups for only some tables, renumbered in the given order; other tables become -1.

        Selecting [3, 1] turns table 3 into 0, table 1 into 1, and table 2 into -1, which operators skip.
        """
        # Selecting all tables is the common case. Avoid new lists on every step.
        if len(selected) > max(self.tables, default=-1) and all(
            map(operator.eq, selected, itertools.count())
        ):
            return self
        index = {table: position for position, table in enumerate(selected)}
        return self._replace(tables=[index.get(table, -1) for table in self.tables])

    def output_shape(self, out_size: int) -> list[int]:
        """Return the output shape for ``out_size`` rows (2-D) or elements (flat)."""
        return [out_size] if self.flat else [out_size, sum(self.dims)]

    def layout(self) -> "OutputLayout":
        """Return the index ranges per feature and block; see `make_layout`."""
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
    """IDs, bags and output range for one feature in one block."""

    feature: int
    ids: slice
    """IDs in ``values_N``."""
    lengths_B: Tensor
    """IDs per bag, int64."""
    rows: slice
    """Rows in a 2-D output."""
    columns: slice
    """Columns in a 2-D output."""
    flat: slice
    """Elements in a 1-D output."""

    def bag_of_id(self) -> Tensor:
        """Return the bag index within the piece per ID: int64 [n]."""
        return torch.repeat_interleave(self.lengths_B)

    def view_of(self, output: Tensor, dim: int) -> Tensor:
        """Return the output (or output gradient) part for this piece.

        Args:
            output: whole lookup output.
            dim: feature width.

        Returns:
            A view, ``[bags, dim]``, or ``[ids, dim]`` without pooling.
        """
        if output.dim() == 1:
            return output[self.flat].view(-1, dim)
        return output[self.rows, self.columns]


class OutputLayout(NamedTuple):
    """Pieces for all features, block by block, and the output size: rows if 2-D, elements if 1-D."""

    pieces: list[FeaturePiece]
    out_size: int


def check_offsets(offsets: Tensor, num_ids: int) -> None:
    """Raise ValueError unless the offsets start at 0, never decrease, and end at ``num_ids``."""
    if offsets.dim() != 1 or offsets.numel() == 0:
        raise ValueError("values and offsets must have one dimension, and offsets at least one entry.")
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise ValueError(f"offsets start at {first}, not at 0. Pass offsets made from the lengths.")
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

    Args:
        num_bags: bag count.
        segments: the values to check and return, int64 [R * K + 1] on the CPU; None: a single block (R = 1),
            in which all keys have equally many bags.
        num_keys: K.

    Raises:
        ValueError: the bounds do not match the bag or key count.
    """
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
    """Compute the index ranges per feature and block.

    Args:
        offsets: first ID index per bag, followed by N.
        segments: first bag index per segment, followed by the bag count, or None.
        num_keys: K.
        keys: [F].
        dims: [F].
        pooling: [F].
        flat: whether the output is 1-D.

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
    for first_segment in range(0, len(bounds) - 1, num_keys):
        block_rows = bounds[first_segment + 1] - bounds[first_segment]
        column = 0
        for feature, (key, dim) in enumerate(zip(keys, dims, strict=True)):
            low, high = bounds[first_segment + key], bounds[first_segment + key + 1]
            if not flat and high - low != block_rows:
                raise ValueError(
                    f"feature {feature} has {high - low} samples and the first key {block_rows}. "
                    "One output matrix needs one batch size; ask for a flat output otherwise."
                )
            offsets_B1 = offsets[low : high + 1].long()
            # On a GPU this synchronizes, which only the fallback can afford.
            ids = slice(int(offsets_B1[0]), int(offsets_B1[-1]))
            num_rows = ids.stop - ids.start if pooling[feature] == NONE else high - low
            end_element = first_element + num_rows * dim
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
            column, first_element = column + dim, end_element
        first_row += block_rows
    return OutputLayout(pieces, first_element if flat else first_row)
