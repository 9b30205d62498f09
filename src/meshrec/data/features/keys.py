"""IDs as 64-bit keys, for hashed tables that assign rows during training."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from meshrec.data.dataset import Feature
from meshrec.data.features.ids import LIST_KINDS, IdFeature
from meshrec.data.features.values import Kind, decoded, hashes_and_missing, integers_of, is_missing, kind_of
from meshrec.data.samples import Ints
from meshrec.tables.hashed.keys import LFU, LRU, Eviction, LowestNorm, MinCount
from meshrec.tables.hashed.keys import Hashed as HashedKeys

_EVICTIONS: dict[str, Callable[[], Eviction | None]] = {
    "lru": LRU,
    "lfu": LFU,
    "lowest_norm": LowestNorm,
    "error": lambda: None,
}


@dataclass(frozen=True, kw_only=True)
class Key(IdFeature):
    """Values as 64-bit keys of a hashed table (``meshrec.Hashed``).

    No vocabulary, and no collisions of rows. The table assigns rows to values seen in training, and evicts
    them.

    An integer is its own key. A string's key is its 64-bit hash (`meshrec.data.features.hashes_of`): with a
    billion strings, the probability of any collision is 3 %.

    Args:
        max_rows: maximum rows, over all ranks.
        min_count: occurrences in training before a value is admitted.
        evict: eviction policy of a full table: ``"lru"`` (least recently updated), ``"lfu"`` (least
            frequently read), ``"lowest_norm"``, or ``"error"``: raise.
        seed: seed for initial rows.
        missing: null, NaN and empty strings share the key -2^63; otherwise they are damage.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "number", "text", "time", *LIST_KINDS)
    takes_whole_only: ClassVar[bool] = True
    needs_fit: ClassVar[bool] = False
    missing_key: ClassVar[int] = -(1 << 63)

    max_rows: int
    min_count: int = 1
    evict: str = "lru"
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
            self.keys()
        except ValueError as error:
            raise ValueError(f"feature {self.name!r}: {error}") from error

    def keys(self) -> HashedKeys:
        """Return the table's hashed key options."""
        admit = MinCount(self.min_count) if self.min_count > 1 else None
        return HashedKeys(max_rows=self.max_rows, admit=admit, evict=_EVICTIONS[self.evict](), seed=self.seed)

    @property
    def rows(self) -> int:
        """Maximum rows."""
        return self.max_rows

    def feature(self) -> Feature:
        """Return the ID table for the model."""
        return replace(IdFeature.feature(self), keys=self.keys())

    def rows_of(self, array: Any) -> Ints:
        """Return int64 keys for values."""
        if kind_of(array.type) == "text":
            hashes, missing = hashes_and_missing(array)
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
