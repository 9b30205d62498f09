"""Compile a sharding plan: which IDs go to which rank, and which rows the rank looks up for them.

[Note: how a plan becomes routes]

- A *use* is a (table, feature) pair: the feature is looked up in the table and gives output columns.
- A *rectangle* is a row range and a column range of a table, on one rank.
- A *route* is a use and a row interval on a rank: the IDs of the use in this interval are sent to the rank.
- A *lookup* is a route and a rectangle: the rank looks up the route's IDs in the rectangle.

For example, feature "item" reads table "t" with 100 rows, and two ranks have 50 rows each. There is one use,
each rank has one rectangle, one route and one lookup, and ID 70 takes the route to rank 1.

1. ``compile_plan`` turns every table's shards into rectangles by rank. Neighbors on the same rank are
   joined. If an optimizer needs sums over whole rows, rectangles are cut at common rows.
2. ``rank_work`` derives, for every rank, a route for every use and row interval on the rank, and a lookup for
   every rectangle with exactly these rows.
3. ``Routing.router`` numbers all ranks' routes. The ends of a use's routes cut the table's rows into
   intervals. For every interval, ``router`` lists the routes which get the IDs in this interval. The kernel
   ``route_ids`` reads it. Data-parallel tables count as an additional rank, whose message is not sent.
4. ``pieces.py`` maps every rank's lookup columns to result columns, and ``output_dist.py`` builds the
   hops from them.

Every rank compiles the same plan into the same route numbers, so messages need not name their routes.
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
from meshrec.tables.hashed.keys import ALL_KEYS, key_at
from meshrec.tables.table import Rectangle, Span

# U: uses, Q: routes, L: lookups, R: ranks

# IDs are sent relative to the first row of the route, as int32 unless some route has at least this many rows.
_INT32_ROWS = 1 << 31
# Keys of hashed tables are int64.
_LAST_KEY = (1 << 63) - 1


class RoutedTable(NamedTuple):
    """Size and features of a whole table, as far as routing needs them."""

    name: str
    num_rows: int
    dim: int
    features: tuple[str, ...]
    mean: bool = False
    """Whether bags are pooled by MEAN."""
    mix_seed: int | None = None
    """Seed for the hash from IDs to keys in a hashed table. None: keys are IDs. See [Note: the keys of hashed
    tables] in ``tables/hashed/keys.py``.
    """

    @property
    def keys(self) -> Span:
        """Interval [first, end) of all possible keys. A key is a row number, or in hashed tables a hash."""
        return (0, self.num_rows) if self.mix_seed is None else ALL_KEYS

    def key_at(self, row: int) -> int:
        """Return the first key that belongs to a row number in the plan.

        In ordinary tables, this is the row number itself. In hashed tables, a row number in the plan stands
        for a range of keys.
        """
        return row if self.mix_seed is None else key_at(row, self.num_rows)


class Use(NamedTuple):
    """A feature which is looked up in a table. A feature read by two tables makes two uses."""

    table: int
    """Table number."""
    feature: str


class Route(NamedTuple):
    """The IDs of a use with keys in [r0, r1). A rank receives them together."""

    use: int
    """Use number."""
    r0: int
    r1: int


class Lookup(NamedTuple):
    """The lookup of a route's IDs in a rectangle on the same rank."""

    route: int
    """Index among the rank's routes."""
    rectangle: int
    """Index among the rank's rectangles."""
    use: int
    """Use number of the route."""
    c0: int
    """First table column of the rectangle."""
    width: int
    """Number of columns in the rectangle."""


