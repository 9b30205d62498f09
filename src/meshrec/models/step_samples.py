"""Gathering samples from all ranks in a training step, for in-batch losses, which use them as negatives."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from meshrec.comms.collectives import all_gather, all_reduce
from meshrec.comms.mesh import Axis

# B samples of this rank, S samples of all ranks, W ranks


class GatheredRows(NamedTuple):
    """Tensors with a row per sample, gathered from all ranks."""

    rows: list[Tensor]
    """Gathered tensors, [S, ...], in rank order."""
    first: int
    """Index of this rank's first sample."""


class StepSamples(nn.Module):
    """Module that gathers the samples in a training step from all ranks, for in-batch losses.

    The trainer calls `join` with the ranks that train together, so an in-batch loss does not depend on the
    rank count. Before that, calls return only this rank's samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self._axis = Axis()  # a single rank until join() is called

    def join(self, axis: Axis) -> None:
        """Gather samples from all ranks on a mesh axis from now on; calls become collective."""
        self._axis = axis

    def forward(self, *tensors: Tensor) -> GatheredRows:
        """Gather tensors from all ranks. Differentiable: a row's gradient is summed over all ranks.

        Args:
            tensors: Tensors with a row per sample on this rank, [B, ...]. B may differ between ranks.
        """
        if self._axis.size == 1:
            return GatheredRows(list(tensors), 0)
        # Sizes differ between ranks: the last batch may be shorter on some.
        size = torch.tensor([len(tensors[0])], device=tensors[0].device)
        sizes = all_gather(size, self._axis, "sizes of a step's samples").wait().flatten().tolist()
        rows: list[Tensor] = [_GatherRows.apply(tensor, self._axis, sizes) for tensor in tensors]  # type: ignore[no-untyped-call]
        return GatheredRows(rows, sum(sizes[: self._axis.rank]))


class _GatherRows(torch.autograd.Function):
    """Autograd function that concatenates the rows from all ranks; rank r has ``sizes[r]`` rows."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, axis: Axis, sizes: list[int]) -> Tensor:
        """Gather rows.

        Args:
            ctx: Autograd context.
            local: Rows of this rank.
            axis: Ranks to gather over.
            sizes: Number of rows per rank.
        """
        ctx.axis, ctx.sizes = axis, sizes
        # All ranks pad to the same size.
        max_size = max(sizes)
        # all_gather needs equal shapes.
        padded = pad(local, (*(0, 0) * (local.dim() - 1), 0, max_size - len(local)))
        gathered = all_gather(padded, axis, "a step's samples").wait()
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        # Every rank has a loss for its samples, and all losses depend on the gathered rows.
        all_reduce(total, ctx.axis, "gradients of a step's samples")
        return total.split(ctx.sizes)[ctx.axis.rank], None, None
