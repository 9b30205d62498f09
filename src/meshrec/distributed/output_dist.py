"""Brings results back to the ranks that asked, and puts them in table order; gradients go the same way in
reverse.

A *hop* is one all-to-all and the sums behind it. A flat mesh needs one. With ``node`` and ``local`` axes
there are two: partial rows are summed inside the node first, and what crosses the network is one row per
node.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, Splits, all_to_all
from meshrec.distributed.input_dist import SourceIds
from meshrec.distributed.pieces import Span, as_tensor, local_spans, pieces_of, rank_spans
from meshrec.distributed.routing import Routing
from meshrec.plan.mesh import Axis, ShardingEnv

# B bags of this rank, D columns, Q routes, U uses


class CommsPrecision(NamedTuple):
    """The types that embeddings and their gradients travel in."""

    forward: torch.dtype = torch.float32
    backward: torch.dtype = torch.float32


FULL_PRECISION = CommsPrecision()
"""Nothing is rounded on the way."""


@dataclass(frozen=True, kw_only=True)
class Hop:
    """The columns that arrive from each rank of an axis, and where they belong."""

    axis: Axis
    dims: list[int]
    pieces: Tensor
    out_dim: int
    grad_dims: list[int]
    grad_pieces: Tensor
    """As ``dims`` and ``pieces``, of what is sent back; of one rank, where all get the same."""
    local_dim: int

    @classmethod
    def of(cls, axis: Axis, sources: Sequence[Sequence[Span]], local: Sequence[Span], out_dim: int) -> "Hop":
        """``sources``: what each rank of the axis has; ``local``: the columns that need no sending."""
        kinds = {tuple(span._replace(source=0) for span in spans) for spans in sources}
        dims = [sum(span.width for span in spans) for spans in sources]
        num_kinds = 1 if len(kinds) == 1 else len(sources)
        return cls(
            axis=axis,
            dims=dims,
            pieces=_pieces(sources, local),
            out_dim=out_dim,
            grad_dims=dims[:num_kinds],
            grad_pieces=_pieces(sources[:num_kinds], local),
            local_dim=sum(span.width for span in local),
        )

    def gather(self, in_flight: InFlight, local: Tensor | None, rows: int, bags: SourceIds | None) -> Tensor:
        """[rows, out_dim]: what arrives, summed and in order. ``bags`` divides MEAN tables, where that is
        due.
        """
        arguments = local, self.pieces, self.dims, rows, self.out_dim, *_bags(bags)
        gather = torch.ops.meshrec.gather_pooled.default
        return in_flight.use(lambda received, *link: gather(received, *arguments, *link))

    def scatter(
        self, grad: Tensor, bags: SourceIds | None, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """The gradient taken apart: what goes to each rank (1-D), and that of the local columns."""
        sent, local = torch.ops.meshrec.scatter_pooled.default(
            grad, self.grad_pieces, self.grad_dims, self.local_dim, *_bags(bags), scale, dtype
        )
        return sent, local

    def send_back(self, sent: Tensor, splits: Splits, name: str) -> InFlight:
        """Starts to send what ``scatter`` gave. ``splits``: of the way here."""
        same = len(self.grad_dims) < len(self.dims)
        return all_to_all(sent, Splits(splits.received, splits.sent), self.axis, name, same=same)

    def splits(self, rows_sent: Sequence[int], rows: int, dim: int) -> Splits:
        """Elements, when every rank p gets ``rows_sent[p]`` rows of ``dim`` columns and gives ``rows`` of
        its own.
        """
        return Splits(list(map(dim.__mul__, rows_sent)), list(map(rows.__mul__, self.dims)))


def flat_hop(routing: Routing, env: ShardingEnv) -> Hop:
    """Results of all ranks at once."""
    num_ranks = env.shard.size
    sources = [rank_spans(routing, rank) for rank in range(num_ranks)]
    return Hop.of(env.shard, sources, local_spans(routing), routing.columns[-1])


def node_hops(routing: Routing, env: ShardingEnv) -> tuple[Hop, Hop]:
    """The hop inside a node, and the one between nodes."""
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
    first = Hop.of(env.local, inside, [], sum(span.width for span in own))
    return first, Hop.of(env.node, nodes, local_spans(routing), routing.columns[-1])


class Asked(NamedTuple):
    """Who asked for how much: what both ends of the exchange know."""

    source: SourceIds
    batches: list[int]
    """Bags per route of every rank of the shard axis, in the order of ranks."""
    block_sizes: list[int]
    """Elements of this rank's output for each block."""


