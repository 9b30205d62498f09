"""Output exchange for pooled embeddings: send pooled rows to the ranks which have requested them.

A rank with a part of a table pools a bag's IDs in this part, and sends the pooled row to the rank with the
bag. That rank adds the parts it receives, and places them in the result columns. Gradients take the reverse
path.

A *hop* is an all-to-all followed by these sums. A flat mesh needs a single hop. A mesh with the axes ``node``
and ``local`` needs two hops: the first adds partial rows inside the node, so the network carries a single row
per bag and node.

A *span* is a range of columns in the result. Every lookup on a rank fills a span (``pieces.py``).

Messages are encoded by wire formats (comms/wire.py), row by row. A row has one lookup's columns for one
bag or ID. A rank with ten tables sends ten rows per bag, with separate scales if the format has scales. The
planner can therefore compute every rectangle's cost separately.

[Note: what rounding may depend on]

A row's rounding does not depend on other rows, nor on whether the row leaves its rank. Stochastic rounding
is seeded by the step, the table, the first table row of the part, and the ID or the requesting rank's bag.
Partial sums are added in row order (``pieces.py``). Results therefore depend on the plan's rectangles, but
not on which ranks have them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, Splits, all_to_all
from meshrec.comms.encoding import Block, Columns, kernel_columns
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.distributed.lookup_batch import LookupBatch, SourceIds
from meshrec.distributed.pieces import (
    Span,
    as_tensor,
    first_rows,
    local_spans,
    pieces_of,
    rank_spans,
    row_range_indices,
)
from meshrec.distributed.routing import Routing
from meshrec.distributed.wire_codec import Codec, first_key
from meshrec.ops import operators

if TYPE_CHECKING:
    from meshrec.distributed.error_feedback import Names

# B: bags on this rank, D: columns, Q: routes, U: uses


@dataclass(frozen=True, kw_only=True)
class Hop:
    """An all-to-all of partial rows between the ranks on an axis, and the sum of the received rows.

    In the forward pass, call ``send`` and ``gather``; in the backward pass ``scatter``, ``send_back`` and
    ``gradient``. Lists have an entry per source rank, which is a rank on the axis that sends rows.
    """

    axis: Axis
    codecs: "Codecs"
    columns: list[Columns]
    """Layout (column widths, formats and seeds) for a row received from each source rank."""
    grad_columns: list[Columns]
    """Layout of a gradient row sent back to each source rank."""
    dims: list[int]
    """Number of columns in a row from each source rank."""
    units: list[int]
    """Elements in an encoded row from each source rank."""
    grad_units: list[int]
    """Elements in an encoded gradient row to each source rank."""
    pieces: Tensor
    """Which source columns are copied or added to which result columns, int64 [P, 6]; see `Piece`."""
    out_dim: int
    """Number of columns in a result row."""
    num_kinds: int
    """Number of different gradient messages: 1 if all ranks get the same message, else the axis size."""
    grad_pieces: Tensor
    """Pieces by which ``scatter`` splits a gradient, formatted like ``pieces``. If all ranks get the same
    message, only the pieces for the first rank.
    """
    local_dim: int
    """Number of result columns from data-parallel tables, which do not travel."""
    encodes: bool
    """Whether embeddings are encoded in a separate pass. If not, the lookup kernel writes the wire format."""
    encodes_grads: bool
    """Like ``encodes``, for gradients."""
    coded: tuple[list[int], list[int], list[int]] | None
    """Arguments for the kernel which decodes and sums rows in one pass; None if this is not possible."""

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
        """Create a hop from the layout of its rows.

        Args:
            axis: ranks which exchange rows.
            sources: for every source rank, the spans (result column ranges) which a row from it fills.
            local: spans which rows from data-parallel tables fill. These rows are not sent.
            out_dim: number of columns in a result row.
            codecs: encodings for embeddings and gradients.
            parts: the table parts from which the spans come. None: spans are sums over whole tables.
        """
        kinds = {tuple(span._replace(source=0) for span in spans) for spans in sources}
        # Row-wise sharding gives every rank the same columns, so a single gradient message serves all.
        num_kinds = 1 if len(kinds) == 1 else len(sources)
        if parts is None:
            # Sums over whole tables start at row 0, and need no order.
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
            dims=[source_columns.width for source_columns in columns],
            units=list(map(codecs.forward.encoding.units, columns)),
            grad_units=list(map(codecs.backward.encoding.units, grad_columns)),
            pieces=_piece_tensor(sources, local, parts.order),
            out_dim=out_dim,
            num_kinds=num_kinds,
            grad_pieces=_piece_tensor(sources[:num_kinds], local),
            local_dim=sum(span.width for span in local),
            encodes=codecs.forward.encodes(axis),
            encodes_grads=codecs.backward.encodes(axis),
            coded=kernel_columns(columns) if codecs.forward.encodes(axis) else None,
        )

    def send(self, rows: Tensor, rows_sent: Sequence[int], num_rows: int, name: str) -> InFlight:
        """Start to send rows to all ranks on the axis. Collective.

        Args:
            rows: rows for all ranks, rank by rank, flat or [total rows, columns], in the encoding's
                ``kernel_dtype``.
            rows_sent: number of rows to send to each rank.
            num_rows: number of rows to receive from each rank.
            name: collective name in errors.

        Returns:
            The running collective, for ``gather``.
        """
        rank = self.axis.rank
        if self.encodes:
            blocks = [Block(count, self.columns[rank], first_key(p)) for p, count in enumerate(rows_sent)]
            rows = self.codecs.forward.encode(rows, blocks)
        # All rows sent by this rank have the same columns, so message sizes are multiples of a row.
        unit = self.units[rank]
        splits = Splits(list(map(unit.__mul__, rows_sent)), list(map(num_rows.__mul__, self.units)))
        return all_to_all(rows.view(-1), splits, self.axis, name)

    def gather(self, in_flight: InFlight, local: Tensor | None, rows: int, bags: SourceIds | None) -> Tensor:
        """Wait for the rows from all ranks, and add them up to result rows.

        Args:
            in_flight: result of ``send``.
            local: columns from data-parallel tables, [rows, local_dim]; None if there are none.
            rows: number of result rows.
            bags: this rank's bags. If a MEAN table is split by rows, its parts send sums, which are divided
                here by the bag lengths. None: this hop does not divide.

        Returns:
            Result rows, [rows, out_dim].
        """
        arguments = local, self.pieces, self.dims, rows, self.out_dim, *bag_arguments(bags)
        # The fastest path: one kernel decodes and sums.
        if self.coded is not None:
            coded, of_coded = self.coded, operators.gather_coded
            return in_flight.wait_and_compute(
                lambda received, *link: of_coded(received, *arguments, *coded, *link)
            )
        gather = operators.gather_pooled
        if self.encodes:
            blocks = [Block(rows, columns) for columns in self.columns]
            return gather(self.codecs.forward.decode(in_flight.wait(), blocks), *arguments)  # type: ignore[no-any-return]
        return in_flight.wait_and_compute(lambda received, *link: gather(received, *arguments, *link))

    def scatter(self, grad: Tensor, bags: SourceIds | None, scale: float) -> tuple[Tensor, Tensor]:
        """Backward pass of ``gather``: split the gradient for result rows into a message per source rank.

        Args:
            grad: gradient for the result rows, [rows, out_dim].
            bags: as for ``gather``.
            scale: factor for the gradient.

        Returns:
            The messages, flat, and the gradient for the columns from data-parallel tables, [rows, local_dim].
            If all ranks get the same message, the first result contains it only once.
        """
        sent, local = operators.scatter_pooled(
            grad,
            self.grad_pieces,
            self.dims[: self.num_kinds],
            self.local_dim,
            *bag_arguments(bags),
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
        names: "Names | None" = None,
    ) -> InFlight:
        """Start to send gradient messages back to the source ranks. Collective.

        Args:
            sent: messages from ``scatter``.
            rows_sent: the value passed to ``send`` in the forward pass.
            num_rows: the value passed to ``send`` in the forward pass.
            name: collective name in error messages.
            names: function that returns the bag names under which rounding errors are kept for the next
                gradient; see `Names`. None: no error feedback.

        Returns:
            The running collective, to pass to ``gradient``.
        """
        if self.encodes_grads:
            key = first_key(self.axis.rank)
            blocks = [Block(num_rows, columns, key) for columns in self.grad_columns[: self.num_kinds]]
            sent = self.codecs.backward.encode(sent, blocks, names=names)
        # Reverse of ``send``: the sizes sent and received are exchanged.
        unit = self.grad_units[self.axis.rank]
        splits = Splits(list(map(num_rows.__mul__, self.grad_units)), list(map(unit.__mul__, rows_sent)))
        return all_to_all(sent, splits, self.axis, name, same=self.num_kinds < len(self.dims))

    def gradient(self, in_flight: InFlight, rows_sent: Sequence[int]) -> Tensor:
        """Wait for the gradients for the rows which this rank has sent with ``send``.

        Returns:
            Gradients, fp32, flat, in the order of the rows.
        """
        message = in_flight.wait()
        if self.encodes_grads:
            block = Block(sum(rows_sent), self.grad_columns[self.axis.rank])
            message = self.codecs.backward.decode(message, [block])
        # Updates are computed in fp32.
        return message.float()


class Codecs(NamedTuple):
    """Encodings for embeddings (forward) and gradients (backward)."""

    forward: Codec
    backward: Codec


class TableParts(NamedTuple):
    """The table parts from which the rows of source ranks come. All fields are ``[source rank][part]``.

    A part is the rectangle (row and column range of a table) which one lookup reads.
    """

    spans: Sequence[Sequence[Span]]
    """Result columns to which the part's values belong."""
    first_rows: Sequence[Sequence[int]]
    """First table row of the part."""
    order: Sequence[Sequence[int]]
    """When to add the part: its position among the table's parts in row order."""

    @classmethod
    def of(cls, routing: Routing, ranks: Sequence[int]) -> "TableParts":
        """Return the parts on the given ranks of the shard axis."""
        return cls(
            [rank_spans(routing, rank) for rank in ranks],
            [first_rows(routing, rank) for rank in ranks],
            [row_range_indices(routing, rank) for rank in ranks],
        )


