"""Update batch norm running statistics once per batch instead of once per split.

In stages, batch norm normalizes every split by the split's mean and variance, as in every pipeline. Without
this module, it would also update the running statistics at every split. With it, they are updated once, by
the whole batch's mean and variance, so evaluation does not depend on the split count.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def deferred_statistics(modules: Sequence[_BatchNorm]) -> Iterator[None]:
    """Update the running statistics in ``modules`` at the end of the block.

    If it raises, they are unchanged.
    """
    sums = [_Sums(module) for module in modules]
    hooks = [module_sums.module.register_forward_pre_hook(module_sums.add) for module_sums in sums]
    try:
        yield
    finally:
        for hook, module_sums in zip(hooks, sums, strict=True):
            # Also after an error, because with momentum 0 the statistics would never be updated again.
            hook.remove()
            module_sums.restore()
    for module_sums in sums:
        module_sums.commit()


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Return the batch norm modules in training mode with running statistics."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ]


class _Sums:
    """Input count, sum [C] and sum of squares [C] for a batch norm module in a batch."""

    def __init__(self, module: _BatchNorm) -> None:
        self.module = module
        # Momentum to restore at the end of the block. In the block it is 0, so statistics do not change.
        self._momentum = module.momentum
        self._tracked = None if module.num_batches_tracked is None else module.num_batches_tracked.clone()
        self._count = 0
        self._shift: Tensor | None = None
        self._sum: Tensor | None = None
        self._squares: Tensor | None = None
        module.momentum = 0.0

    @torch.no_grad()
    def add(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        values = arguments[0].transpose(0, 1).flatten(1).double()
        if self._shift is None:  # sums of squares are accurate only for values around 0, so subtract a mean
            self._shift = values.mean(1)
            self._sum, self._squares = torch.zeros_like(self._shift), torch.zeros_like(self._shift)
        assert self._sum is not None
        assert self._squares is not None
        values = values - self._shift[:, None]
        self._sum += values.sum(1)
        self._squares += values.square().sum(1)
        self._count += values.shape[1]

    def restore(self) -> None:
        self.module.momentum = self._momentum
        if self._tracked is not None and self.module.num_batches_tracked is not None:
            self.module.num_batches_tracked.copy_(self._tracked)

    @torch.no_grad()
    def commit(self) -> None:
        module = self.module
        if self._shift is None or self._sum is None or self._squares is None:
            return
        if module.num_batches_tracked is not None:
            module.num_batches_tracked += 1
        factor = self._momentum
        if factor is None:
            assert module.num_batches_tracked is not None
            # momentum=None is torch's cumulative average.
            factor = 1.0 / float(module.num_batches_tracked)
        mean = self._sum / self._count
        # Unbiased, as torch's running variance.
        variance = (self._squares - self._sum * mean) / max(self._count - 1, 1)
        assert module.running_mean is not None
        assert module.running_var is not None
        module.running_mean.lerp_((self._shift + mean).to(module.running_mean.dtype), factor)
        module.running_var.lerp_(variance.to(module.running_var.dtype), factor)
