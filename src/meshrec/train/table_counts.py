"""Count the admitted, refused and evicted IDs of hashed tables, for metrics lines."""

from collections.abc import Iterable

from torch import nn

from meshrec.tables.hashed.keys import ALL_KEYS
from meshrec.tables.module import TableModule
from meshrec.train.ranks import Ranks

PREFIX = "hashed/"
"""Prefix of the metrics' names."""
# Fields of a table's report; see `take`.
_COUNTS = ("live", "new", "refused", "evicted", "read", "hits")


class IdCounts:
    """Metrics about the IDs in every hashed table, for a metrics line.

    A hashed table finds rows by the hash of an ID. It admits new IDs in training, and evicts old IDs.

    Args:
        model: the model, with sharded tables.
        ranks: the ranks, from `join`.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._tables = [
            module
            for module in model.modules()
            if isinstance(module, TableModule) and module.is_sharded and module.is_growable
        ]
        # Totals since the start at the last `take`, because a line reports differences.
        self._before = [dict.fromkeys(_COUNTS, 0.0) for _ in self._tables]

    def take(self) -> dict[str, float]:
        """Return hashed-table metrics over all ranks, and start a new counting interval. Collective.

        The metrics are named ``hashed/TABLE/METRIC``:

        - ``live``: IDs that have a row now.
        - ``new``: IDs admitted since the last call.
        - ``refused``: refusals to admit an ID since the last call. An ID that several updates refuse counts
          several times.
        - ``evicted``: IDs whose rows were evicted since the last call.
        - ``hit_rate``: share of IDs with a row, or with a reserved row, among the IDs looked up in training
          since the last call. Missing if no ID was looked up.

        Returns:
            Metrics by name; empty if the model has no sharded hashed table.
        """
        if not self._tables:
            return {}
        counts = [value for table in self._tables for value in _table_counts(table)]
        totals = iter(self._ranks.sum(counts))
        line = {}
        for table, before in zip(self._tables, self._before, strict=True):
            # Replicas of the same keys report the same counts, so divide by the number of copies.
            copies = max(next(totals), 1e-9)
            now = {name: round(next(totals) / copies) for name in _COUNTS}
            since = {name: max(0, now[name] - before[name]) for name in _COUNTS}
            before.update(now)
            prefix = f"{PREFIX}{table.name}/"
            line[f"{prefix}live"] = float(now["live"])
            line |= {f"{prefix}{name}": float(since[name]) for name in ("new", "refused", "evicted")}
            if since["read"]:
                line[f"{prefix}hit_rate"] = since["hits"] / since["read"]
        return line


def _table_counts(module: TableModule) -> Iterable[float]:
    """Return the share of a table's keys that this rank holds, and then this rank's `_COUNTS`.

    A key is the hash of an ID. Every count is the sum over this rank's shards of the table.
    """
    # Column shards of the same keys report the same counts, so use only the shards with the first column.
    first = [table for table in module.tables if table.rectangle.c0 == 0]
    span = ALL_KEYS[1] - ALL_KEYS[0]
    share = sum(table.rectangle.r1 - table.rectangle.r0 for table in first) / span
    return [share, *(float(sum(getattr(table.report, name) for table in first)) for name in _COUNTS)]
