"""Lookups as modules call them: one kernel for all tables, and a backward pass that may update the tables."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.tbe import (
    naive,  # noqa: F401 - registers the ops in plain torch, and their shapes and gradients
    reporting,  # noqa: F401 - registers report_clamped
    triton,  # noqa: F401 - registers the ops for GPUs
)
from meshrec.ops.tbe.layout import Lookups
from meshrec.ops.versions import check_unchanged, versions_of

# Shape legend: F features, K keys, T tables, N IDs, B samples, D width.

# Overloads, resolved once: resolving them by name on every call, as torch.ops does, doubles the call time.
_forward: Callable[..., Tensor] = operators.tbe_forward
update: Callable[..., None] = operators.tbe_update
"""``torch.ops.meshrec.tbe_update``; see ``naive.tbe_update``."""


BATCH_TENSORS = ("the ids", "the offsets", "the per-sample weights", "the batch sizes")
"""Names for the first four ``Lookups`` fields, for error messages."""


class LookupOptions(NamedTuple):
    """Lookup result size and dtype, and whether to check IDs and weights."""

    out_size: int
    """Rows (2-D) or elements (flat) in the result."""
    out_dtype: torch.dtype
    """Result dtype."""
    check_ids: bool
    """Whether to check IDs and per-sample weights."""
    names: Tensor
    """UTF-8 bytes of ``"table\\tfeature\\n"`` per feature, uint8, for messages."""


class Updater(Protocol):
    """Protocol for objects updating tables in a fused lookup backward pass."""

    def foreign_writes(self, weights: Sequence[Tensor]) -> list[int]:
        """Return the in-place write count per table, without writes by the updater.

        Raises:
            ValueError: ``weights`` are not the updater's tables.
        """

    def check_tables(self, before: list[int]) -> None:
        """Raise ValueError if ``foreign_writes`` no longer returns ``before``: a table was changed."""

    def take(self, grad: Tensor, lookups: Lookups) -> None:
        """Update the tables with a lookup's gradient.

        Args:
            grad: gradient with the shape of the lookup output.
            lookups: the batch; ``lookups.tables`` index the module tables.
        """


def forward(weights: Sequence[Tensor], lookups: Lookups, options: LookupOptions) -> Tensor:
    """Look up and pool rows. Differentiable: gives dense weight gradients, and per-sample weight gradients.

    Args:
        weights: ``[rows, D]`` per table; fp32, fp16 or bf16.
        lookups: the batch, and the tables read by the features.
        options: output size and dtype, and whether to check IDs.

    Returns:
        ``[out_size, sum of D]``, or ``[out_size]`` if flat.

    Raises:
        ValueError: invalid offsets; or, with ``options.check_ids``, an ID outside the table or a NaN
            per-sample weight.
    """
    return _forward(list(weights), *lookups[:-1], *options)


def dense_grad(grad: Tensor, weights: Sequence[Tensor], lookups: Lookups) -> list[Tensor]:
    """Return the dense gradients of all tables, with the weight shapes and dtypes.

    Args:
        grad: output gradient.
        weights: ``[rows, D]`` per table.
        lookups: the batch.
    """
    result: list[Tensor] = operators.tbe_dense_grad(grad, list(weights), *lookups)
    return result


def sparse_grad(grad: Tensor, lookups: Lookups, num_rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return gradients for rows touched by the batch, per table: (rows, gradients).

    ``rows`` are distinct and ascending, int64 [U]. ``gradients`` are summed over the batch, fp32 [U, D].

    Args:
        grad: output gradient.
        lookups: the batch.
        num_rows: row count per table.
    """
    flat = operators.tbe_sparse_grad(grad, *lookups, num_rows)
    return list(zip(flat[::2], flat[1::2], strict=True))


