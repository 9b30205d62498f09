"""A table with hashed keys in a sharded module, under the name of the whole table."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from meshrec.comms.collectives import all_reduce
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.distributed.routing import Routing
from meshrec.distributed.row_stats import ColumnPeers
from meshrec.distributed.table_shards import TableShards
from meshrec.optim.optimizers import StateSlot
from meshrec.tables.at_rest import IDS
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_keys import Score
from meshrec.tables.hashed_loading import WAITING, is_own, load_whole, whole_names
from meshrec.tables.holdings import Holdings
from meshrec.tables.storage import RowStorage
from meshrec.tables.table import Rectangle
from meshrec.tables.turnover import Turnover
from meshrec.tables.waiting import parts_of


class HashedParts:
    """The entry of a state dict for a table with hashed keys, of which this rank holds a part.

    ``state_dict`` has the rows at rest (see [Note: a hashed table at rest] in tables/at_rest.py): ``weight``
    and ``ids`` are split tensors of as many rows as the table has now, in the order of their keys. It is
    collective if IDs that wait for admission are counted, and loading always is.

    Args:
        shards: the part of the table that this rank holds.
        number: the number of the table.
        turnover: knows how many rows each interval of keys has on all ranks.
        axis: the ranks.
    """

    def __init__(self, shards: TableShards, number: int, turnover: Turnover, axis: Axis) -> None:
        self._shards, self._number, self._turnover, self._axis = shards, number, turnover, axis
        self.storage: HashedRows = turnover.storages[number]
        """The layout of the rows, and the options of the table."""
        self.tables = [table for table in shards.tables if isinstance(table, HashedTable)]
        """The rectangles of this rank."""

    def whole_state(self, slot: StateSlot) -> Tensor:
        """Return a state of the table's rows, in the order of their keys, without a copy."""
        return self._at_rest()(slot.name, torch.float32, slot.per_row)

    def part_names(self) -> list[str]:
        """Return the names of all tensors of the table in a state dict: rows, IDs and waiting IDs."""
        return whole_names(self.storage)

    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the table's rows by name, in the order of their keys, without a copy."""
        part_at_rest = self._at_rest()
        found = {
            part.name: part_at_rest(part.name, part.dtype, part.per_row) for part in self.storage.row_parts
        }
        found[IDS] = part_at_rest(IDS, torch.int64, True)
        if self.storage.counts:
            found |= self._whole_counts()
        return found

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Replace the rows by those of a whole table: all of it, or nothing. Collective.

        Raises:
            ValueError: a part does not fit, or there are more rows than the table may have.
        """
        is_other = torch.tensor([0 if is_own(values, self.tables) else 1])
        if self._shards.is_split:
            all_reduce(is_other, self._axis, "loading a hashed table")
        if int(is_other):
            load_whole(self.tables, values, prefix)
            self.changed()

    def changed(self) -> None:
        """Tell batches in flight, and all ranks, that rows were loaded. Collective."""
        increment_version(self._shards.weight)
        self._turnover.recount()

    def _at_rest(self) -> Callable[[str, torch.dtype, bool], Tensor]:
        """Return the function that joins a part of the rows of all ranks."""
        place = self._places(self._turnover.live[self._number])
        tables = [table.at_rest(place(table.rectangle)[0]) for table in self.tables]
        own = [table.tensors() for table in tables]
        for table in tables:
            r = table.rectangle
            assert (r.r0, r.r1) == place(self.tables[tables.index(table)].rectangle), "ranks have lost count"

        def part(name: str, dtype: torch.dtype, per_row: bool) -> Tensor:
            return self._split([parts[name] for parts in own], place, dtype, per_row)

        return part

    def _whole_counts(self) -> dict[str, Tensor]:
        """Return the counts of IDs that wait, of all ranks. Collective."""
        intervals = self._turnover.intervals[self._number]
        sizes = torch.zeros(len(intervals), dtype=torch.int64)
        found = [parts_of(table.waiting) for table in self.tables]
        for table, parts in zip(self.tables, found, strict=True):
            r = table.rectangle
            if r.c0 == 0:
                for number, span in enumerate(intervals):
                    if r.r0 <= span[0] and span[1] <= r.r1:
                        keys = next(table.waiting.stream(span), (parts[WAITING[0]][:0],))[0]
                        sizes[number] = len(keys)
        if self._shards.is_split:
            all_reduce(sizes, self._axis, "waiting IDs")
        place = self._places(sizes.tolist())
        return {
            name: self._split([parts[name] for parts in found], place, torch.int64, True) for name in WAITING
        }

    def _places(self, counts: Sequence[int]) -> Callable[[Rectangle], tuple[int, int]]:
        """Return the function that gives the first position of a rectangle's rows, and the end."""
        spans = self._turnover.intervals[self._number]
        edges = [span[0] for span in spans] + [spans[-1][1]]
        position = dict(zip(edges, accumulate(counts, initial=0), strict=True))
        return lambda rectangle: (position[rectangle.r0], position[rectangle.r1])

    def _split(
        self,
        parts: Sequence[Tensor],
        place: Callable[[Rectangle], tuple[int, int]],
        dtype: torch.dtype,
        per_row: bool,
    ) -> Tensor:
        if not self._shards.is_split:
            return parts[0]
        # Imported here, because torch's DTensor is slow to import.
        from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor

        def placed(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
            return [Rectangle(each.table, *place(each), *map(column, each.columns)) for each in rectangles]

        column = self.storage.part_column
        end = place(Rectangle(0, *self._shards.table.keys, 0, 0))[1]
        size = [end] if per_row else [end, column(self._shards.table.dim)]
        holders = [placed(each) for each in self._shards.holders]
        # DCP tells pieces apart by where they begin, and so do empty ones and those that follow them.
        own = [
            (part, each)
            for part, each in zip(parts, placed(self._shards.rectangles), strict=True)
            if len(part) or not end
        ]
        if end:
            holders = [[each for each in held if each.r0 < each.r1] for held in holders]
        local = LocalRectangles(
            [part for part, _ in own], [each for _, each in own], torch.empty(0, dtype=dtype), size
        )
        assert self._shards.mesh is not None
        return SplitTensor.of(local, holders, self._shards.mesh)


class ShardRanks:
    """The ranks of the shard axis, with the interface that ``Turnover`` needs."""

    def __init__(self, routing: Routing, axis: Axis) -> None:
        self._routing, self._axis = routing, axis
        self.rank, self.size = axis.rank, axis.size

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks. Collective."""
        all_reduce(values, self._axis, "rows of hashed tables")
        return values

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over all columns. Collective."""
        peers = ColumnPeers(self._routing, self._axis, [table])
        return [each[:, 0] for each in peers.summed([value[:, None] for value in values])]


def turnovers_of(
    routing: Routing, storages: Sequence[RowStorage], env: ShardingEnv, split: Holdings, local: Holdings
) -> tuple[Turnover | None, Turnover | None]:
    """Make the turnovers of the split tables and of the data-parallel ones; None without hashed tables."""
    found: list[Turnover | None] = []
    for replicated, held in ((False, split), (True, local)):
        if env.devices and not replicated:  # they are not trained
            found.append(None)
            continue
        hashed = {
            t: storage
            for t, storage in enumerate(storages)
            if isinstance(storage, HashedRows) and routing.replicated[t] == replicated
        }
        tables = [table for each in held.held for table in each.tables]
        rectangles = {i: table for i, table in enumerate(tables) if isinstance(table, HashedTable)}
        intervals = {t: [routing.tables[t].keys] if replicated else routing.intervals(t) for t in hashed}
        everyone = None if replicated or env.shard.size == 1 else ShardRanks(routing, env.shard)
        found.append(Turnover(rectangles, hashed, intervals, everyone) if hashed else None)
    return found[0], found[1]


def check_hashed(
    routing: Routing, storages: Sequence[RowStorage], env: ShardingEnv, across_nodes: str
) -> None:
    """Raise ValueError for tables with hashed keys that the plan cannot place."""
    cut = {
        x.table for work in routing.work for x in work.rectangles if x.c1 - x.c0 < routing.tables[x.table].dim
    }
    for t, storage in enumerate(storages):
        if not isinstance(storage, HashedRows):
            continue
        if across_nodes == "rows":
            raise ValueError(
                f"table {storage.name!r} has hashed keys, whose reads are counted where its rows are; with "
                'across_nodes="rows" only distinct IDs come there. Choose across_nodes="sums" for its module.'
            )
        if t in cut and isinstance(storage.keys.evict, Score):
            raise ValueError(
                f"table {storage.name!r}: a score of your own reads whole rows, and the plan splits its "
                "columns. Use a plan without column splits for this table, or LRU, LFU, TTL or LowestNorm."
            )