def _flat_hop(routing: Routing, env: ShardingEnv, codecs: Codecs) -> Hop:
    """Create the only hop for a flat mesh, in which all ranks send rows to all ranks."""
    ranks = range(env.shard.size)
    sources = [rank_spans(routing, rank) for rank in ranks]
    parts = TableParts.of(routing, ranks)
    return Hop.of(env.shard, sources, local_spans(routing), routing.columns[-1], codecs=codecs, parts=parts)


def _node_hops(routing: Routing, env: ShardingEnv, codecs: Codecs) -> tuple[Hop, Hop]:
    """Create two hops: the first adds rows inside a node, the second sends the sums between nodes."""
    assert env.node is not None
    assert env.local is not None
    size = env.local.size
    nodes = [_node_spans(routing, range(n * size, (n + 1) * size), n) for n in range(env.node.size)]
    node_spans = nodes[env.node.rank]
    position = _source_positions(node_spans)
    # The rows inside the node have only the columns which some rank on the node fills, without gaps.
    inside = [
        [
            span._replace(source=local, column=position[span.column])
            for span in rank_spans(routing, env.node.rank * size + local, divide=False)
        ]
        for local in range(size)
    ]
    ranks = [env.node.rank * size + local for local in range(size)]
    width, parts = sum(span.width for span in node_spans), TableParts.of(routing, ranks)
    first = Hop.of(env.local, inside, [], width, codecs=codecs, parts=parts)
    return first, Hop.of(env.node, nodes, local_spans(routing), routing.columns[-1], codecs=codecs)


