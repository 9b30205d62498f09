"""Admission and eviction for hashed tables in a sharded module."""

from collections.abc import Sequence

from torch import Tensor

from meshrec.comms.collectives import all_reduce
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.distributed.routing import Routing
from meshrec.distributed.row_stats import ColumnPeers
from meshrec.tables.hashed.admission_eviction import AdmissionEviction
from meshrec.tables.hashed.table import has_growable_rows, is_growable
from meshrec.tables.local_shards import LocalShards
from meshrec.tables.storage import RowStorage


class ShardRanks:
    """Shard-axis ranks as a ``RankGroup``."""

    def __init__(self, routing: Routing, axis: Axis) -> None:
        self._routing, self._axis = routing, axis
        self.rank, self.size = axis.rank, axis.size

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the ranks in place and return them. Collective."""
        all_reduce(values, self._axis, "rows of hashed tables")
        return values

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over all column shards, [U] per rectangle. Collective.

        Args:
            table: table number.
            values: partial sums, [U] for every local rectangle that stores the table.
        """
        peers = ColumnPeers(self._routing, self._axis, [table])
        return [row_sums[:, 0] for row_sums in peers.summed([value[:, None] for value in values])]


def admission_evictions_of(
    routing: Routing, storages: Sequence[RowStorage], env: ShardingEnv, split: LocalShards, local: LocalShards
) -> tuple[AdmissionEviction | None, AdmissionEviction | None]:
    """Create admission and eviction for the split and the data-parallel tables.

    Args:
        routing: the compiled plan.
        storages: row storage by table number.
        env: the ranks.
        split: local shards from the split tables.
        local: data-parallel tables.

    Returns:
        The pair (split, data-parallel). None stands for a kind without hashed tables.
    """
    pair: list[AdmissionEviction | None] = []
    for replicated, held in ((False, split), (True, local)):
        if env.devices and not replicated:  # tables over several devices are for inference only
            pair.append(None)
            continue
        hashed = {
            t: storage
            for t, storage in enumerate(storages)
            if is_growable(storage) and routing.replicated[t] == replicated
        }
        # Rectangle numbers follow this flat order.
        tables = [table for shard in held.held for table in shard.tables]
        rectangles = {i: table for i, table in enumerate(tables) if has_growable_rows(table)}
        # Replicas see the same updates, so they agree without a rank group.
        intervals = {t: [routing.tables[t].keys] if replicated else routing.intervals(t) for t in hashed}
        ranks = None if replicated or env.shard.size == 1 else ShardRanks(routing, env.shard)
        pair.append(AdmissionEviction(rectangles, hashed, intervals, ranks) if hashed else None)
    return pair[0], pair[1]


def check_hashed(
    routing: Routing, storages: Sequence[RowStorage], env: ShardingEnv, across_nodes: str
) -> None:
    """Check the plan against the tables with hashed keys.

    Args:
        routing: the compiled plan.
        storages: row storage by table number.
        env: the ranks.
        across_nodes: the sharder's option, ``"sums"`` or ``"rows"``.

    Raises:
        ValueError: the plan cannot place a hashed table.
    """
    cut = {
        x.table for work in routing.work for x in work.rectangles if x.c1 - x.c0 < routing.tables[x.table].dim
    }
    for t, storage in enumerate(storages):
        if not is_growable(storage):
            continue
        if across_nodes == "rows":
            raise ValueError(
                f"table {storage.name!r} has hashed keys, whose reads are counted where its rows are; with "
                'across_nodes="rows" only distinct IDs come there. Choose across_nodes="sums" for its module.'
            )
        if t in cut and storage.keys.evict is not None and storage.keys.evict.needs_whole_rows:
            raise ValueError(
                f"table {storage.name!r}: a score of your own reads whole rows, and the plan splits its "
                "columns. Use a plan without column splits for this table, or LRU, LFU, TTL or LowestNorm."
            )
