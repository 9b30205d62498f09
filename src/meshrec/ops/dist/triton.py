"""Dist operators on GPUs, launched as Triton kernels. ``naive.py`` documents arguments and results.

No operator synchronizes with the GPU. The host needs some sizes (words per rank). They are in the header on
the device, and the caller reads them together with the sizes from other ranks, once. Two contracts therefore
differ from those on the CPU:

- ``route_ids`` does not know the message lengths. It allocates the maximum that the plan allows, and unused
  words follow the last message. Invalid input does not raise an error, but sets the status in all headers to
  1. The caller then runs ``naive.route_ids``, which raises it.
- ``unpack_ids`` and the sequence operators take header and counts on the CPU, where the caller has read them.
  (If bag counts differ between features, they travel inside the messages, and are read from there.)
"""

import importlib.util
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.device_copies import cached_on_device, copy_to_device, device_tensor
from meshrec.ops.dist.naive import IdsToRoute, PooledGradient, PooledRows, SequenceRows, WeightGradients
from meshrec.ops.dist.triton_plans import (
    ColumnGroups,
    PlanRoutes,
    UseBags,
    cached_groups,
    cached_routes,
    ceil_div,
)
from meshrec.ops.library import implement

# Shape legend: U uses, Q routes, R ranks, K keys, L lookups, N IDs, S slots (a slot is one bag in one route).

_LANES = 128
"""Bags that a program handles."""
_TILE = 1024
"""Matrix elements that a program handles."""


class _RouteSlots(NamedTuple):
    """The routes of a plan, with the bags of a batch, on the device. A slot is a bag on a route."""

    fields: Tensor
    """``triton_kernels.ROUTE_FIELDS`` per route, int64 [Q, ROUTE_FIELDS] on the device."""
    max_bags: int
    """Number of bags in the use with the most bags."""
    first: list[int]
    """First slot per route, followed by S; [Q + 1]."""
    starts: Tensor
    """ID count before every slot, int64 [S + 1] on the device."""
    num_bad: Tensor
    """IDs outside the table, per use, int64 [U] on the device."""
    is_bad: Tensor
    """1 if the input is invalid, int32 [1] on the device."""

    def grid(self, num: int | None = None) -> tuple[int, int]:
        """Return a launch grid in which a program handles ``_LANES`` bags on a route."""
        return ceil_div(max(self.max_bags, 1), _LANES), self.fields.shape[0] if num is None else num


def _build_slots(
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    bags: UseBags,
    routes: PlanRoutes,
    check_ids: bool,
) -> _RouteSlots:
    """Assign a slot to every bag on every route, and count the IDs in each slot on the device."""
    from meshrec.ops.dist import triton_kernels

    device = values.device
    bags_of_routes = [[bags.first[use], bags.number[use]] for use in routes.uses]
    first = list(accumulate((number for _, number in bags_of_routes), initial=0))
    slot_fields = torch.tensor([[*pair, slot] for pair, slot in zip(bags_of_routes, first[:-1], strict=True)])
    # Seven fields come from the plan, three from the batch.
    fields = copy_to_device(torch.cat([routes.fields, slot_fields.view(-1, 3)], 1), device)
    lengths = torch.empty(first[-1], dtype=torch.int32, device=device)
    starts = torch.zeros(first[-1] + 1, dtype=torch.int64, device=device)
    num_bad = torch.zeros(len(bags.first), dtype=torch.int64, device=device)
    is_bad = torch.zeros(1, dtype=torch.int32, device=device)
    slots = _RouteSlots(fields, max(bags.number, default=0), first, starts, num_bad, is_bad)
    # Without slots, the launch grid would be empty, which CUDA refuses.
    if first[-1]:
        triton_kernels.count_ids[slots.grid()](
            fields,
            values,
            offsets,
            weights,
            values.numel(),
            lengths,
            num_bad,
            is_bad,
            WEIGHTED=weights is not None,
            CHECK=check_ids,
            BLOCK=_LANES,
        )
        # A prefix sum gives every bag a message position, without atomics.
        torch.cumsum(lengths, 0, dtype=torch.int64, out=starts[1:])
    return slots