class PooledOutput:
    """Output exchange for a module which returns a pooled row per bag.

    Args:
        routing: the compiled plan.
        env: the ranks.
        codecs: encodings for embeddings and gradients.

    Attributes:
        blocks: ranks which request rows, in the order in which their IDs must be looked up.
    """

    def __init__(self, routing: Routing, env: ShardingEnv, codecs: Codecs) -> None:
        # With a single node, or a single rank per node, a second hop would not reduce the traffic.
        if env.node is not None and env.local is not None and min(env.node.size, env.local.size) > 1:
            # The hop inside a node, then the hop between nodes.
            self._hops: tuple[Hop, ...] = _node_hops(routing, env, codecs)
            num_nodes, size = env.node.size, env.local.size
            # The first hop sends by local rank, so blocks with the same local rank must be adjacent.
            self.blocks = [n * size + local for local in range(size) for n in range(num_nodes)]
        else:
            self._hops = (_flat_hop(routing, env, codecs),)
            self.blocks = list(range(env.shard.size))

    def send_rows(self, out: Tensor, batch: LookupBatch) -> InFlight:
        """Start to send pooled rows to the ranks which have requested them. Collective.

        Args:
            out: pooled rows for all ranks [total bags, columns], in the encoding's ``kernel_dtype``.
        """
        return self._hops[0].send(out, *self._message_sizes(batch)[0], "embeddings")

    def receive_rows(self, in_flight: InFlight, local: Tensor | None, batch: LookupBatch) -> Tensor:
        """Wait for the rows, and add them up. With two hops, also run the second hop. Collective.

        Args:
            in_flight: result of ``send_rows``.
            local: columns from data-parallel tables, [B, columns]; None if there are none.
            batch: the batch.

        Returns:
            Pooled embeddings for this rank's bags, fp32 [B, D].
        """
        source = batch.source
        if len(self._hops) == 2:
            (_, num_rows), (rows_sent, _) = self._message_sizes(batch)
            first, second = self._hops
            rows = first.gather(in_flight, None, num_rows, None)
            # The sums from the first hop are fp32. The second hop sends another dtype.
            rows = rows.to(second.codecs.forward.encoding.kernel_dtype)
            in_flight = second.send(rows, rows_sent, source.batches[0], "embeddings between nodes")
        return self._hops[-1].gather(in_flight, local, source.batches[0], source)

    def send_gradient(self, grad: Tensor, batch: LookupBatch, scale: float) -> tuple[InFlight, Tensor]:
        """Start to send the gradient for pooled embeddings to the ranks which have the rows. Collective.

        Args:
            grad: gradient for the result of ``receive_rows``, [B, D].
            batch: the batch.
            scale: factor for the gradient.

        Returns:
            The running collective, for ``receive_gradient``, and the gradient for the columns from
            data-parallel tables, [B, columns].
        """
        source, sizes = batch.source, self._message_sizes(batch)
        sent, local = self._hops[-1].scatter(grad, source, scale)
        # Bag names by use. Computed once, although several columns may need them.
        names: dict[int, Tensor] = {}

        def names_of(_: int, use: int) -> Tensor:
            """Return the bag names for a use (a feature looked up in a table). The block number is unused."""
            if use not in names:
                from meshrec.distributed.error_feedback import bag_names

                names[use] = bag_names(source, use)
            return names[use]

        if len(self._hops) == 2:
            first, second = self._hops
            # The reverse order of the forward pass: first between nodes, then inside the node.
            received = second.send_back(sent, *sizes[1], "gradients between nodes", names=names_of)
            node_grad = second.gradient(received, sizes[1][0])
            node_grad = node_grad.view(sizes[0][1], first.out_dim)  # no -1: a node may hold nothing
            # The gradient was scaled and divided by bag lengths in the second hop already.
            sent, _ = first.scatter(node_grad, None, 1.0)
            return first.send_back(sent, *sizes[0], "gradients of embeddings"), local
        hop = self._hops[0]
        return hop.send_back(sent, *sizes[0], "gradients of embeddings", names=names_of), local

    def receive_gradient(self, in_flight: InFlight, batch: LookupBatch) -> Tensor:
        """Wait for the gradients for the rows which ``send_rows`` has sent, and return them, fp32, flat."""
        return self._hops[0].gradient(in_flight, batch.batches)

    def _message_sizes(self, batch: LookupBatch) -> list[tuple[list[int], int]]:
        """Return the message sizes for every hop.

        Returns:
            For every hop, the number of rows sent to each rank, and the number of rows received from each
            rank.
        """
        if len(self._hops) == 1:
            return [(batch.batches, batch.source.batches[0])]
        local = self._hops[0].axis
        # In the first hop, this rank sends to local rank l the rows which ranks with local rank l on all
        # nodes request. In the second hop, it sends to node n the sums for the rank on n with this local
        # rank.
        by_node = batch.batches[local.rank :: local.size]
        by_local = [sum(batch.batches[other :: local.size]) for other in range(local.size)]
        return [(by_local, sum(by_node)), (by_node, batch.source.batches[0])]


