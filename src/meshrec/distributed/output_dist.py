"""The exchange that returns rows to the ranks that asked for them, in table order. Gradients take the reverse
way.

A *hop* is one all-to-all with the sums after it. A flat mesh needs one hop. With the axes ``node`` and
``local`` there are two: partial rows are summed inside the node first, so that one row per node crosses the
network.

Messages are encoded by wire formats (comms/wire.py), row by row. A row is the columns of one lookup for one
bag or one ID. A rank that holds ten tables sends ten rows per bag, each with its own scale if the format has
scales, and the planner can compute the cost of each rectangle by itself.

[Note: what rounding may depend on]

A row is rounded on its own, also the one that a rank keeps for itself. Noise is drawn from the step, the
table, the row's place in its table, and the ID or the asking rank's bag. Partial sums are added in the
order of rows (``pieces.py``). So results depend on the rectangles of a plan, and not on which rank holds
which rectangle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, Splits, all_to_all
from meshrec.comms.encoding import Block, Columns, kernel_columns
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.distributed.error_feedback import Names, bag_names
from meshrec.distributed.input_dist import LookupIds, SourceIds
from meshrec.distributed.pieces import (
    Span,
    as_tensor,
    first_rows,
    local_spans,
    pieces_of,
    rank_spans,
    row_order,
)
from meshrec.distributed.routing import Routing
from meshrec.distributed.wire_codec import Codec, first_key

# B bags of this rank, D columns, Q routes, U uses


@dataclass(frozen=True, kw_only=True)
class Hop:
    """The columns that arrive from each rank of an axis, and their places in the result."""

    axis: Axis
    codecs: "Codecs"
    columns: list[Columns]
    """The rows that each rank sends for one bag."""
    grad_columns: list[Columns]
    """The rows that each rank gets back."""
    dims: list[int]
    """The number of columns from each rank."""
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
    coded: tuple[list[int], list[int], list[int]] | None
    """The arguments of the kernel that adds encoded rows up; None if there is none for these formats."""

    @classmethod
    def of(
        cls,
        axis: Axis,
        sources: Sequence[Sequence[Span]],
        local: Sequence[Span],
        out_dim: int,
        *,
        codecs: "Codecs",
        parts: "TableParts | None" = None,
    ) -> "Hop":
        """Make a hop.

        Args:
            axis: the ranks.
            sources: the columns of each rank of the axis.
            local: the columns that are not sent.
            out_dim: the number of columns of the result.
            codecs: the encodings of both directions.
            parts: which parts of their tables the columns are; None if they are whole.
        """
        kinds = {tuple(span._replace(source=0) for span in spans) for spans in sources}
        num_kinds = 1 if len(kinds) == 1 else len(sources)
        if parts is None:
            parts = TableParts(sources, [[0] * len(spans) for spans in sources], ())
        columns = [
            codecs.forward.columns(spans, rows)
            for spans, rows in zip(parts.spans, parts.first_rows, strict=True)
        ]
        grad_columns = [codecs.backward.columns(spans) for spans in parts.spans]
        return cls(
            axis=axis,
            codecs=codecs,
            columns=columns,
            grad_columns=grad_columns,
            dims=[own.width for own in columns],
            units=list(map(codecs.forward.encoding.units, columns)),
            grad_units=list(map(codecs.backward.encoding.units, grad_columns)),
            pieces=_pieces(sources, local, parts.order),
            out_dim=out_dim,
            num_kinds=num_kinds,
            grad_pieces=_pieces(sources[:num_kinds], local),
            local_dim=sum(span.width for span in local),
            encodes=codecs.forward.encodes(axis),
            encodes_grads=codecs.backward.encodes(axis),
            coded=kernel_columns(columns) if codecs.forward.encodes(axis) else None,
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
            blocks = [Block(count, self.columns[own], first_key(p)) for p, count in enumerate(rows_sent)]
            rows = self.codecs.forward.encode(rows, blocks)
        unit = self.units[own]
        splits = Splits(list(map(unit.__mul__, rows_sent)), list(map(num_rows.__mul__, self.units)))
        return all_to_all(rows.view(-1), splits, self.axis, name)

    def gather(self, in_flight: InFlight, local: Tensor | None, rows: int, bags: SourceIds | None) -> Tensor:
        """Sum the rows that arrive and put them in order, [rows, out_dim]. ``bags`` gives the bag sizes
        for tables with MEAN pooling whose sums are divided here.
        """
        arguments = local, self.pieces, self.dims, rows, self.out_dim, *bags_of(bags)
        if self.coded is not None:
            coded, of_coded = self.coded, torch.ops.meshrec.gather_coded.default
            return in_flight.use(lambda received, *link: of_coded(received, *arguments, *coded, *link))
        gather = torch.ops.meshrec.gather_pooled.default
        if self.encodes:
            blocks = [Block(rows, columns) for columns in self.columns]
            return gather(self.codecs.forward.decode(in_flight.wait(), blocks), *arguments)  # type: ignore[no-any-return]
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
            *bags_of(bags),
            scale,
            self.codecs.backward.encoding.kernel_dtype,
        )
        return sent, local

    def send_back(
        self,
        sent: Tensor,
        rows_sent: Sequence[int],
        num_rows: int,
        name: str,
        *,
        names: Names | None = None,
    ) -> InFlight:
        """Start to send the result of ``scatter``. ``rows_sent`` and ``num_rows`` are those of ``send``.

        ``names``: the bags, for error feedback.
        """
        if self.encodes_grads:
            key = first_key(self.axis.rank)
            blocks = [Block(num_rows, columns, key) for columns in self.grad_columns[: self.num_kinds]]
            sent = self.codecs.backward.encode(sent, blocks, names=names)
        unit = self.grad_units[self.axis.rank]
        splits = Splits(list(map(num_rows.__mul__, self.grad_units)), list(map(unit.__mul__, rows_sent)))
        return all_to_all(sent, splits, self.axis, name, same=self.num_kinds < len(self.dims))

    def gradient(self, in_flight: InFlight, rows_sent: Sequence[int]) -> Tensor:
        """Return the gradients of the rows that ``send`` sent, in their order, fp32, flat."""
        message = in_flight.wait()
        if self.encodes_grads:
            block = Block(sum(rows_sent), self.grad_columns[self.axis.rank])
            message = self.codecs.backward.decode(message, [block])
        return message.float()


class Codecs(NamedTuple):
    """The encodings of both directions."""

    forward: Codec
    backward: Codec


class TableParts(NamedTuple):
    """The parts of tables that each source's columns belong to."""

    spans: Sequence[Sequence[Span]]
    """The columns of the result that each source's parts fill."""
    first_rows: Sequence[Sequence[int]]
    order: Sequence[Sequence[int]]
    """The order in which the parts of a table are added."""

    @classmethod
    def of(cls, routing: Routing, ranks: Sequence[int]) -> "TableParts":
        """Return the parts of some ranks as sources."""
        return cls(
            [rank_spans(routing, rank) for rank in ranks],
            [first_rows(routing, rank) for rank in ranks],
            [row_order(routing, rank) for rank in ranks],
        )


