"""LRU cache for the attention keys and values of user histories (a KV cache), limited in bytes.

When a user returns with a longer history, only the new items are encoded. Cached tensors depend only on the
history's items, their times and the weights. So entries are looked up by history, and requests do not name
users.
"""

from collections import Counter, OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data.samples import Ints
from meshrec.export import Predictor
from meshrec.models import TokenCache
from meshrec.serve.requests import Floats, Request

# N items per history, F values per item

# Estimated bytes of Python objects per entry, counted in addition to rows and history.
_OVERHEAD = 512


class CacheCounts(NamedTuple):
    """Cache hits and misses in a batch, and the cache size afterwards.

    Attributes:
        hits: number of histories with a cached prefix.
        misses: number of nonempty histories without a cached prefix.
        num_bytes: bytes in the cache after the batch.
    """

    hits: int
    misses: int
    num_bytes: int


class CachedPrefix(NamedTuple):
    """Cache entry for the first items of a history.

    Attributes:
        num_items: number of items in this prefix.
        rows: attention keys and values of these items, [layers, items, values per item]. The tensor may have
            unused capacity for further items at the end; see `TokenCache`.
    """

    num_items: int
    rows: Tensor


class HistoryCache:
    """KV cache for user histories with least-recently-used eviction.

    A lookup finds the longest cached prefix of a history. A history is an array [N, F] with F values per
    item: the ID, and the time if the model uses times.

    Args:
        max_bytes: limit on the total size; a single larger history is not cached.

    Raises:
        ValueError: the limit is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be at least 0 (0: no cache), got {max_bytes}.")
        self._max_bytes, self._num_bytes = max_bytes, 0
        # Attention keys and values by the bytes of the history, least recently used first.
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()
        # Number of entries by first item and length: lets `find` skip lengths without entries.
        self._lengths: Counter[tuple[bytes, int]] = Counter()

    @property
    def num_bytes(self) -> int:
        """Current cache size in bytes."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, values_NF: Ints) -> CachedPrefix | None:
        """Return the longest cached prefix of a history, and mark it as used; None if no prefix is cached."""
        values, width = values_NF.tobytes(), values_NF[:1].nbytes
        # Longest prefix first, because it leaves the fewest items to encode.
        for num_items in range(len(values_NF), 0, -1):
            # Building a key copies up to the whole history: test the cheap count first.
            if (values[:width], num_items) in self._lengths:
                rows = self._entries.get(values[: num_items * width])
                if rows is not None:
                    self._entries.move_to_end(values[: num_items * width])
                    return CachedPrefix(num_items, rows)
        return None

    def put(self, values_NF: Ints, rows: Tensor, prefix: CachedPrefix | None = None) -> None:
        """Add an entry for a history, and evict the least recently used entries above the size limit.

        Args:
            rows: attention keys and values of all items, [layers, N, values per item]. The caller must not
                change them afterwards.
            prefix: result of `find` for this history. The new entry replaces the entry of the prefix. None:
                no prefix is cached.
        """
        values, width = values_NF.tobytes(), values_NF[:1].nbytes
        if prefix is not None:
            # The longer entry serves every request which the prefix would, as histories only grow.
            self._drop(values[: prefix.num_items * width], width)
        self._drop(values, width)
        if _entry_bytes(values, rows) > self._max_bytes:
            return
        self._entries[values] = rows
        self._lengths[values[:width], len(values_NF)] += 1
        self._num_bytes += _entry_bytes(values, rows)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)), width)

    def clear(self) -> None:
        """Remove all entries, for example after weights changed."""
        self._entries.clear()
        self._lengths.clear()
        self._num_bytes = 0

    def _drop(self, values: bytes, width: int) -> None:
        """Remove the entry of a history, if present; ``width`` is the number of bytes per item."""
        rows = self._entries.pop(values, None)
        if rows is None:
            return
        self._num_bytes -= _entry_bytes(values, rows)
        kind = values[:width], len(values) // width
        self._lengths[kind] -= 1
        # `find` tests for the key, and the counter would grow with every history ever cached.
        if not self._lengths[kind]:
            del self._lengths[kind]