def return_weight_grads(
    by_rank: Sequence[Tensor], local: Tensor | None, source: SourceIds, routing: Routing, axis: Axis
) -> Tensor:
    """Send gradients for per-sample weights back to the ranks with the samples. Collective.

    An ID which is looked up in several parts of a table gets the sum of the gradients from all parts.

    Args:
        by_rank: gradients for the weights received from each rank, in message order.
        local: gradients from data-parallel tables; None if there are none.
        source: this rank's IDs.
        routing: the compiled plan.
        axis: ranks which exchange gradients.

    Returns:
        Gradient for the per-sample weights of this rank's N IDs, fp32 [N].
    """
    num_routes = [len(work.routes) for work in (*routing.work, routing.local)]
    # ID counts by destination rank. The last entry is for the data-parallel tables.
    *routes, _ = source.counts.split(num_routes)
    splits = Splits([part.numel() for part in by_rank], [int(counts.sum()) for counts in routes])
    received = all_to_all(torch.cat(list(by_rank)), splits, axis, "gradients of weights").wait()
    gradient: Tensor = operators.gather_weight_grads(
        received if local is None else torch.cat([received, local]),
        source.values,
        source.offsets,
        source.segments,
        source.num_keys,
        source.keys,
        routing.router,
        source.counts,
    )
    return gradient


