"""Output shapes for the dist operators (fake kernels), for tracing.

``schemas.inc`` has the signatures. A fake kernel names only the arguments that it needs.
"""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.dist.average_naive  # noqa: F401 - the ops must exist before fakes are registered for them
from meshrec.ops.dist import wire_naive
from meshrec.ops.dist.naive import IdsToRoute
from meshrec.ops.library import dynamic_size, register_fakes


def _route_ids(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = IdsToRoute(*arguments)
    # The message size depends on the IDs.
    words = dynamic_size()
    return (
        batch.values.new_empty(words, dtype=torch.int32),
        batch.values.new_empty(batch.num_ranks, 4, dtype=torch.int64),
        batch.values.new_empty(batch.router[4].numel() // 3, dtype=torch.int64),
        batch.values.new_empty(len(batch.keys), dtype=torch.int64),
    )


def _unpack_ids(
    received: Tensor, header: Tensor, blocks: list[int], num_routes: int, weighted: bool, wide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_ids, num_offsets = dynamic_size(), dynamic_size()
    return (
        received.new_empty(num_ids, dtype=torch.int64 if wide else torch.int32),
        received.new_empty(num_offsets, dtype=torch.int64),
        received.new_empty(num_ids if weighted else 0, dtype=torch.float32),
        received.new_empty(len(blocks) * num_routes + 1, dtype=torch.int64),
    )


def _wire_encode(
    values: Tensor,
    row_counts: list[int],
    first_columns: list[int],
    widths: list[int],
    formats: list[int],
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    size = sum(
        num_rows * wire_naive.column_bytes(formats[c], widths[c])
        for b, num_rows in enumerate(row_counts)
        for c in range(first_columns[b], first_columns[b + 1])
    )
    return values.new_empty(size, dtype=torch.uint8), values.new_empty(2, dtype=torch.int64)


def _wire_decode(
    message: Tensor, row_counts: list[int], first_columns: list[int], widths: list[int], formats: list[int]
) -> Tensor:
    size = sum(n * sum(widths[first_columns[b] : first_columns[b + 1]]) for b, n in enumerate(row_counts))
    return message.new_empty(size, dtype=torch.float32)


register_fakes(
    route_ids=_route_ids,
    unpack_ids=_unpack_ids,
    gather_pooled=lambda received, local, pieces, dims, *sizes: received.new_empty(
        sizes[:2], dtype=torch.float32
    ),
    gather_coded=lambda received, local, pieces, dims, *sizes: received.new_empty(
        sizes[:2], dtype=torch.float32
    ),
    scatter_pooled=lambda grad, pieces, dims, local_dim, *arguments: (
        grad.new_empty(grad.shape[0] * sum(dims), dtype=arguments[-1]),
        grad.new_empty(grad.shape[0], local_dim),
    ),
    gather_sequence=lambda received, *_: received.new_empty(dynamic_size(), dtype=torch.float32),
    scatter_sequence=lambda grad, *arguments: grad.new_empty(dynamic_size(), dtype=arguments[-1]),
    gather_weight_grads=lambda received, values, *_: received.new_empty(values.numel(), dtype=torch.float32),
    distinct_ids=lambda ids, num_rows: (ids.new_empty(dynamic_size()), torch.empty_like(ids)),
    pack_ids=lambda ids, counts: (
        ids.new_empty(dynamic_size(), dtype=torch.uint8),
        ids.new_empty(len(counts), dtype=torch.int64),
    ),
    unpack_sorted_ids=lambda message, counts, wide: message.new_empty(
        sum(counts), dtype=torch.int64 if wide else torch.int32
    ),
    wire_encode=_wire_encode,
    wire_decode=_wire_decode,
    average_ranks=lambda *_: None,
)
