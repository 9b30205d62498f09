"""Gradients for replicated tables, made equal on all replicas.

For every table, the ranks select the exchange with fewer bytes:

- the sum over whole gradients, for small tables;
- the backward pass's input: packed IDs and the gradients for looked-up rows. For pooled tables this is a row
  per bag, which takes fewer bytes than a gradient row per ID. The update then runs as if a single rank had
  seen all IDs.

Whatever the mix, there is a single size exchange, a single sum, and a single exchange for IDs and gradients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import all_gather, all_reduce
from meshrec.comms.mesh import Axis
from meshrec.comms.phase_clock import OFF, phase, recorders
from meshrec.distributed.input_dist import InputDist
from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.lookup_batch import LookupIds, PackedIds
from meshrec.ops import operators
from meshrec.tables.packing import RowGradients
from meshrec.tables.updates import TableGradient

# P: replicas, n: messages per replica, Q: routes per message


class ReplicaSizes(NamedTuple):
    """Message sizes on every replica, in unpacking order.

    ``headers`` is int64 [P, n, 4]. ``bags`` and ``num_ids`` count by route, int64 [P, n, Q].
    """

    headers: Tensor
    bags: Tensor
    num_ids: Tensor

    def headers_of(self, routes: Sequence[int], words_per_id: int) -> Tensor:
        """Return headers for messages reduced to some routes, int64 [P, n, 4], in unpacking order."""
        bags, num_ids = self.bags[:, :, routes], self.num_ids[:, :, routes].sum(2)
        # -1 marks routes with different bag counts, as in the headers from ``route_ids``.
        batch = torch.where((bags == bags[:, :, :1]).all(2), bags[:, :, 0], -1)
        # Messages with ragged routes start with the bags per route, see ``pack_routes``.
        prefix = (batch < 0).long() * len(routes)
        words = prefix + bags.sum(2) + num_ids * words_per_id
        return torch.stack([torch.zeros_like(words), words, num_ids, batch], 2)


class Replicas:
    """Replicas of the tables looked up together on a rank.

    Args:
        tables: this rank's tables.
        axis: ranks with the same rows, at least two.
        input_dist: unpacks messages.
        blocks: order in which a rank unpacks messages.
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
        with phase(self._phase) if recorders else OFF:
            sizes = gather_sizes(message.header, ids, self._axis)
            whole = self._moved_whole(sizes)
            rows = self._summed(whole, ids, grad)
            # All tables were summed whole, so no IDs need to travel.
            if rows and len(rows) == len(self._tables.work.rectangles):
                return TableGradient(None, rows)
            return self._gathered(whole, message, ids, grad, sizes)._replace(rows=rows)

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
        selected = [i for i, rectangle in enumerate(rectangles) if rectangle.table in whole]
        if not selected:
            return {}
        gradients = self._tables.sparse_grads(self._tables.shaped(grad, ids), ids, selected)
        weights = self._tables.weights
        shapes = [(weights[i].shape[0], weights[i].shape[1]) for i in selected]
        return dict(zip(selected, reduce_gradients(gradients, shapes, self._axis), strict=True))

    def _gathered(
        self, whole: frozenset[int], message: PackedIds, ids: LookupIds, grad: Tensor, sizes: ReplicaSizes
    ) -> TableGradient:
        """Return the gradient from all replicas' lookups in the remaining tables."""
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
        # Keys travel: slots differ between ranks.
        return tables.gradient(grad, tables.resolve(all_ids, train=True))


def gather_sizes(header: Tensor, ids: LookupIds, axis: Axis) -> ReplicaSizes:
    """Gather the message sizes from every rank in the axis. Collective.

    Args:
        header: this rank's headers, int64 [n, 4].
        ids: the unpacked messages.
        axis: the replicas.
    """
    num_messages = header.shape[0]
    # The ID counts are data on the device; a single copy brings them to the host.
    starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu()
    counts = torch.cat([header.reshape(-1), ids.segments.diff(), starts.diff()]).to(ids.values.device)
    rows = all_gather(counts, axis, "sizes of gradients").wait().cpu()
    num_routes = (ids.segments.numel() - 1) // num_messages
    sizes = [header.numel(), num_messages * num_routes, num_messages * num_routes]
    headers, bags, num_ids = rows.split(sizes, 1)
    shape = axis.size, num_messages, num_routes
    return ReplicaSizes(
        headers.reshape(axis.size, num_messages, -1), bags.reshape(shape), num_ids.reshape(shape)
    )


