"""Exchange between replicas that gives all replicas the same update.

Replicas exchange the backward pass's input: packed IDs and the gradients for looked-up rows. For pooled
tables this is a row per bag, which takes fewer bytes than a gradient row per ID. The update then runs as if
a single rank had seen all IDs. Small tables are summed whole instead.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import all_gather, all_reduce
from meshrec.comms.mesh import Axis
from meshrec.distributed.lookup_batch import LookupIds, PackedIds
from meshrec.ops import operators
from meshrec.tables.packing import RowGradients

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
    own: Sequence[RowGradients], shapes: Sequence[tuple[int, int]], axis: Axis
) -> list[RowGradients]:
    """Sum all ranks' gradients as whole tables.

    Args:
        own: this rank's row gradients by table.
        shapes: (rows, columns) by table.
        axis: the ranks.

    Returns:
        The touched rows and their summed gradients, by table.
    """
    sizes = [rows * (dim + 1) for rows, dim in shapes]
    flat = torch.zeros(sum(sizes), device=own[0].grads.device)
    tables = [part.view(rows, dim + 1) for part, (rows, dim) in zip(flat.split(sizes), shapes, strict=True)]
    for table, part in zip(tables, own, strict=True):
        table[part.rows, :-1] = part.grads
        # A zero gradient also counts as touched: the optimizer may still change the row.
        table[part.rows, -1] = 1
    all_reduce(flat, axis, "gradients of replicas")
    rows = [table[:, -1].nonzero()[:, 0] for table in tables]
    return [RowGradients(at, table[at, :-1]) for at, table in zip(rows, tables, strict=True)]
