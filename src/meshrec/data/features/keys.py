"""IDs as 64-bit keys, for tables that give rows to the IDs that come."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from meshrec.data.dataset import Feature
from meshrec.data.encoding import Place
from meshrec.data.faults import Faults
from meshrec.data.features.ids import IdFeature, check_missing
from meshrec.data.features.values import Kind, Values, hashes_and_missing, integers_of, is_missing, is_text
from meshrec.data.samples import Bools, Ints
from meshrec.tables.hashed_keys import LFU, LRU, Eviction, LowestNorm, MinCount
from meshrec.tables.hashed_keys import Hashed as HashedKeys

_EVICTIONS: dict[str, Callable[[], Eviction | None]] = {
    "lru": LRU,
    "lfu": LFU,
    "lowest_norm": LowestNorm,
    "error": lambda: None,
}


@dataclass(frozen=True, kw_only=True)
class Key(IdFeature):
    """Values as 64-bit keys of a table with hashed keys (``meshrec.Hashed``).

    There is no vocabulary, and no two values share a row. The table gives rows to the values that training
    meets, and takes them back.

    An integer is its own key. The key of a text is its 64-bit hash (`meshrec.data.features.hashes_of`), and
    two texts have the same one in a table of a billion with a chance of 3 %.

    Args:
        max_rows: the number of rows that the table may have, on all ranks together.
        min_count: a value gets a row once training has read it so often.
        evict: whose rows go when the table is full: ``"lru"`` (the longest without an update), ``"lfu"`` (the
            least often read), ``"lowest_norm"``; ``"error"``: a full table is an error.
        seed: the seed of first rows.
        missing: null, NaN and empty texts share the key -2^63; otherwise they are damage.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "text", "time", "list of integer", "list of text")
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
        """Return the keys of the table."""
        admit = MinCount(self.min_count) if self.min_count > 1 else None
        return HashedKeys(max_rows=self.max_rows, admit=admit, evict=_EVICTIONS[self.evict](), seed=self.seed)

    @property
    def is_fitted(self) -> bool:
        """True: there is nothing to fit."""
        return True

    @property
    def rows(self) -> int:
        """The number of rows that the table may have."""
        return self.max_rows

    def feature(self) -> Feature:
        """Return what a model needs to know of the IDs."""
        return Feature(
            name=self.name,
            num_embeddings=self.max_rows,
            average_length=self.average_length,
            sequence=self.sequence,
            table=self.table,
            keys=self.keys(),
        )

    def rows_of(self, array: Any) -> Ints:
        """Return the keys of values, int64."""
        if _is_text(array):
            hashes, missing = hashes_and_missing(array)
            keys = hashes.view(np.int64).copy()
        else:
            array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
            keys, missing = integers_of(array).copy(), is_missing(array)
        if missing is not None:
            keys[missing] = self.missing_key
        return keys

    def check(self, rows: Ints, found: Values, place: Place, kept: Bools, faults: Faults) -> None:
        """Take samples with null out of ``kept``, unless ``missing`` says otherwise."""
        if not self.missing:
            check_missing(self, found, place, kept, faults)


def _is_text(array: Any) -> bool:
    kind = array.type
    return is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)