def route_ids(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack the IDs in a batch into a message per rank on a GPU, as ``naive.route_ids`` does.

    The module docstring lists the differences.
    """
    from meshrec.ops.dist import triton_kernels
    from meshrec.ops.tbe.triton_kernels import check_offsets

    values, offsets, weights, segments, num_keys, keys, router, num_ranks, wide, check_ids, _ = IdsToRoute(
        *arguments
    )
    device, num_ids = values.device, values.numel()
    # Kernels index these tensors as flat arrays.
    values, offsets = values.contiguous(), offsets.contiguous()
    weights = None if weights is None else weights.contiguous()
    routes, bags = cached_routes(router), UseBags.from_offsets(offsets, segments, num_keys, keys)
    slots = _build_slots(values, offsets, weights, bags, routes, check_ids)
    num_bags = offsets.numel() - 1
    # Always checked: this sets a flag on the device, which costs no synchronization.
    check_offsets[(ceil_div(max(num_bags, 1), _TILE),)](offsets, num_bags, num_ids, slots.is_bad, BLOCK=_TILE)
    # An ID takes one or two words, and a weight one more.
    words_per_id = (2 if wide else 1) + (weights is not None)
    # -1: bag counts differ, so each message lists them.
    batches = set(bags.number)
    batch = batches.pop() if len(batches) == 1 else (-1 if batches else 0)
    ranks, before = [], 0
    num_routes = slots.fields.shape[0]
    for rank in range(num_ranks):
        # Ranks after the last rank with a route have no routes.
        first, end = (routes.first_of_rank[min(at, len(routes.first_of_rank) - 1)] for at in (rank, rank + 1))
        words = slots.first[end] - slots.first[first] + (end - first if batch < 0 else 0)
        # RANK_FIELDS: the words before the IDs are bag lengths, and bag counts if these differ.
        ranks.append((slots.first[first], slots.first[end], words, before, batch))
        before += words
    # Depends on the bag counts but not on the IDs, so it repeats as long as the batch size does.
    rank_fields = cached_on_device(device, ranks)
    # Keys have disjoint ID ranges, so the routes send at most num_ids times the maximum routes per key.
    max_routes_by_key: dict[int, int] = {}
    for key, max_routes in zip(keys, routes.max_routes, strict=True):
        max_routes_by_key[key] = max_routes_by_key.get(key, 0) + max_routes
    capacity = num_ids * max(max_routes_by_key.values(), default=0)
    # The host does not know the message sizes, so allocate the maximum.
    payload = torch.empty(before + capacity * words_per_id, dtype=torch.int32, device=device)
    header = torch.empty(num_ranks, 4, dtype=torch.int64, device=device)
    counts = torch.empty(num_routes, dtype=torch.int64, device=device)
    triton_kernels.write_header[(ceil_div(max(num_routes, num_ranks), _LANES),)](
        slots.fields,
        rank_fields,
        slots.starts,
        slots.is_bad,
        header,
        counts,
        num_routes,
        num_ranks,
        words_per_id,
        BLOCK=_LANES,
    )
    if num_routes:
        triton_kernels.write_messages[slots.grid()](
            slots.fields,
            rank_fields,
            slots.starts,
            values,
            offsets,
            weights,
            num_ids,
            slots.first[-1],
            capacity,
            payload,
            words_per_id,
            WEIGHTED=weights is not None,
            WIDE=wide,
            BLOCK=_LANES,
        )
    return payload, header, counts, slots.num_bad


def unpack_ids(
    received: Tensor, header: Tensor, blocks: list[int], num_routes: int, weighted: bool, wide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unpack the messages from all ranks into a batch on a GPU, as ``naive.unpack_ids`` does.

    Args:
        header: int64 [R, 4], on the CPU.
    """
    from meshrec.ops.dist import triton_kernels

    words, num_ids, batches = header[:, 1].tolist(), header[:, 2].tolist(), header[:, 3].tolist()
    if sum(words) != received.numel():
        raise ValueError(f"header speaks of {sum(words)} words, {received.numel()} were received")
    device, starts = received.device, list(accumulate(words, initial=0))
    bags = _bags_of_routes(received, starts, batches, blocks, num_routes)
    segments = torch.tensor(
        list(accumulate((n for block_bags in bags for n in block_bags), initial=0)), dtype=torch.int64
    )
    fields, first_bag, first_id, max_size = [], 0, 0, 0
    for rank, block_bags in zip(blocks, bags, strict=True):
        # The bag lengths follow the bag counts, if the message has these.
        lengths_at = starts[rank] + (num_routes if batches[rank] < 0 else 0)
        number = sum(block_bags)
        fields.append([lengths_at, number, lengths_at + number, num_ids[rank], first_bag, first_id])
        first_bag, first_id = first_bag + number, first_id + num_ids[rank]
        # The grid must cover the longest list of all messages.
        max_size = max(max_size, number, num_ids[rank])
    lengths = torch.empty(first_bag, dtype=torch.int32, device=device)
    values = torch.empty(first_id, dtype=torch.int64 if wide else torch.int32, device=device)
    weights = torch.empty(first_id if weighted else 0, dtype=torch.float32, device=device)
    offsets = torch.zeros(first_bag + 1, dtype=torch.int64, device=device)
    if max_size:
        triton_kernels.unpack_messages[(ceil_div(max_size, _TILE), len(blocks))](
            # Not cached: the number of IDs differs from batch to batch.
            device_tensor(fields, device),
            received,
            lengths,
            values,
            weights,
            WEIGHTED=weighted,
            WIDE=wide,
            BLOCK=_TILE,
        )
    torch.cumsum(lengths, 0, dtype=torch.int64, out=offsets[1:])
    return values, offsets, weights, segments


def _bags_of_routes(
    received: Tensor, starts: list[int], batches: list[int], blocks: list[int], num_routes: int
) -> list[list[int]]:
    """Return, for every block, the number of bags on each route to this rank.

    A block is the message of a source rank. A route brings the IDs of a feature for a table shard. If
    features differ in bag counts, the counts are read from the messages, which synchronizes with the GPU.

    Args:
        starts: index in ``received`` where the message of each rank starts.
        batches: bags per route in the message of each rank; -1 if routes have different bag counts.
    """
    ragged = [rank for rank in blocks if batches[rank] < 0]
    prefixes: list[list[int]] = []
    if ragged and num_routes:
        # A single transfer for all messages.
        together = torch.cat([received[starts[rank] : starts[rank] + num_routes] for rank in ragged])
        prefixes = together.view(-1, num_routes).tolist()
    prefix_iterator = iter(prefixes or [[]] * len(ragged))
    return [next(prefix_iterator) if batches[rank] < 0 else [batches[rank]] * num_routes for rank in blocks]


def gather_pooled(*arguments: Any) -> Tensor:
    """Assemble pooled output columns from all ranks on a GPU, as ``naive.gather_pooled`` does.

    ``link`` and ``exchange`` are ignored.
    """
    from meshrec.ops.dist import triton_kernels

    rows, _ = PooledRows.split(arguments)
    received, local, pieces, dims, batch, out_dim, offsets, segments, num_keys, keys = rows
    if received.numel() != batch * sum(dims):
        raise ValueError(f"received {received.numel()} elements in place of {batch * sum(dims)}")
    groups = cached_groups(pieces, received.device)
    out = torch.empty(batch, out_dim, dtype=torch.float32, device=received.device)
    # A program handles a tile with _TILE elements: narrow groups leave room for more rows.
    columns = 1 << (groups.max_columns - 1).bit_length()
    # Row tiles by column groups. CUDA refuses a grid with a dimension 0.
    grid = ceil_div(batch, _TILE // columns), len(groups.groups)
    if 0 not in grid:
        triton_kernels.gather_columns[grid](
            groups.groups,
            groups.parts,
            _first_columns(dims, received.device),
            received.contiguous(),
            # Without local tables, no piece reads this argument, so any tensor will do.
            out if local is None else local.contiguous(),
            offsets,
            _first_bags(groups, received.device, offsets, segments, num_keys, keys),
            out,
            batch,
            len(dims),
            0 if local is None else local.shape[1],
            out_dim,
            MEANS=groups.has_means,
            ROWS=_TILE // columns,
            BLOCK=columns,
        )
    return out


def scatter_pooled(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Split a pooled output gradient into columns for all ranks, as ``naive.scatter_pooled`` does."""
    from meshrec.ops.dist import triton_kernels

    gradient = PooledGradient(*arguments)
    grad, pieces, dims, local_dim, offsets, segments, num_keys, keys, scale, dtype = gradient
    (batch, out_dim), device = grad.shape, grad.device
    groups = cached_groups(pieces, device)
    sent = torch.empty(batch * sum(dims), dtype=dtype, device=device)
    local = torch.empty(batch, local_dim, dtype=torch.float32, device=device)
    columns = 1 << (groups.max_columns - 1).bit_length()
    # Row tiles by pieces. CUDA refuses a grid with a dimension 0.
    grid = ceil_div(batch, _TILE // columns), len(groups.pieces)
    if 0 not in grid:
        triton_kernels.scatter_columns[grid](
            groups.pieces,
            _first_columns(dims, device),
            grad.contiguous(),
            offsets,
            _first_bags(groups, device, offsets, segments, num_keys, keys),
            float(scale),
            sent,
            local,
            batch,
            len(dims),
            local_dim,
            out_dim,
            MEANS=groups.has_means,
            ROWS=_TILE // columns,
            BLOCK=columns,
        )
    return sent, local


def gather_sequence(received: Tensor, *arguments: Any) -> Tensor:
    """Assemble sequence lookup rows from all ranks, as ``naive.gather_sequence`` does."""
    batch = SequenceRows(*arguments)
    num_elements = batch.num_elements()
    if received.numel() != num_elements:
        raise ValueError(f"received {received.numel()} elements in place of {num_elements}")
    # Every result element comes from exactly one rank, so the sizes are equal and nothing needs zeroing.
    out = torch.empty(num_elements, dtype=torch.float32, device=received.device)
    _copy_sequences(received.contiguous(), out, 1.0, batch, gather=True)
    return out


def scatter_sequence(grad: Tensor, *arguments: Any) -> Tensor:
    """Split a sequence gradient into parts for all ranks, as ``naive.scatter_sequence`` does."""
    *shared, scale, dtype = arguments
    batch = SequenceRows(*shared)
    num_elements = batch.num_elements()
    if grad.numel() != num_elements:
        raise ValueError(f"the gradient must be float32 with {num_elements} elements, got {grad.numel()}")
    out = torch.empty(num_elements, dtype=dtype, device=grad.device)
    _copy_sequences(grad.contiguous(), out, float(scale), batch, gather=False)
    return out


def _copy_sequences(
    source: Tensor, target: Tensor, scale: float, batch: SequenceRows, *, gather: bool
) -> None:
    """Copy rows between the message from all ranks and a tensor with the rows in ID order.

    Args:
        source: message if ``gather``, else the gradient in ID order.
        target: output. Rows in ID order if ``gather``, else the message.
    """
    from meshrec.ops.dist import triton_kernels

    values, offsets, segments, num_keys, keys, router, lookups, counts, dims = batch
    rows: list[list[int]] = lookups.tolist()
    # Without elements, the launch grid would be empty, which CUDA refuses.
    if not rows or not target.numel():
        return
    ids_of_route: list[int] = counts.tolist()
    ids_of_use = [0] * len(keys)
    for route, use, column, _ in rows:
        if column == 0:  # a table's shards contain column 0 of every row exactly once
            ids_of_use[use] += ids_of_route[route]
    # First element per use in the result.
    first = list(accumulate((n * dim for n, dim in zip(ids_of_use, dims, strict=True)), initial=0))
    # The parts of rows are in the message in the order of the lookups.
    fields, message_offset = [], 0
    for route, use, column, width in rows:
        fields.append([route, column, width, message_offset, first[use], dims[use]])
        message_offset += ids_of_route[route] * width
    # Route slots again, because only the counts were kept from the forward pass.
    bags = UseBags.from_offsets(offsets, segments, num_keys, keys)
    values, offsets = values.contiguous(), offsets.contiguous()
    slots = _build_slots(values, offsets, None, bags, cached_routes(router), False)
    triton_kernels.copy_sequences[(slots.max_bags, len(fields))](
        device_tensor(fields, values.device),
        slots.fields,
        slots.starts,
        values,
        offsets,
        values.numel(),
        source,
        target,
        scale,
        GATHER=gather,
        # A program copies a row at full width.
        BLOCK=1 << (max(width for *_, width in rows) - 1).bit_length(),
    )


def gather_weight_grads(*arguments: Any) -> Tensor:
    """Sum per-sample weight gradients from all ranks, as ``naive.gather_weight_grads`` does."""
    from meshrec.ops.dist import triton_kernels

    received, values, offsets, segments, num_keys, keys, router, counts = WeightGradients(*arguments)
    num_sent = int(counts.sum())
    if received.numel() != num_sent:
        raise ValueError(f"received {received.numel()} elements in place of {num_sent}")
    device, routes = values.device, cached_routes(router)
    values, offsets = values.contiguous(), offsets.contiguous()
    slots = _build_slots(
        values,
        offsets,
        None,
        UseBags.from_offsets(offsets, segments, num_keys, keys),
        routes,
        check_ids=False,
    )
    # A program handles all routes of a key, so that no other program adds to the same ID.
    routes_by_key: dict[int, list[int]] = {}
    for route, use in enumerate(routes.uses):
        routes_by_key.setdefault(keys[use], []).append(route)
    firsts = accumulate(map(len, routes_by_key.values()), initial=0)
    # `firsts` ends with the total, which belongs to no key.
    fields = [
        (first, len(key_routes)) for first, key_routes in zip(firsts, routes_by_key.values(), strict=False)
    ]
    # Zeros, because routes add to it, and some IDs are on no route.
    out = torch.zeros(values.numel(), dtype=torch.float32, device=device)
    if num_sent:
        triton_kernels.sum_weight_grads[slots.grid(len(fields))](
            cached_on_device(device, fields),
            cached_on_device(device, [q for key_routes in routes_by_key.values() for q in key_routes]),
            slots.fields,
            slots.starts,
            values,
            offsets,
            values.numel(),
            received.contiguous(),
            out,
            BLOCK=_LANES,
        )
    return out


def _first_columns(dims: Sequence[int], device: torch.device) -> Tensor:
    """Return the number of columns in all earlier sources, per source, followed by the total, on the device.

    A source is a rank that sends pooled columns.
    """
    return cached_on_device(device, list(accumulate(dims, initial=0)))


def _first_bags(
    groups: ColumnGroups,
    device: torch.device,
    offsets: Tensor | None,
    segments: Tensor | None,
    num_keys: int,
    keys: list[int],
) -> Tensor | None:
    """Return the first bag per use, [U] on the device; None if no piece is divided by bag lengths."""
    if not groups.has_means:
        return None
    assert offsets is not None
    return cached_on_device(device, UseBags.from_offsets(offsets, segments, num_keys, keys).first)


OPS: list[Callable[..., Any]] = [
    route_ids,
    unpack_ids,
    gather_pooled,
    scatter_pooled,
    gather_sequence,
    scatter_sequence,
    gather_weight_grads,
]
"""Operators with Triton kernels."""

if importlib.util.find_spec("triton") is not None:
    implement(OPS, "CUDA")