class PooledOutput:
    """One row for each bag: partial rows are summed, columns laid out in table order."""

    def __init__(self, routing: Routing, env: ShardingEnv, precision: CommsPrecision) -> None:
        self._precision = precision
        self._dim = routing.work[env.shard.rank].dim
        if env.node is not None and env.local is not None and min(env.node.size, env.local.size) > 1:
            self._hops: tuple[Hop, ...] = node_hops(routing, env)
            num_nodes, size = env.node.size, env.local.size
            self.blocks = [n * size + local for local in range(size) for n in range(num_nodes)]
            self._own_local = env.local.rank
        else:
            self._hops = (flat_hop(routing, env),)
            self.blocks = list(range(env.shard.size))

    def start(self, out: Tensor, asked: Asked) -> InFlight:
        """Sends the lookup's rows on the first hop. ``out``: [sum of batches, dim], of the type that
        travels.
        """
        return all_to_all(out.view(-1), self._splits(asked)[0], self._hops[0].axis, "embeddings")

    def finish(self, in_flight: InFlight, local: Tensor | None, asked: Asked) -> Tensor:
        """[B, D] fp32. ``local``: [B, columns of the tables that every rank holds]."""
        source = asked.source
        if len(self._hops) == 2:
            first, second = self._hops
            rows = first.gather(in_flight, None, sum(self._node_rows(asked)), None)
            sent = rows.to(self._precision.forward).view(-1)
            in_flight = all_to_all(sent, self._splits(asked)[1], second.axis, "embeddings between nodes")
        return self._hops[-1].gather(in_flight, local, source.batches[0], source)

    def start_grad(self, grad: Tensor, asked: Asked, scale: float) -> tuple[InFlight, Tensor]:
        """Sends the gradient of what ``finish`` gave, times ``scale``; also gives that of the local
        columns.
        """
        dtype, splits = self._precision.backward, self._splits(asked)
        sent, local = self._hops[-1].scatter(grad, asked.source, scale, dtype)
        if len(self._hops) == 2:
            first, second = self._hops
            received = second.send_back(sent, splits[1], "gradients between nodes").wait()
            rows = received.float().view(
                sum(self._node_rows(asked)), first.out_dim
            )  # a node may hold nothing
            sent, _ = first.scatter(rows, None, 1.0, dtype)
        return self._hops[0].send_back(sent, splits[0], "gradients of embeddings"), local

    def _node_rows(self, asked: Asked) -> list[int]:
        """Rows that the ranks of this local position ask for, by node."""
        local = self._hops[0].axis
        return asked.batches[local.rank :: local.size]

    def _splits(self, asked: Asked) -> list[Splits]:
        if len(self._hops) == 1:
            return [self._hops[0].splits(asked.batches, asked.source.batches[0], self._dim)]
        first, second = self._hops
        size = first.axis.size
        by_local = [sum(asked.batches[local::size]) for local in range(size)]
        by_node = self._node_rows(asked)
        return [
            first.splits(by_local, sum(by_node), self._dim),
            second.splits(by_node, asked.source.batches[0], first.out_dim),
        ]


