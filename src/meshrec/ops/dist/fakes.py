"""Output shapes for the dist operators (fake kernels), for tracing."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import meshrec.ops.dist.average_naive  # noqa: F401 - the ops must exist before fakes are registered for them
from meshrec.ops.dist import wire_naive
from meshrec.ops.dist.naive import IdsToRoute

# Shape legend: R ranks, Q routes, U uses.

_F = TypeVar("_F", bound=Callable[..., object])
_register_fake: Callable[[str], Callable[[_F], _F]] = torch.library.register_fake


@_register_fake("meshrec::route_ids")
def _route_ids(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = IdsToRoute(*arguments)
    # The message size depends on the IDs.
    words = torch.library.get_ctx().new_dynamic_size()
    return (
        batch.values.new_empty(words, dtype=torch.int32),
        batch.values.new_empty(batch.num_ranks, 4, dtype=torch.int64),
        batch.values.new_empty(batch.router[4].numel() // 3, dtype=torch.int64),
        batch.values.new_empty(len(batch.keys), dtype=torch.int64),
    )


@_register_fake("meshrec::unpack_ids")
def _unpack_ids(
    received: Tensor, header: Tensor, blocks: list[int], num_routes: int, weighted: bool, wide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    context = torch.library.get_ctx()
    num_ids, num_offsets = context.new_dynamic_size(), context.new_dynamic_size()
    return (
        received.new_empty(num_ids, dtype=torch.int64 if wide else torch.int32),
        received.new_empty(num_offsets, dtype=torch.int64),
        received.new_empty(num_ids if weighted else 0, dtype=torch.float32),
        received.new_empty(len(blocks) * num_routes + 1, dtype=torch.int64),
    )


@_register_fake("meshrec::gather_coded")
@_register_fake("meshrec::gather_pooled")
def _gather_pooled(received: Tensor, local: Any, pieces: Any, dims: Any, *sizes: Any) -> Tensor:
    batch, out_dim = sizes[:2]
    return received.new_empty(batch, out_dim, dtype=torch.float32)


@_register_fake("meshrec::scatter_pooled")
def _scatter_pooled(
    grad: Tensor, pieces: Tensor, dims: list[int], local_dim: int, *arguments: Any
) -> tuple[Tensor, Tensor]:
    batch, dtype = grad.shape[0], arguments[-1]
    return grad.new_empty(batch * sum(dims), dtype=dtype), grad.new_empty(batch, local_dim)


@_register_fake("meshrec::gather_sequence")
def _gather_sequence(received: Tensor, *arguments: Any) -> Tensor:
    return received.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.float32)


@_register_fake("meshrec::scatter_sequence")
def _scatter_sequence(grad: Tensor, *arguments: Any) -> Tensor:
    return grad.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=arguments[-1])


@_register_fake("meshrec::gather_weight_grads")
def _gather_weight_grads(received: Tensor, values: Tensor, *arguments: Any) -> Tensor:
    return received.new_empty(values.numel(), dtype=torch.float32)


@_register_fake("meshrec::distinct_ids")
def _distinct_ids(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return ids.new_empty(torch.library.get_ctx().new_dynamic_size()), torch.empty_like(ids)


@_register_fake("meshrec::pack_ids")
def _pack_ids(ids: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    num_bytes = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(num_bytes, dtype=torch.uint8), ids.new_empty(len(counts), dtype=torch.int64)


@_register_fake("meshrec::unpack_sorted_ids")
def _unpack_sorted_ids(message: Tensor, counts: list[int], wide: bool) -> Tensor:
    return message.new_empty(sum(counts), dtype=torch.int64 if wide else torch.int32)


@_register_fake("meshrec::wire_encode")
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


@_register_fake("meshrec::wire_decode")
def _wire_decode(
    message: Tensor, row_counts: list[int], first_columns: list[int], widths: list[int], formats: list[int]
) -> Tensor:
    size = sum(n * sum(widths[first_columns[b] : first_columns[b + 1]]) for b, n in enumerate(row_counts))
    return message.new_empty(size, dtype=torch.float32)


@_register_fake("meshrec::average_ranks")
def _average_ranks(mean: Tensor, *arguments: Any) -> None:
    return None
