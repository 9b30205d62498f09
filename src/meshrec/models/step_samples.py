"""The samples of a step on all ranks, whose items are the negatives of losses within a batch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from meshrec.comms.collectives import all_gather, all_reduce
from meshrec.comms.mesh import Axis

# B samples of this rank, S samples of all ranks, W ranks


class OfAllRanks(NamedTuple):
    """Rows of all ranks, in the order of ranks."""

    rows: list[Tensor]
    """The rows [S, ...] of each tensor."""
    first: int
    """The position of this rank's first row."""


class StepSamples(nn.Module):
    """The samples that are trained on in one step.

    They are those of this rank alone until `join` names the ranks that take the step together. The trainer
    does so, so that a loss within the batch does not depend on the number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._axis = Axis()

    def join(self, axis: Axis) -> None:
        """Take the samples of all ranks of an axis. From then on every call is collective."""
        self._axis = axis

    def forward(self, *own: Tensor) -> OfAllRanks:
        """Gather tensors [B, ...], which have one row for each sample; B may differ between ranks.

        Differentiable: a row's gradient is the sum of the gradients that all ranks have for it.
        """
        if self._axis.size == 1:
            return OfAllRanks(list(own), 0)
        size = torch.tensor([len(own[0])], device=own[0].device)
        sizes = all_gather(size, self._axis, "sizes of a step's samples").wait().flatten().tolist()
        rows: list[Tensor] = [_Gathered.apply(each, self._axis, sizes) for each in own]  # type: ignore[no-untyped-call]
        return OfAllRanks(rows, sum(sizes[: self._axis.rank]))


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, of which rank r has ``sizes[r]``."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, axis: Axis, sizes: list[int]) -> Tensor:
        ctx.axis, ctx.sizes = axis, sizes
        most = max(sizes)
        padded = pad(own, (*(0, 0) * (own.dim() - 1), 0, most - len(own)))
        every = all_gather(padded, axis, "a step's samples").wait()
        return torch.cat([rows[:size] for rows, size in zip(every, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(total, ctx.axis, "gradients of a step's samples")
        return total.split(ctx.sizes)[ctx.axis.rank], None, None
