"""ID feature for hashed tables, which assign rows to 64-bit keys during training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from meshrec.data.dataset import Feature
from meshrec.data.features.ids import LIST_KINDS, IdFeature
from meshrec.data.features.values import Kind, decoded, hashes_and_missing, integers_of, is_missing, kind_of
from meshrec.data.samples import Ints
from meshrec.tables.hashed.keys import LFU, LRU, TTL, Eviction, LowestNorm, MinCount
from meshrec.tables.hashed.keys import Hashed as HashedKeys

_EVICTIONS: dict[str, Callable[[], Eviction | None]] = {
    "lru": LRU,
    "lfu": LFU,
    "lowest_norm": LowestNorm,
    "error": lambda: None,
}


@dataclass(frozen=True, kw_only=True)
class Key(IdFeature):
    """ID feature that converts values to 64-bit hashed table keys (``meshrec.Hashed``).

    It needs no vocabulary, and different keys do not share a row. The table admits keys that occur in
    training, and evicts others when it is full.

    The key of an integer is the integer. The key of a string is its 64-bit hash
    (`meshrec.data.features.hashes_of`). With a billion strings, the probability that any two have the same
    key is 3 %.

    Args:
        max_rows: maximum table rows, over all ranks.
        min_count: occurrences in training before a key is admitted.
        evict: eviction policy of a full table: "lru" (least recently updated), "lfu" (least frequently
            read), "lowest_norm", or "error" (raise an error).
        ttl_seconds: also evict keys without an update for this many seconds of event time, which replaces
            ``evict``; see `meshrec.TTL`. Streams have event times, `meshrec train` has none.
        seed: seed for initial row values.
        missing: whether null, NaN and empty strings get the key -2^63. Otherwise they are damage.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "number", "text", "time", *LIST_KINDS)
    takes_whole_only: ClassVar[bool] = True
    needs_fit: ClassVar[bool] = False
    missing_key: ClassVar[int] = -(1 << 63)

    max_rows: int
    min_count: int = 1
    evict: str = "lru"
    ttl_seconds: int | None = None
    seed: int = 0
    missing: bool = True

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        if self.evict not in _EVICTIONS or self.min_count < 1:
            raise ValueError(
                f"feature {self.name!r}: evict is one of {list(_EVICTIONS)} and min_count at least 1, got "
                f"{self.evict!r} and {self.min_count}."
            )
        try:
            # Checks the remaining options.
            self.keys()
        except ValueError as error:
            raise ValueError(f"feature {self.name!r}: {error}") from error

    def keys(self) -> HashedKeys:
        """Return the hashed table options."""
        # Without admission, the first occurrence gets a row.
        admit = MinCount(self.min_count) if self.min_count > 1 else None
        ttl = self.ttl_seconds
        evict = _EVICTIONS[self.evict]() if ttl is None else TTL(seconds=ttl)
        return HashedKeys(max_rows=self.max_rows, admit=admit, evict=evict, seed=self.seed)

    @property
    def rows(self) -> int:
        """Maximum table rows."""
        return self.max_rows

    def feature(self) -> Feature:
        """Return the description of the feature for models and the planner, with hashed table options."""
        return replace(IdFeature.feature(self), keys=self.keys())

    def rows_of(self, array: Any) -> Ints:
        """Return the key per value, int64 [n]."""
        if kind_of(array.type) == "text":
            hashes, missing = hashes_and_missing(array)
            # A copy, because missing keys are written below.
            keys = hashes.view(np.int64).copy()
        else:
            array = decoded(array)
            keys, missing = integers_of(array).copy(), is_missing(array)
        if missing is not None:
            # The smallest int64, which no plausible ID uses.
            keys[missing] = self.missing_key
        return keys

    @property
    def null_remedy(self) -> str | None:
        return None if self.missing else f"Set missing=True of feature {self.name!r}"