class SequenceOutput:
    """One row for each id, in the order of the caller's ids."""

    def __init__(self, routing: Routing, env: ShardingEnv, precision: CommsPrecision) -> None:
        self._routing, self._axis, self._precision = routing, env.shard, precision
        self.blocks = list(range(env.shard.size))
        lookups, first_route = [], 0
        for work in routing.work:
            for lookup in work.lookups:
                lookups.append([first_route + lookup.route, lookup.use, lookup.c0, lookup.width])
            first_route += len(work.routes)
        ranks, widths = routing.route_elements
        self._route_ranks = torch.tensor(ranks[:first_route], dtype=torch.int64)
        self._route_widths = torch.tensor(widths[:first_route], dtype=torch.int64)
        replicated = [routing.replicated[use.table] for use in routing.uses]
        self.uses_in_order = sorted(range(len(replicated)), key=replicated.__getitem__)
        self._lookups = torch.tensor(lookups, dtype=torch.int64).view(-1, 4)
        self._dims = [
            0 if routing.replicated[use.table] else dim
            for use, dim in zip(routing.uses, routing.dims, strict=True)
        ]

    def start(self, out: Tensor, asked: Asked) -> InFlight:
        """Sends the lookup's rows; ``out`` is flat, block by block."""
        return all_to_all(out, self._splits(asked), self._axis, "embeddings")

    def finish(self, in_flight: InFlight, local: Tensor | None, asked: Asked) -> Tensor:
        """Flat fp32: for each use [ids, dim]; the tables that every rank holds come last, as ``local`` has
        them.
        """
        rows: Tensor = torch.ops.meshrec.gather_sequence.default(in_flight.wait(), *self._ids(asked.source))
        return rows if local is None else torch.cat([rows, local])

    def start_grad(self, grad: Tensor, asked: Asked, scale: float) -> tuple[InFlight, Tensor]:
        """Sends the gradient of what ``finish`` gave, times ``scale``; also gives that of the local part."""
        splits = self._splits(asked)
        split = sum(splits.received)  # each element of the split tables' rows came from one rank
        sent = torch.ops.meshrec.scatter_sequence.default(
            grad[:split], *self._ids(asked.source), scale, self._precision.backward
        )
        back = Splits(splits.received, splits.sent)
        return all_to_all(sent, back, self._axis, "gradients of embeddings"), grad[split:] * scale

    def _ids(self, source: SourceIds) -> tuple[object, ...]:
        return (
            source.values,
            *_bags(source),
            self._routing.router,
            self._lookups,
            source.counts,
            self._dims,
        )

    def _splits(self, asked: Asked) -> Splits:
        elements = asked.source.counts[: self._route_widths.numel()] * self._route_widths
        received: list[int] = (
            torch.zeros(self._axis.size, dtype=torch.int64)
            .index_add_(0, self._route_ranks, elements)
            .tolist()
        )
        return Splits(asked.block_sizes, received)


def _pieces(sources: Sequence[Sequence[Span]], local: Sequence[Span]) -> Tensor:
    own = [span._replace(source=len(sources)) for span in local]
    return as_tensor(pieces_of([*sources, own]))


def _bags(source: SourceIds | None) -> tuple[Tensor | None, Tensor | None, int, list[int]]:
    if source is None:
        return None, None, 0, []
    return source.offsets, source.segments, source.num_keys, source.keys


def _node_spans(routing: Routing, ranks: Sequence[int], node: int) -> list[Span]:
    """The columns that the ranks of a node have together, use by use."""
    columns = {
        (span.mean_use, column)
        for rank in ranks
        for span in rank_spans(routing, rank)
        for column in range(span.column, span.column + span.width)
    }
    spans: list[Span] = []
    for mean_use, column in sorted(columns, key=lambda pair: pair[1]):
        last = spans[-1] if spans else None
        if last is not None and last.column + last.width == column and last.mean_use == mean_use:
            spans[-1] = last._replace(width=last.width + 1)
        else:
            spans.append(Span(node, column, 1, mean_use))
    return spans


def _places(spans: Sequence[Span]) -> dict[int, int]:
    """For each column of the result its place in a row of the spans."""
    columns = [column for span in spans for column in range(span.column, span.column + span.width)]
    return {column: place for place, column in enumerate(columns)}