class RankWork(NamedTuple):
    """The rectangles on a rank, and the lookups in them.

    A pooled output row of the rank has the columns of all lookups, in the order of ``lookups``.
    """

    rectangles: tuple[Rectangle, ...]
    routes: tuple[Route, ...]
    lookups: tuple[Lookup, ...]

    @property
    def dim(self) -> int:
        """Number of columns in a pooled output row of the rank."""
        return sum(lookup.width for lookup in self.lookups)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A module's compiled plan, equal on all ranks. See [Note: how a plan becomes routes].

    Lists have an entry per use [U], per rank on the shard axis [R], or per route [Q].
    """

    tables: tuple[RoutedTable, ...]
    """Tables by table number."""
    uses: tuple[Use, ...]
    """Uses by use number, in output order."""
    work: tuple[RankWork, ...]
    """Rectangles and lookups of every rank on the shard axis, [R]."""
    local: RankWork
    """Rectangles and lookups for the data-parallel tables, of which every rank has a copy."""
    replicated: tuple[bool, ...]
    """Whether a table is data-parallel, by table number."""

    @cached_property
    def dims(self) -> list[int]:
        """Number of output columns for every use, [U]."""
        return [self.tables[use.table].dim for use in self.uses]

    @cached_property
    def columns(self) -> list[int]:
        """First output column of every use, followed by the total number of columns, [U + 1]."""
        return list(accumulate(self.dims, initial=0))

    @property
    def holders(self) -> list[list[list[Rectangle]]]:
        """``holders[table][rank]`` lists a table's rectangles on a rank; empty for data-parallel tables."""
        owned: list[list[list[Rectangle]]] = [[[] for _ in self.work] for _ in self.tables]
        for rank, work in enumerate(self.work):
            for rectangle in work.rectangles:
                owned[rectangle.table][rank].append(rectangle)
        return owned

    @cached_property
    def row_split(self) -> list[bool]:
        """Whether a table is split by rows, by table number. A rank then pools only a part of every bag."""
        split = [False] * len(self.tables)
        for work in self.work:
            for rectangle in work.rectangles:
                first, end = self.tables[rectangle.table].keys
                split[rectangle.table] |= rectangle.r1 - rectangle.r0 < end - first
        return split

    def intervals(self, table: int) -> list[Span]:
        """Return the intervals into which the row edges of all rectangles cut a table's keys, ascending."""
        edges = set(self.tables[table].keys)
        for work in self.work:
            edges.update(*((x.r0, x.r1) for x in work.rectangles if x.table == table))
        return list(pairwise(sorted(edges)))

    @cached_property
    def wide(self) -> bool:
        """Whether messages must send IDs as int64, because some route has too many rows for int32."""
        return any(q.r1 - q.r0 >= _INT32_ROWS for work in self._all_work for q in work.routes)

    @property
    def _all_work(self) -> tuple[RankWork, ...]:
        """``work`` of all ranks, followed by ``local``, [R + 1]."""
        return (*self.work, self.local)

    @cached_property
    def router(self) -> list[Tensor]:
        """Arguments from which the op ``route_ids`` finds the routes for an ID.

        The list contains the int64 tensors cut_begin, cuts, interval_begin, interval_routes and routes, which
        are described in ``ops/dist/naive.py``. Routes for data-parallel tables belong to an additional rank,
        number R.
        """
        # Numbered over all ranks, in rank order.
        routes = [(rank, *route) for rank, work in enumerate(self._all_work) for route in work.routes]
        of_use: list[list[tuple[int, int, int]]] = [[] for _ in self.uses]
        for number, (_, use, r0, r1) in enumerate(routes):
            of_use[use].append((number, r0, r1))
        cut_start, cuts, interval_start, interval_routes = [0], [], [0], []
        for reader, use_routes in zip(self.uses, of_use, strict=True):
            edges = set(self.tables[reader.table].keys)
            # All keys at which some route of the use starts or ends, and the ends of the key range.
            use_cuts = sorted(edges.union(*((r0, r1) for _, r0, r1 in use_routes)))
            cuts += use_cuts
            cut_start.append(len(cuts))
            # A route covers an interval completely, or not at all.
            for first in use_cuts[:-1]:
                interval_routes += [number for number, r0, r1 in use_routes if r0 <= first < r1]
                interval_start.append(len(interval_routes))
        # The key end for hashed tables, 2^63, does not fit int64.
        # Only the last cut of a hashed table is affected. The kernels treat it as no end (router.h).
        cuts = [min(cut, _LAST_KEY) for cut in cuts]
        columns = [cut_start, cuts, interval_start, interval_routes, [x for q in routes for x in q[:3]]]
        return [torch.tensor(column, dtype=torch.int64) for column in columns]

    @cached_property
    def route_elements(self) -> tuple[list[int], list[int]]:
        """Two lists with an entry per route, [Q]: the rank which gets the IDs, and the columns per ID.

        The second list has the total number of columns which the rank looks up for an ID on the route. As in
        ``router``, routes for data-parallel tables belong to an additional rank, number R.
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
        """Two int64 tensors: the routes with a lookup in table column 0, and the use of every such route.

        Routes and uses are given by number.

        Together, these routes get every ID of a use exactly once. If the columns of a table are split, other
        routes get the same IDs again.
        """
        routes, uses, first = [], [], 0
        for work in self._all_work:
            # Other column shards receive the same IDs again.
            firsts = [lookup for lookup in work.lookups if lookup.c0 == 0]
            routes += [first + lookup.route for lookup in firsts]
            uses += [lookup.use for lookup in firsts]
            first += len(work.routes)
        return torch.tensor(routes, dtype=torch.int64), torch.tensor(uses, dtype=torch.int64)

    @cached_property
    def names(self) -> Tensor:
        """UTF-8 bytes of one line "TABLE <tab> FEATURE" per table and feature that looks up in it.

        Kernels name the table and the feature in their error messages.
        """
        # Operators take no lists of strings, so the names are passed as a tensor.
        text = "".join(f"{self.tables[use.table].name}\t{use.feature}\n" for use in self.uses)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)


def compile_plan(
    tables: Sequence[RoutedTable],
    plan: EmbeddingModuleShardingPlan,
    *,
    num_ranks: int,
    whole_rows: Collection[int] = (),
) -> Routing:
    """Compile a verified plan; see [Note: how a plan becomes routes].

    Args:
        tables: tables in the module. Uses are numbered in table order, then in feature order.
        plan: the module's plan.
        num_ranks: shard axis size.
        whole_rows: numbers of the tables whose updates need sums over all columns of a row. Their rectangles
            are cut so that any two have either the same rows or disjoint rows. Column shards then have
            partial sums for the same rows, which ranks can add up.
    """
    uses = [Use(t, feature) for t, table in enumerate(tables) for feature in table.features]
    rectangles: list[list[Rectangle]] = [[] for _ in range(num_ranks)]
    local: list[Rectangle] = []
    for t, table in enumerate(tables):
        # Data-parallel tables are a rectangle with the whole table on every rank.
        if plan[table.name].sharding_type is ShardingType.DATA_PARALLEL:
            local.append(Rectangle(t, *table.keys, 0, table.dim))
        for rank, cuts in _rectangles_by_rank(plan[table.name], t, in_bands=t in whole_rows).items():
            rectangles[rank] += [x._replace(r0=table.key_at(x.r0), r1=table.key_at(x.r1)) for x in cuts]
    return Routing(
        tables=tuple(tables),
        uses=tuple(uses),
        work=tuple(rank_work(rank_rectangles, uses) for rank_rectangles in rectangles),
        local=rank_work(local, uses),
        replicated=tuple(plan[table.name].sharding_type is ShardingType.DATA_PARALLEL for table in tables),
    )


def _rectangles_by_rank(
    sharding: ParameterSharding, table: int, *, in_bands: bool
) -> dict[int, list[Rectangle]]:
    """Return the rectangles of a table on every rank, after joining adjacent shards on the same rank.

    Args:
        in_bands: whether any two rectangles must have either the same rows or disjoint rows.
    """
    by_rank: dict[int, list[Rectangle]] = {}
    for shard in sharding.shards:
        by_rank.setdefault(shard.placement.rank, []).append(Rectangle(table, *shard.rows, *shard.columns))
    # On a single rank, cutting at common rows also joins all shards, in both directions.
    if in_bands or len(by_rank) == 1:
        return _cut_at_common_rows(by_rank)
    return {rank: _merge_rectangles(rectangles) for rank, rectangles in by_rank.items()}


def _cut_at_common_rows(by_rank: Mapping[int, Sequence[Rectangle]]) -> dict[int, list[Rectangle]]:
    """Cut and join a table's rectangles such that any two have either the same rows or disjoint rows.

    Cuts only at rows where the assignment of columns to ranks changes.
    """
    edges = sorted({edge for rectangles in by_rank.values() for x in rectangles for edge in (x.r0, x.r1)})
    # (first column, end column, rank) of all rectangles in every interval between two edges.
    columns: list[list[tuple[int, int, int]]] = [[] for _ in edges[1:]]
    for rank, rectangles in by_rank.items():
        for x in rectangles:
            for band in range(bisect_left(edges, x.r0), bisect_left(edges, x.r1)):
                columns[band].append((x.c0, x.c1, rank))
    # Comparable lists: equal lists mean that the same ranks own the same columns.
    owners = [_join_columns(sorted(band_columns)) for band_columns in columns]
    cut_by_rank: dict[int, list[Rectangle]] = {rank: [] for rank in by_rank}
    # Adjacent intervals with the same owners need no cut between them.
    for same, bands in groupby(zip(pairwise(edges), owners, strict=True), key=itemgetter(1)):
        rows = [edge for band, _ in bands for edge in band]
        for c0, c1, rank in same:
            cut_by_rank[rank].append(Rectangle(by_rank[rank][0].table, rows[0], rows[-1], c0, c1))
    return cut_by_rank


def _join_columns(columns: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join adjacent column ranges (first, end, rank) on the same rank."""
    joined: list[tuple[int, int, int]] = []
    for c0, c1, rank in columns:
        if joined and joined[-1][1:] == (c0, rank):
            joined[-1] = (joined[-1][0], c1, rank)
        else:
            joined.append((c0, c1, rank))
    return joined


