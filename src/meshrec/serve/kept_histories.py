"""Keys and values of users' histories that are kept between requests, within a limit of bytes.

What is kept of a history depends on its items, their times and the weights alone. So entries are found by the
history, and requests do not name their user.
"""

from collections import Counter, OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data.samples import Ints
from meshrec.export import Predictor
from meshrec.models import KeptTokens
from meshrec.serve.requests import Floats, Request

# N items of a history, F values that are known of an item

_OVERHEAD = 512
"""Bytes that an entry takes beside its rows and its history."""


class KeptCounts(NamedTuple):
    """Counts of a batch's histories, and the bytes that are kept after it."""

    hits: int
    """The number of histories of which a beginning, or all, was kept."""
    misses: int
    """The number of histories of which nothing was kept, except for empty ones."""
    num_bytes: int


class Beginning(NamedTuple):
    """The beginning of a history that is kept."""

    num_items: int
    rows: Tensor
    """The keys and values of its tokens, maybe with room after them; see `KeptTokens`."""


class KeptHistories:
    """Keys and values of the tokens of histories, by the history; the least recently used leave first.

    A history is the values [N, F] that are known of its items: their IDs, and their times if the model reads
    times.

    Args:
        max_bytes: the limit of what all entries take together. A larger history is not kept at all.

    Raises:
        ValueError: the limit is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be 0, which keeps nothing, or more.")
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lengths: Counter[tuple[bytes, int]] = Counter()  # of entries, by their first item and length

    @property
    def num_bytes(self) -> int:
        """The bytes that are kept."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, values_NF: Ints) -> Beginning | None:
        """Return the longest beginning of a history that is kept; None if there is none."""
        values, width = values_NF.tobytes(), values_NF[:1].nbytes
        for num_items in range(len(values_NF), 0, -1):
            if (values[:width], num_items) in self._lengths:
                rows = self._entries.get(values[: num_items * width])
                if rows is not None:
                    self._entries.move_to_end(values[: num_items * width])
                    return Beginning(num_items, rows)
        return None

    def keep(self, values_NF: Ints, rows: Tensor, found: Beginning | None = None) -> None:
        """Keep the rows of a history, whose memory nobody else writes to.

        Args:
            values_NF: the history, of one item or more.
            rows: the keys and values of its tokens.
            found: what `find` returned for the history; the rows replace that entry.
        """
        values, width = values_NF.tobytes(), values_NF[:1].nbytes
        if found is not None:
            self._drop(values[: found.num_items * width], width)
        self._drop(values, width)
        if _size(values, rows) > self._max_bytes:
            return
        self._entries[values] = rows
        self._lengths[values[:width], len(values_NF)] += 1
        self._num_bytes += _size(values, rows)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)), width)

    def clear(self) -> None:
        """Remove everything, as when weights change."""
        self._entries.clear()
        self._lengths.clear()
        self._num_bytes = 0

    def _drop(self, values: bytes, width: int) -> None:
        rows = self._entries.pop(values, None)
        if rows is None:
            return
        self._num_bytes -= _size(values, rows)
        kind = values[:width], len(values) // width
        self._lengths[kind] -= 1
        if not self._lengths[kind]:
            del self._lengths[kind]


class IncrementalScores:
    """Queries for requests, where the beginnings of histories may be kept from earlier ones.

    Call it from one thread.

    Args:
        predictor: a predictor with `Predictor.incremental`.
        max_bytes: the limit of what is kept.
    """

    def __init__(self, predictor: Predictor, max_bytes: int) -> None:
        assert predictor.incremental is not None
        self._advance, self._kept = predictor.advance, KeptHistories(max_bytes)
        self._kept_shape = predictor.incremental.kept_shape
        self._places = [predictor.features.index(each) for each in predictor.incremental.features]

    def clear(self) -> None:
        """Remove everything that is kept, as when weights change."""
        self._kept.clear()

    def __call__(self, request: Request) -> tuple[Floats, KeptCounts]:
        """Return the queries [B, V] of a request, and what was found.

        Raises:
            ValueError: a history is too long or has not one time for each item, or an ID lies outside the
                table.
            PackageError: the file of the weights was cut short meanwhile.
        """
        values, lengths = ([of[at] for at in self._places] for of in (request.values, request.lengths))
        histories = self._histories(values, lengths)
        found = [self._kept.find(each) for each in histories]
        advanced = self._advance(
            [torch.tensor(each) for each in values],
            [torch.tensor(each) for each in lengths],
            self._rows_of(found),
        )
        is_alone, lengths_B = len(histories) == 1, advanced.kept.lengths_B.tolist()
        own = [advanced.kept.rows] if is_alone else advanced.kept.rows.split(lengths_B, dim=1)
        for each, beginning, rows in zip(histories, found, own, strict=True):
            if len(each):
                self._kept.keep(each, rows if is_alone else rows.clone(), beginning)
        hits = sum(each is not None for each in found)
        misses = sum(len(each) > 0 for each in histories) - hits
        return advanced.query_BV.numpy(), KeptCounts(hits, misses, self._kept.num_bytes)

    def _rows_of(self, found: list[Beginning | None]) -> KeptTokens:
        """Return what is kept of the histories of a batch. That of a single one has its room after it."""
        num_kept = torch.tensor([0 if each is None else each.num_items for each in found], dtype=torch.int64)
        rows = [each.rows for each in found if each is not None]
        if len(found) > 1 or not rows:
            nothing = KeptTokens.none(self._kept_shape, len(found)).rows
            own = num_kept[num_kept > 0].tolist()
            rows = [torch.cat([nothing, *(each[:, :n] for each, n in zip(rows, own, strict=True))], dim=1)]
        return KeptTokens(rows[0], num_kept)

    @staticmethod
    def _histories(values: list[Ints], lengths: list[Ints]) -> list[Ints]:
        """Return the values [N, F] of each history."""
        if any(not np.array_equal(each, lengths[0]) for each in lengths):
            at = int((lengths[1] != lengths[0]).argmax())
            raise ValueError(
                f"sample {at} has a history of {lengths[0][at]} items and {lengths[1][at]} times. Give every "
                "item of the history its time."
            )
        return np.split(np.stack(values, axis=1), lengths[0].cumsum()[:-1])


def _size(values: bytes, rows: Tensor) -> int:
    return _OVERHEAD + len(values) + rows.untyped_storage().nbytes()