def flat_hop(routing: Routing, env: ShardingEnv, codecs: Codecs) -> Hop:
    """Return the hop that brings the results of all ranks at once."""
    ranks = range(env.shard.size)
    sources = [rank_spans(routing, rank) for rank in ranks]
    parts = TableParts.of(routing, ranks)
    return Hop.of(env.shard, sources, local_spans(routing), routing.columns[-1], codecs=codecs, parts=parts)


def node_hops(routing: Routing, env: ShardingEnv, codecs: Codecs) -> tuple[Hop, Hop]:
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
    ranks = [env.node.rank * size + local for local in range(size)]
    width, parts = sum(span.width for span in own), TableParts.of(routing, ranks)
    first = Hop.of(env.local, inside, [], width, codecs=codecs, parts=parts)
    return first, Hop.of(env.node, nodes, local_spans(routing), routing.columns[-1], codecs=codecs)


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

    def __init__(self, routing: Routing, env: ShardingEnv, codecs: Codecs) -> None:
        if env.node is not None and env.local is not None and min(env.node.size, env.local.size) > 1:
            self._hops: tuple[Hop, ...] = node_hops(routing, env, codecs)
            num_nodes, size = env.node.size, env.local.size
            self.blocks = [n * size + local for local in range(size) for n in range(num_nodes)]
        else:
            self._hops = (flat_hop(routing, env, codecs),)
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
            rows = first.gather(in_flight, None, num_rows, None)
            rows = rows.to(second.codecs.forward.encoding.kernel_dtype)
            in_flight = second.send(rows, rows_sent, source.batches[0], "embeddings between nodes")
        return self._hops[-1].gather(in_flight, local, source.batches[0], source)

    def send_gradient(self, grad: Tensor, asked: Asked, scale: float) -> tuple[InFlight, Tensor]:
        """Send the gradient of the result of ``receive_rows``, times ``scale``; also return that of the local
        columns.
        """
        rows = self._rows(asked)
        sent, local = self._hops[-1].scatter(grad, asked.source, scale)
        names: dict[int, Tensor] = {}

        def names_of(_: int, use: int) -> Tensor:
            if use not in names:
                names[use] = bag_names(asked.source, use)
            return names[use]

        if len(self._hops) == 2:
            first, second = self._hops
            received = second.send_back(sent, *rows[1], "gradients between nodes", names=names_of)
            own = second.gradient(received, rows[1].sent)
            own = own.view(rows[0].num_rows, first.out_dim)  # no -1: a node may hold nothing
            sent, _ = first.scatter(own, None, 1.0)
            return first.send_back(sent, *rows[0], "gradients of embeddings"), local
        hop = self._hops[0]
        return hop.send_back(sent, *rows[0], "gradients of embeddings", names=names_of), local

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


def _pieces(
    sources: Sequence[Sequence[Span]], local: Sequence[Span], order: Sequence[Sequence[int]] = ()
) -> Tensor:
    own = [span._replace(source=len(sources)) for span in local]
    return as_tensor(pieces_of([*sources, own], order))


def bags_of(source: SourceIds | None) -> tuple[Tensor | None, Tensor | None, int, list[int]]:
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
