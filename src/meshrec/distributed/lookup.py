"""Look up IDs in all rectangles on this rank with a single kernel call, and compute the gradients.

A rectangle is a row and column range of a table. See [Note: how a plan becomes routes] in ``routing.py``.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from meshrec.distributed.lookup_batch import LookupIds
from meshrec.distributed.routing import RankWork, Route, Routing
from meshrec.ops import tbe
from meshrec.ops.tbe import LookupOptions
from meshrec.ops.tbe.layout import MEAN, NONE, SUM
from meshrec.tables.index import FeatureRows, Index, replace_ids_by_slots
from meshrec.tables.local_shards import LocalShards
from meshrec.tables.packing import RowGradients
from meshrec.tables.storage import RowStorage, lookup_function
from meshrec.tables.updates import LookedUp, TableGradient

# K: routes on this rank, L: lookups, T: rectangles


# Replaces ``Lookups._make`` without a Python call, because it runs in every lookup.
_as_lookups: Callable[[Iterable[Any]], tbe.Lookups] = functools.partial(tuple.__new__, tbe.Lookups)


class FetchedRows:
    """Rows fetched from other nodes for a batch, used in `LookupTables` instead of ``LocalShards``.

    `NodeRows` looks up every distinct row once and stores it here. Pooling then reads these rows.
    """

    def __init__(self) -> None:
        # Rows by rectangle, set for every forward pass and again for its backward pass.
        self.weights: Sequence[Tensor] = []
        self.is_packed = True  # so ``weights`` is read again for every batch
        self.storages: list[RowStorage] = []
        self.indexes: dict[int, Index] = {}
        self.parameters: list[nn.Parameter] = []


class LookupTables:
    """Lookup in the rectangles (row and column ranges of tables) on this rank, in a single kernel call.

    The object also computes gradients. A module has an object for the tables split over ranks, and an object
    for the data-parallel tables, which every rank has completely.

    Args:
        routing: the compiled plan.
        work: routes and lookups on this rank. A route is a group of IDs which the rank receives together. A
            lookup looks up a route's IDs in a rectangle.
        shards: memory with the rows of the rectangles.
        sequence: whether the result has a row per ID instead of a pooled row per bag.
        out_dtype: output dtype.
        routes: message positions for the routes in ``work``, if ``work`` has only some of the message's
            routes. None: ``work`` has all routes.
    """

    def __init__(
        self,
        routing: Routing,
        work: RankWork,
        shards: LocalShards | FetchedRows,
        *,
        sequence: bool,
        out_dtype: torch.dtype = torch.float32,
        routes: Sequence[int] | None = None,
    ) -> None:
        # Everything except ``_parts`` is fixed, because another plan creates another object.
        self._routing = routing
        self.routes = list(range(len(work.routes))) if routes is None else list(routes)
        """Position in the messages of every route in ``work``."""
        # Results of ``without``, by table numbers, for the lifetime of this object.
        self._parts: dict[frozenset[int], LookupTables] = {}
        self.work, self.sequence = work, sequence
        self.shards = cast(LocalShards, shards)  # FetchedRows has all attributes needed by lookups
        # Packed parameters may get other memory, so only the unpacked weights are listed in advance.
        self._plain = None if shards.is_packed else list(shards.weights)
        # Depends on how rows are stored, for example as floating-point values or as quantized codes.
        self._look_up = lookup_function(shards.storages)
        self.is_empty = not work.lookups
        """Whether there is nothing to look up."""
        # Values in a pooled output row.
        self._dim = sum(lookup.width for lookup in work.lookups)
        self._out_dtype = out_dtype
        # Table and feature names, for errors in the kernel.
        self._names = routing.names
        # Columns of every lookup.
        self._widths = [lookup.width for lookup in work.lookups]
        # Kernel arguments that are the same for every batch.
        self._layout = (
            len(work.routes),
            [lookup.route for lookup in work.lookups],
            [lookup.rectangle for lookup in work.lookups],
            [_pooling(routing, lookup.use, sequence) for lookup in work.lookups],
        )
        indexes, rectangles = shards.indexes, work.rectangles
        # Indexes, which map keys to slots, by route. A route with several indexed rectangles (column shards)
        # reads all their indexes.
        self._readers: dict[int, FeatureRows] = {}
        for lookup in work.lookups:
            if lookup.rectangle in indexes:
                before = self._readers.get(lookup.route, FeatureRows([], rectangles[lookup.rectangle].r0))
                self._readers[lookup.route] = before._replace(
                    indexes=[*before.indexes, indexes[lookup.rectangle]]
                )
        # Values per ID (or bag) that each route adds to the output, over all column shards on this rank.
        self._route_widths = torch.zeros(len(work.routes), dtype=torch.int64)
        for lookup in work.lookups:
            self._route_widths[lookup.route] += lookup.width

    @property
    def weights(self) -> Sequence[Tensor]:
        """Memory with the rows of every rectangle, as the kernels read them."""
        return self.shards.weights

    def table_of(self, route: Route) -> int:
        """Return the number of the table in which a route's IDs are looked up."""
        return self._routing.uses[route.use].table

    def without(self, tables: frozenset[int]) -> "LookupTables":
        """Return a LookupTables object for all tables except ``tables``.

        The result is cached, so a later call returns the same object.
        """
        # The table set depends on batch sizes, and the same few sets recur.
        if tables not in self._parts:
            routes = [q for q, route in enumerate(self.work.routes) if self.table_of(route) not in tables]
            # New number of every remaining route.
            number = {route: number for number, route in enumerate(routes)}
            work = RankWork(
                self.work.rectangles,
                tuple(self.work.routes[q] for q in routes),
                tuple(x._replace(route=number[x.route]) for x in self.work.lookups if x.route in number),
            )
            self._parts[tables] = LookupTables(
                self._routing,
                work,
                self.shards,
                sequence=self.sequence,
                out_dtype=self._out_dtype,
                routes=routes,
            )
        return self._parts[tables]

    def resolve(self, ids: LookupIds, *, train: bool) -> LookupIds:
        """Replace keys by slots in tables with an index. If no table has an index, return the IDs unchanged.

        An index maps a key (a row number or hash) to a slot, the row's position in memory. Resolving
        keys may start to read rows from a file.
        """
        if not self._readers:
            return ids
        bounds = ids.offsets[ids.segments.to(ids.offsets.device)].tolist()
        num_keys = len(self.work.routes)
        values, pins = replace_ids_by_slots(ids.values, bounds, self._readers, num_keys=num_keys, train=train)
        return ids._replace(values=values, pins=pins)

    def num_elements(self, bags: Tensor, num_ids: Tensor) -> Tensor:
        """Return the number of output values for every route, int64 [..., K], with K routes."""
        return (num_ids if self.sequence else bags) * self._route_widths

    def part_of_grad(self, part: "LookupTables", grad: Tensor, ids: LookupIds) -> Tensor:
        """Return the values of an output gradient which belong to the lookups in ``part``, flat.

        Args:
            part: result of ``without``.
            grad: gradient for the whole output.
            ids: IDs that were looked up.
        """
        routes = set(part.routes)
        selected = [i for i, lookup in enumerate(self.work.lookups) if lookup.route in routes]
        if not self.is_flat(ids):
            # Output columns of every lookup.
            columns = [columns.tolist() for columns in torch.arange(self._dim).split(self._widths)]
            return grad.view(-1, self._dim)[:, [c for i in selected for c in columns[i]]].reshape(-1)
        starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu() if self.sequence else ids.segments
        rows = starts.diff().view(-1, len(self.work.routes))[:, self._layout[1]]
        # The flat output has, block by block, the rows of one lookup after the other.
        pieces = grad.reshape(-1).split((rows * torch.tensor(self._widths)).view(-1).tolist())
        number = len(self.work.lookups)
        return torch.cat([pieces[first + i] for first in range(0, len(pieces), number) for i in selected])

    def is_flat(self, ids: LookupIds) -> bool:
        """Return whether the output is a flat tensor, because lookups have different numbers of rows.

        If not, the output is a matrix [total bags, columns].
        """
        return self.sequence or ids.ragged

    def block_sizes(self, ids: LookupIds) -> list[int]:
        """Return the number of output values for every rank that sent IDs, in the order of the IDs."""
        if self.is_empty:
            return [0] * len(ids.batches)
        if self.sequence:
            return list(ids.elements)
        if not ids.ragged:
            return list(map(self._dim.__mul__, ids.batches))
        # Bags by block and route.
        rows = ids.segments.diff().view(len(ids.batches), -1)
        sizes: list[int] = (rows @ self._route_widths).tolist()
        return sizes

    def lookups(self, ids: LookupIds) -> tbe.Lookups:
        """Return the lookup kernel's arguments for these IDs.

        In the names of kernel arguments, "table" means a rectangle on this rank, not a whole table.
        """
        return _as_lookups((*ids[:4], *self._layout, self.is_flat(ids), self._widths))

    def forward(self, ids: LookupIds, num_elements: int) -> Tensor:
        """Look up and pool the rows for all ranks that sent IDs.

        Args:
            num_elements: ``sum(block_sizes(ids))``, the number of output values.
        """
        if self.is_empty:
            return ids.values.new_empty(0, dtype=self._out_dtype)
        # Inlined ``is_flat`` and ``lookups``, because this method runs in every step.
        flat = self.sequence or ids.ragged
        lookups = _as_lookups((*ids[:4], *self._layout, flat, self._widths))
        size = num_elements if flat else sum(ids.batches)
        # ``sharded_tables.py`` computes the gradients, so the op's own autograd would only cost time.
        with torch._C._AutoDispatchBelowAutograd():
            weights = self._plain or self.weights
            options = LookupOptions(size, self._out_dtype, False, self._names)
            return self._look_up(weights, lookups, options)

    def output_shaped(self, grad: Tensor, ids: LookupIds) -> Tensor:
        """Return an output gradient of any shape as fp32 in the shape of `forward`'s output."""
        grad = grad.float()
        if self.is_flat(ids) or self.is_empty:
            return grad.reshape(-1)
        return grad.view(-1, self._dim)

    def gradient(self, grad: Tensor, ids: LookupIds) -> TableGradient:
        """Return the gradient for all tables, as looked-up IDs with their output gradients."""
        return TableGradient(LookedUp(self.output_shaped(grad, ids), self.lookups(ids)), {}, ids.pins)

    def sparse_grads(self, grad: Tensor, ids: LookupIds, rectangles: list[int]) -> list[RowGradients]:
        """Return the distinct rows which were looked up in some rectangles, and their summed gradients.

        Args:
            grad: output gradient, from ``output_shaped``.
            ids: IDs that were looked up.
            rectangles: rectangle numbers.

        Returns:
            Row numbers and gradients for every rectangle in ``rectangles``.
        """
        if not rectangles:
            return []
        lookups = self.lookups(ids).of_tables(rectangles)
        return [RowGradients(*pair) for pair in tbe.sparse_grad(grad, lookups, self._heights(rectangles))]

    def sample_weight_grad(self, grad: Tensor, ids: LookupIds) -> Tensor:
        """Return the gradient for the per-sample weights, fp32 [N]."""
        if self.is_empty:
            return grad.new_zeros(ids.values.numel(), dtype=torch.float32)
        return tbe.sample_weight_grad(self.output_shaped(grad, ids), self.weights, self.lookups(ids))

    def _heights(self, rectangles: list[int]) -> list[int]:
        """Return the row count in each rectangle."""
        selected = [self.work.rectangles[i] for i in rectangles]
        return [rectangle.r1 - rectangle.r0 for rectangle in selected]


def _pooling(routing: Routing, use: int, sequence: bool) -> int:
    """Return the kernel's pooling mode for a use (a feature looked up in a table).

    The mode is NONE for sequence output, and MEAN for a MEAN table. It is SUM for all other tables, and also
    for a MEAN table split by rows, whose sums are divided later.
    """
    table = routing.uses[use].table
    if sequence:
        return NONE
    # A row-split MEAN sums here; the division follows after all parts are added (``pieces.py``).
    return MEAN if routing.tables[table].mean and not routing.row_split[table] else SUM
