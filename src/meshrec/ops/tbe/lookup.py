"""Table lookups for modules: a kernel call for all tables, and a backward pass that may update tables."""

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
"""Names of the first four ``Lookups`` fields in error messages."""


class LookupOptions(NamedTuple):
    """Size and dtype of a lookup result, and whether to check IDs and per-sample weights.

    The fields are the last arguments of ``torch.ops.meshrec.tbe_forward``, in the same order.
    """

    out_size: int
    """Number of rows in a 2-D result, or number of elements in a flat result."""
    out_dtype: torch.dtype
    """Result dtype."""
    check_ids: bool
    """Whether to raise an error for an ID outside its table and for a NaN per-sample weight."""
    names: Tensor
    """For error messages: the UTF-8 bytes of ``"table\\tfeature\\n"`` per feature, uint8."""


class Updater(Protocol):
    """An object that updates tables during the backward pass of a fused lookup.

    The update replaces the gradient: autograd gets none for these tables.
    """

    def foreign_writes(self, weights: Sequence[Tensor]) -> list[int]:
        """Return, for every table, the number of in-place writes that the updater did not make.

        Raises:
            ValueError: ``weights`` are not the updater's tables.
        """

    def check_tables(self, before: list[int]) -> None:
        """Raise ValueError if other code wrote to a table since ``foreign_writes`` returned ``before``."""

    def apply_gradient(self, grad: Tensor, lookups: Lookups) -> None:
        """Update the tables with the gradient of a lookup.

        Args:
            grad: lookup output gradient, with the same shape.
            lookups: the batch that was looked up; ``lookups.tables`` are indices into the module's tables.
        """


def forward(weights: Sequence[Tensor], lookups: Lookups, options: LookupOptions) -> Tensor:
    """Look up the rows for a batch, and pool the rows of every bag.

    Differentiable: the weights get dense gradients, and per-sample weights get a gradient.

    Args:
        weights: ``[rows, D]`` per table; fp32, fp16 or bf16.
        lookups: the batch, and the table that every feature reads.
        options: size and dtype of the result, and whether to check IDs.

    Returns:
        ``[out_size, sum of D]``, or ``[out_size]`` if ``lookups.flat``.

    Raises:
        ValueError: invalid offsets; or, with ``options.check_ids``, an ID outside the table or a NaN
            per-sample weight.
    """
    # Without dims: the forward operator reads the widths from the weights.
    return _forward(list(weights), *lookups[:-1], *options)


def dense_grad(grad: Tensor, weights: Sequence[Tensor], lookups: Lookups) -> list[Tensor]:
    """Return the gradient of every whole table, with the shape and dtype of the weight.

    Args:
        grad: lookup output gradient.
        weights: ``[rows, D]`` per table.
        lookups: the batch.
    """
    result: list[Tensor] = operators.tbe_dense_grad(grad, list(weights), *lookups)
    return result


