"""The exchange that returns rows to the ranks that asked for them, in table order. Gradients take the reverse
way.

A *hop* is one all-to-all with the sums after it. A flat mesh needs one hop. With the axes ``node`` and
``local`` there are two: partial rows are summed inside the node first, so that one row per node crosses the
network.

Messages are encoded by a wire format (comms/wire.py), row by row. A row is the columns of one lookup for one
bag or one ID. A rank that holds ten tables sends ten rows per bag, each with its own scale if the format has
scales, and the planner can compute the cost of each rectangle by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, Splits, all_to_all
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.comms.wire import Block, WireFormat, WireFormats, decode_blocks, encode_blocks
from meshrec.distributed.input_dist import LookupIds, SourceIds
from meshrec.distributed.pieces import Span, as_tensor, local_spans, pieces_of, rank_spans
from meshrec.distributed.routing import Routing

# B bags of this rank, D columns, Q routes, U uses


@dataclass(frozen=True, kw_only=True)
class Hop:
    """The columns that arrive from each rank of an axis, and their places in the result."""

    axis: Axis
    wire: WireFormats
    widths: list[list[int]]
    """Widths of the rows that each rank sends for one bag."""
    dims: list[int]
    """Sums of ``widths``: the number of columns from each rank."""
    units: list[int]
    """Number of elements that each rank sends for one bag, encoded."""
    grad_units: list[int]
    """Like ``units``, for the gradients that each rank gets back."""
    pieces: Tensor
    out_dim: int
    num_kinds: int
    """Number of different gradients that are sent back; 1 if all ranks get the same one."""
    grad_pieces: Tensor
    """Like ``pieces``, for the gradients; for one rank only, if all get the same."""
    local_dim: int
    encodes: bool
    """Whether embeddings are encoded after their kernel, and decoded before the next one."""
    encodes_grads: bool
    """Like ``encodes``, for gradients."""

    @classmethod
    def of(
        cls,
        axis: Axis,
        sources: Sequence[Sequence[Span]],
        local: Sequence[Span],
        out_dim: int,
        wire: WireFormats,
    ) -> "Hop":
        """Make a hop. ``sources``: the columns of each rank of the axis; ``local``: the columns that are not
        sent.
        """
        kinds = {tuple(span._replace(source=0) for span in spans) for spans in sources}
        widths = [[span.width for span in spans] for spans in sources]
        num_kinds = 1 if len(kinds) == 1 else len(sources)
        travels = _travels(axis)
        return cls(
            axis=axis,
            wire=wire,
            widths=widths,
            dims=[sum(own) for own in widths],
            units=[sum(map(wire.forward.row_units, own)) for own in widths],
            grad_units=[sum(map(wire.backward.row_units, own)) for own in widths],
            pieces=_pieces(sources, local),
            out_dim=out_dim,
            num_kinds=num_kinds,
            grad_pieces=_pieces(sources[:num_kinds], local),
            local_dim=sum(span.width for span in local),
            encodes=travels and not wire.forward.is_cast,
            encodes_grads=travels and not wire.backward.is_cast,
        )

    def send(self, rows: Tensor, rows_sent: Sequence[int], num_rows: int, name: str) -> InFlight:
        """Start to send ``rows_sent[p]`` rows of this rank's columns to each rank p of the axis.

        Args:
            rows: consecutive rows, flat or [sum of ``rows_sent``, columns], of the format's ``kernel_dtype``.
            rows_sent: number of rows for each rank.
            num_rows: number of rows that this rank gets from each rank.
            name: name of the collective.
        """
        own = self.axis.rank
        if self.encodes:
            rows = encode_blocks(self.wire.forward, rows, [Block(sum(rows_sent), self.widths[own])])
        unit = self.units[own]
        splits = Splits(list(map(unit.__mul__, rows_sent)), list(map(num_rows.__mul__, self.units)))
        return all_to_all(rows.view(-1), splits, self.axis, name)

    def gather(self, in_flight: InFlight, local: Tensor | None, rows: int, bags: SourceIds | None) -> Tensor:
        """Sum the rows that arrive and put them in order, [rows, out_dim]. ``bags`` gives the bag sizes
        for tables with MEAN pooling whose sums are divided here.
        """
        arguments = local, self.pieces, self.dims, rows, self.out_dim, *_bags(bags)
        gather = torch.ops.meshrec.gather_pooled.default
        if self.encodes:
            blocks = [Block(rows, widths) for widths in self.widths]
            return gather(decode_blocks(self.wire.forward, in_flight.wait(), blocks), *arguments)  # type: ignore[no-any-return]
        return in_flight.use(lambda received, *link: gather(received, *arguments, *link))

    def scatter(self, grad: Tensor, bags: SourceIds | None, scale: float) -> tuple[Tensor, Tensor]:
        """Take the gradient apart: return the message to the ranks (1-D), and the gradient of the local
        columns.
        """
        sent, local = torch.ops.meshrec.scatter_pooled.default(
            grad,
            self.grad_pieces,
            self.dims[: self.num_kinds],
            self.local_dim,
            *_bags(bags),
            scale,
            self.wire.backward.kernel_dtype,
        )
        return sent, local

    def send_back(self, sent: Tensor, rows_sent: Sequence[int], num_rows: int, name: str) -> InFlight:
        """Start to send the result of ``scatter``. ``rows_sent`` and ``num_rows`` are those of ``send``."""
        if self.encodes_grads:
            blocks = [Block(num_rows, widths) for widths in self.widths[: self.num_kinds]]
            sent = encode_blocks(self.wire.backward, sent, blocks)
        unit = self.grad_units[self.axis.rank]
        splits = Splits(list(map(num_rows.__mul__, self.grad_units)), list(map(unit.__mul__, rows_sent)))
        return all_to_all(sent, splits, self.axis, name, same=self.num_kinds < len(self.dims))

    def gradient(self, in_flight: InFlight, rows_sent: Sequence[int]) -> Tensor:
        """Return the gradients of the rows that ``send`` sent, in their order, fp32, flat."""
        message = in_flight.wait()
        if self.encodes_grads:
            block = Block(sum(rows_sent), self.widths[self.axis.rank])
            message = decode_blocks(self.wire.backward, message, [block])
        return message.float()


def flat_hop(routing: Routing, env: ShardingEnv, wire: WireFormats) -> Hop:
    """Return the hop that brings the results of all ranks at once."""
    num_ranks = env.shard.size
    sources = [rank_spans(routing, rank) for rank in range(num_ranks)]
    return Hop.of(env.shard, sources, local_spans(routing), routing.columns[-1], wire)


def node_hops(routing: Routing, env: ShardingEnv, wire: WireFormats) -> tuple[Hop, Hop]:
    """Return the hop inside a node, and the hop between nodes."""
    assert env.node is not None
    assert env.local is not None
    size = env.local.size
    nodes = [_node_spans(routing, range(n * size, (n + 1) * size), n) for n in range(env.node.size)]
    own = nodes[env.node.rank]
    place = _places(own)
    inside = [
        [
            span._replace(source=local, column=place[span.column])
            for span in rank_spans(routing, env.node.rank * size + local, divide=False)
        ]
        for local in range(size)
    ]
    first = Hop.of(env.local, inside, [], sum(span.width for span in own), wire)
    return first, Hop.of(env.node, nodes, local_spans(routing), routing.columns[-1], wire)


class Asked(NamedTuple):
    """The request of a batch: the sizes that both ends of the exchange know."""

    source: SourceIds
    ids: LookupIds
    """The IDs that are looked up here."""
    batches: list[int]
    """Bags per route of every rank of the shard axis, in the order of ranks."""
    block_sizes: list[int]
    """Elements of this rank's output for each block."""


