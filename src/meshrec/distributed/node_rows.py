"""Exchange rows between nodes such that every distinct row crosses the network once per node.

[Note: two levels]

On a mesh with the axes ``node`` and ``local``, a sharder's option ``across_nodes`` selects what nodes
exchange:

- ``"sums"`` (``output_dist.py``): the ranks which have rows pool bags, ranks on the same node add their
  partial sums, and the network carries a row per bag and node.
- ``"rows"`` (this file): on every node, the rank with local rank i stands in for the ranks with local rank i
  on all nodes. If one of those ranks has an ID's row, the other ranks on the node send the ID to the
  stand-in. The stand-in removes duplicates, fetches every distinct row once from the rank which has the row,
  and pools the bags for its node. Gradients take the reverse path: they are summed by row inside the node,
  and cross the network once per row.

``"rows"`` sends less if the ranks on a node look up the same IDs, as for popular IDs and small tables. Inside
a node, rows and gradients are fp32; only messages between nodes are encoded.

The exchange inside a node works as if the node had all tables. ``input_dist.py`` and ``output_dist.py`` run
it, with the routing from ``inside_node``. A *band* is a row interval of a table, and the *owner* of a band is
the rank which has its rows.
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

# Above this number of table rows per ID, find distinct IDs by sorting the IDs, otherwise by marking table
# rows.
_MAX_ROWS_PER_ID = 512


class _Owner(NamedTuple):
    """A rank with the same local rank as this rank, and the bands which it owns.

    A band is a row interval of a table.
    """

    work: RankWork
    """The owner's rectangles (row and column ranges). There is a route per band, which is a group of IDs to
    look up, and a lookup per band and rectangle.
    """
    bands: list[int]
    """Numbers of these bands, counted over the owners on all nodes."""
    columns: list[tuple[Columns, Columns]]
    """Message columns for every lookup, for embeddings and for gradients."""


def inside_node(routing: Routing, env: ShardingEnv) -> tuple[Routing, ShardingEnv]:
    """Return the routing and the ranks for the exchange inside a node, with ``across_nodes="rows"``.

    In this routing, local rank i has the rectangles (row and column ranges of tables) of the ranks with local
    rank i on all nodes. See [Note: two levels].

    Args:
        routing: the plan, compiled for all ranks.
        env: the ranks, on a mesh with the axes ``node`` and ``local``.

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
    # Nodes stand in for replica groups: inside a node, the exchange works as on a mesh with one replica per
    # node.
    peers = Axis(size=env.world.size // size, rank=env.world.rank // size)
    return replace(routing, work=work), ShardingEnv(world=env.world, shard=env.local, replicate=peers)


class NodeRows:
    """Exchange of a module's rows and row gradients between nodes; see [Note: two levels].

    For a batch, call ``request_rows``, then ``look_up``, and in the backward pass ``return_gradients``.

    Args:
        routing: the plan, compiled for all ranks.
        inside: routing inside the node, from `inside_node`.
        env: the ranks.
        shards: memory with this rank's rectangles (row and column ranges of tables).
        wires: encodings for embeddings and gradients in messages between nodes, by table number.
        clock: function which returns the table update count so far. The count seeds stochastic rounding.

    Attributes:
        fetched: rows fetched for the batch that is looked up now.
    """

    def __init__(
        self,
        routing: Routing,
        inside: Routing,
        env: ShardingEnv,
        shards: LocalShards,
        *,
        wires: Sequence[WireFormats],
        clock: Callable[[], int],
    ) -> None:
        assert env.node is not None
        assert env.local is not None
        # The fields follow from the plan, except ``fetched`` (per batch) and the error feedback in
        # ``codecs``.
        self._routing, self._node, self._rank = routing, env.node, env.shard.rank
        # Only messages between nodes are encoded, so the codecs use the routing of all ranks.
        self.codecs = Codecs(*(Codec(routing, wires, direction, clock) for direction in (FORWARD, BACKWARD)))
        self.fetched = FetchedRows()
        self._work = inside.work[env.local.rank]
        bands = sorted({_band_of(routing, route) for route in self._work.routes})
        # Number of every band (table, first row, end row) whose owner has this local rank, in table
        # order.
        band_index = {band: number for number, band in enumerate(bands)}
        self._band_of_route = torch.tensor(
            [band_index[_band_of(routing, route)] for route in self._work.routes], dtype=torch.int64
        )
        # Offset of every band's rows in a common numbering, followed by the number of rows in all bands.
        self._edges = torch.tensor([0, *accumulate(r1 - r0 for _, r0, r1 in bands)], dtype=torch.int64)
        # The ranks with this local rank, by node. Only these exchange rows across the network.
        ranks = range(env.local.rank, env.shard.size, env.local.size)
        self._owners = [_owner(routing, rank, band_index, self.codecs) for rank in ranks]
        self._ids = SortedIdExchange(
            env.node, [len(owner.bands) for owner in self._owners], wide=routing.wide
        )
        # Looks up a row per requested ID; pooling happens at the requesting rank.
        self._tables = LookupTables(
            routing,
            self._local_owner.work,
            shards,
            sequence=True,
            out_dtype=self.codecs.forward.encoding.kernel_dtype,
        )
        rectangles = [len(owner.work.rectangles) for owner in self._owners]
        # Number of every owner's first rectangle in the routing inside the node, and the total number.
        self._first_rectangle = list(accumulate(rectangles, initial=0))

    @property
    def _local_owner(self) -> _Owner:
        """The entry in ``_owners`` for this rank."""
        return self._owners[self._node.rank]

    def request_rows(self, ids: LookupIds, *, train: bool) -> Fetch:
        """Remove duplicates from this node's IDs, and request their rows from the owners. Collective.

        Returns:
            The rows to fetch, and the rows which other nodes request from this rank.
        """
        # First ID of every (source rank, route), followed by the number of IDs.
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu()
        num_blocks = (len(starts) - 1) // max(len(self._work.routes), 1)
        bands = self._band_of_route.repeat(num_blocks).repeat_interleave(starts.diff()).to(ids.values.device)
        edges = self._edges.to(ids.values.device)
        # Add an offset per band, so that IDs in different bands differ, and remove duplicates in all bands at
        # once.
        keys, inverse = _distinct(ids.values.long() + edges[bands], int(self._edges[-1]))
        # First distinct ID of every band, and the number of distinct IDs.
        # Distinct keys ascend and bands are numbered in ascending ranges, so a band is a slice.
        bounds = torch.searchsorted(keys, edges)
        # Positions among the distinct IDs of the band.
        slots = (inverse - bounds[bands]).to(ids.values.dtype)
        # On a GPU, this waits for the device: the host needs the sizes of the messages.
        ends = bounds.tolist()
        distinct = [keys[a:b] - edges[band] for band, (a, b) in enumerate(pairwise(ends))]
        # Grouped by owner, because every owner gets its bands in the order in which it numbers them.
        sent = [[len(distinct[band]) for band in owner.bands] for owner in self._owners]
        parts = [distinct[band] for owner in self._owners for band in owner.bands]
        # The empty slice keeps torch.cat from failing on an empty list.
        requested, counts = self._ids.exchange(torch.cat([*parts, keys[:0]]), sent)
        owned = self._tables.resolve(self._as_ids(requested, counts), train=train)
        return Fetch(ids._replace(values=slots), distinct, owned, counts)

    def look_up(self, fetch: Fetch) -> Sequence[Tensor]:
        """Look up the rows which all nodes have requested from this rank, and send them. Collective.

        At the same time, receive the rows which this rank has requested.

        Returns:
            For every rectangle in the routing inside the node, the requested rows for its U distinct IDs,
            [U, columns].
        """
        codec, encodes = self.codecs.forward, self.codecs.forward.encodes(self._node)
        with phase("lookup") if recorders else OFF:
            rows = self._tables.forward(fetch.owned, sum(fetch.owned.elements))
        with phase("output") if recorders else OFF:
            sent, received = self._blocks(fetch, FORWARD)
            if encodes:
                keys = self._keys(fetch) if codec.draws else None
                rows = codec.encode(rows, [block for blocks in sent for block in blocks], keys=keys)
            splits = Splits(
                _elements_per_node(codec, sent, encodes=encodes),
                _elements_per_node(codec, received, encodes=encodes),
            )
            message = all_to_all(rows.view(-1), splits, self._node, "embeddings between nodes").wait()
            flat = [block for blocks in received for block in blocks]
            if encodes:
                message = codec.decode(message, flat)
            parts = message.split([block.num_rows * block.columns.width for block in flat])
        # Filled below in the order of the owners; the initial value is only a placeholder.
        rows_by_rectangle: list[Tensor] = [message] * self._first_rectangle[-1]
        rectangle_indices = self._rectangle_indices()
        for part, block, number in zip(parts, flat, rectangle_indices, strict=True):
            rows_by_rectangle[number] = part.view(block.num_rows, block.columns.width)
        return rows_by_rectangle

    def return_gradients(self, fetch: Fetch, gradients: Sequence[RowGradients]) -> TableGradient:
        """Send the gradients for fetched rows to the owners, and return the gradient for this rank's
        rectangles.

        Collective.

        Args:
            fetch: result of ``request_rows``.
            gradients: for every rectangle in the routing inside the node, the gradients for all rows which
                ``look_up`` returned.
        """
        codec, encodes = self.codecs.backward, self.codecs.backward.encodes(self._node)
        # The reverse of the forward pass: this rank receives gradients for rows it owns, and sends those for
        # rows it has fetched.
        received, sent = self._blocks(fetch, BACKWARD)
        flat = [block for blocks in sent for block in blocks]
        parts = [gradients[number].grads.reshape(-1) for number in self._rectangle_indices()]
        device = fetch.slots.values.device
        grad = torch.cat(parts) if parts else torch.empty(0, device=device)
        # Band of every block, which error feedback needs to name rows by their IDs.
        bands = [owner.bands[x.route] for owner in self._owners for x in owner.work.lookups]
        if encodes:
            grad = codec.encode(grad, flat, names=lambda block, _: fetch.distinct[bands[block]])
        else:
            grad = grad.to(codec.encoding.kernel_dtype)
        splits = Splits(
            _elements_per_node(codec, sent, encodes=encodes),
            _elements_per_node(codec, received, encodes=encodes),
        )
        grad = all_to_all(grad, splits, self._node, "gradients between nodes").wait()
        if encodes:
            grad = codec.decode(grad, [block for blocks in received for block in blocks])
        return self._tables.gradient(grad, fetch.owned)

    def _as_ids(self, values: Tensor, counts: Sequence[Sequence[int]]) -> LookupIds:
        """Return the IDs requested by all nodes as input for a sequence lookup, with a single ID per bag.

        Args:
            counts: ``counts[node][band]`` is the number of IDs.
        """
        # Values per ID in every band, over all column shards on this rank.
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
        """Return the layout of this rank's messages to and from all nodes.

        A block is a message part. Its rows belong to the same lookup, so they have the same columns.

        Args:
            fetch: result of ``request_rows``.

        Returns:
            The blocks with rows which this rank owns, and the blocks with rows which it fetches. Both are
            lists with a list of blocks per node.
        """
        # Gradients of different ranks are rounded with different random numbers, rows by their IDs.
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
        """Return a rectangle number for every block of fetched rows, in the order of the blocks.

        Rectangles are numbered as in the routing inside the node.
        """
        return [
            first + x.rectangle
            for first, owner in zip(self._first_rectangle, self._owners, strict=False)
            for x in owner.work.lookups
        ]

    def _keys(self, fetch: Fetch) -> Tensor:
        """Return the ID for every row which this rank looks up for other nodes, int64.

        The IDs seed stochastic rounding, so rows for the same ID are rounded alike.
        """
        starts, owner = fetch.owned.segments.tolist(), self._local_owner
        parts = [
            fetch.owned.values[starts[first + x.route] : starts[first + x.route + 1]].long()
            + owner.work.routes[x.route].r0
            for first in range(0, len(starts) - 1, max(len(owner.bands), 1))
            for x in owner.work.lookups
        ]
        return torch.cat(parts) if parts else fetch.owned.values.new_empty(0, dtype=torch.int64)


def _band_of(routing: Routing, route: Route) -> tuple[int, int, int]:
    """Return the row interval to which a route's IDs belong: (table number, first row, end row)."""
    return routing.uses[route.use].table, route.r0, route.r1


def _owner(
    routing: Routing, rank: int, band_index: dict[tuple[int, int, int], int], codecs: Codecs
) -> _Owner:
    """Return an `_Owner` with the bands (row intervals of tables) which a rank owns."""
    rectangles = routing.work[rank].rectangles
    # The exchange is by table, not by use, so any use stands for the table.
    # Reversed, so that the first use of a table replaces the others.
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


def _elements_per_node(codec: Codec, blocks: Sequence[Sequence[Block]], *, encodes: bool) -> list[int]:
    """Return the number of elements in the message to or from every node."""
    if not encodes:
        return [sum(block.num_rows * block.columns.width for block in group) for group in blocks]
    return [sum(block.num_rows * codec.encoding.units(block.columns) for block in group) for group in blocks]


def _distinct(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return the distinct keys, ascending, and for every key its index among the distinct keys."""
    distinct: tuple[Tensor, Tensor]
    # Marking takes time proportional to the number of table rows, sorting to N log N.
    if num_keys > _MAX_ROWS_PER_ID * max(len(keys), 1):
        distinct = torch.unique(keys, return_inverse=True)
    else:
        distinct = operators.distinct_ids(keys, num_keys)
    return distinct
