"""The lookup of all rectangles of a rank in one kernel call, and the gradients of that lookup."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshrec.distributed.input_dist import LookupIds
from meshrec.distributed.routing import RankWork, Route, Routing
from meshrec.ops import tbe
from meshrec.ops.tbe import LookupOptions
from meshrec.ops.tbe.layout import MEAN, NONE, SUM
from meshrec.tables.holdings import Holdings
from meshrec.tables.index import Index, KeyReader, slots_of
from meshrec.tables.packing import RowGradients
from meshrec.tables.storage import RowStorage, lookup_of

# K routes of this rank, L lookups, T rectangles


# Like Lookups._make, but without a Python call.
_as_lookups: Callable[[Iterable[Any]], tbe.Lookups] = functools.partial(tuple.__new__, tbe.Lookups)


class FetchedRows:
    """The rows that a lookup reads in place of tables: those of one batch, see ``LookupTables``."""

    def __init__(self) -> None:
        self.weights: Sequence[Tensor] = []
        self.is_packed = True  # taken anew for each batch
        self.storages: list[RowStorage] = []
        self.indexes: dict[int, Index] = {}
        self.parameters: list[nn.Parameter] = []


class LookupTables:
    """The rectangles that a rank looks up together: its share of the split tables, or the data-parallel
    tables.
    """

    def __init__(
        self,
        routing: Routing,
        work: RankWork,
        held: Holdings | FetchedRows,
        *,
        sequence: bool,
        out_dtype: torch.dtype = torch.float32,
        routes: Sequence[int] | None = None,
    ) -> None:
        self._routing = routing
        self.routes = list(range(len(work.routes))) if routes is None else list(routes)
        """The routes of ``work``, by their numbers in the IDs of which this is a part."""
        self._parts: dict[frozenset[int], LookupTables] = {}
        self.work, self.sequence = work, sequence
        self.held = cast(Holdings, held)  # FetchedRows has all that lookups need of it
        self._plain = None if held.is_packed else list(held.weights)
        self._look_up = lookup_of(held.storages)
        self.is_empty = not work.lookups
        """Whether there is nothing to look up."""
        self._dim = sum(lookup.width for lookup in work.lookups)
        self._out_dtype = out_dtype
        self._names = routing.names
        self._widths = [lookup.width for lookup in work.lookups]
        self._layout = (
            len(work.routes),
            [lookup.route for lookup in work.lookups],
            [lookup.rectangle for lookup in work.lookups],
            [_pooling(routing, lookup.use, sequence) for lookup in work.lookups],
        )
        indexes, rectangles = held.indexes, work.rectangles
        self._readers: dict[int, KeyReader] = {}
        for lookup in work.lookups:
            if lookup.rectangle in indexes:
                before = self._readers.get(lookup.route, KeyReader([], rectangles[lookup.rectangle].r0))
                self._readers[lookup.route] = before._replace(
                    indexes=[*before.indexes, indexes[lookup.rectangle]]
                )
        self._route_widths = torch.zeros(len(work.routes), dtype=torch.int64)
        for lookup in work.lookups:
            self._route_widths[lookup.route] += lookup.width

    @property
    def weights(self) -> Sequence[Tensor]:
        """The memory of each rectangle."""
        return self.held.weights

    def table_of(self, route: Route) -> int:
        """Return the table whose IDs a route carries."""
        return self._routing.uses[route.use].table

    def without(self, tables: frozenset[int]) -> "LookupTables":
        """Return the same lookups without those of some tables."""
        if tables not in self._parts:
            kept = [q for q, route in enumerate(self.work.routes) if self.table_of(route) not in tables]
            place = {route: number for number, route in enumerate(kept)}
            work = RankWork(
                self.work.rectangles,
                tuple(self.work.routes[q] for q in kept),
                tuple(x._replace(route=place[x.route]) for x in self.work.lookups if x.route in place),
            )
            self._parts[tables] = LookupTables(
                self._routing, work, self.held, sequence=self.sequence, out_dtype=self._out_dtype, routes=kept
            )
        return self._parts[tables]

    def resolve(self, ids: LookupIds, *, train: bool) -> LookupIds:
        """Replace the keys of tables with an index by slots."""
        if not self._readers:
            return ids
        bounds = ids.offsets[ids.segments.to(ids.offsets.device)].tolist()
        num_keys = len(self.work.routes)
        values, pins = slots_of(ids.values, bounds, self._readers, num_keys=num_keys, train=train)
        return ids._replace(values=values, pins=pins)

    def num_elements(self, bags: Tensor, num_ids: Tensor) -> Tensor:
        """Return the number of output elements for each route, the last dimension of both arguments."""
        return (num_ids if self.sequence else bags) * self._route_widths

    def part_of_grad(self, part: "LookupTables", grad: Tensor, ids: LookupIds) -> Tensor:
        """Return the part of the output's gradient that belongs to the lookups of ``part``, flat."""
        kept = set(part.routes)
        chosen = [i for i, lookup in enumerate(self.work.lookups) if lookup.route in kept]
        if not self.is_flat(ids):
            columns = [columns.tolist() for columns in torch.arange(self._dim).split(self._widths)]
            return grad.view(-1, self._dim)[:, [c for i in chosen for c in columns[i]]].reshape(-1)
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu() if self.sequence else ids.segments
        rows = starts.diff().view(-1, len(self.work.routes))[:, self._layout[1]]
        pieces = grad.reshape(-1).split((rows * torch.tensor(self._widths)).view(-1).tolist())
        number = len(self.work.lookups)
        return torch.cat([pieces[first + i] for first in range(0, len(pieces), number) for i in chosen])

    def is_flat(self, ids: LookupIds) -> bool:
        """Return whether outputs lie piece by piece, because rows of different lookups differ in number."""
        return self.sequence or ids.ragged

    def block_sizes(self, ids: LookupIds) -> list[int]:
        """Return the number of output elements for each block, that is, for each rank that sent IDs."""
        if self.is_empty:
            return [0] * len(ids.batches)
        if self.sequence:
            return list(ids.elements)
        if not ids.ragged:
            return list(map(self._dim.__mul__, ids.batches))
        rows = ids.segments.diff().view(len(ids.batches), -1)
        sizes: list[int] = (rows @ self._route_widths).tolist()
        return sizes

    def lookups(self, ids: LookupIds) -> tbe.Lookups:
        """Return the kernel's arguments for these IDs. Its tables are the rectangles."""
        return _as_lookups((*ids[:4], *self._layout, self.is_flat(ids), self._widths))

    def forward(self, ids: LookupIds, num_elements: int) -> Tensor:
        """Look up the rows for every block: [sum of batches, columns], or flat [num_elements]."""
        if self.is_empty:
            return ids.values.new_empty(0, dtype=self._out_dtype)
        flat = self.sequence or ids.ragged
        lookups = _as_lookups((*ids[:4], *self._layout, flat, self._widths))
        size = num_elements if flat else sum(ids.batches)
        # Gradients are made elsewhere: skip the op's own, which costs time in Python and is not used.
        with torch._C._AutoDispatchBelowAutograd():
            weights = self._plain or self.weights
            options = LookupOptions(size, self._out_dtype, False, self._names)
            return self._look_up(weights, lookups, options)

    def shaped(self, grad: Tensor, ids: LookupIds) -> Tensor:
        """Return a gradient in fp32 with the shape of the output."""
        grad = grad.float()
        if self.is_flat(ids) or self.is_empty:
            return grad.reshape(-1)
        return grad.view(-1, self._dim)

    def sparse_grads(self, grad: Tensor, ids: LookupIds, rectangles: list[int]) -> list[RowGradients]:
        """Return the touched rows of each of the rectangles, with their gradients."""
        if not rectangles:
            return []
        lookups = self.lookups(ids).of_tables(rectangles)
        return [RowGradients(*pair) for pair in tbe.sparse_grad(grad, lookups, self._heights(rectangles))]

    def sample_weight_grad(self, grad: Tensor, ids: LookupIds) -> Tensor:
        """Return the gradient of the per-sample weights, fp32 [N], from the output's gradient in any
        shape.
        """
        if self.is_empty:
            return grad.new_zeros(ids.values.numel(), dtype=torch.float32)
        return tbe.sample_weight_grad(self.shaped(grad, ids), self.weights, self.lookups(ids))

    def _heights(self, rectangles: list[int]) -> list[int]:
        chosen = [self.work.rectangles[i] for i in rectangles]
        return [rectangle.r1 - rectangle.r0 for rectangle in chosen]


def _pooling(routing: Routing, use: int, sequence: bool) -> int:
    table = routing.uses[use].table
    if sequence:
        return NONE
    return MEAN if routing.tables[table].mean and not routing.row_split[table] else SUM
