"""Lookups as modules call them: one kernel for all tables, and a backward pass that may update the tables."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshrec.ops.tbe import (
    autograd,  # noqa: F401 - registers the gradient of tbe_forward
    fakes,  # noqa: F401 - registers the shapes
    reporting,  # noqa: F401 - registers report_clamped
    triton,  # noqa: F401 - registers the ops for GPUs
)
from meshrec.ops.tbe.layout import Lookups
from meshrec.ops.versions import check_unchanged, versions_of

# F features, K keys, T tables, N ids, B samples, D width

# Overloads, found once: finding them by name in every call, as torch.ops does, doubles its time.
_forward: Callable[..., Tensor] = torch.ops.meshrec.tbe_forward.default
update: Callable[..., None] = torch.ops.meshrec.tbe_update.default
"""``torch.ops.meshrec.tbe_update``; see ``naive.tbe_update``."""


BATCH_TENSORS = ("the ids", "the offsets", "the per-sample weights", "the batch sizes")
"""Names of the first four fields of ``Lookups`` in messages."""


class LookupOptions(NamedTuple):
    """The size and dtype of a lookup's result, and whether its input is checked."""

    out_size: int
    """The number of rows (2-D) or elements (flat) of the result."""
    out_dtype: torch.dtype
    """The dtype of the result."""
    check_ids: bool
    """Whether to check IDs and per-sample weights."""
    names: Tensor
    """The bytes, uint8, of ``"table\\tfeature\\n"`` per feature, for messages."""


class Updater(Protocol):
    """An object that receives the gradient of a lookup and updates tables with it."""

    def foreign_writes(self, weights: Sequence[Tensor]) -> list[int]:
        """Return how often anybody other than the updater has written to each table.

        Raises:
            ValueError: ``weights`` are not the updater's tables.
        """

    def check_tables(self, before: list[int]) -> None:
        """Raise ValueError if ``foreign_writes`` has changed since it returned ``before``."""

    def take(self, grad: Tensor, lookups: Lookups) -> None:
        """Update the tables. ``grad`` has the shape of the lookup's output; ``lookups.tables`` index the
        module's tables.
        """


def forward(weights: Sequence[Tensor], lookups: Lookups, options: LookupOptions) -> Tensor:
    """Look up. The result is differentiable in the weights (dense gradients) and in the per-sample weights.

    Args:
        weights: ``[rows, D]`` per table; fp32, fp16 or bf16.
        lookups: the batch, and the tables that its features read.
        options: size and dtype of the result, and whether IDs are checked.

    Raises:
        ValueError: offsets do not fit; or, with ``options.check_ids``, an ID is outside its table or a
            per-sample weight is NaN.
    """
    return _forward(list(weights), *lookups[:-1], *options)


def dense_grad(grad: Tensor, weights: Sequence[Tensor], lookups: Lookups) -> list[Tensor]:
    """Return gradients with the shapes and dtypes of the weights."""
    result: list[Tensor] = torch.ops.meshrec.tbe_dense_grad.default(grad, list(weights), *lookups)
    return result


def sparse_grad(grad: Tensor, lookups: Lookups, num_rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Return, for each table, the touched rows, int64 [U] ascending, and their summed gradients, fp32 [U,
    D].
    """
    flat = torch.ops.meshrec.tbe_sparse_grad.default(grad, *lookups, num_rows)
    return list(zip(flat[::2], flat[1::2], strict=True))


def row_squares(grad: Tensor, lookups: Lookups, num_rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of squared gradients of the touched rows, their numbers by table, and ``runs``.

    See ``naive.tbe_row_squares``.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.meshrec.tbe_row_squares.default(
        grad, *lookups, num_rows
    )
    return result


def sample_weight_grad(grad: Tensor, weights: Sequence[Tensor], lookups: Lookups) -> Tensor:
    """Return the gradient of the per-sample weights, fp32 [N]."""
    values, offsets, _, segments, *rest = lookups
    result: Tensor = torch.ops.meshrec.tbe_sample_weight_grad.default(
        grad, list(weights), values, offsets, segments, *rest
    )
    return result


class _FusedLookup(torch.autograd.Function):
    """The lookup as an autograd function whose backward pass gives the gradient to the updater."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        per_sample_weights: Tensor | None,
        weights: Sequence[Tensor],
        lookups: Lookups,
        updater: Updater,
        options: LookupOptions,
        plain: list[int],
        *plain_weights: Tensor,
    ) -> Tensor:
        # Not saved for backward, because the update changes the weights in place on purpose. All other
        # in-place writes are found by comparing versions, as torch does for saved tensors.
        ctx.weights, ctx.lookups, ctx.updater, ctx.plain = weights, lookups, updater, plain
        ctx.versions = versions_of(lookups[:4])
        ctx.foreign_writes = updater.foreign_writes(weights)
        # This function is the gradient: skip tbe_forward's own, which costs time in Python and is not used.
        with torch._C._AutoDispatchBelowAutograd():
            return forward(weights, lookups, options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_unchanged(BATCH_TENSORS, ctx.lookups[:4], ctx.versions)
        ctx.updater.check_tables(ctx.foreign_writes)
        sample_grad = None
        if ctx.needs_input_grad[1]:
            sample_grad = sample_weight_grad(grad, ctx.weights, ctx.lookups)
        plain_grads: list[Tensor] = []
        if ctx.plain:
            plain_weights = [ctx.weights[table] for table in ctx.plain]
            plain_grads = dense_grad(grad, plain_weights, ctx.lookups.of_tables(ctx.plain))
        ctx.updater.take(grad, ctx.lookups)
        return (None, sample_grad, None, None, None, None, None, *plain_grads)


# Function.apply first prepares for torch.func, which doubles the time of the call.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _FusedLookup).apply


def fused_forward(
    weights: Sequence[Tensor],
    lookups: Lookups,
    updater: Updater,
    plain: list[int],
    options: LookupOptions,
) -> Tensor:
    """Look up like ``forward``; in the backward pass, ``updater`` receives the gradient.

    ``plain``: the tables that the updater does not update; they get ordinary dense gradients.

    torch.compile does not trace this function, but runs it between its graphs: the update in the backward
    pass is an effect that a traced graph would lose.

    Raises:
        ValueError: as for ``forward``, or it was called inside a transform of torch.func.
    """
    # Without tracing the guard is not needed, and making it would import the compiler, which takes seconds.
    run = _untraced() if torch.compiler.is_compiling() else _run_fused
    return run(weights, lookups, updater, plain, options)


def _run_fused(
    weights: Sequence[Tensor],
    lookups: Lookups,
    updater: Updater,
    plain: list[int],
    options: LookupOptions,
) -> Tensor:
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            "a fused collection was called inside a torch.func transform (grad, vmap, ...), which cannot "
            "carry the update in its backward pass. Use torch.autograd, or torch.no_grad() to look up only."
        )
    plain_weights = [weights[table] for table in plain]
    anchor, sample_weights = _anchor(), lookups.per_sample_weights
    return _apply(anchor, sample_weights, weights, lookups, updater, options, plain, *plain_weights)


@functools.cache
def _anchor() -> Tensor:
    """Return the tensor that makes a result require a gradient. It never gets one, so all lookups share
    it.
    """
    with torch.inference_mode(False):
        return torch.empty(0, device="cpu", requires_grad=True)


_untraced_fused: Callable[..., Tensor] | None = None


def _untraced() -> Callable[..., Tensor]:
    global _untraced_fused
    if _untraced_fused is None:
        _untraced_fused = torch.compiler.disable(_run_fused)
    return _untraced_fused
