"""Update batch norm running statistics once per batch instead of once per split (microbatch).

A staged model normalizes every split by the mean and variance of that split, as every pipeline does. Without
this module, batch norm would also update the running statistics once per split. With this module, the running
statistics are updated once per batch, by the mean and variance of the whole batch. Evaluation results
then do not depend on the number of splits in training.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def deferred_statistics(modules: Sequence[_BatchNorm]) -> Iterator[None]:
    """Collect batch norm inputs within the block, and update the running statistics when the block ends.

    All forward passes of a batch must run within the block. If the block raises, the running statistics stay
    unchanged.
    """
    # Creating the sums sets the modules' momentum to 0, so the forward passes do not change the statistics.
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
    """Return the model's batch norm modules that are in training mode and keep running statistics."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
    ]


class _Sums:
    """Statistics of the inputs to a batch norm module, summed over the splits (microbatches) of a batch.

    Stores the value count per channel, the sum and the sum of squares (float64 [C], C channels).
    """

    def __init__(self, module: _BatchNorm) -> None:
        self.module = module
        # Momentum to restore at the end of the block. In the block it is 0, so statistics do not change.
        self._momentum = module.momentum
        # Batch counter before the block; every forward pass increments the module's counter.
        self._tracked = None if module.num_batches_tracked is None else module.num_batches_tracked.clone()
        # Inputs per channel, over all splits so far.
        self._count = 0
        # Mean of the first split [C]. The sums are sums of (value - shift).
        self._shift: Tensor | None = None
        self._sum: Tensor | None = None
        self._squares: Tensor | None = None
        module.momentum = 0.0

    @torch.no_grad()
    def add(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Forward pre-hook: add the module's input [N, C, ...] to the sums."""
        # Move channels first and flatten the other dimensions: [C, values per channel].
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
        """Restore the module's momentum and batch counter to their values before the block."""
        self.module.momentum = self._momentum
        if self._tracked is not None and self.module.num_batches_tracked is not None:
            self.module.num_batches_tracked.copy_(self._tracked)

    @torch.no_grad()
    def commit(self) -> None:
        """Update the module's running mean and variance from the sums, as one batch."""
        module = self.module
        # The module did not run in this batch.
        if self._shift is None or self._sum is None or self._squares is None:
            return
        # A batch counts once, whatever the number of splits.
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
        # The sums are relative to the shift, so add it again. lerp_ with weight ``factor`` is torch's update
        # rule.
        module.running_mean.lerp_((self._shift + mean).to(module.running_mean.dtype), factor)
        module.running_var.lerp_(variance.to(module.running_var.dtype), factor)
