"""Counts of the IDs of hashed tables between two lines of metrics."""

from collections.abc import Iterable

from torch import nn

from meshrec.distributed.table_shards import TableShards
from meshrec.tables.hashed import HashedTable
from meshrec.tables.key_space import ALL_KEYS
from meshrec.train.ranks import Ranks

PREFIX = "hashed/"
_COUNTS = ("live", "new", "refused", "evicted", "read", "hits")


class IdCounts:
    """The numbers of live, new, refused and evicted IDs of each hashed table, and its hit rate.

    Args:
        model: the model, with its sharded tables.
        ranks: the ranks, from `join`.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._tables = [
            each for each in model.modules() if isinstance(each, TableShards) and each.hashed is not None
        ]
        self._before = [dict.fromkeys(_COUNTS, 0.0) for _ in self._tables]

    def take(self) -> dict[str, float]:
        """Return ``hashed/<table>/<what>``: ``live`` as of now, the rest since the last call. Collective.

        ``hit_rate`` is the share of the IDs read in training that had a row or were about to get one.
        """
        if not self._tables:
            return {}
        own = [value for table in self._tables for value in _counts(table)]
        totals = iter(self._ranks.sum(own))
        found = {}
        for table, before in zip(self._tables, self._before, strict=True):
            # Ranks that hold the same keys have counted the same.
            copies = max(next(totals), 1e-9)
            now = {name: round(next(totals) / copies) for name in _COUNTS}
            since = {name: max(0, now[name] - before[name]) for name in _COUNTS}
            before.update(now)
            prefix = f"{PREFIX}{table.table.name}/"
            found[f"{prefix}live"] = float(now["live"])
            found |= {f"{prefix}{name}": float(since[name]) for name in ("new", "refused", "evicted")}
            if since["read"]:
                found[f"{prefix}hit_rate"] = since["hits"] / since["read"]
        return found


def _counts(shards: TableShards) -> Iterable[float]:
    """Return the share of the keys that this rank owns, and the counts of these keys."""
    # Rectangles with other columns of the same keys count the same: take the first columns.
    first = [each for each in shards.tables if isinstance(each, HashedTable) and each.rectangle.c0 == 0]
    span = ALL_KEYS[1] - ALL_KEYS[0]
    share = sum(each.rectangle.r1 - each.rectangle.r0 for each in first) / span
    return [share, *(float(sum(getattr(each.report, name) for each in first)) for name in _COUNTS)]
