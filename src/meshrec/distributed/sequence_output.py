"""Output exchange for sequence embeddings, a row per ID. See ``output_dist.py`` for pooled embeddings.

A *unit* is an element of the encoded message. See [Note: how a plan becomes routes] in ``routing.py`` for use
and route.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, Splits, all_to_all
from meshrec.comms.encoding import Block, Columns
from meshrec.comms.mesh import ShardingEnv
from meshrec.distributed.lookup_batch import LookupBatch
from meshrec.distributed.output_dist import Codecs, bag_arguments
from meshrec.distributed.pieces import first_rows, rank_spans
from meshrec.distributed.routing import Route, Routing
from meshrec.distributed.wire_codec import BACKWARD, FORWARD, Codec, first_key
from meshrec.ops import operators


class SequenceOutput:
    """Output exchange for a module which returns a row per ID, in the order of the caller's IDs.

    A use is a feature looked up in a table. A route is a group of IDs from one use which a rank receives
    together.

    Args:
        routing: the compiled plan.
        env: the ranks.
        codecs: encodings for embeddings and gradients.

    Attributes:
        blocks: source ranks in the order in which their IDs must be looked up.
        uses_in_order: use numbers in the order of the result: uses of split tables, then of data-parallel
            tables.
    """

    def __init__(self, routing: Routing, env: ShardingEnv, codecs: Codecs) -> None:
        # All fields depend only on the plan, so they hold for the lifetime of the object.
        self._routing, self._axis = routing, env.shard
        self.blocks = list(range(env.shard.size))
        # A row (route, use, first column, width) per lookup on all ranks. Routes are numbered over all ranks.
        lookups, first_route = [], 0
        for work in routing.work:
            for lookup in work.lookups:
                lookups.append([first_route + lookup.route, lookup.use, lookup.c0, lookup.width])
            first_route += len(work.routes)
        ranks, widths = routing.route_elements
        # Rank and columns per ID for every route, without the routes for data-parallel tables.
        self._route_ranks = torch.tensor(ranks[:first_route], dtype=torch.int64)
        self._route_widths = torch.tensor(widths[:first_route], dtype=torch.int64)
        local_work = routing.work[env.shard.rank]
        self._local_routes = local_work.routes
        # Routes to all ranks, in rank order.
        self._all_routes: list[Route] = [route for work in routing.work for route in work.routes]
        all_columns = [_single_columns(codecs, routing, rank) for rank in range(env.shard.size)]
        # (route, columns of embeddings, columns of gradients) for this rank's lookups, and for all ranks'.
        self._local_lookups = [
            (lookup.route, *pair)
            for lookup, pair in zip(local_work.lookups, all_columns[env.shard.rank], strict=True)
        ]
        flat = [pair for of_rank in all_columns for pair in of_rank]
        self._all_lookups = [(route, *pair) for (route, *_), pair in zip(lookups, flat, strict=True)]
        # Index 0 for embeddings, index 1 for gradients.
        self._directions = [
            _Direction(
                codec,
                codec.encodes(env.shard),
                _units_per_route(codec, number, self._local_lookups, len(local_work.routes)),
                _units_per_route(codec, number, self._all_lookups, first_route),
            )
            for number, codec in enumerate(codecs)
        ]
        replicated = [routing.replicated[use.table] for use in routing.uses]
        # Stable sort: split uses first, data-parallel uses last, as ``receive_rows`` concatenates them.
        self.uses_in_order = sorted(range(len(replicated)), key=replicated.__getitem__)
        self._lookups = torch.tensor(lookups, dtype=torch.int64).view(-1, 4)
        # 0 for data-parallel tables, which the kernels must skip.
        self._dims = [
            0 if routing.replicated[use.table] else dim
            for use, dim in zip(routing.uses, routing.dims, strict=True)
        ]

    def send_rows(self, out: Tensor, batch: LookupBatch) -> InFlight:
        """Start to send rows to the ranks which have requested them. Collective.

        Args:
            out: looked-up rows, flat, requesting rank by requesting rank, in the encoding's ``kernel_dtype``.
        """
        direction = self._directions[0]
        # Otherwise the lookup kernel has written the message dtype.
        if direction.encodes:
            blocks = self._local_blocks(batch, FORWARD)
            out = direction.codec.encode(
                out, blocks, keys=self._keys(batch) if direction.codec.draws else None
            )
        return all_to_all(out, self._splits(direction, batch), self._axis, "embeddings")

    def receive_rows(self, in_flight: InFlight, local: Tensor | None, batch: LookupBatch) -> Tensor:
        """Wait for the rows, and return them in the order of the caller's IDs.

        Args:
            in_flight: result of ``send_rows``.
            local: rows from data-parallel tables, flat; None if there are none.
            batch: the batch.

        Returns:
            Rows, fp32, flat, use by use in the order of ``uses_in_order``.
        """
        received, direction = in_flight.wait(), self._directions[0]
        if direction.encodes:
            received = direction.codec.decode(received, self._all_blocks(batch, FORWARD))
        rows: Tensor = operators.gather_sequence(received, *self._op_arguments(batch))
        return rows if local is None else torch.cat([rows, local])

    def send_gradient(self, grad: Tensor, batch: LookupBatch, scale: float) -> tuple[InFlight, Tensor]:
        """Start to send the gradients for rows to the ranks which have the rows. Collective.

        Args:
            grad: gradient for the result of ``receive_rows``, flat.
            batch: the batch.
            scale: factor for the gradient.

        Returns:
            The running collective, for ``receive_gradient``, and the gradient for the rows from data-parallel
            tables, flat.
        """
        direction = self._directions[1]
        splits = self._splits(direction, batch)
        split = sum(splits.received)  # without encoding, an element of a row is an element of the messages
        if not direction.codec.encoding.is_cast:
            split = int((batch.source.counts[: self._route_widths.numel()] * self._route_widths).sum())
        sent = operators.scatter_sequence(
            grad[:split], *self._op_arguments(batch), scale, direction.codec.encoding.kernel_dtype
        )
        if direction.encodes:
            sent = direction.codec.encode(
                sent, self._all_blocks(batch, BACKWARD), names=lambda block, _: self._ids_of(block, batch)
            )
        back = Splits(splits.received, splits.sent)
        return all_to_all(sent, back, self._axis, "gradients of embeddings"), grad[split:] * scale

    def receive_gradient(self, in_flight: InFlight, batch: LookupBatch) -> Tensor:
        """Wait for the gradients for the rows which ``send_rows`` has sent, and return them, fp32, flat."""
        message, direction = in_flight.wait(), self._directions[1]
        if direction.encodes:
            message = direction.codec.decode(message, self._local_blocks(batch, BACKWARD))
        return message.float()

    def _op_arguments(self, batch: LookupBatch) -> tuple[object, ...]:
        """Return the arguments shared by the ops ``gather_sequence`` and ``scatter_sequence``.

        They describe the batch's IDs, and the routes on which the IDs were sent.
        """
        source = batch.source
        return (
            source.values,
            *bag_arguments(source),
            self._routing.router,
            self._lookups,
            source.counts,
            self._dims,
        )

    def _splits(self, direction: "_Direction", batch: LookupBatch) -> Splits:
        """Return the message sizes, in elements, of the exchange which returns rows."""
        # Without the routes for data-parallel tables, whose rows are not sent.
        counts = batch.source.counts[: self._route_ranks.numel()]
        received: list[int] = (
            torch.zeros(self._axis.size, dtype=torch.int64)
            .index_add_(0, self._route_ranks, counts * direction.all_units)
            .tolist()
        )
        sent = (
            (self._local_counts(batch) @ direction.local_units).tolist()
            if direction.encodes
            else batch.block_sizes
        )
        return Splits(sent, received)

    def _local_counts(self, batch: LookupBatch) -> Tensor:
        """Return how many IDs this rank has received, by sending rank and by route, int64 [R, Q]."""
        ids = batch.ids[0]
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu()
        return starts.diff().view(len(ids.batches), self._directions[0].local_units.numel())

    def _local_blocks(self, batch: LookupBatch, direction: int) -> list[Block]:
        """Return the layout for messages with rows which this rank looks up for all ranks.

        The result has a block, with row count and columns, for every requesting rank and lookup. Blocks are
        ordered by requesting rank, then by lookup.
        """
        counts_RQ = self._local_counts(batch).tolist()
        return [Block(counts[q], pair[direction]) for counts in counts_RQ for q, *pair in self._local_lookups]

    def _all_blocks(self, batch: LookupBatch, direction: int) -> list[Block]:
        """Return the layout for messages with rows which all ranks look up for this rank.

        The result has a block, with row count and columns, for every lookup on any rank. Blocks are ordered
        by the rank which looks up the rows, then by lookup.
        """
        counts, key = batch.source.counts.tolist(), first_key(self._axis.rank)
        return [Block(counts[q], pair[direction], key) for q, *pair in self._all_lookups]

    def _keys(self, batch: LookupBatch) -> Tensor:
        """Return the ID for every row in ``_local_blocks``, int64. The IDs seed stochastic rounding."""
        ids = batch.ids[0]
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].tolist()
        num_routes = len(self._local_routes)
        parts = [
            batch.keys[starts[first + q] : starts[first + q + 1]].long() + self._local_routes[q].r0
            # A step of 0 is not allowed, so at least 1 without routes.
            for first in range(0, len(starts) - 1, max(num_routes, 1))
            for q, *_ in self._local_lookups
        ]
        return torch.cat(parts) if parts else batch.keys.new_empty(0, dtype=torch.int64)

    def _ids_of(self, block: int, batch: LookupBatch) -> Tensor:
        """Return the ID for every row in a block, int64."""
        use, r0, r1 = self._all_routes[self._all_lookups[block][0]]
        source = batch.source
        bounds, key = source.bag_bounds(), source.keys[use]
        # IDs of the use's feature: ``values[first:end]``.
        first, end = source.offsets[[bounds[key], bounds[key + 1]]].tolist()
        ids = source.values[first:end].long()
        table = self._routing.tables[self._routing.uses[use].table]
        if table.mix_seed is None:  # every int64 is a key of a hashed table
            # As routing replaces invalid IDs.
            ids = torch.where((ids >= 0) & (ids < table.num_rows), ids, 0)
        # The end of a hashed table's keys, 2^63, does not fit int64.
        return ids[(ids >= r0) & (ids <= r1 - 1)]


class _Direction(NamedTuple):
    """Encoding of messages in one direction: embeddings or gradients."""

    codec: Codec
    encodes: bool
    """Whether rows are encoded in a separate pass. If not, kernels read and write the wire format."""
    local_units: Tensor
    """Elements per ID in the encoded message, for every route to this rank, int64. A route is a group of IDs
    which a rank receives together.
    """
    all_units: Tensor
    """Elements per ID in the encoded message, for every route to any rank, int64."""


def _single_columns(codecs: Codecs, routing: Routing, rank: int) -> list[tuple[Columns, Columns]]:
    """Return the message columns for every lookup on a rank, for embeddings and for gradients."""
    spans, rows = rank_spans(routing, rank, divide=False), first_rows(routing, rank)
    return [
        (codecs.forward.columns([span], [row]), codecs.backward.columns([span], [row]))
        for span, row in zip(spans, rows, strict=True)
    ]


def _units_per_route(
    codec: Codec, direction: int, lookups: Sequence[tuple[int, Columns, Columns]], num_routes: int
) -> Tensor:
    """Return the elements per ID in the encoded message, for every route, int64 [num_routes].

    Args:
        lookups: (route, columns of embeddings, columns of gradients) for every lookup.
    """
    units = torch.zeros(num_routes, dtype=torch.int64)
    for route, *pair in lookups:
        units[route] += codec.encoding.units(pair[direction])
    return units