def row_squares(grad: Tensor, lookups: Lookups, num_rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squared gradient norm per touched row, for optimizers with row statistics.

    The remaining results are the touched row count per table, and ``runs`` to pass to ``update``. See
    ``naive.tbe_row_squares``.

    Args:
        grad: output gradient.
        lookups: the batch.
        num_rows: row count per table.
    """
    result: tuple[Tensor, Tensor, Tensor] = operators.tbe_row_squares(grad, *lookups, num_rows)
    return result


def sample_weight_grad(grad: Tensor, weights: Sequence[Tensor], lookups: Lookups) -> Tensor:
    """Return the per-sample weight gradient, fp32 [N].

    Args:
        grad: output gradient.
        weights: ``[rows, D]`` per table.
        lookups: the batch.
    """
    values, offsets, _, segments, *options = lookups
    result: Tensor = operators.tbe_sample_weight_grad(
        grad, list(weights), values, offsets, segments, *options
    )
    return result


class _FusedLookup(torch.autograd.Function):
    """Lookup whose backward pass passes the gradient to an updater instead of to the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        per_sample_weights: Tensor | None,
        weights: Sequence[Tensor],
        lookups: Lookups,
        updater: Updater,
        options: LookupOptions,
        dense_tables: list[int],
        *dense_weights: Tensor,
    ) -> Tensor:
        """Look up the rows.

        Args:
            ctx: holds the lookup for the backward pass.
            anchor: tensor requiring a gradient, so the result does too; never gets one.
            per_sample_weights: the weights in ``lookups``, as an input with an autograd gradient.
            weights: ``[rows, D]`` per table.
            lookups: the batch.
            updater: receives the gradient.
            options: output size and dtype, and whether to check IDs.
            dense_tables: tables with ordinary dense gradients instead of an update.
            dense_weights: the ``dense_tables`` weights, as inputs with autograd gradients.
        """
        # Not saved for backward, because the update intentionally modifies the weights in place. Other
        # in-place writes are detected by comparing versions, as torch does for saved tensors.
        ctx.weights, ctx.lookups, ctx.updater, ctx.dense_tables = weights, lookups, updater, dense_tables
        ctx.versions = versions_of(lookups[:4])
        ctx.foreign_writes = updater.foreign_writes(weights)
        # Skip tbe_forward's autograd kernel: this function defines the gradient, and the kernel costs Python
        # time.
        with torch._C._AutoDispatchBelowAutograd():
            return forward(weights, lookups, options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_unchanged(BATCH_TENSORS, ctx.lookups[:4], ctx.versions)
        ctx.updater.check_tables(ctx.foreign_writes)
        sample_grad = None
        if ctx.needs_input_grad[1]:
            sample_grad = sample_weight_grad(grad, ctx.weights, ctx.lookups)
        dense_grads: list[Tensor] = []
        if ctx.dense_tables:
            dense_weights = [ctx.weights[table] for table in ctx.dense_tables]
            dense_grads = dense_grad(grad, dense_weights, ctx.lookups.of_tables(ctx.dense_tables))
        # Last, because dense and sample weight gradients must see the weights before the update.
        ctx.updater.take(grad, ctx.lookups)
        return (None, sample_grad, None, None, None, None, None, *dense_grads)


# Function.apply first handles torch.func transforms, which doubles the call time.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _FusedLookup).apply


def fused_forward(
    weights: Sequence[Tensor],
    lookups: Lookups,
    updater: Updater,
    dense_tables: list[int],
    options: LookupOptions,
) -> Tensor:
    """Look up like ``forward``, with a backward pass that passes the gradient to ``updater``.

    torch.compile does not trace this function, but runs it between graphs: a traced graph would lose the
    update, a side effect in the backward pass.

    Args:
        weights: ``[rows, D]`` per table.
        lookups: the batch, and the tables read by the features.
        updater: receives the gradient in the backward pass.
        dense_tables: tables not updated by ``updater``; they get ordinary dense gradients.
        options: output size and dtype, and whether to check IDs.

    Raises:
        ValueError: as for ``forward``, or called inside a torch.func transform.
    """
    # Only tracing needs the guard. Creating it imports the compiler, which takes seconds.
    run = _untraced() if torch.compiler.is_compiling() else _run_fused
    return run(weights, lookups, updater, dense_tables, options)


def _run_fused(
    weights: Sequence[Tensor],
    lookups: Lookups,
    updater: Updater,
    dense_tables: list[int],
    options: LookupOptions,
) -> Tensor:
    """Implement ``fused_forward`` outside tracing."""
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            "a fused collection was called inside a torch.func transform (grad, vmap, ...), which cannot "
            "carry the update in its backward pass. Use torch.autograd, or torch.no_grad() to look up only."
        )
    dense_weights = [weights[table] for table in dense_tables]
    anchor, sample_weights = _anchor(), lookups.per_sample_weights
    return _apply(anchor, sample_weights, weights, lookups, updater, options, dense_tables, *dense_weights)


@functools.cache
def _anchor() -> Tensor:
    """Return a tensor requiring a gradient, so that lookup results require one.

    No gradient ever reaches it, so all lookups share it.
    """
    # A tensor created in inference mode could not require a gradient later.
    with torch.inference_mode(False):
        return torch.empty(0, device="cpu", requires_grad=True)


# Created at the first traced call, because creating it imports the compiler.
_untraced_fused: Callable[..., Tensor] | None = None


def _untraced() -> Callable[..., Tensor]:
    """Return ``_run_fused`` wrapped so that torch.compile runs it outside graphs."""
    global _untraced_fused
    if _untraced_fused is None:
        _untraced_fused = torch.compiler.disable(_run_fused)
    return _untraced_fused