def gather_gradients(
    message: PackedIds, grad: Tensor, headers: Tensor, num_grads: Sequence[int], axis: Axis
) -> tuple[PackedIds, Tensor]:
    """Gather all ranks' messages in rank order, and their flat gradients in the same order.

    Args:
        message: this rank's messages.
        grad: this rank's gradients, fp32, flat.
        headers: message headers on all ranks, int64 [P, n, 4].
        num_grads: gradient elements by rank.
        axis: the ranks.
    """
    words = headers[:, :, 1].sum(1).tolist()
    lengths = [count + grads for count, grads in zip(words, num_grads, strict=True)]
    mine = torch.cat([message.words, grad.reshape(-1).view(torch.int32)])
    # all_gather needs equal lengths. IDs and gradients share a buffer to save a collective.
    padded = torch.nn.functional.pad(mine, (0, max(lengths) - mine.numel()))
    rows = all_gather(padded, axis, "ids and gradients of replicas").wait()
    grads = [row[count:length] for row, count, length in zip(rows, words, lengths, strict=True)]
    return (
        PackedIds(
            torch.cat([row[:count] for row, count in zip(rows, words, strict=True)]), headers.flatten(0, 1)
        ),
        torch.cat(grads).view(torch.float32),
    )


def pack_routes(ids: LookupIds, routes: Sequence[int], header: Tensor) -> PackedIds:
    """Pack messages with a subset of the routes in ``ids``.

    Args:
        ids: the unpacked messages.
        routes: routes to retain.
        header: int64 [n, 4], see ``ReplicaSizes.headers_of``.
    """
    num_messages = header.shape[0]
    num_routes = (ids.segments.numel() - 1) // num_messages
    order = [message * num_routes + route for message in range(num_messages) for route in routes]
    bags = ids.segments.diff()[order]
    num_bags = bags.view(num_messages, -1).sum(1).tolist()
    num_ids = header[:, 2].tolist()
    lengths, values, weights = operators.permute_jagged(
        order,
        num_messages * num_routes,
        ids.offsets.diff(),
        ids.values,
        ids.weights,
        ids.segments,
        sum(num_bags),
        sum(num_ids),
    )
    columns = [lengths.int().split(num_bags), values.split(num_ids)]
    if ids.weights is not None:
        columns.append(weights.split(num_ids))
    words: list[Tensor] = []
    for message, parts in enumerate(zip(*columns, strict=True)):
        if header[message, 3] < 0:
            words.append(bags.view(num_messages, -1)[message].int().to(values.device))
        words += [part.view(torch.int32) for part in parts]
    return PackedIds(torch.cat(words), header)


def reduce_bytes(shapes: Sequence[tuple[int, int]], num_ranks: int) -> int:
    """Return the bytes a rank sends to sum whole gradients for tables with these shapes."""
    # A ring all-reduce of fp32 values. The additional column marks touched rows.
    elements = sum(rows * (dim + 1) for rows, dim in shapes)
    return 2 * (num_ranks - 1) * 4 * elements // num_ranks


def reduce_gradients(
    local_gradients: Sequence[RowGradients], shapes: Sequence[tuple[int, int]], axis: Axis
) -> list[RowGradients]:
    """Sum all ranks' gradients as whole tables.

    Args:
        local_gradients: this rank's row gradients by table.
        shapes: (rows, columns) by table.
        axis: the ranks.

    Returns:
        The touched rows and their summed gradients, by table.
    """
    sizes = [rows * (dim + 1) for rows, dim in shapes]
    flat = torch.zeros(sum(sizes), device=local_gradients[0].grads.device)
    tables = [part.view(rows, dim + 1) for part, (rows, dim) in zip(flat.split(sizes), shapes, strict=True)]
    for table, part in zip(tables, local_gradients, strict=True):
        table[part.rows, :-1] = part.grads
        # A zero gradient also counts as touched: the optimizer may still change the row.
        table[part.rows, -1] = 1
    all_reduce(flat, axis, "gradients of replicas")
    rows = [table[:, -1].nonzero()[:, 0] for table in tables]
    return [RowGradients(at, table[at, :-1]) for at, table in zip(rows, tables, strict=True)]
