"""Interaction logs, sorted by user and time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.data.dataset import Feature
from meshrec.data.in_memory import Ranges
from meshrec.data.samples import Ints

# N interactions

HISTORY, SEEN, TIMES = "history", "seen", "times"
"""Feature names in next-item samples: earlier items, items not to recommend again, and history timestamps;
see `next_items`."""
Arrays = Mapping[str, npt.NDArray[Any]]
"""Arrays by name."""
BLOCK = 1 << 18
"""Interactions per block: arrays of a few MB, which make the overhead per block negligible."""


@dataclass(frozen=True, kw_only=True)
class Interactions:
    """Interaction log: N user interactions with items, sorted by user, then by time.

    Users are numbered from 0. ``items``, ``times`` and ``rows`` are int32 or int64, and may be memory-mapped
    files.

    Args:
        name: display name.
        offsets: int64 [num_users + 1]. User u has the interactions ``offsets[u]`` to ``offsets[u + 1]``,
            exclusive, possibly none.
        items: item ID in the item table, per interaction, [N].
        times: timestamp per interaction, in seconds since 1970, [N].
        rows: row number in the data, per interaction, [N].
        num_rows: row count in the data, including rows without an interaction here.
        item: item feature, which names and sizes the item table.
        catalogue: all item IDs, ascending, int64 [items]. An index into this array is a catalog position.
        user: user feature; None: users are not a feature.
        user_ids: ID in the user table, per user, [num_users]; -1 for a user without an ID.
        described: additional item features by name, with the IDs of every catalog item.
        store: stores the arrays of `derived` beside the log; None: they are computed at every start.
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
    store: Callable[[Any, Callable[[], Arrays]], Arrays] | None = None

    @property
    def num_users(self) -> int:
        """User count, including users without interactions."""
        return len(self.offsets) - 1

    @property
    def firsts(self) -> Ints:
        """Index of the first interaction per user, int64 [num_users]."""
        return self.offsets[:-1]

    @property
    def stops(self) -> Ints:
        """Index after the last interaction per user, int64 [num_users]."""
        return self.offsets[1:]

    def users_of(self, interactions: Ints) -> Ints:
        """Return the user number for n interactions, given by their indices in the log, int64 [n]."""
        # Users without interactions share their offset with the next user, who is the last of equal offsets.
        return np.searchsorted(self.offsets, interactions, side="right") - 1

    def positions(self, items: Ints) -> Ints:
        """Return the item IDs' catalog positions, int64 [n]. All items must be in the catalog."""
        # Python integers: hashed table keys cover the whole int64 range.
        first, last = self.catalogue[[0, -1]].tolist()
        if last - first == len(self.catalogue) - 1:
            # Subtraction is many times faster than a search, and most vocabularies have no gaps.
            positions: Ints = items - first
            return positions
        return np.searchsorted(self.catalogue, items)

    def derived(self, options: Any, compute: Callable[[], Arrays]) -> Arrays:
        """Return arrays computed in passes over the log. A log on disk computes them once for all runs.

        Args:
            options: everything that the arrays depend on, besides the log; JSON types.
            compute: returns the arrays by name.

        Returns:
            The arrays, which may be memory-mapped and read-only.
        """
        return compute() if self.store is None else self.store(options, compute)

    def blocks(self, stops: Ints) -> "Iterator[Block]":
        """Iterate over the log in blocks, because it may be larger than memory.

        Args:
            stops: index per user, int64 [num_users]. Blocks omit the user's interactions from this index on.
        """
        for start in range(0, len(self.items), BLOCK):
            indices = np.arange(start, min(start + BLOCK, len(self.items)))
            # Users with interactions in this block, and how many: offsets cut off at the block's edges.
            first, last = self.users_of(indices[[0, -1]])
            # A user may have interactions in several blocks.
            lengths = np.diff(self.offsets[first : last + 2].clip(start, start + len(indices)))
            users = np.repeat(np.arange(first, last + 1), lengths)
            # Users' blocks end at different indices, so a block may have gaps.
            is_before = indices < stops[users]
            yield Block(self, indices[is_before], users[is_before])


class Block(NamedTuple):
    """Some interactions of a log, in log order, not necessarily contiguous; see `Interactions.blocks`."""

    log: Interactions
    indices: Ints
    """Index in the log per interaction, ascending, int64 [n]."""
    users: Ints
    """User number per interaction, int64 [n]."""

    @property
    def times(self) -> Ints:
        """Timestamp per interaction, in seconds since 1970, [n]."""
        return self.log.times[self.indices]

    @property
    def catalog_positions(self) -> Ints:
        """Item's catalog position per interaction, [n]; see `Interactions.positions`."""
        return self.log.positions(self.log.items[self.indices])

    @property
    def num_earlier(self) -> Ints:
        """Number of earlier interactions by the same user, per interaction, [n]."""
        return self.indices - self.log.firsts[self.users]

    @property
    def arrivals(self) -> Ints:
        """Timestamp of the same user's first interaction in the log, per interaction, [n]."""
        return self.log.times[self.log.firsts[self.users]]
