"""A plan, compiled for the run time: routes for IDs, lookups on every rank, and the places of results.

[Note: how a plan becomes routes]

A *use* is a feature read in a table, the unit of the output. A *rectangle* is a part of a table on a rank. A
*route* is the part of one use that one rank gets: the IDs of one interval of rows. A *lookup* is a route read
in a rectangle.

1. ``compile_plan`` turns the shards of each table into rectangles by rank. Neighbours on one rank are joined;
   if an optimizer needs sums over whole rows, rectangles are cut at common rows.
2. ``rank_work`` derives, for each rank, one route for each use and each interval of rows that the rank
   holds, and one lookup for each rectangle with exactly these rows.
3. ``Routing.router`` numbers the routes of all ranks and lists, for every interval between two row cuts of a
   use, the routes that take its IDs. The kernel ``route_ids`` reads it. Data-parallel tables count as those
   of one more rank, whose message stays here.
4. ``pieces.py`` lays out the columns of each rank's lookups in the result, and ``output_dist.py`` makes the
   hops of them.

Every rank compiles the same plan into the same numbers, so no rank has to tell another what it sends.
"""

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.plan.sharding_plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from meshrec.tables.key_space import ALL_KEYS, key_at
from meshrec.tables.table import Rectangle, Span

# U uses, Q routes, L lookups, R ranks

_INT32_ROWS = 1 << 31
_LAST_KEY = (1 << 63) - 1


