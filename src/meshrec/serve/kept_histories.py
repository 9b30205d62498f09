"""Keys and values of users' histories that are kept between requests, within a limit of bytes.

What is kept of a history depends on its items, their times and the weights alone. So entries are found by a
digest of the history, and requests do not name their user.
"""

import hashlib
from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data.samples import Ints
from meshrec.export import Predictor
from meshrec.models import KeptTokens
from meshrec.serve.requests import Floats, Request

_OVERHEAD = 512
"""Bytes that an entry takes beside its rows."""


class KeptCounts(NamedTuple):
    """Counts of a batch's histories, and the bytes that are kept after it."""

    hits: int
    """The number of histories of which a beginning, or all, was kept."""
    misses: int
    """The number of histories of which nothing was kept, except for empty ones."""
    num_bytes: int


class KeptHistories:
    """Keys and values of the tokens of histories, by the digest of the history; the least recently used leave
    first.

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

    @property
    def num_bytes(self) -> int:
        """The bytes that are kept."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, digests: list[bytes]) -> Tensor | None:
        """Return the rows of the longest beginning of a history that is kept; None if there is none.

        Args:
            digests: what `digests_of` returned for the history.
        """
        for digest in reversed(digests):
            rows = self._entries.get(digest)
            if rows is not None:
                self._entries.move_to_end(digest)
                return rows
        return None

    def keep(self, digests: list[bytes], rows: Tensor) -> None:
        """Keep the rows of a history. They replace those of its longest prefix that is kept."""
        digest = digests[-1]
        if digest in self._entries:
            return
        self._drop(next((each for each in reversed(digests) if each in self._entries), digest))
        if _size(rows) > self._max_bytes:
            return
        self._entries[digest] = rows.clone()
        self._num_bytes += _size(rows)
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Remove everything, as when weights change."""
        self._entries.clear()
        self._num_bytes = 0

    def _drop(self, digest: bytes) -> None:
        rows = self._entries.pop(digest, None)
        self._num_bytes -= 0 if rows is None else _size(rows)


def digests_of(values_NF: Ints) -> list[bytes]:
    """Return a digest of each beginning of a history, from its first item alone to all of it.

    Args:
        values_NF: the values that are known of each item: its ID, and its time if the model reads times.
    """
    found, hasher = [], hashlib.blake2b(digest_size=16)
    for row in np.ascontiguousarray(values_NF):
        hasher.update(row.data)
        found.append(hasher.copy().digest())
    return found


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
        digests = self._digests(values, lengths)
        rows = [self._kept.find(each) for each in digests]
        nothing = torch.zeros(0, *self._kept_shape)
        kept = KeptTokens(
            torch.cat([nothing, *(each for each in rows if each is not None)]),
            torch.tensor([0 if each is None else len(each) for each in rows], dtype=torch.int64),
        )
        found = self._advance([*map(torch.from_numpy, values)], [*map(torch.from_numpy, lengths)], kept)
        own = found.kept.rows.split(found.kept.lengths_B.tolist())
        for each, encoded in zip(digests, own, strict=True):
            if each:
                self._kept.keep(each, encoded)
        hits = sum(each is not None for each in rows)
        misses = sum(bool(each) for each in digests) - hits
        return found.query_BV.numpy(), KeptCounts(hits, misses, self._kept.num_bytes)

    @staticmethod
    def _digests(values: list[Ints], lengths: list[Ints]) -> list[list[bytes]]:
        if any(not np.array_equal(each, lengths[0]) for each in lengths):
            at = int((lengths[1] != lengths[0]).argmax())
            raise ValueError(
                f"sample {at} has a history of {lengths[0][at]} items and {lengths[1][at]} times. Give every "
                "item of the history its time."
            )
        together = np.stack(values, axis=1)
        return [digests_of(each) for each in np.split(together, lengths[0].cumsum()[:-1])]


def _size(rows: Tensor) -> int:
    return _OVERHEAD + rows.numel() * rows.element_size()
