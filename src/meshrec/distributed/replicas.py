"""Sum table gradients over replicas: ranks which have copies of the same rows.

For every table, the ranks choose the exchange which sends fewer bytes:

- all-reduce the dense gradient; best for small tables.
- all-gather the inputs to the backward pass: packed IDs and output gradients. For pooled tables, an output
  gradient has a row per bag, which takes fewer bytes than a gradient row per ID. Every replica then computes
  the update as if it had looked up the IDs from all replicas.

For all tables of a `Replicas` object together, a step needs at most one size exchange, one all-reduce and one
all-gather.
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
    """Sizes of the ID messages on all P replicas. A replica has looked up the IDs in its messages.

    A replica has n messages, one from each rank that sent it IDs. A message has Q routes. A route is a group
    of IDs for the same table, feature and row interval.
    """

    headers: Tensor
    """Message headers (see `PackedIds`), int64 [P, n, 4]."""
    bags: Tensor
    """Number of bags in every route, int64 [P, n, Q]."""
    num_ids: Tensor
    """Number of IDs in every route, int64 [P, n, Q]."""

    def headers_of(self, routes: Sequence[int], words_per_id: int) -> Tensor:
        """Return the headers for messages that contain only some routes, int64 [P, n, 4].

        Args:
            routes: positions of the routes in the messages.
            words_per_id: int32 words per ID in a message.
        """
        bags, num_ids = self.bags[:, :, routes], self.num_ids[:, :, routes].sum(2)
        # -1 marks routes with different bag counts, as in the headers from ``route_ids``.
        batch = torch.where((bags == bags[:, :, :1]).all(2), bags[:, :, 0], -1)
        # Messages with ragged routes start with the bags per route, see ``pack_routes``.
        prefix = (batch < 0).long() * len(routes)
        words = prefix + bags.sum(2) + num_ids * words_per_id
        return torch.stack([torch.zeros_like(words), words, num_ids, batch], 2)


class Replicas:
    """Table gradient sums over replicas, which are ranks with copies of the same rows.

    Args:
        tables: tables on this rank which have copies on all replicas.
        axis: the replicas, at least two ranks.
        input_dist: unpacks messages with IDs.
        blocks: source ranks in the order in which their messages are unpacked.
        name: name of this phase in `record_phases`.
    """

    def __init__(
        self, tables: LookupTables, axis: Axis, input_dist: InputDist, blocks: list[int], *, name: str
    ) -> None:
        # Set once; all state of a batch is in the arguments of sum_gradients().
        self._tables, self._axis, self._input, self._blocks = tables, axis, input_dist, blocks
        self._phase = name

    def sum_gradients(self, message: PackedIds, ids: LookupIds, grad: Tensor) -> TableGradient:
        """Return the gradient for this rank's tables, summed over all replicas. Collective.

        Args:
            message: packed IDs which this replica has looked up.
            ids: the same IDs, unpacked.
            grad: gradient for this replica's lookup output.
        """
        with phase(self._phase) if recorders else OFF:
            sizes = _gather_sizes(message.header, ids, self._axis)
            whole = self._tables_to_sum(sizes)
            # First the all-reduce, because afterwards the all-gather may not be needed.
            rows = self._sum_tables(whole, ids, grad)
            # The all-reduce had all tables, so no IDs need to be gathered.
            if rows and len(rows) == len(self._tables.work.rectangles):
                # Rows here are slots on this rank, which equal row numbers: indexed tables are never
                # all-reduced.
                return TableGradient(None, rows)
            return self._gather_lookups(whole, message, ids, grad, sizes)._replace(rows=rows)

    def _tables_to_sum(self, sizes: ReplicaSizes) -> frozenset[int]:
        """Return the table numbers for which an all-reduce sends fewer bytes than an all-gather.

        The result is equal on all replicas. It never contains tables with an index, because replicas may
        store the same row in different slots (memory positions).
        """
        work, num_ranks = self._tables.work, self._axis.size
        # Words that a replica sends per route in the all-gather: bag lengths, IDs, and gradients.
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
        # Bytes for the all-reduce, by table.
        summed = dict.fromkeys(gathered, 0)
        for rectangle in work.rectangles:
            if rectangle.table in summed:
                shape = (rectangle.r1 - rectangle.r0, rectangle.c1 - rectangle.c0)
                summed[rectangle.table] += reduce_bytes([shape], num_ranks)
        indexed = {work.rectangles[i].table for i in self._tables.shards.indexes}
        return frozenset(
            table for table in gathered if summed[table] < gathered[table] and table not in indexed
        )

    def _sum_tables(self, whole: frozenset[int], ids: LookupIds, grad: Tensor) -> dict[int, RowGradients]:
        """All-reduce the dense gradients for the tables in ``whole``. Collective."""
        rectangles = self._tables.work.rectangles
        selected = [i for i, rectangle in enumerate(rectangles) if rectangle.table in whole]
        if not selected:
            return {}
        gradients = self._tables.sparse_grads(self._tables.output_shaped(grad, ids), ids, selected)
        weights = self._tables.weights
        shapes = [(weights[i].shape[0], weights[i].shape[1]) for i in selected]
        return dict(zip(selected, _reduce_gradients(gradients, shapes, self._axis), strict=True))

    def _gather_lookups(
        self, whole: frozenset[int], message: PackedIds, ids: LookupIds, grad: Tensor, sizes: ReplicaSizes
    ) -> TableGradient:
        """All-gather IDs and output gradients, and return the gradient for tables not in ``whole``.
        Collective.
        """
        tables, headers, blocks = self._tables, sizes.headers, self._blocks
        if whole:
            tables = self._tables.without(whole)
            headers = sizes.headers_of(tables.routes, self._input.words_per_id)
            # ``pack_routes`` writes messages in unpacking order, so they need no reordering.
            blocks = list(range(len(blocks)))
            message = pack_routes(ids, tables.routes, headers[self._axis.rank])
            grad = self._tables.part_of_grad(tables, grad, ids)
        # Number of gradient values on every replica, for the tables in the all-gather.
        num_grads = (
            self._tables.num_elements(sizes.bags, sizes.num_ids)[:, :, tables.routes].sum((1, 2)).tolist()
        )
        message, grad = _gather_gradients(message, grad, headers, num_grads, self._axis)
        # Messages of all replicas, each in unpacking order.
        every = [p * len(blocks) + block for p in range(self._axis.size) for block in blocks]
        all_ids = self._input.unpack(message, every, len(tables.work.routes))
        # Messages have keys, because slots differ between ranks. Resolve them to this rank's slots.
        return tables.gradient(grad, tables.resolve(all_ids, train=True))


def _gather_sizes(header: Tensor, ids: LookupIds, axis: Axis) -> ReplicaSizes:
    """Gather the message sizes from all replicas. Collective.

    Args:
        header: headers for this rank's n messages, int64 [n, 4].
    """
    num_messages = header.shape[0]
    # ID counts are on the device. This is the only copy to the host.
    starts = ids.offsets[ids.segments.to(ids.offsets.device)].cpu()
    counts = torch.cat([header.reshape(-1), ids.segments.diff(), starts.diff()]).to(ids.values.device)
    rows = all_gather(counts, axis, "sizes of gradients").wait().cpu()
    num_routes = (ids.segments.numel() - 1) // num_messages
    # The three parts of ``counts``.
    sizes = [header.numel(), num_messages * num_routes, num_messages * num_routes]
    headers, bags, num_ids = rows.split(sizes, 1)
    shape = axis.size, num_messages, num_routes
    return ReplicaSizes(
        headers.reshape(axis.size, num_messages, -1), bags.reshape(shape), num_ids.reshape(shape)
    )


def _gather_gradients(
    message: PackedIds, grad: Tensor, headers: Tensor, num_grads: Sequence[int], axis: Axis
) -> tuple[PackedIds, Tensor]:
    """Gather the packed IDs and the output gradients from all replicas in a single all-gather. Collective.

    Args:
        num_grads: number of gradient values on each rank.

    Returns:
        Packed IDs and flat gradients from all ranks, in rank order.
    """
    # Words of packed IDs on every rank.
    words = headers[:, :, 1].sum(1).tolist()
    lengths = [count + grads for count, grads in zip(words, num_grads, strict=True)]
    # The bits of the fp32 values, reinterpreted: nothing is rounded.
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
    """Pack the IDs in some routes into new messages, a new message for every message in ``ids``.

    A route is a group of IDs for the same table, feature and row interval.

    Args:
        ids: unpacked messages with all routes.
        routes: positions of the routes to pack.
        header: headers for the new messages, int64 [n, 4], from ``ReplicaSizes.headers_of``.
    """
    num_messages = header.shape[0]
    num_routes = (ids.segments.numel() - 1) // num_messages
    # Index of every packed (message, route) among all routes in ``ids``.
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
        # Routes with different bag counts: the message starts with the counts.
        if header[message, 3] < 0:
            words.append(bags.view(num_messages, -1)[message].int().to(values.device))
        words += [part.view(torch.int32) for part in parts]
    return PackedIds(torch.cat(words), header)


def reduce_bytes(shapes: Sequence[tuple[int, int]], num_ranks: int) -> int:
    """Return the number of bytes which a rank sends to all-reduce dense gradients."""
    # A ring all-reduce of fp32 values sends 2 (n - 1) / n of the elements. The additional column marks
    # touched rows.
    elements = sum(rows * (dim + 1) for rows, dim in shapes)
    return 2 * (num_ranks - 1) * 4 * elements // num_ranks


def _reduce_gradients(
    local_gradients: Sequence[RowGradients], shapes: Sequence[tuple[int, int]], axis: Axis
) -> list[RowGradients]:
    """All-reduce gradients as dense tensors, for all given tables at once. Collective.

    Args:
        local_gradients: for every table, the rows touched on this rank, and their gradients.

    Returns:
        For every table, the rows touched on any rank, and their summed gradients.
    """
    sizes = [rows * (dim + 1) for rows, dim in shapes]
    # A buffer for all tables, so that one all-reduce is enough.
    flat = torch.zeros(sum(sizes), device=local_gradients[0].grads.device)
    tables = [part.view(rows, dim + 1) for part, (rows, dim) in zip(flat.split(sizes), shapes, strict=True)]
    for table, part in zip(tables, local_gradients, strict=True):
        # Rows are distinct, so assignment loses nothing.
        table[part.rows, :-1] = part.grads
        # A row with gradient 0 is also touched, because the optimizer may still change it (momentum, decay).
        table[part.rows, -1] = 1
    all_reduce(flat, axis, "gradients of replicas")
    rows = [table[:, -1].nonzero()[:, 0] for table in tables]
    return [RowGradients(at, table[at, :-1]) for at, table in zip(rows, tables, strict=True)]