class _Rows(NamedTuple):
    """The numbers of rows that this rank sends to each rank on a hop, and gets from each."""

    sent: list[int]
    num_rows: int


class PooledOutput:
    """The exchange of one row for each bag. Partial rows are summed, and columns are put in table order."""

    def __init__(self, routing: Routing, env: ShardingEnv, wire: WireFormats) -> None:
        if env.node is not None and env.local is not None and min(env.node.size, env.local.size) > 1:
            self._hops: tuple[Hop, ...] = node_hops(routing, env, wire)
            num_nodes, size = env.node.size, env.local.size
            self.blocks = [n * size + local for local in range(size) for n in range(num_nodes)]
        else:
            self._hops = (flat_hop(routing, env, wire),)
            self.blocks = list(range(env.shard.size))

    def send_rows(self, out: Tensor, asked: Asked) -> InFlight:
        """Send the lookup's rows on the first hop. ``out`` is [sum of batches, dim], in the type that
        travels.
        """
        return self._hops[0].send(out, *self._rows(asked)[0], "embeddings")

    def receive_rows(self, in_flight: InFlight, local: Tensor | None, asked: Asked) -> Tensor:
        """Return the result, [B, D] fp32. ``local`` has the columns of the data-parallel tables, [B,
        columns].
        """
        source = asked.source
        if len(self._hops) == 2:
            (_, num_rows), (rows_sent, _) = self._rows(asked)
            first, second = self._hops
            rows = first.gather(in_flight, None, num_rows, None).to(second.wire.forward.kernel_dtype)
            in_flight = second.send(rows, rows_sent, source.batches[0], "embeddings between nodes")
        return self._hops[-1].gather(in_flight, local, source.batches[0], source)

    def send_gradient(self, grad: Tensor, asked: Asked, scale: float) -> tuple[InFlight, Tensor]:
        """Send the gradient of the result of ``receive_rows``, times ``scale``; also return that of the local
        columns.
        """
        rows = self._rows(asked)
        sent, local = self._hops[-1].scatter(grad, asked.source, scale)
        if len(self._hops) == 2:
            first, second = self._hops
            received = second.send_back(sent, *rows[1], "gradients between nodes")
            own = second.gradient(received, rows[1].sent)
            own = own.view(rows[0].num_rows, first.out_dim)  # no -1: a node may hold nothing
            sent, _ = first.scatter(own, None, 1.0)
        return self._hops[0].send_back(sent, *rows[0], "gradients of embeddings"), local

    def receive_gradient(self, in_flight: InFlight, asked: Asked) -> Tensor:
        """Return the gradient of the rows that ``send_rows`` sent, fp32, flat."""
        return self._hops[0].gradient(in_flight, asked.batches)

    def _rows(self, asked: Asked) -> list[_Rows]:
        """Return the numbers of rows that this rank sends and gets on each hop."""
        if len(self._hops) == 1:
            return [_Rows(asked.batches, asked.source.batches[0])]
        local = self._hops[0].axis
        # The rows that the ranks with this local rank ask for, by node.
        by_node = asked.batches[local.rank :: local.size]
        by_local = [sum(asked.batches[other :: local.size]) for other in range(local.size)]
        return [_Rows(by_local, sum(by_node)), _Rows(by_node, asked.source.batches[0])]


