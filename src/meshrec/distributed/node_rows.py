"""Exchange between nodes in which a distinct row crosses the network once.

[Note: two levels]

With the axes ``node`` and ``local``, there are two ways across the network. A sharder's ``across_nodes``
selects:

- ``"sums"`` (``output_dist.py``): the owners pool bags, a node adds its partial sums, and a row per bag and
  node crosses.
- ``"rows"`` (here): a rank stands for the owners with its local rank on all nodes. The ranks on its node send
  it their IDs. It removes duplicates, fetches every row once, and pools the node's bags. Gradients take the
  reverse path: they are summed by row inside the node, and cross once per row.

Bags cross in ``"sums"``, distinct IDs in ``"rows"``. So ``"rows"`` pays if the ranks on a node share IDs, as
for hot IDs and for tables that are small relative to a node's batch. Inside a node everything is fp32; only
network traffic is encoded.

To the ranks on a node, the inner exchange looks like a module whose tables all lie on this node. Its routing,
return, and per-sample weights come from ``input_dist.py`` and ``output_dist.py``, with the routing from
``inside_node``.
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
from meshrec.distributed.lookup import FetchedRows, LookupTables
from meshrec.distributed.lookup_batch import Fetch, LookupIds
from meshrec.distributed.output_dist import Codecs
from meshrec.distributed.pieces import Span
from meshrec.distributed.routing import Lookup, RankWork, Route, Routing, rank_work
from meshrec.distributed.wire_codec import BACKWARD, FORWARD, Codec, first_key
from meshrec.ops import operators
from meshrec.tables.local_shards import LocalShards
from meshrec.tables.packing import RowGradients
from meshrec.tables.updates import TableGradient

# M: nodes, B: bands, U: distinct IDs in a band, Q: routes

_MARKED = 512
"""Maximum table rows per ID for deduplication by marking rows; beyond, IDs are sorted."""


class _Owner(NamedTuple):
    """Rows that a rank owns for all nodes: bands, with the columns stored there."""

    work: RankWork
    bands: list[int]
    """Band band_index among the bands on all nodes."""
    columns: list[tuple[Columns, Columns]]
    """Columns on the wire in both directions, by lookup."""


def inside_node(routing: Routing, env: ShardingEnv) -> tuple[Routing, ShardingEnv]:
    """Return the routing and the ranks for the exchange inside a node.

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
        rank_work([r for work in routing.work[local::size] for r in work.rectangles], list(routing.uses))
        for local in range(size)
    )
    peers = Axis(size=env.world.size // size, rank=env.world.rank // size)
    return replace(routing, work=work), ShardingEnv(world=env.world, shard=env.local, replicate=peers)


class NodeRows:
    """Row exchange between nodes for a single module on a single rank.

    Args:
        routing: the plan, compiled for all ranks.
        inside: routing inside the node.
        env: the ranks.
        held: this rank's rectangles.
        wires: wire formats by table number.
        clock: returns the number of table updates so far.
    """

    def __init__(
        self,
        routing: Routing,
        inside: Routing,
        env: ShardingEnv,
        held: LocalShards,
        *,
        wires: Sequence[WireFormats],
        clock: Callable[[], int],
    ) -> None:
        assert env.node is not None
        assert env.local is not None
        self._routing, self._node, self._rank = routing, env.node, env.shard.rank
        self.codecs = Codecs(*(Codec(routing, wires, direction, clock) for direction in (FORWARD, BACKWARD)))
        self.fetched = FetchedRows()
        self._work = inside.work[env.local.rank]
        bands = sorted({_band_of(routing, route) for route in self._work.routes})
        # Bands owned by all peers with this local rank, numbered in table order.
        band_index = {band: number for number, band in enumerate(bands)}
        self._band_of_route = torch.tensor(
            [band_index[_band_of(routing, route)] for route in self._work.routes], dtype=torch.int64
        )
        self._edges = torch.tensor([0, *accumulate(r1 - r0 for _, r0, r1 in bands)], dtype=torch.int64)
        # Peers with the same local rank, by node: only these exchange rows across the network.
        ranks = range(env.local.rank, env.shard.size, env.local.size)
        self._owners = [_owner(routing, rank, band_index, self.codecs) for rank in ranks]
        self._ids = SortedIdExchange(
            env.node, [len(owner.bands) for owner in self._owners], wide=routing.wide
        )
        self._tables = LookupTables(
            routing,
            self._local_owner.work,
            held,
            sequence=True,
            out_dtype=self.codecs.forward.encoding.kernel_dtype,
        )
        rectangles = [len(owner.work.rectangles) for owner in self._owners]
        self._first_rectangle = list(accumulate(rectangles, initial=0))

    @property
    def _local_owner(self) -> _Owner:
        return self._owners[self._node.rank]

    def ask(self, ids: LookupIds, *, train: bool) -> Fetch:
        """Deduplicate a node's IDs and send them to their owners. Collective."""
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu()
        num_blocks = (len(starts) - 1) // max(len(self._work.routes), 1)
        bands = self._band_of_route.repeat(num_blocks).repeat_interleave(starts.diff()).to(ids.values.device)
        edges = self._edges.to(ids.values.device)
        # Band offsets keep IDs from different bands apart in a single deduplication.
        keys, inverse = _distinct(ids.values.long() + edges[bands], int(self._edges[-1]))
        bounds = torch.searchsorted(keys, edges)
        slots = (inverse - bounds[bands]).to(ids.values.dtype)
        ends = bounds.tolist()
        distinct = [keys[a:b] - edges[band] for band, (a, b) in enumerate(pairwise(ends))]
        sent = [[len(distinct[band]) for band in owner.bands] for owner in self._owners]
        parts = [distinct[band] for owner in self._owners for band in owner.bands]
        requested, counts = self._ids.exchange(torch.cat([*parts, keys[:0]]), sent)
        owned = self._tables.resolve(self._as_ids(requested, counts), train=train)
        return Fetch(ids._replace(values=slots), distinct, owned, counts)

    def look_up(self, fetch: Fetch) -> Sequence[Tensor]:
        """Look up the rows requested by other nodes, and return the rows this rank stands for.

        Collective. Returns [U, columns] per rectangle in the inner work.
        """
        codec, encodes = self.codecs.forward, self.codecs.forward.encodes(self._node)
        with phase("lookup") if recorders else OFF:
            rows = self._tables.forward(fetch.owned, sum(fetch.owned.elements))
        with phase("output") if recorders else OFF:
            sent, received = self._blocks(fetch, FORWARD)
            if encodes:
                keys = self._keys(fetch) if codec.draws else None
                rows = codec.encode(rows, [block for blocks in sent for block in blocks], keys=keys)
            splits = Splits(_units(codec, sent, encodes=encodes), _units(codec, received, encodes=encodes))
            message = all_to_all(rows.view(-1), splits, self._node, "embeddings between nodes").wait()
            flat = [block for blocks in received for block in blocks]
            if encodes:
                message = codec.decode(message, flat)
            parts = message.split([block.num_rows * block.columns.width for block in flat])
        rows_by_rectangle: list[Tensor] = [message] * self._first_rectangle[-1]
        rectangle_indices = self._rectangle_indices()
        for part, block, number in zip(parts, flat, rectangle_indices, strict=True):
            rows_by_rectangle[number] = part.view(block.num_rows, block.columns.width)
        return rows_by_rectangle

    def send_home(self, fetch: Fetch, gradients: Sequence[RowGradients]) -> TableGradient:
        """Return the gradient for this rank's rectangles, summed over all nodes. Collective.

        Args:
            fetch: the batch's distinct IDs.
            gradients: gradients for the rows from ``look_up``. All these rows are touched.
        """
        codec, encodes = self.codecs.backward, self.codecs.backward.encodes(self._node)
        received, sent = self._blocks(fetch, BACKWARD)
        flat = [block for blocks in sent for block in blocks]
        parts = [gradients[number].grads.reshape(-1) for number in self._rectangle_indices()]
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
            grad = codec.decode(grad, [block for blocks in received for block in blocks])
        return self._tables.gradient(grad, fetch.owned)

    def _as_ids(self, values: Tensor, counts: Sequence[Sequence[int]]) -> LookupIds:
        """Return the IDs from all nodes as single-ID bags."""
        widths = [0] * len(self._local_owner.bands)
        for lookup in self._local_owner.work.lookups:
            widths[lookup.route] += lookup.width
        return LookupIds(
            values=values,
            offsets=torch.arange(len(values) + 1, device=values.device),
            weights=None,
            segments=torch.tensor([0, *accumulate(n for row in counts for n in row)], dtype=torch.int64),
            batches=[-1] * len(counts),
            ragged=True,
            elements=tuple(sum(n * width for n, width in zip(row, widths, strict=True)) for row in counts),
        )

    def _blocks(self, fetch: Fetch, direction: int) -> tuple[list[list[Block]], list[list[Block]]]:
        """Return the blocks this rank owns and the blocks it fetches, both by node."""
        keys = [first_key(self._rank) if direction == BACKWARD else 0] * len(self._owners)
        owned = [
            [
                Block(counts[x.route], columns[direction])
                for x, columns in zip(self._local_owner.work.lookups, self._local_owner.columns, strict=True)
            ]
            for counts in fetch.counts
        ]
        fetched = [
            [
                Block(len(fetch.distinct[owner.bands[x.route]]), columns[direction], key)
                for x, columns in zip(owner.work.lookups, owner.columns, strict=True)
            ]
            for owner, key in zip(self._owners, keys, strict=True)
        ]
        return owned, fetched

    def _rectangle_indices(self) -> list[int]:
        """Return the rectangle number for every fetched block."""
        return [
            first + x.rectangle
            for first, owner in zip(self._first_rectangle, self._owners, strict=False)
            for x in owner.work.lookups
        ]

    def _keys(self, fetch: Fetch) -> Tensor:
        """Return the whole-table ID for every row looked up here, so equal IDs are rounded alike."""
        starts, owner = fetch.owned.segments.tolist(), self._local_owner
        parts = [
            fetch.owned.values[starts[first + x.route] : starts[first + x.route + 1]].long()
            + owner.work.routes[x.route].r0
            for first in range(0, len(starts) - 1, max(len(owner.bands), 1))
            for x in owner.work.lookups
        ]
        return torch.cat(parts) if parts else fetch.owned.values.new_empty(0, dtype=torch.int64)


def _band_of(routing: Routing, route: Route) -> tuple[int, int, int]:
    return routing.uses[route.use].table, route.r0, route.r1


def _owner(
    routing: Routing, rank: int, band_index: dict[tuple[int, int, int], int], codecs: Codecs
) -> _Owner:
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
    return _Owner(RankWork(rectangles, routes, tuple(lookups)), [band_index[band] for band in bands], columns)


def _units(codec: Codec, blocks: Sequence[Sequence[Block]], *, encodes: bool) -> list[int]:
    """Return the elements sent per node."""
    if not encodes:
        return [sum(block.num_rows * block.columns.width for block in group) for group in blocks]
    return [sum(block.num_rows * codec.encoding.units(block.columns) for block in group) for group in blocks]


def _distinct(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, ascending, and every key's index among them."""
    distinct: tuple[Tensor, Tensor]
    # Marking is linear in table rows, sorting is linearithmic in IDs.
    if num_keys > _MARKED * max(len(keys), 1):
        distinct = torch.unique(keys, return_inverse=True)
    else:
        distinct = operators.distinct_ids(keys, num_keys)
    return distinct
