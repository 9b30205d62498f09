"""The exchange of one row for each ID; see ``output_dist.py`` for pooled rows. Gradients take the reverse
way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, Splits, all_to_all
from meshrec.comms.encoding import Block, Columns
from meshrec.comms.mesh import ShardingEnv
from meshrec.distributed.input_dist import SourceIds
from meshrec.distributed.output_dist import Asked, Codecs, bags_of
from meshrec.distributed.pieces import first_rows, rank_spans
from meshrec.distributed.routing import Route, Routing
from meshrec.distributed.wire_codec import BACKWARD, FORWARD, Codec, first_key


class SequenceOutput:
    """The exchange of one row for each ID, in the order of the caller's IDs."""

    def __init__(self, routing: Routing, env: ShardingEnv, codecs: Codecs) -> None:
        self._routing, self._axis = routing, env.shard
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
        self._own_routes = own.routes
        self._all_routes: list[Route] = [route for work in routing.work for route in work.routes]
        all_columns = [_single_columns(codecs, routing, rank) for rank in range(env.shard.size)]
        self._own = [
            (lookup.route, *pair)
            for lookup, pair in zip(own.lookups, all_columns[env.shard.rank], strict=True)
        ]
        flat = [pair for of_rank in all_columns for pair in of_rank]
        self._all = [(route, *pair) for (route, *_), pair in zip(lookups, flat, strict=True)]
        self._ways = [
            _Way(
                codec,
                codec.encodes(env.shard),
                _units_per_route(codec, way, self._own, len(own.routes)),
                _units_per_route(codec, way, self._all, first_route),
            )
            for way, codec in enumerate(codecs)
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
            blocks = self._own_blocks(asked, FORWARD)
            out = way.codec.encode(out, blocks, keys=self._keys(asked) if way.codec.draws else None)
        return all_to_all(out, self._splits(way, asked), self._axis, "embeddings")

    def receive_rows(self, in_flight: InFlight, local: Tensor | None, asked: Asked) -> Tensor:
        """Return the rows of each use, flat fp32 [ids, dim]. Those of data-parallel tables come last, as
        ``local`` has them.
        """
        received, way = in_flight.wait(), self._ways[0]
        if way.encodes:
            received = way.codec.decode(received, self._all_blocks(asked, FORWARD))
        rows: Tensor = torch.ops.meshrec.gather_sequence.default(received, *self._ids(asked.source))
        return rows if local is None else torch.cat([rows, local])

    def send_gradient(self, grad: Tensor, asked: Asked, scale: float) -> tuple[InFlight, Tensor]:
        """Send ``scale`` times the gradient of the result of ``receive_rows``; also return that of the local
        rows.
        """
        way = self._ways[1]
        splits = self._splits(way, asked)
        split = sum(splits.received)  # each element of the split tables' rows came from one rank
        if not way.codec.encoding.is_cast:
            split = int((asked.source.counts[: self._route_widths.numel()] * self._route_widths).sum())
        sent = torch.ops.meshrec.scatter_sequence.default(
            grad[:split], *self._ids(asked.source), scale, way.codec.encoding.kernel_dtype
        )
        if way.encodes:
            sent = way.codec.encode(
                sent, self._all_blocks(asked, BACKWARD), names=lambda block, _: self._ids_of(block, asked)
            )
        back = Splits(splits.received, splits.sent)
        return all_to_all(sent, back, self._axis, "gradients of embeddings"), grad[split:] * scale

    def receive_gradient(self, in_flight: InFlight, asked: Asked) -> Tensor:
        """Return the gradient of the rows that ``send_rows`` sent, fp32, flat."""
        message, way = in_flight.wait(), self._ways[1]
        if way.encodes:
            message = way.codec.decode(message, self._own_blocks(asked, BACKWARD))
        return message.float()

    def _ids(self, source: SourceIds) -> tuple[object, ...]:
        return (
            source.values,
            *bags_of(source),
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

    def _own_blocks(self, asked: Asked, way: int) -> list[Block]:
        """Return the blocks of rows that are looked up here: rank by rank, lookup by lookup."""
        counts_RQ = self._own_counts(asked).tolist()
        return [Block(counts[q], pair[way]) for counts in counts_RQ for q, *pair in self._own]

    def _all_blocks(self, asked: Asked, way: int) -> list[Block]:
        """Return the blocks of rows that all ranks look up for this one, in the same order."""
        counts, key = asked.source.counts.tolist(), first_key(self._axis.rank)
        return [Block(counts[q], pair[way], key) for q, *pair in self._all]

    def _keys(self, asked: Asked) -> Tensor:
        """Return the ID in its whole table of each row of ``_own_blocks``: equal IDs are rounded alike."""
        ids = asked.ids
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].tolist()
        num_routes = len(self._own_routes)
        parts = [
            ids.values[starts[first + q] : starts[first + q + 1]].long() + self._own_routes[q].r0
            for first in range(0, len(starts) - 1, max(num_routes, 1))
            for q, *_ in self._own
        ]
        return torch.cat(parts) if parts else ids.values.new_empty(0, dtype=torch.int64)

    def _ids_of(self, block: int, asked: Asked) -> Tensor:
        """Return the IDs whose rows are in a block, which is given by its number in ``_all_blocks``."""
        use, r0, r1 = self._all_routes[self._all[block][0]]
        source = asked.source
        bounds, key = source.bag_bounds(), source.keys[use]
        first, end = source.offsets[[bounds[key], bounds[key + 1]]].tolist()
        ids = source.values[first:end].long()
        num_rows = self._routing.tables[self._routing.uses[use].table].num_rows
        ids = torch.where((ids >= 0) & (ids < num_rows), ids, 0)  # as they are clamped
        return ids[(ids >= r0) & (ids < r1)]


class _Way(NamedTuple):
    """One direction of the exchange of sequences."""

    codec: Codec
    encodes: bool
    """Whether rows are encoded after their kernel, and decoded before the next one."""
    own_units: Tensor
    """For each route of this rank, the number of elements of an encoded ID's rows."""
    all_units: Tensor
    """Like ``own_units``, for the routes of all ranks."""


def _single_columns(codecs: Codecs, routing: Routing, rank: int) -> list[tuple[Columns, Columns]]:
    """Return the columns of each lookup of a rank, for both directions."""
    spans, rows = rank_spans(routing, rank, divide=False), first_rows(routing, rank)
    return [
        (codecs.forward.columns([span], [row]), codecs.backward.columns([span], [row]))
        for span, row in zip(spans, rows, strict=True)
    ]


def _units_per_route(
    codec: Codec, way: int, lookups: Sequence[tuple[int, Columns, Columns]], num_routes: int
) -> Tensor:
    units = torch.zeros(num_routes, dtype=torch.int64)
    for route, *pair in lookups:
        units[route] += codec.encoding.units(pair[way])
    return units
