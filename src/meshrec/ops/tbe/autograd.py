"""Shapes for tracing (fakes) and the gradient of ``tbe_forward``, for all kernels alike."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import SymInt, Tensor

import meshrec.ops.tbe.naive  # noqa: F401 - the ops must exist before fakes are registered for them

# F features, T tables, N ids

_F = TypeVar("_F", bound=Callable[..., object])

# Typed here, because torch's own decorators are not.
_register_fake: Callable[[str], Callable[[_F], _F]] = torch.library.register_fake
_register_autograd: Callable[..., None] = torch.library.register_autograd


@_register_fake("meshrec::tbe_forward")
def _forward_fake(
    weights: list[Tensor],
    values: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    segments: Tensor | None,
    num_keys: int,
    keys: list[int],
    tables: list[int],
    pooling: list[int],
    flat: bool,
    out_size: int | SymInt,
    out_dtype: torch.dtype,
    check_ids: bool,
    names: Tensor,
) -> Tensor:
    shape = [out_size] if flat else [out_size, sum(weights[table].shape[1] for table in tables)]
    return values.new_empty(shape, dtype=out_dtype)


@_register_fake("meshrec::tbe_update")
def _update_fake(*args: Any) -> None:
    return None


@_register_fake("meshrec::tbe_sparse_grad")
def _sparse_grad_fake(
    grad: Tensor,
    values: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    segments: Tensor | None,
    num_keys: int,
    keys: list[int],
    tables: list[int],
    pooling: list[int],
    flat: bool,
    dims: list[int],
    num_rows: list[int | SymInt],
) -> list[Tensor]:
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, values, offsets, per_sample_weights, segments, *rest = inputs
    ctx.save_for_backward(values, offsets, per_sample_weights, segments, *weights)
    num_keys, keys, tables, pooling, flat = rest[:5]
    ctx.lookups = num_keys, keys, tables, pooling, flat
    ctx.dims = [weights[table].shape[1] for table in tables]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    values, offsets, per_sample_weights, segments, *weights = ctx.saved_tensors
    weights_grad: list[Tensor | None] = [None] * len(weights)
    sample_grad = None
    if any(ctx.needs_input_grad[0]):
        dense = torch.ops.meshrec.tbe_dense_grad.default(
            grad, weights, values, offsets, per_sample_weights, segments, *ctx.lookups, ctx.dims
        )
        needed = ctx.needs_input_grad[0]
        weights_grad = [gradient if need else None for gradient, need in zip(dense, needed, strict=True)]
    if ctx.needs_input_grad[3]:
        sample_grad = torch.ops.meshrec.tbe_sample_weight_grad.default(
            grad, weights, values, offsets, segments, *ctx.lookups, ctx.dims
        ).to(per_sample_weights.dtype)
    return (weights_grad, None, None, sample_grad, *[None] * 10)


_register_autograd("meshrec::tbe_forward", _backward, setup_context=_save)

# An update has no gradient of its own. torch would look for one among all of its tensors.
_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("tbe_update", torch.library.fallthrough_kernel, "Autograd")
