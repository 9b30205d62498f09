"""Samples from all ranks, validated, without zero-weight samples."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def stacked(*columns: Tensor, weights: Tensor | None) -> Tensor:
    """Stack columns with n entries and weights, default 1, into a detached float64 tensor [k + 1, n].

    Raises:
        ValueError: sizes differ.
    """
    inputs = [*columns, *([] if weights is None else [weights])]
    sizes = [column.numel() for column in inputs]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"scores, labels and weights must have one entry per sample, got {sizes} entries. Score each "
            "sample once."
        )
    flat = [column.detach().reshape(-1).double() for column in inputs]
    return torch.stack(flat if weights is not None else [*flat, torch.ones_like(flat[0])])


def gathered(columns: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate columns [k, n] from all ranks, with n varying by rank. No-op on a single rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return columns
    size = torch.tensor([columns.shape[1]], device=columns.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    max_size = int(torch.cat(sizes).max())
    if not max_size:
        return columns
    parts = [columns.new_empty(len(columns), max_size) for _ in sizes]
    # all_gather needs equal shapes.
    padded = torch.nn.functional.pad(columns, (0, max_size - columns.shape[1]))
    dist.all_gather(parts, padded.contiguous(), group=group)
    return torch.cat([part[:, : int(size)] for part, size in zip(parts, sizes, strict=True)], dim=1)


def refuse(name: str, values: Tensor, allowed: Tensor, rule: str) -> None:
    """Raise ValueError for the first value that is not allowed.

    Args:
        name: argument name in the message.
        values: [n].
        allowed: mask [n].
        rule: requirement, for the message.
    """
    if not bool(allowed.all()):
        row = int((~allowed).nonzero()[0])
        raise ValueError(f"{name}[{row}] is {float(values[row])}; {name} must be {rule}.")


def check_cutoffs(ks: Sequence[int]) -> None:
    """Raise ValueError for a cutoff below 1."""
    if wrong := [k for k in ks if k < 1]:
        raise ValueError(f"a cut-off k must be at least 1, got {wrong[0]}.")


def with_weight(columns: Tensor, allowed: Tensor, rule: str, *, name: str = "labels") -> Tensor:
    """Drop zero-weight samples, and validate the others.

    Validation follows gathering, so that every rank raises the same error.

    Args:
        columns: float64 columns [k, n], with labels and weights last.
        allowed: allowed label mask, [n]. Ignored for zero-weight samples.
        rule: label requirement, for the message.
        name: label name in the message.

    Returns:
        Columns of the m remaining samples, [k, m].

    Raises:
        ValueError: a label is not allowed, or a weight is negative, NaN or infinite.
    """
    labels, weights = columns[-2], columns[-1]
    finite = "finite and at least 0. Give weight 0 to samples that must not count"
    refuse("weights", weights, (weights >= 0) & weights.isfinite(), finite)
    counts = weights > 0
    refuse(name, labels, allowed | ~counts, rule)
    return columns if bool(counts.all()) else columns[:, counts]


def counted(columns: Tensor, allowed: Tensor, rule: str, *, name: str = "labels") -> Tensor:
    """Like `with_weight`, with weights divided by their maximum to avoid overflow in sums.

    Args:
        columns: see `with_weight`.
        allowed: see `with_weight`.
        rule: see `with_weight`.
        name: see `with_weight`.
    """
    columns = with_weight(columns, allowed, rule, name=name)
    if not columns.shape[1]:
        return columns
    return torch.cat([columns[:-1], columns[-1:] / columns[-1].max()])


def integer_column(values: Tensor) -> Tensor:
    """Reinterpret query or group IDs as float64: float64 values cannot represent all int64.

    Only ``.view(torch.int64)`` of the result is meaningful: equal IDs have equal bits.
    """
    values = values.detach().reshape(-1)
    if values.is_floating_point():
        return values.double() + 0.0  # -0.0 becomes 0.0
    return values.long().view(torch.float64)


def codes_of(column: Tensor, name: str, *, is_floating: bool) -> "np.typing.NDArray[np.int64]":
    """Return codes in [0, G) for query or group IDs from `integer_column`.

    Args:
        column: output of `integer_column`.
        name: argument name in messages.
        is_floating: whether the IDs were floating-point.

    Raises:
        ValueError: a floating-point ID was NaN.
    """
    if is_floating:
        refuse(name, column, ~column.isnan(), "numbers")
    codes: np.typing.NDArray[np.int64] = np.unique(
        column.view(torch.int64).cpu().numpy(), return_inverse=True
    )[1]
    return codes