def _piece_tensor(
    sources: Sequence[Sequence[Span]], local: Sequence[Span], order: Sequence[Sequence[int]] = ()
) -> Tensor:
    """Return the pieces (column copies and additions) that assemble a result row, int64 [P, 6]; see `Piece`.

    Args:
        local: spans which the row from data-parallel tables fills. This row becomes the last source.
    """
    unsent = [span._replace(source=len(sources)) for span in local]
    return as_tensor(pieces_of([*sources, unsent], order))


def bag_arguments(source: SourceIds | None) -> tuple[Tensor | None, Tensor | None, int, list[int]]:
    """Return the op arguments ``offsets``, ``segments``, ``num_keys`` and ``keys``, as in `SourceIds`.

    If ``source`` is None, return empty arguments. Pass these to pooling ops that do not divide by bag
    lengths.
    """
    if source is None:
        return None, None, 0, []
    return source.offsets, source.segments, source.num_keys, source.keys


def _node_spans(routing: Routing, ranks: Sequence[int], node: int) -> list[Span]:
    """Return the spans of result columns for which a node's ranks together have values.

    Spans are cut wherever a lookup on any of the ranks starts or ends.
    """
    # Because of the cuts, the second hop encodes each lookup's columns as a separate row, as the first hop
    # does.
    held = [span for rank in ranks for span in rank_spans(routing, rank)]
    columns = {
        (span.mean_use, column) for span in held for column in range(span.column, span.column + span.width)
    }
    edges = {edge for span in held for edge in (span.column, span.column + span.width)}
    spans: list[Span] = []
    for mean_use, column in sorted(columns, key=lambda pair: pair[1]):
        last = spans[-1] if spans else None
        joins = last is not None and (last.column + last.width, last.mean_use) == (column, mean_use)
        if last is not None and joins and column not in edges:
            spans[-1] = last._replace(width=last.width + 1)
        else:
            spans.append(Span(node, column, 1, mean_use))
    return spans


def _source_positions(spans: Sequence[Span]) -> dict[int, int]:
    """Return, for every result column in the spans, its position in the row that concatenates the spans."""
    columns = [column for span in spans for column in range(span.column, span.column + span.width)]
    return {column: position for position, column in enumerate(columns)}
