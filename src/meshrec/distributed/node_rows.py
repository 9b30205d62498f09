"""The exchange between nodes in which each distinct row crosses the network once.

[Note: two levels]

With the axes ``node`` and ``local`` there are two ways over the network, and a sharder's ``across_nodes``
chooses one:

- ``"sums"`` (``output_dist.py``): the owners pool bags, a node adds its partial sums, and one row for each
  bag and node crosses.
- ``"rows"`` (here): a rank stands for the owners with its local rank on all nodes. The ranks of its node send
  their IDs to it, it removes duplicates, fetches each row once, and pools the bags of its node from them.
  Gradients take the reverse way: they are added up by row inside the node, and cross once for each row.

Bags cross in ``"sums"``, distinct IDs in ``"rows"``. So ``"rows"`` pays where the ranks of a node share
IDs: hot IDs, and tables that are small for the batch of a node. Inside a node everything is fp32; only what
crosses the network is encoded.

To the ranks of a node, the exchange inside it looks like that of a module whose tables lie on this node
alone. So its routing, its return and its per-sample weights are those of ``input_dist.py`` and
``output_dist.py``, with the routing of ``inside_node``.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import Splits, all_to_all
from meshrec.comms.encoding import Block, Columns
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.comms.phase_clock import OFF, phase, recorders
from meshrec.comms.wire import WireFormats
from meshrec.distributed.id_exchange import SortedIdExchange
from meshrec.distributed.input_dist import LookupIds
from meshrec.distributed.lookup import FetchedRows, LookupTables
from meshrec.distributed.output_dist import Codecs
from meshrec.distributed.pieces import Span
from meshrec.distributed.routing import Lookup, RankWork, Route, Routing, rank_work
from meshrec.distributed.wire_codec import BACKWARD, FORWARD, Codec, first_key
from meshrec.tables.holdings import Holdings
from meshrec.tables.packing import RowGradients
from meshrec.tables.updates import LookedUp, TableGradient

# M nodes, B bands, U distinct IDs of a band, Q routes

_MARKED = 512
"""Rows for each ID up to which duplicates are found by marking rows; with more, by sorting IDs."""


class Fetch(NamedTuple):
    """The distinct IDs of one batch on their way to their owners, and the IDs that other nodes ask for
    here.
    """

    slots: LookupIds
    """The IDs of the node's ranks, as places among the distinct IDs of their band."""
    distinct: list[Tensor]
    """The distinct IDs of each band, int64 [U]."""
    owned: LookupIds
    """The IDs to look up here for each node."""
    counts: list[list[int]]
    """The number of IDs of each own band that each node asks for, [M, B]."""


class _Owner(NamedTuple):
    """The rows that a rank owns for all nodes: bands, each with the columns that it holds."""

    work: RankWork
    bands: list[int]
    """The number of each of its bands among those of all nodes."""
    columns: list[tuple[Columns, Columns]]
    """For each of its lookups, the columns that travel in both directions."""


