"""Connect a sharded module to the admission and eviction of rows in its hashed tables.

A hashed table gives rows only to IDs that training has seen often enough (admission), and takes rows away
from IDs that are no longer used (eviction). All ranks must select the same IDs, so they sum counts over the
ranks.
"""

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
    """The ranks on the shard axis, as the `RankGroup` over which hashed tables sum their counts.

    Args:
        routing: the compiled plan, which says which ranks have columns in the same rows.
        axis: the shard axis.
    """

    def __init__(self, routing: Routing, axis: Axis) -> None:
        # Fixed, because resharding creates another object.
        self._routing, self._axis = routing, axis
        self.rank, self.size = axis.rank, axis.size

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` elementwise over all ranks, in place, and return them. Collective."""
        all_reduce(values, self._axis, "rows of hashed tables")
        return values

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Sum a value per row, such as a squared norm, over all ranks with columns in the row. Collective.

        Args:
            table: table number.
            values: for every rectangle (row and column range) of the table on this rank, partial values for
                U rows, [U]. Ranks with columns in these rows must pass the same rows in the same order.

        Returns:
            For every rectangle on this rank, the sums over all table columns, [U].
        """
        # The routing has this table in ``whole_rows``, because the policy needs whole rows (build.py).
        peers = ColumnPeers(self._routing, self._axis, [table])
        return [row_sums[:, 0] for row_sums in peers.sum_columns([value[:, None] for value in values])]


def create_admissions(
    routing: Routing, storages: Sequence[RowStorage], env: ShardingEnv, split: LocalShards, local: LocalShards
) -> tuple[AdmissionEviction | None, AdmissionEviction | None]:
    """Create the objects that admit and evict rows in hashed tables.

    Args:
        routing: the compiled plan.
        storages: row storage by table number.
        env: the ranks.
        split: this rank's shards of the tables that are split over ranks.
        local: this rank's copies of the data-parallel tables.

    Returns:
        The object for the split tables, then the object for the data-parallel tables. An object is None if
        none of its tables is hashed. With ``env.devices``, the first is always None, because tables over
        several devices of a process are for inference only.
    """
    # Split tables first, then data-parallel tables, as ``replicated`` indexes the pair.
    pair: list[AdmissionEviction | None] = []
    for replicated, shards in ((False, split), (True, local)):
        if env.devices and not replicated:  # tables over several devices are for inference only
            pair.append(None)
            continue
        hashed = {
            t: storage
            for t, storage in enumerate(storages)
            if is_growable(storage) and routing.replicated[t] == replicated
        }
        # Rectangle numbers are indices in this flat list. Gradients and lookups use the same numbers.
        tables = [table for shard in shards.shards for table in shard.tables]
        rectangles = {i: table for i, table in enumerate(tables) if has_growable_rows(table)}
        # Data-parallel tables get the same updates on all ranks, so all ranks select the same IDs without
        # communication.
        intervals = {t: [routing.tables[t].keys] if replicated else routing.intervals(t) for t in hashed}
        ranks = None if replicated or env.shard.size == 1 else ShardRanks(routing, env.shard)
        pair.append(AdmissionEviction(rectangles, hashed, intervals, ranks) if hashed else None)
    return pair[0], pair[1]


def check_hashed(
    routing: Routing, storages: Sequence[RowStorage], env: ShardingEnv, across_nodes: str
) -> None:
    """Check that hashed tables work with this plan and with the sharder's options.

    Args:
        routing: the compiled plan.
        storages: row storage by table number.
        env: the ranks.
        across_nodes: what nodes exchange, ``"sums"`` or ``"rows"``; see `EmbeddingBagCollectionSharder`.

    Raises:
        ValueError: ``across_nodes`` is ``"rows"``, or the plan splits the columns of a table whose eviction
            score reads whole rows.
    """
    # Tables with a rectangle narrower than the table.
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
