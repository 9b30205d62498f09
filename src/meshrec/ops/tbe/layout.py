"""The places of each feature's IDs, bags and output rows, shared by the plain torch kernels.

Bags come segment-major: segment ``s = block * K + key`` holds the bags of one key of one block. A block is
the message of one source rank; a single process has one block. ``segments`` holds the first bag of each
segment.
"""

import itertools
import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

# F features, K keys, R blocks, S = R*K segments, N ids, B bags of one segment, D width

SUM, MEAN, NONE = 0, 1, 2
"""The codes of the pooling modes."""


class Lookups(NamedTuple):
    """The keys of a batch and the tables to look them up in: the arguments that all tbe ops share."""

    values: Tensor
    """int32 or int64 [N]."""
    offsets: Tensor
    """int32 or int64: the start of each bag, and N."""
    per_sample_weights: Tensor | None
    """float32 [N]."""
    segments: Tensor | None
    """int64 on the CPU: the first bag of each segment, and the number of bags. None: equally many bags per
    key.
    """
    num_keys: int
    keys: list[int]
    """[F]: the key that the feature reads."""
    tables: list[int]
    """[F]: the table it reads, as an index into the weights."""
    pooling: list[int]
    """[F]: 0 SUM, 1 MEAN, 2 NONE."""
    flat: bool
    """Whether the output has one dimension (``[B, D]`` of one feature after the other) instead of ``[B, sum
    of D]``.
    """
    dims: list[int]
    """[F]: the width of the feature."""

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> tuple["Lookups", Sequence[Any]]:
        """Split the arguments of an op into those that all ops share, and the op's own."""
        shared = len(cls._fields)
        return cls._make(arguments[:shared]), arguments[shared:]

    def of_tables(self, chosen: Sequence[int]) -> "Lookups":
        """Return the same batch for some of the tables, numbered in their order. Other tables are skipped."""
        if len(chosen) > max(self.tables, default=-1) and all(map(operator.eq, chosen, itertools.count())):
            return self
        index = {table: position for position, table in enumerate(chosen)}
        return self._replace(tables=[index.get(table, -1) for table in self.tables])


class FeaturePiece(NamedTuple):
    """The part of one feature in one block."""

    feature: int
    ids: slice
    """Its IDs in ``values_N``."""
    lengths_B: Tensor
    """int64: the number of IDs in each of its bags."""
    rows: slice
    """Its rows of a 2-D output."""
    columns: slice
    """Its columns of a 2-D output."""
    flat: slice
    """Its elements of a 1-D output."""

    def bag_of_id(self) -> Tensor:
        """Return the index, within the piece, of the bag of each ID, int64 [n]."""
        return torch.repeat_interleave(self.lengths_B)

    def of(self, output: Tensor, dim: int) -> Tensor:
        """Return the piece's rows, ``[bags or ids, dim]``, as a view of an output (or of its gradient)."""
        if output.dim() == 1:
            return output[self.flat].view(-1, dim)
        return output[self.rows, self.columns]


class OutputLayout(NamedTuple):
    """All pieces in the order of the flat output, and the total number of rows (2-D) or elements (1-D)."""

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
    """Return the first bag of each segment, and the end of the last one (R*K + 1 integers)."""
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
    """Compute the place of every feature of every block.

    Raises:
        ValueError: a width is below 1, NONE is used with a 2-D output, or features of a 2-D output have
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