class SequenceOutput:
    """The exchange of one row for each ID, in the order of the caller's IDs."""

    def __init__(self, routing: Routing, env: ShardingEnv, wire: WireFormats) -> None:
        self._routing, self._axis, self._wire = routing, env.shard, wire
        self.blocks = list(range(env.shard.size))
        lookups, first_route = [], 0
        for work in routing.work:
            for lookup in work.lookups:
                lookups.append([first_route + lookup.route, lookup.use, lookup.c0, lookup.width])
            first_route += len(work.routes)
        ranks, widths = routing.route_elements
        self._route_ranks = torch.tensor(ranks[:first_route], dtype=torch.int64)
        self._route_widths = torch.tensor(widths[:first_route], dtype=torch.int64)
        own = routing.work[env.shard.rank]
        self._own = [(lookup.route, lookup.width) for lookup in own.lookups]
        self._all = [(route, width) for route, _, _, width in lookups]
        self._ways = [
            _Way(
                format,
                _travels(env.shard) and not format.is_cast,
                _units_per_route(format, self._own, len(own.routes)),
                _units_per_route(format, self._all, first_route),
            )
            for format in wire
        ]
        replicated = [routing.replicated[use.table] for use in routing.uses]
        self.uses_in_order = sorted(range(len(replicated)), key=replicated.__getitem__)
        self._lookups = torch.tensor(lookups, dtype=torch.int64).view(-1, 4)
        self._dims = [
            0 if routing.replicated[use.table] else dim
            for use, dim in zip(routing.uses, routing.dims, strict=True)
        ]

    def send_rows(self, out: Tensor, asked: Asked) -> InFlight:
        """Send the lookup's rows. ``out`` is flat, block by block."""
        way = self._ways[0]
        if way.encodes:
            out = encode_blocks(way.wire, out, self._own_blocks(asked))
        return all_to_all(out, self._splits(way, asked), self._axis, "embeddings")

    def receive_rows(self, in_flight: InFlight, local: Tensor | None, asked: Asked) -> Tensor:
        """Return the rows of each use, flat fp32 [ids, dim]. Those of data-parallel tables come last, as
        ``local`` has them.
        """
        received, way = in_flight.wait(), self._ways[0]
        if way.encodes:
            received = decode_blocks(way.wire, received, self._all_blocks(asked))
        rows: Tensor = torch.ops.meshrec.gather_sequence.default(received, *self._ids(asked.source))
        return rows if local is None else torch.cat([rows, local])

    def send_gradient(self, grad: Tensor, asked: Asked, scale: float) -> tuple[InFlight, Tensor]:
        """Send ``scale`` times the gradient of the result of ``receive_rows``; also return that of the local
        rows.
        """
        way = self._ways[1]
        splits = self._splits(way, asked)
        split = sum(splits.received)  # each element of the split tables' rows came from one rank
        if not way.wire.is_cast:
            split = int((asked.source.counts[: self._route_widths.numel()] * self._route_widths).sum())
        sent = torch.ops.meshrec.scatter_sequence.default(
            grad[:split], *self._ids(asked.source), scale, way.wire.kernel_dtype
        )
        if way.encodes:
            sent = encode_blocks(way.wire, sent, self._all_blocks(asked))
        back = Splits(splits.received, splits.sent)
        return all_to_all(sent, back, self._axis, "gradients of embeddings"), grad[split:] * scale

    def receive_gradient(self, in_flight: InFlight, asked: Asked) -> Tensor:
        """Return the gradient of the rows that ``send_rows`` sent, fp32, flat."""
        message, way = in_flight.wait(), self._ways[1]
        if way.encodes:
            message = decode_blocks(way.wire, message, self._own_blocks(asked))
        return message.float()

    def _ids(self, source: SourceIds) -> tuple[object, ...]:
        return (
            source.values,
            *_bags(source),
            self._routing.router,
            self._lookups,
            source.counts,
            self._dims,
        )

    def _splits(self, way: "_Way", asked: Asked) -> Splits:
        counts = asked.source.counts[: self._route_ranks.numel()]
        received: list[int] = (
            torch.zeros(self._axis.size, dtype=torch.int64)
            .index_add_(0, self._route_ranks, counts * way.all_units)
            .tolist()
        )
        sent = (self._own_counts(asked) @ way.own_units).tolist() if way.encodes else asked.block_sizes
        return Splits(sent, received)

    def _own_counts(self, asked: Asked) -> Tensor:
        """Return the number of IDs that each rank asks for on each route of this rank, int64 [R, Q]."""
        ids = asked.ids
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu()
        return starts.diff().view(len(ids.batches), self._ways[0].own_units.numel())

    def _own_blocks(self, asked: Asked) -> list[Block]:
        """Return the blocks of rows that are looked up here: rank by rank, lookup by lookup."""
        counts_RQ = self._own_counts(asked).tolist()
        return [Block(counts[q], (width,)) for counts in counts_RQ for q, width in self._own]

    def _all_blocks(self, asked: Asked) -> list[Block]:
        """Return the blocks of rows that all ranks look up for this one, in the same order."""
        counts = asked.source.counts.tolist()
        return [Block(counts[q], (width,)) for q, width in self._all]