def _merge_rectangles(rectangles: list[Rectangle]) -> list[Rectangle]:
    """Join adjacent rectangles of a table on the same rank, first along columns, then along rows."""
    by_columns: list[Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda x: (x.r0, x.r1, x.c0)):
        last = by_columns[-1] if by_columns else None
        if last and (last.r0, last.r1, last.c1) == (rectangle.r0, rectangle.r1, rectangle.c0):
            by_columns[-1] = last._replace(c1=rectangle.c1)
        else:
            by_columns.append(rectangle)
    # Columns first, then rows, so a table wholly on one rank becomes a single rectangle.
    by_rows: list[Rectangle] = []
    for rectangle in sorted(by_columns, key=lambda x: (x.c0, x.c1, x.r0)):
        last = by_rows[-1] if by_rows else None
        if last and (last.c0, last.c1, last.r1) == (rectangle.c0, rectangle.c1, rectangle.r0):
            by_rows[-1] = last._replace(r1=rectangle.r1)
        else:
            by_rows.append(rectangle)
    return sorted(by_rows, key=lambda x: (x.r0, x.c0))


def rank_work(rectangles: list[Rectangle], uses: list[Use]) -> RankWork:
    """Return the routes and lookups for a rank with the given rectangles.

    The rank gets a route for every use and distinct row interval, and a lookup for every rectangle with these
    rows.
    """
    # Sorted, so all ranks number them alike. A set, because column shards with the same rows share a route.
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