def inside_node(routing: Routing, env: ShardingEnv) -> tuple[Routing, ShardingEnv]:
    """Return the routing and the ranks of the exchange inside a node.

    Raises:
        ValueError: the mesh has no nodes, or has replicas.
    """
    if env.node is None or env.local is None or env.replicate.size > 1:
        raise ValueError(
            "across_nodes='rows' needs a mesh with the axes ('node', 'local') and without 'replicate'. Make "
            "it with init_device_mesh('cpu', (nodes, ranks_per_node), mesh_dim_names=('node', 'local')), or "
            "take across_nodes='sums'."
        )
    size = env.local.size
    work = tuple(
        rank_work([r for own in routing.work[local::size] for r in own.rectangles], list(routing.uses))
        for local in range(size)
    )
    others = Axis(size=env.world.size // size, rank=env.world.rank // size)
    return replace(routing, work=work), ShardingEnv(world=env.world, shard=env.local, replicate=others)


class NodeRows:
    """The rows of one module between nodes, for one rank.

    Args:
        routing: the plan, compiled for all ranks.
        inside: the routing inside the node.
        env: the ranks.
        held: the rectangles of this rank.
        wires: the wire formats of each table, by number.
        clock: returns the number of updates of the tables so far.
    """

    def __init__(
        self,
        routing: Routing,
        inside: Routing,
        env: ShardingEnv,
        held: Holdings,
        *,
        wires: Sequence[WireFormats],
        clock: Callable[[], int],
    ) -> None:
        assert env.node is not None
        assert env.local is not None
        self._routing, self._node, self._rank = routing, env.node, env.shard.rank
        self.codecs = Codecs(*(Codec(routing, wires, way, clock) for way in (FORWARD, BACKWARD)))
        self.fetched = FetchedRows()
        self._work = inside.work[env.local.rank]
        bands = sorted({_band_of(routing, route) for route in self._work.routes})
        place = {band: number for number, band in enumerate(bands)}
        self._band_of_route = torch.tensor(
            [place[_band_of(routing, route)] for route in self._work.routes], dtype=torch.int64
        )
        self._edges = torch.tensor([0, *accumulate(r1 - r0 for _, r0, r1 in bands)], dtype=torch.int64)
        ranks = range(env.local.rank, env.shard.size, env.local.size)
        self._owners = [_owner(routing, rank, place, self.codecs) for rank in ranks]
        self._ids = SortedIdExchange(
            env.node, [len(owner.bands) for owner in self._owners], wide=routing.wide
        )
        self._tables = LookupTables(
            routing,
            self._own.work,
            held,
            sequence=True,
            out_dtype=self.codecs.forward.encoding.kernel_dtype,
        )
        rectangles = [len(owner.work.rectangles) for owner in self._owners]
        self._first_rectangle = list(accumulate(rectangles, initial=0))

    @property
    def _own(self) -> _Owner:
        return self._owners[self._node.rank]

    def ask(self, ids: LookupIds, *, train: bool) -> Fetch:
        """Remove the duplicates of a node's IDs and send each to its owner. Collective."""
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu()
        num_blocks = (len(starts) - 1) // max(len(self._work.routes), 1)
        bands = self._band_of_route.repeat(num_blocks).repeat_interleave(starts.diff()).to(ids.values.device)
        edges = self._edges.to(ids.values.device)
        keys, inverse = _distinct(ids.values.long() + edges[bands], int(self._edges[-1]))
        bounds = torch.searchsorted(keys, edges)
        slots = (inverse - bounds[bands]).to(ids.values.dtype)
        ends = bounds.tolist()
        distinct = [keys[a:b] - edges[band] for band, (a, b) in enumerate(pairwise(ends))]
        sent = [[len(distinct[band]) for band in owner.bands] for owner in self._owners]
        parts = [distinct[band] for owner in self._owners for band in owner.bands]
        asked, counts = self._ids.exchange(torch.cat([*parts, keys[:0]]), sent)
        owned = self._tables.resolve(self._as_ids(asked, counts), train=train)
        return Fetch(ids._replace(values=slots), distinct, owned, counts)

    def look_up(self, fetch: Fetch) -> Sequence[Tensor]:
        """Look up what other nodes ask for, and return the rows of each rectangle that this rank stands for.

        Collective. The result is [U, columns] for each rectangle of the work inside the node.
        """
        codec, encodes = self.codecs.forward, self.codecs.forward.encodes(self._node)
        with phase("lookup") if recorders else OFF:
            rows = self._tables.forward(fetch.owned, sum(fetch.owned.elements))
        with phase("output") if recorders else OFF:
            sent, received = self._blocks(fetch, FORWARD)
            if encodes:
                keys = self._keys(fetch) if codec.draws else None
                rows = codec.encode(rows, [block for each in sent for block in each], keys=keys)
            splits = Splits(_units(codec, sent, encodes=encodes), _units(codec, received, encodes=encodes))
            message = all_to_all(rows.view(-1), splits, self._node, "embeddings between nodes").wait()
            flat = [block for each in received for block in each]
            if encodes:
                message = codec.decode(message, flat)
            parts = message.split([block.num_rows * block.columns.width for block in flat])
        found: list[Tensor] = [message] * self._first_rectangle[-1]
        places = self._places()
        for part, block, place in zip(parts, flat, places, strict=True):
            found[place] = part.view(block.num_rows, block.columns.width)
        return found

    def send_home(self, fetch: Fetch, gradients: Sequence[RowGradients]) -> TableGradient:
        """Return the gradient of this rank's rectangles, summed over all nodes. Collective.

        ``gradients``: those of ``look_up``'s rows, whose rows are all touched.
        """
        codec, encodes = self.codecs.backward, self.codecs.backward.encodes(self._node)
        received, sent = self._blocks(fetch, BACKWARD)
        flat = [block for each in sent for block in each]
        parts = [gradients[place].grads.reshape(-1) for place in self._places()]
        device = fetch.slots.values.device
        grad = torch.cat(parts) if parts else torch.empty(0, device=device)
        bands = [owner.bands[x.route] for owner in self._owners for x in owner.work.lookups]
        if encodes:
            grad = codec.encode(grad, flat, names=lambda block, _: fetch.distinct[bands[block]])
        else:
            grad = grad.to(codec.encoding.kernel_dtype)
        splits = Splits(_units(codec, sent, encodes=encodes), _units(codec, received, encodes=encodes))
        grad = all_to_all(grad, splits, self._node, "gradients between nodes").wait()
        if encodes:
            grad = codec.decode(grad, [block for each in received for block in each])
        looked_up = LookedUp(self._tables.shaped(grad, fetch.owned), self._tables.lookups(fetch.owned))
        return TableGradient(looked_up, {}, fetch.owned.pins)

    def _as_ids(self, values: Tensor, counts: Sequence[Sequence[int]]) -> LookupIds:
        """Return the IDs of all nodes as bags of one ID."""
        widths = [0] * len(self._own.bands)
        for lookup in self._own.work.lookups:
            widths[lookup.route] += lookup.width
        return LookupIds(
            values=values,
            offsets=torch.arange(len(values) + 1, device=values.device),
            weights=None,
            segments=torch.tensor([0, *accumulate(n for each in counts for n in each)], dtype=torch.int64),
            batches=[-1] * len(counts),
            ragged=True,
            elements=tuple(sum(n * width for n, width in zip(each, widths, strict=True)) for each in counts),
        )

    def _blocks(self, fetch: Fetch, way: int) -> tuple[list[list[Block]], list[list[Block]]]:
        """Return, for each node, the blocks of rows that this rank owns, and of those that it fetches."""
        keys = [first_key(self._rank) if way == BACKWARD else 0] * len(self._owners)
        owned = [
            [
                Block(counts[x.route], columns[way])
                for x, columns in zip(self._own.work.lookups, self._own.columns, strict=True)
            ]
            for counts in fetch.counts
        ]
        fetched = [
            [
                Block(len(fetch.distinct[owner.bands[x.route]]), columns[way], key)
                for x, columns in zip(owner.work.lookups, owner.columns, strict=True)
            ]
            for owner, key in zip(self._owners, keys, strict=True)
        ]
        return owned, fetched

    def _places(self) -> list[int]:
        """Return the rectangle of each of the blocks that this rank fetches."""
        return [
            first + x.rectangle
            for first, owner in zip(self._first_rectangle, self._owners, strict=False)
            for x in owner.work.lookups
        ]

    def _keys(self, fetch: Fetch) -> Tensor:
        """Return the ID in its whole table of each row to look up here: equal IDs are rounded alike."""
        starts, own = fetch.owned.segments.tolist(), self._own
        parts = [
            fetch.owned.values[starts[first + x.route] : starts[first + x.route + 1]].long()
            + own.work.routes[x.route].r0
            for first in range(0, len(starts) - 1, max(len(own.bands), 1))
            for x in own.work.lookups
        ]
        return torch.cat(parts) if parts else fetch.owned.values.new_empty(0, dtype=torch.int64)


def _band_of(routing: Routing, route: Route) -> tuple[int, int, int]:
    return routing.uses[route.use].table, route.r0, route.r1


def _owner(routing: Routing, rank: int, place: dict[tuple[int, int, int], int], codecs: Codecs) -> _Owner:
    rectangles = routing.work[rank].rectangles
    first_use = {use.table: number for number, use in reversed(list(enumerate(routing.uses)))}
    bands = sorted({(x.table, x.r0, x.r1) for x in rectangles if x.table in first_use})
    lookups = [
        Lookup(q, i, first_use[table], x.c0, x.c1 - x.c0)
        for q, (table, r0, r1) in enumerate(bands)
        for i, x in enumerate(rectangles)
        if (x.table, x.r0, x.r1) == (table, r0, r1)
    ]
    routes = tuple(Route(first_use[table], r0, r1) for table, r0, r1 in bands)
    columns = []
    for x in lookups:
        span = Span(0, routing.columns[x.use] + x.c0, x.width)
        row = routes[x.route].r0
        columns.append((codecs.forward.columns([span], [row]), codecs.backward.columns([span], [row])))
    return _Owner(RankWork(rectangles, routes, tuple(lookups)), [place[band] for band in bands], columns)


def _units(codec: Codec, blocks: Sequence[Sequence[Block]], *, encodes: bool) -> list[int]:
    """Return the number of elements that travel for each node."""
    if not encodes:
        return [sum(block.num_rows * block.columns.width for block in each) for each in blocks]
    return [sum(block.num_rows * codec.encoding.units(block.columns) for block in each) for each in blocks]


def _distinct(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, ascending, and the place of each key among them."""
    found: tuple[Tensor, Tensor]
    if num_keys > _MARKED * max(len(keys), 1):
        found = torch.unique(keys, return_inverse=True)
    else:
        found = torch.ops.meshrec.distinct_ids.default(keys, num_keys)
    return found
