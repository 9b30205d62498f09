"""Coverage of embedding tables: how many rows the values in some data use, and how many values collide."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from meshrec.data.features.ids import IdFeature
from meshrec.data.features.sketches import Distinct
from meshrec.data.features.values import hashes_of, is_missing
from meshrec.data.features.vocabulary import Vocabulary


class Coverage(NamedTuple):
    """Statistics on how the values of an ID feature, in some data, are spread over the rows of its table.

    Crosses are not analyzed by value: ``missing``, ``distinct`` and ``colliding`` are 0.
    """

    name: str
    """Name of the feature."""
    num_ids: int
    """Number of IDs in the data, including repeated ones."""
    missing: float
    """Share of IDs from null or the empty string."""
    distinct: int
    """Estimated distinct value count."""
    rows: int
    """Table rows."""
    used_rows: int
    """Number of rows that some value uses."""
    colliding: float
    """Expected share of distinct values that share a row with another value; 0 with a vocabulary."""
    unseen: float | None
    """Share of IDs outside the vocabulary; None for a feature without a vocabulary."""


class SeenValues:
    """Accumulator for the `Coverage` of one ID feature: call `add` for every table, then `coverage`."""

    def __init__(self, feature: IdFeature) -> None:
        self._feature = feature
        # Counts of IDs so far: all, missing, and outside the vocabulary.
        self._num = self._missing = self._unseen = 0
        # Whether a table row is used so far.
        self._used = np.zeros(feature.rows, np.bool_)
        self._distinct = Distinct(np.zeros(0, np.uint64))

    def add(self, table: pa.Table) -> None:
        array = self._feature.values(table).array
        rows = self._feature.rows_of(array)
        self._num += len(rows)
        # Negative rows are damage, counted elsewhere.
        self._used[rows[rows >= 0]] = True
        if pa.types.is_struct(array.type):  # crosses: only rows are counted
            return
        missing = is_missing(array)
        self._missing += 0 if missing is None else int(missing.sum())
        self._distinct = self._distinct.merged(Distinct.of(array))
        if isinstance(self._feature, Vocabulary):
            unseen = self._feature.lookup(hashes_of(array)) < 0
            self._unseen += int(unseen.sum() if missing is None else (unseen & ~missing).sum())

    def coverage(self) -> Coverage:
        distinct, rows = self._distinct.count(), self._feature.rows
        used = int(self._used.sum())
        # Expected number of values without collision, for n values hashed to m rows: n (1 - 1/m)^(n-1).
        shared = 0.0
        if distinct > 1 and not isinstance(self._feature, Vocabulary) and self._feature.is_fitted:
            shared = 1.0 - (1.0 - 1.0 / rows) ** (distinct - 1)
        num = max(self._num, 1)
        unseen = self._unseen / num if isinstance(self._feature, Vocabulary) else None
        return Coverage(
            self._feature.name, self._num, self._missing / num, distinct, rows, used, shared, unseen
        )