class _Way(NamedTuple):
    """One direction of the exchange of sequences."""

    wire: WireFormat
    encodes: bool
    """Whether rows are encoded after their kernel, and decoded before the next one."""
    own_units: Tensor
    """For each route of this rank, the number of elements of an encoded ID's rows."""
    all_units: Tensor
    """Like ``own_units``, for the routes of all ranks."""


def _travels(axis: Axis) -> bool:
    """Return whether the axis has other ranks. A rank's message to itself is not encoded."""
    return axis.group is not None and axis.size > 1


def _units_per_route(wire: WireFormat, lookups: Sequence[tuple[int, int]], num_routes: int) -> Tensor:
    units = torch.zeros(num_routes, dtype=torch.int64)
    for route, width in lookups:
        units[route] += wire.row_units(width)
    return units


def _pieces(sources: Sequence[Sequence[Span]], local: Sequence[Span]) -> Tensor:
    own = [span._replace(source=len(sources)) for span in local]
    return as_tensor(pieces_of([*sources, own]))


def _bags(source: SourceIds | None) -> tuple[Tensor | None, Tensor | None, int, list[int]]:
    if source is None:
        return None, None, 0, []
    return source.offsets, source.segments, source.num_keys, source.keys


def _node_spans(routing: Routing, ranks: Sequence[int], node: int) -> list[Span]:
    """List the columns that the ranks of a node hold together.

    They are cut at every start and end of a rank's lookup, so that a summed row is also encoded by the
    columns of one lookup.
    """
    found = [span for rank in ranks for span in rank_spans(routing, rank)]
    columns = {
        (span.mean_use, column) for span in found for column in range(span.column, span.column + span.width)
    }
    edges = {edge for span in found for edge in (span.column, span.column + span.width)}
    spans: list[Span] = []
    for mean_use, column in sorted(columns, key=lambda pair: pair[1]):
        last = spans[-1] if spans else None
        joins = last is not None and (last.column + last.width, last.mean_use) == (column, mean_use)
        if last is not None and joins and column not in edges:
            spans[-1] = last._replace(width=last.width + 1)
        else:
            spans.append(Span(node, column, 1, mean_use))
    return spans


def _places(spans: Sequence[Span]) -> dict[int, int]:
    """Return the position of each column of the result in a row of the spans."""
    columns = [column for span in spans for column in range(span.column, span.column + span.width)]
    return {column: place for place, column in enumerate(columns)}
