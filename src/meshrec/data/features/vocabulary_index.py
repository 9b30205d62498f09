"""Look-up of the positions that values have in a vocabulary: a hash index, or a table for dense integers."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from meshrec.data.faults import DataError
from meshrec.data.features.values import hashes_of
from meshrec.data.hashing import UInt64s
from meshrec.data.samples import IdTable, Ints
from meshrec.ops.index.hash_index import HashIndex

_BLOCK_BITS = 16
"""A block has 2**16 values, so that a position in it fits 2 bytes."""
_MAX_SPARSITY = 2
"""Integers from the lowest to the highest value, per value, up to which a table takes 16 bytes per value."""


class VocabularyIndex:
    """Map from 64-bit hashes of values to positions in the vocabulary, with 18 bytes per value or less.

    The values are read once, block by block, and are not copied. Look-ups compare hashes only: an unknown
    value is taken for a known one with an equal hash, for 100 M values once in 2e11 look-ups.

    Args:
        name: feature name, for messages.
        vocabulary: distinct values, an Arrow array.

    Raises:
        DataError: two values have the same hash.
    """

    def __init__(self, name: str, vocabulary: Any) -> None:
        self._index = HashIndex(max(len(vocabulary), 1), name=f"the vocabulary of feature {name!r}")
        # Slots of a block are in the order of the hashes: the position in the block, by slot.
        self._positions = np.empty(len(vocabulary), np.uint16)
        size = 1 << _BLOCK_BITS
        for start in range(0, len(vocabulary), size):
            hashes = hashes_of(vocabulary.slice(start, size)).view(np.int64)
            order = np.argsort(hashes)
            try:
                self._index.insert(torch.from_numpy(hashes[order]))
            except ValueError as error:
                raise DataError(
                    f"feature {name!r}: two values of the vocabulary have one 64-bit hash. Hash it."
                ) from error
            self._positions[start : start + size] = order

    def find(self, hashes: UInt64s) -> Ints:
        """Return the position in the vocabulary per hash, int64 [n]; -1 for a hash of no value."""
        if not len(self._positions):
            return np.full(len(hashes), -1, np.int64)
        # A copy, because torch takes only arrays that may be written.
        hashes = hashes if hashes.flags.writeable else hashes.copy()
        slots = self._index.find(torch.from_numpy(hashes.view(np.int64))).numpy()
        # Slots of a block are consecutive. For -1, any position will do.
        positions: Ints = self._positions[slots] + ((slots >> _BLOCK_BITS) << _BLOCK_BITS)
        positions[slots < 0] = -1
        return positions


def integer_rows(vocabulary: Any, first_row: int, unseen: int) -> IdTable | None:
    """Return the table row of every integer from the lowest value to the highest.

    A look-up reads one entry, which is several times as fast as `VocabularyIndex`.

    Args:
        vocabulary: values, an Arrow array.
        first_row: table row for the first value; the next values have the next rows.
        unseen: row for integers outside the vocabulary.

    Returns:
        The rows; None if the values are sparse, are not int64, or are not distinct.
    """
    if vocabulary.type != pa.int64() or not len(vocabulary):
        return None
    lowest, highest = (bound.as_py() for bound in pc.min_max(vocabulary).values())
    size = highest - lowest + 1
    if size > _MAX_SPARSITY * len(vocabulary):
        return None
    # One entry more: integers outside the table have the last row.
    positions = np.full(size + 1, -1, np.int64)
    positions[vocabulary.to_numpy() - lowest] = np.arange(len(vocabulary))
    if np.count_nonzero(positions >= 0) < len(vocabulary):
        return None
    return IdTable(np.where(positions < 0, unseen, positions + first_row), lowest)