class CachedQueryEncoder:
    """Encoder of query vectors, with a KV cache for the histories of earlier requests. Not thread-safe.

    Args:
        predictor: predictor of a model which supports a KV cache (`Predictor.incremental` is not None).
    """

    def __init__(self, predictor: Predictor, max_bytes: int) -> None:
        assert predictor.incremental is not None
        # Entries are valid until the weights change; `clear` is then called.
        self._advance, self._cache = predictor.advance, HistoryCache(max_bytes)
        self._cache_shape = predictor.incremental.cache_shape
        self._feature_indices = [
            predictor.features.index(feature) for feature in predictor.incremental.features
        ]

    def clear(self) -> None:
        """Clear the cache, for example after weights changed."""
        self._cache.clear()

    def __call__(self, request: Request) -> tuple[Floats, CacheCounts]:
        """Compute the query vectors for all histories in a request, and cache the histories.

        Returns:
            Query vectors, float32 [B, V], and the numbers of cache hits and misses.

        Raises:
            ValueError: a history is too long, times do not match items, or an ID is outside the table.
            PackageError: the weights file was truncated.
        """
        values, lengths = (
            [of[at] for at in self._feature_indices] for of in (request.values, request.lengths)
        )
        histories = self._stack_histories(values, lengths)
        prefixes = [self._cache.find(history) for history in histories]
        # Whole histories: the model itself skips the items in the cache.
        advanced = self._advance(
            [torch.tensor(history) for history in values],
            [torch.tensor(history) for history in lengths],
            self._rows_of(prefixes),
        )
        is_single, lengths_B = len(histories) == 1, advanced.cache.lengths_B.tolist()
        rows_by_history = [advanced.cache.rows] if is_single else advanced.cache.rows.split(lengths_B, dim=1)
        for history, beginning, rows in zip(histories, prefixes, rows_by_history, strict=True):
            if len(history):
                # Cloned, because a slice would keep the tensor of the whole batch in memory.
                self._cache.put(history, rows if is_single else rows.clone(), beginning)
        hits = sum(history is not None for history in prefixes)
        misses = sum(len(history) > 0 for history in histories) - hits
        return advanced.query_BV.numpy(), CacheCounts(hits, misses, self._cache.num_bytes)

    def _rows_of(self, prefixes: list[CachedPrefix | None]) -> TokenCache:
        """Return the cache entries for all histories in a batch as a single `TokenCache`.

        Entries of several histories are copied into one tensor. The entry of a single history is not copied:
        new items can then be written to the unused capacity at the end of its tensor.
        """
        num_cached = torch.tensor(
            [0 if cached is None else cached.num_items for cached in prefixes], dtype=torch.int64
        )
        rows = [cached.rows for cached in prefixes if cached is not None]
        if len(prefixes) > 1 or not rows:
            # Without rows, so that the concatenation has a shape and dtype when no history is cached.
            nothing = TokenCache.empty(self._cache_shape, len(prefixes)).rows
            cached_lengths = num_cached[num_cached > 0].tolist()
            rows = [
                torch.cat(
                    [nothing, *(cached[:, :n] for cached, n in zip(rows, cached_lengths, strict=True))], dim=1
                )
            ]
        return TokenCache(rows[0], num_cached)

    @staticmethod
    def _stack_histories(values: list[Ints], lengths: list[Ints]) -> list[Ints]:
        """Return an array per history, int64 [N, F], with N items and F values per item."""
        if any(not np.array_equal(feature_lengths, lengths[0]) for feature_lengths in lengths):
            at = int((lengths[1] != lengths[0]).argmax())
            raise ValueError(
                f"sample {at} has a history with {lengths[0][at]} items but {lengths[1][at]} times. Give one "
                "time per item."
            )
        return np.split(np.stack(values, axis=1), lengths[0].cumsum()[:-1])


def _entry_bytes(values: bytes, rows: Tensor) -> int:
    """Return the size of a cache entry in bytes, including unused capacity in the storage of ``rows``."""
    return _OVERHEAD + len(values) + rows.untyped_storage().nbytes()