def sparse_grad(grad: Tensor, lookups: Lookups, num_rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return the gradients of only the rows touched by the batch: a pair (rows, gradients) per table.

    ``rows`` are distinct and ascending, int64 [U]. ``gradients`` are summed over the batch, fp32 [U, D].

    Args:
        grad: lookup output gradient.
        lookups: the batch.
        num_rows: row count per table.
    """
    # Rows and gradients alternate in this list.
    flat = operators.tbe_sparse_grad(grad, *lookups, num_rows)
    return list(zip(flat[::2], flat[1::2], strict=True))


def row_squares(grad: Tensor, lookups: Lookups, num_rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the squared gradient norm of every touched row, for optimizers that need row statistics.

    Returns (squared norms, touched row count per table, runs). Pass ``runs`` to ``update``, which then need
    not sort the rows again. See ``naive.tbe_row_squares``.

    Args:
        grad: lookup output gradient.
        lookups: the batch.
        num_rows: row count per table.
    """
    result: tuple[Tensor, Tensor, Tensor] = operators.tbe_row_squares(grad, *lookups, num_rows)
    return result


def sample_weight_grad(grad: Tensor, weights: Sequence[Tensor], lookups: Lookups) -> Tensor:
    """Return the gradient of the per-sample weights, fp32 [N].

    Args:
        grad: lookup output gradient.
        weights: ``[rows, D]`` per table.
        lookups: the batch.
    """
    # The gradient of the per-sample weights does not depend on these weights.
    values, offsets, _, segments, *options = lookups
    result: Tensor = operators.tbe_sample_weight_grad(
        grad, list(weights), values, offsets, segments, *options
    )
    return result


class _FusedLookup(torch.autograd.Function):
    """Lookup as an autograd function. The backward pass gives the gradient to an updater, not to weights."""

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
        """Look up the rows, and remember the batch for the backward pass.

        Args:
            anchor: empty tensor that requires a gradient, so that autograd calls ``backward`` although the
                weights are not autograd inputs. Never gets a gradient.
            weights: ``[rows, D]`` per table.
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
        """Give the gradient to the updater. Return gradients for per-sample weights and dense tables."""
        # Before anything is updated, so that an error leaves all tables as they were.
        check_unchanged(BATCH_TENSORS, ctx.lookups[:4], ctx.versions)
        ctx.updater.check_tables(ctx.foreign_writes)
        sample_grad = None
        # Only on request, because it reads all rows again.
        if ctx.needs_input_grad[1]:
            sample_grad = sample_weight_grad(grad, ctx.weights, ctx.lookups)
        dense_grads: list[Tensor] = []
        if ctx.dense_tables:
            # of_tables renumbers the tables to match this list.
            dense_weights = [ctx.weights[table] for table in ctx.dense_tables]
            dense_grads = dense_grad(grad, dense_weights, ctx.lookups.of_tables(ctx.dense_tables))
        # Last, because dense and sample weight gradients must see the weights before the update.
        ctx.updater.apply_gradient(grad, ctx.lookups)
        # A gradient per forward argument: anchor, sample weights, five without a gradient, dense weights.
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
    """Look up rows like ``forward``, but let the backward pass give the gradient to ``updater``.

    torch.compile does not trace this function, but runs it between graphs. A traced graph would lose the
    update, because it is a side effect of the backward pass.

    Args:
        weights: ``[rows, D]`` per table.
        lookups: the batch, and the table that every feature reads.
        updater: receives the gradient in the backward pass.
        dense_tables: numbers of the tables that ``updater`` does not update; they get ordinary dense
            gradients.
        options: size and dtype of the result, and whether to check IDs.

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
    """Run a fused lookup eagerly.

    While torch.compile traces, ``fused_forward`` calls this through ``torch.compiler.disable``.
    """
    # _apply skips the check in Function.apply, so check here.
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            "a fused collection was called inside a torch.func transform (grad, vmap, ...), which cannot "
            "carry the update in its backward pass. Use torch.autograd, or torch.no_grad() to look up only."
        )
    # Passed as separate arguments, because autograd only sees tensors that are direct arguments.
    dense_weights = [weights[table] for table in dense_tables]
    anchor, sample_weights = _anchor(), lookups.per_sample_weights
    return _apply(anchor, sample_weights, weights, lookups, updater, options, dense_tables, *dense_weights)


@functools.cache
def _anchor() -> Tensor:
    """Return an empty tensor that requires a gradient, so that lookup results require a gradient too.

    The tensor never receives a gradient, so all lookups share it.
    """
    # A tensor created in inference mode could not require a gradient later.
    with torch.inference_mode(False):
        return torch.empty(0, device="cpu", requires_grad=True)


# Created at the first traced call, because creating it imports the compiler. Not `functools.cache`: Dynamo
# warns of it.
_untraced_fused: Callable[..., Tensor] | None = None


def _untraced() -> Callable[..., Tensor]:
    """Return ``_run_fused``, wrapped so that torch.compile runs it between graphs instead of tracing it."""
    global _untraced_fused
    if _untraced_fused is None:
        _untraced_fused = torch.compiler.disable(_run_fused)
    return _untraced_fused