class RoutedTable(NamedTuple):
    """A whole table, and the features that read it."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]
    mean: bool = False
    mix_seed: int | None = None
    """The seed of the mix that makes keys of IDs; None: keys are IDs. See [Note: the keys of hashed tables]
    in ``tables/key_space.py``."""

    @property
    def keys(self) -> Span:
        """The interval of all keys."""
        return (0, self.num_rows) if self.mix_seed is None else ALL_KEYS

    def key_at(self, row: int) -> int:
        """Return the first key of a row of the plan."""
        return row if self.mix_seed is None else key_at(row, self.num_rows)


class Use(NamedTuple):
    """A feature read in a table. It has ``dim`` columns of the output."""

    table: int
    feature: str


class Route(NamedTuple):
    """The IDs of one use whose rows lie in [r0, r1)."""

    use: int
    r0: int
    r1: int


class Lookup(NamedTuple):
    """A route of a rank (as an index among its routes), read in one of its rectangles."""

    route: int
    rectangle: int
    use: int
    c0: int
    width: int


class RankWork(NamedTuple):
    """The rectangles and lookups of one rank. Its output row holds the columns of the lookups in this
    order.
    """

    rectangles: tuple[Rectangle, ...]
    routes: tuple[Route, ...]
    lookups: tuple[Lookup, ...]

    @property
    def dim(self) -> int:
        """The number of columns of the rank's output row."""
        return sum(lookup.width for lookup in self.lookups)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The compiled plan of one module."""

    tables: tuple[RoutedTable, ...]
    uses: tuple[Use, ...]
    work: tuple[RankWork, ...]
    """[R]: the work of each rank of the shard axis."""
    local: RankWork
    """The work of every rank for itself: the data-parallel tables."""
    replicated: tuple[bool, ...]
    """Whether every rank holds the table whole (data-parallel), for each table."""

    @cached_property
    def dims(self) -> list[int]:
        """[U]: number of columns of each use."""
        return [self.tables[use.table].dim for use in self.uses]

    @cached_property
    def columns(self) -> list[int]:
        """[U + 1]: first column of each use in the output, and the output's width."""
        return list(accumulate(self.dims, initial=0))

    @property
    def holders(self) -> list[list[list[Rectangle]]]:
        """The rectangles of each table on each rank. Data-parallel tables have none."""
        found: list[list[list[Rectangle]]] = [[[] for _ in self.work] for _ in self.tables]
        for rank, work in enumerate(self.work):
            for rectangle in work.rectangles:
                found[rectangle.table][rank].append(rectangle)
        return found

    @cached_property
    def row_split(self) -> list[bool]:
        """Whether the rows of each table lie in several rectangles, so that partial results are summed."""
        split = [False] * len(self.tables)
        for work in self.work:
            for rectangle in work.rectangles:
                first, end = self.tables[rectangle.table].keys
                split[rectangle.table] |= rectangle.r1 - rectangle.r0 < end - first
        return split

    def intervals(self, table: int) -> list[Span]:
        """Return the intervals of a table's keys that no rectangle cuts."""
        edges = set(self.tables[table].keys)
        for work in self.work:
            edges.update(*((x.r0, x.r1) for x in work.rectangles if x.table == table))
        return list(pairwise(sorted(edges)))

    @cached_property
    def wide(self) -> bool:
        """Whether local IDs need 64 bits."""
        return any(q.r1 - q.r0 >= _INT32_ROWS for work in self._all_work for q in work.routes)

    @property
    def _all_work(self) -> tuple[RankWork, ...]:
        return (*self.work, self.local)

    @cached_property
    def router(self) -> list[Tensor]:
        """The tensors that ``route_ids`` reads: cut_begin, cuts, interval_begin, interval_routes, routes
        (ops/dist/naive.py).

        The data-parallel tables are those of one more rank, number R, whose message stays here.
        """
        routes = [(rank, *route) for rank, work in enumerate(self._all_work) for route in work.routes]
        of_use: list[list[tuple[int, int, int]]] = [[] for _ in self.uses]
        for number, (_, use, r0, r1) in enumerate(routes):
            of_use[use].append((number, r0, r1))
        cut_begin, cuts, interval_begin, interval_routes = [0], [], [0], []
        for reader, own in zip(self.uses, of_use, strict=True):
            edges = set(self.tables[reader.table].keys)
            use_cuts = sorted(edges.union(*((r0, r1) for _, r0, r1 in own)))
            cuts += use_cuts
            cut_begin.append(len(cuts))
            for first in use_cuts[:-1]:
                interval_routes += [number for number, r0, r1 in own if r0 <= first < r1]
                interval_begin.append(len(interval_routes))
        cuts = [min(cut, _LAST_KEY) for cut in cuts]
        columns = [cut_begin, cuts, interval_begin, interval_routes, [x for q in routes for x in q[:3]]]
        return [torch.tensor(column, dtype=torch.int64) for column in columns]

    @cached_property
    def route_elements(self) -> tuple[list[int], list[int]]:
        """The rank of each route, and the number of columns that one of its IDs reads there, [Q] each.

        As in ``router``, the data-parallel tables are those of one more rank.
        """
        ranks = [rank for rank, work in enumerate(self._all_work) for _ in work.routes]
        widths = []
        for work in self._all_work:
            of_rank = [0] * len(work.routes)
            for lookup in work.lookups:
                of_rank[lookup.route] += lookup.width
            widths += of_rank
        return ranks, widths

    @cached_property
    def first_columns(self) -> tuple[Tensor, Tensor]:
        """Routes and their uses, two int64 tensors. Together these routes take each ID of a use exactly
        once.
        """
        routes, uses, first = [], [], 0
        for work in self._all_work:
            firsts = [lookup for lookup in work.lookups if lookup.c0 == 0]
            routes += [first + lookup.route for lookup in firsts]
            uses += [lookup.use for lookup in firsts]
            first += len(work.routes)
        return torch.tensor(routes, dtype=torch.int64), torch.tensor(uses, dtype=torch.int64)

    @cached_property
    def names(self) -> Tensor:
        """The line "table, tab, feature" of each use, as uint8, for the kernels' error messages."""
        text = "".join(f"{self.tables[use.table].name}\t{use.feature}\n" for use in self.uses)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)


def compile_plan(
    tables: Sequence[RoutedTable],
    plan: EmbeddingModuleShardingPlan,
    *,
    num_ranks: int,
    whole_rows: Collection[int] = (),
) -> Routing:
    """Compile a verified plan. Uses are in table order, and for each table in the order of its features.

    ``whole_rows``: the tables whose updates need sums over whole rows. Two of their rectangles have either
    all rows in common or none.
    """
    uses = [Use(t, feature) for t, table in enumerate(tables) for feature in table.features]
    rectangles: list[list[Rectangle]] = [[] for _ in range(num_ranks)]
    local: list[Rectangle] = []
    for t, table in enumerate(tables):
        if plan[table.name].sharding_type is ShardingType.DATA_PARALLEL:
            local.append(Rectangle(t, *table.keys, 0, table.dim))
        for rank, own in _by_rank(plan[table.name], t, in_bands=t in whole_rows).items():
            rectangles[rank] += [x._replace(r0=table.key_at(x.r0), r1=table.key_at(x.r1)) for x in own]
    return Routing(
        tables=tuple(tables),
        uses=tuple(uses),
        work=tuple(rank_work(own, uses) for own in rectangles),
        local=rank_work(local, uses),
        replicated=tuple(plan[table.name].sharding_type is ShardingType.DATA_PARALLEL for table in tables),
    )


