"""Samples stacked as columns in one tensor, gathered from all ranks, and validated.

A column is a row in the tensor, with a value per sample. The last two columns are labels and weights.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def stack_columns(*columns: Tensor, weights: Tensor | None) -> Tensor:
    """Stack k tensors and the sample weights as columns: a detached float64 tensor [k + 1, n].

    Args:
        columns: k tensors with n values each, in any shape; labels last.
        weights: sample weights, n values; None: 1.

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
    # float64 represents float32 scores exactly, and keeps sums precise.
    flat = [column.detach().reshape(-1).double() for column in inputs]
    return torch.stack(flat if weights is not None else [*flat, torch.ones_like(flat[0])])


def gather_columns(columns: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the samples from all ranks, in rank order. Collective.

    Args:
        columns: columns for this rank's samples, [k, n]. n may differ between ranks.
        group: process group; None: all ranks.

    Returns:
        Columns for all samples, [k, sum of all n]. With a single rank, or without a process group, this is
        ``columns``.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return columns
    # Exchange the sizes first, because ranks may have different numbers of samples.
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


def check_values(name: str, values: Tensor, allowed: Tensor, rule: str) -> None:
    """Raise ValueError if a value is not allowed. The message shows the first such value.

    Args:
        name: name of the argument with the values, for the message.
        values: values [n].
        allowed: mask [n], True for allowed values.
        rule: description of the allowed values, such as "in [0, 1]", for the message.
    """
    if not bool(allowed.all()):
        row = int((~allowed).nonzero()[0])
        raise ValueError(f"{name}[{row}] is {float(values[row])}; {name} must be {rule}.")


def check_cutoffs(ks: Sequence[int]) -> None:
    """Raise ValueError if a cutoff is below 1. A cutoff k means that a metric uses the first k items."""
    if wrong := [k for k in ks if k < 1]:
        raise ValueError(f"a cut-off k must be at least 1, got {wrong[0]}.")


def drop_unweighted(columns: Tensor, allowed: Tensor, rule: str, *, name: str = "labels") -> Tensor:
    """Drop samples with weight 0, and validate the weights and the remaining labels.

    Call this function after `gather_columns`: then every rank raises the same error.

    Args:
        columns: float64 columns [k, n], with labels second to last, and weights last.
        allowed: mask [n] for allowed labels. Labels of samples with weight 0 are not checked.
        rule: description of the allowed labels, such as "in [0, 1]", for the message.
        name: name of the label column, for the message.

    Returns:
        Columns of the m samples with positive weight, [k, m].

    Raises:
        ValueError: a label is not allowed, or a weight is negative, NaN or infinite.
    """
    labels, weights = columns[-2], columns[-1]
    finite = "finite and at least 0. Give weight 0 to samples that must not count"
    check_values("weights", weights, (weights >= 0) & weights.isfinite(), finite)
    is_weighted = weights > 0
    check_values(name, labels, allowed | ~is_weighted, rule)
    return columns if bool(is_weighted.all()) else columns[:, is_weighted]


def normalize_samples(columns: Tensor, allowed: Tensor, rule: str, *, name: str = "labels") -> Tensor:
    """Drop samples with weight 0, validate the others, and divide the weights by the largest weight.

    The largest remaining weight becomes 1, so sums over weights do not overflow. See `drop_unweighted` for
    the arguments, the result and the errors.

    Args:
        columns, allowed, rule, name: see `drop_unweighted`.
    """
    columns = drop_unweighted(columns, allowed, rule, name=name)
    if not columns.shape[1]:
        return columns
    return torch.cat([columns[:-1], columns[-1:] / columns[-1].max()])


def id_column(values: Tensor) -> Tensor:
    """Store query IDs or group IDs in a float64 column for `stack_columns`, without rounding int64 IDs.

    The bits of an integer ID are reinterpreted as float64, and a floating-point ID is converted. Results are
    not meant for arithmetic or comparison as floats: equal IDs have equal bits, which `encode_ids` compares.

    Args:
        values: IDs, n integers or floating-point numbers.
    """
    values = values.detach().reshape(-1)
    if values.is_floating_point():
        return values.double() + 0.0  # -0.0 becomes 0.0: equal IDs must have equal bits
    return values.long().view(torch.float64)


def encode_ids(column: Tensor, name: str, *, is_floating: bool) -> "np.typing.NDArray[np.int64]":
    """Number the G distinct query IDs or group IDs from 0, and return the number per sample, int64 [n].

    Args:
        column: result from `id_column`, [n].
        name: name of the argument with the IDs, for the message.
        is_floating: whether the original IDs were floating-point numbers.

    Raises:
        ValueError: a floating-point ID was NaN.
    """
    if is_floating:
        check_values(name, column, ~column.isnan(), "numbers")
    # Compared as integers: as floats, some of the bit patterns are NaN.
    codes: np.typing.NDArray[np.int64] = np.unique(
        column.view(torch.int64).cpu().numpy(), return_inverse=True
    )[1]
    return codes
