"""Interaction logs, sorted by user and time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from meshrec.data.dataset import Feature
from meshrec.data.in_memory import Ranges
from meshrec.data.samples import Ints

# N interactions

HISTORY, SEEN, TIMES = "history", "seen", "times"
"""Sample feature names besides user and item."""
BLOCK = 1 << 18
"""Interactions per block: arrays of a few MB, which make the overhead per block negligible."""


@dataclass(frozen=True, kw_only=True)
class Interactions:
    """Interactions sorted by user and time.

    ``items``, ``times`` and ``rows`` are int32 or int64, and may be memory-mapped files.

    Args:
        name: display name.
        offsets: int64 [num_users + 1]. User u has the interactions ``offsets[u]`` to ``offsets[u + 1]``,
            exclusive, possibly none.
        items: item IDs [N] in their table.
        times: timestamps [N] in seconds.
        rows: row numbers [N] in the data.
        num_rows: rows in the data.
        item: item feature and table.
        catalogue: all item IDs, ascending.
        user: user feature; None: users are not a feature.
        user_ids: ID per user in the table of ``user``; -1 for a user without an ID.
        described: additional item features, with values per catalog item.
    """

    name: str
    offsets: Ints
    items: Ints
    times: Ints
    rows: Ints
    num_rows: int
    item: Feature
    catalogue: Ints
    user: Feature | None = None
    user_ids: Ints | None = None
    described: Mapping[str, tuple[Feature, Ranges]] = field(default_factory=dict)

    @property
    def num_users(self) -> int:
        """User count, including users without interactions."""
        return len(self.offsets) - 1

    @property
    def firsts(self) -> Ints:
        """First interaction per user."""
        return self.offsets[:-1]

    @property
    def stops(self) -> Ints:
        """Interaction end per user."""
        return self.offsets[1:]

    def users_of(self, interactions: Ints) -> Ints:
        """Return the user number by interaction."""
        # Users without interactions share their offset with the next user, who is the last of equal offsets.
        return np.searchsorted(self.offsets, interactions, side="right") - 1

    def positions(self, items: Ints) -> Ints:
        """Return items' catalog positions."""
        # Python integers: keys of hashed tables cover the whole range of int64.
        first, last = self.catalogue[[0, -1]].tolist()
        if last - first == len(self.catalogue) - 1:
            # Subtraction is many times faster than a search, and most vocabularies have no gaps.
            positions: Ints = items - first
            return positions
        return np.searchsorted(self.catalogue, items)

    def blocks(self, stops: Ints) -> "Iterator[Block]":
        """Yield each user's interactions before ``stops`` [num_users], in order.

        Logs may exceed memory, so reads of a whole log go block by block.
        """
        for start in range(0, len(self.items), BLOCK):
            indices = np.arange(start, min(start + BLOCK, len(self.items)))
            first, last = self.users_of(indices[[0, -1]])
            lengths = np.diff(self.offsets[first : last + 2].clip(start, start + len(indices)))
            users = np.repeat(np.arange(first, last + 1), lengths)
            is_before = indices < stops[users]
            yield Block(self, indices[is_before], users[is_before])


class Block(NamedTuple):
    """Part of a log: interactions in order, not necessarily contiguous."""

    log: Interactions
    indices: Ints
    """Positions in the log, int64 [n]."""
    users: Ints
    """User numbers [n]."""

    @property
    def times(self) -> Ints:
        """Timestamps [n] in seconds."""
        return self.log.times[self.indices]

    @property
    def catalog_positions(self) -> Ints:
        """The items' catalog positions [n]."""
        return self.log.positions(self.log.items[self.indices])

    @property
    def num_earlier(self) -> Ints:
        """Earlier interaction count for the same user [n]."""
        return self.indices - self.log.firsts[self.users]

    @property
    def arrivals(self) -> Ints:
        """Timestamps for the same user's first interaction [n]."""
        return self.log.times[self.log.firsts[self.users]]