def _by_rank(sharding: ParameterSharding, table: int, *, in_bands: bool) -> dict[int, list[Rectangle]]:
    """Return the rectangles of a table on each rank. Rectangles of a rank are merged where possible."""
    own: dict[int, list[Rectangle]] = {}
    for shard in sharding.shards:
        own.setdefault(shard.placement.rank, []).append(Rectangle(table, *shard.rows, *shard.columns))
    if in_bands or len(own) == 1:
        return _in_bands(own)
    return {rank: _merged(rectangles) for rank, rectangles in own.items()}


def _in_bands(own: Mapping[int, Sequence[Rectangle]]) -> dict[int, list[Rectangle]]:
    """Cut the rectangles of a table at common rows, but only where the owners of its columns change."""
    edges = sorted({edge for rectangles in own.values() for x in rectangles for edge in (x.r0, x.r1)})
    columns: list[list[tuple[int, int, int]]] = [[] for _ in edges[1:]]
    for rank, rectangles in own.items():
        for x in rectangles:
            for band in range(bisect_left(edges, x.r0), bisect_left(edges, x.r1)):
                columns[band].append((x.c0, x.c1, rank))
    owners = [_joined_columns(sorted(each)) for each in columns]
    found: dict[int, list[Rectangle]] = {rank: [] for rank in own}
    for same, bands in groupby(zip(pairwise(edges), owners, strict=True), key=itemgetter(1)):
        rows = [edge for band, _ in bands for edge in band]
        for c0, c1, rank in same:
            found[rank].append(Rectangle(own[rank][0].table, rows[0], rows[-1], c0, c1))
    return found


def _joined_columns(columns: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return (first, end, rank) in order, with neighbours of one rank joined."""
    joined: list[tuple[int, int, int]] = []
    for c0, c1, rank in columns:
        if joined and joined[-1][1:] == (c0, rank):
            joined[-1] = (joined[-1][0], c1, rank)
        else:
            joined.append((c0, c1, rank))
    return joined


def _merged(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Join neighbours of one table on one rank: fewer rectangles with the same elements."""
    by_columns: list[Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda x: (x.r0, x.r1, x.c0)):
        last = by_columns[-1] if by_columns else None
        if last and (last.r0, last.r1, last.c1) == (rectangle.r0, rectangle.r1, rectangle.c0):
            by_columns[-1] = last._replace(c1=rectangle.c1)
        else:
            by_columns.append(rectangle)
    by_rows: list[Rectangle] = []
    for rectangle in sorted(by_columns, key=lambda x: (x.c0, x.c1, x.r0)):
        last = by_rows[-1] if by_rows else None
        if last and (last.c0, last.c1, last.r1) == (rectangle.c0, rectangle.c1, rectangle.r0):
            by_rows[-1] = last._replace(r1=rectangle.r1)
        else:
            by_rows.append(rectangle)
    return sorted(by_rows, key=lambda x: (x.r0, x.c0))


def rank_work(rectangles: list[Rectangle], uses: list[Use]) -> RankWork:
    """Return the routes and lookups of a rank with these rectangles."""
    routes = sorted(
        {Route(u, x.r0, x.r1) for u, use in enumerate(uses) for x in rectangles if x.table == use.table}
    )
    lookups = [
        Lookup(q, i, route.use, x.c0, x.c1 - x.c0)
        for q, route in enumerate(routes)
        for i, x in enumerate(rectangles)
        if (x.table, x.r0, x.r1) == (uses[route.use].table, route.r0, route.r1)
    ]
    return RankWork(tuple(rectangles), tuple(routes), tuple(lookups))
