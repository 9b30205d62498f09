"""Gradients for replicated tables, made equal on all replicas.

For every table, the ranks select the exchange with fewer bytes: the sum over whole gradients, or IDs with
looked-up row gradients, from which every replica works as if a single rank had seen all IDs. Whatever the
mix, there is a single size exchange, a single sum, and a single exchange for IDs and gradients.
"""

from collections.abc import Sequence

from torch import Tensor

from meshrec.comms.mesh import Axis
from meshrec.comms.phase_clock import OFF, phase, recorders
from meshrec.distributed.gradient_exchange import (
    ReplicaSizes,
    gather_gradients,
    gather_sizes,
    pack_routes,
    reduce_bytes,
    reduce_gradients,
)
from meshrec.distributed.input_dist import InputDist
from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.lookup_batch import LookupIds, PackedIds
from meshrec.tables.packing import RowGradients
from meshrec.tables.updates import LookedUp, TableGradient

# P: replicas, n: messages per replica, Q: routes per message


class Replicas:
    """Replicas of the tables looked up together on a rank.

    Args:
        tables: this rank's tables.
        axis: ranks with the same rows.
        input_dist: unpacks messages.
        blocks: order in which a rank unpacks its messages.
        name: phase name.
    """

    def __init__(
        self, tables: LookupTables, axis: Axis, input_dist: InputDist, blocks: list[int], *, name: str
    ) -> None:
        self._tables, self._axis, self._input, self._blocks = tables, axis, input_dist, blocks
        self._phase = name

    def sum_of_all(self, message: PackedIds, ids: LookupIds, grad: Tensor) -> TableGradient:
        """Return the gradient over all replicas. Collective over the axis.

        Args:
            message: the packed IDs.
            ids: the unpacked IDs.
            grad: gradient for the rows looked up here.
        """
        if self._axis.size == 1:
            looked_up = LookedUp(self._tables.shaped(grad, ids), self._tables.lookups(ids))
            return TableGradient(looked_up, {}, ids.pins)
        with phase(self._phase) if recorders else OFF:
            return self._summed_over_replicas(message, ids, grad)

    def _summed_over_replicas(self, message: PackedIds, ids: LookupIds, grad: Tensor) -> TableGradient:
        sizes = gather_sizes(message.header, ids, self._axis)
        whole = self._moved_whole(sizes)
        rows = self._summed(whole, ids, grad)
        # All tables were summed whole, so no IDs need to travel.
        if rows and len(rows) == len(self._tables.work.rectangles):
            return TableGradient(None, rows)
        looked_up, pins = self._gathered(whole, message, ids, grad, sizes)
        return TableGradient(looked_up, rows, pins)

    def _moved_whole(self, sizes: ReplicaSizes) -> frozenset[int]:
        """Return the tables for which a sum moves fewer bytes. They are equal on all replicas.

        Tables with an index are excluded: a row may have different slots on different replicas.
        """
        work, num_ranks = self._tables.work, self._axis.size
        elements = (
            sizes.bags
            + sizes.num_ids * self._input.words_per_id
            + self._tables.num_elements(sizes.bags, sizes.num_ids)
        )
        # all_gather pads to the longest message, hence the maximum over replicas.
        per_route = 4 * elements.sum(1).amax(0) * (num_ranks - 1)
        gathered: dict[int, int] = {}
        for route, num_bytes in zip(work.routes, per_route.tolist(), strict=True):
            table = self._tables.table_of(route)
            gathered[table] = gathered.get(table, 0) + num_bytes
        summed = dict.fromkeys(gathered, 0)
        for rectangle in work.rectangles:
            if rectangle.table in summed:
                shape = (rectangle.r1 - rectangle.r0, rectangle.c1 - rectangle.c0)
                summed[rectangle.table] += reduce_bytes([shape], num_ranks)
        indexed = {work.rectangles[i].table for i in self._tables.held.indexes}
        return frozenset(
            table for table in gathered if summed[table] < gathered[table] and table not in indexed
        )

    def _summed(self, whole: frozenset[int], ids: LookupIds, grad: Tensor) -> dict[int, RowGradients]:
        """Return the summed gradients by rectangle for these tables."""
        rectangles = self._tables.work.rectangles
        chosen = [i for i, rectangle in enumerate(rectangles) if rectangle.table in whole]
        if not chosen:
            return {}
        own = self._tables.sparse_grads(self._tables.shaped(grad, ids), ids, chosen)
        weights = self._tables.weights
        shapes = [(weights[i].shape[0], weights[i].shape[1]) for i in chosen]
        return dict(zip(chosen, reduce_gradients(own, shapes, self._axis), strict=True))

    def _gathered(
        self, whole: frozenset[int], message: PackedIds, ids: LookupIds, grad: Tensor, sizes: ReplicaSizes
    ) -> tuple[LookedUp, Sequence[object]]:
        """Return all replicas' lookups in the remaining tables, with pins."""
        tables, headers, blocks = self._tables, sizes.headers, self._blocks
        if whole:
            tables = self._tables.without(whole)
            headers = sizes.headers_of(tables.routes, self._input.words_per_id)
            # ``pack_routes`` writes messages in unpacking order, so they need no reordering.
            blocks = list(range(len(blocks)))
            message = pack_routes(ids, tables.routes, headers[self._axis.rank])
            grad = self._tables.part_of_grad(tables, grad, ids)
        num_grads = (
            self._tables.num_elements(sizes.bags, sizes.num_ids)[:, :, tables.routes].sum((1, 2)).tolist()
        )
        message, grad = gather_gradients(message, grad, headers, num_grads, self._axis)
        every = [p * len(blocks) + block for p in range(self._axis.size) for block in blocks]
        all_ids = self._input.unpack(message, every, len(tables.work.routes))
        all_ids = tables.resolve(all_ids, train=True)  # keys travel: slots differ between ranks
        return LookedUp(tables.shaped(grad, all_ids), tables.lookups(all_ids)), all_ids.pins
