"""Fake kernels of the table-batched operators, for tracing."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

import meshrec.ops.tbe.naive  # noqa: F401 - the ops must exist before fakes are registered for them
from meshrec.ops.tbe.layout import Lookups

# F features, T tables, N ids

_F = TypeVar("_F", bound=Callable[..., object])

# torch.library.register_fake is untyped.
_register_fake: Callable[[str], Callable[[_F], _F]] = torch.library.register_fake


@_register_fake("meshrec::tbe_forward")
def _forward_fake(weights: list[Tensor], values: Tensor, *arguments: Any) -> Tensor:
    tables, _, flat, out_size, out_dtype, *_ = arguments[5:]
    shape = [out_size] if flat else [out_size, sum(weights[table].shape[1] for table in tables)]
    return values.new_empty(shape, dtype=out_dtype)


@_register_fake("meshrec::tbe_update")
def _update_fake(*args: Any) -> None:
    return None


@_register_fake("meshrec::tbe_sparse_grad")
def _sparse_grad_fake(grad: Tensor, *arguments: Any) -> list[Tensor]:
    lookups, (num_rows,) = Lookups.split(arguments)
    values, tables, dims = lookups.values, lookups.tables, lookups.dims
    context = torch.library.get_ctx()
    result: list[Tensor] = []
    for table in range(len(num_rows)):
        read = table in tables
        num_touched = context.new_dynamic_size() if read else 0
        dim = dims[tables.index(table)] if read else 0
        result.append(values.new_empty([num_touched], dtype=torch.int64))
        result.append(grad.new_empty([num_touched, dim], dtype=torch.float32))
    return result


@_register_fake("meshrec::tbe_row_squares")
def _row_squares_fake(grad: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    context, num_tables = torch.library.get_ctx(), len(args[-1])
    squares = grad.new_empty([context.new_dynamic_size()], dtype=torch.float32)
    counts = torch.empty([num_tables], dtype=torch.int64)
    return squares, counts, grad.new_empty([context.new_dynamic_size()], dtype=torch.int64)


@_register_fake("meshrec::tbe_dense_grad")
def _dense_grad_fake(grad: Tensor, weights: list[Tensor], *args: Any) -> list[Tensor]:
    return [weight.new_empty(weight.shape) for weight in weights]


@_register_fake("meshrec::tbe_sample_weight_grad")
def _sample_weight_grad_fake(grad: Tensor, weights: list[Tensor], values: Tensor, *args: Any) -> Tensor:
    return values.new_empty(values.shape, dtype=torch.float32)


@_register_fake("meshrec::clamp_ids")
def _clamp_ids_fake(
    values: Tensor, offsets: Tensor, segments: Tensor | None, num_keys: int, keys: list[int], *args: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), values.new_empty([len(keys)], dtype=torch.int64)
