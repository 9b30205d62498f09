"""Keyed optimizers with TorchRec's arguments; their state_dict has groups only if ``save_param_groups`` says
so, as there.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshrec.compat.bridge.adapted import Adapted
from meshrec.optim import clipping, keyed, warmup


class KeyedOptimizerWrapper(keyed.KeyedOptimizerWrapper):
    """Any torch optimizer, keyed by names.

    Args:
        params: the parameters by name.
        optim_factory: makes the optimizer from their list, or from the mapping if ``pass_params_dict``.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[Any], torch.optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        super().__init__(params, (lambda _: optim_factory(params)) if pass_params_dict else optim_factory)
        self.save_param_groups(False)


class CombinedOptimizer(keyed.CombinedOptimizer):
    """Several keyed optimizers as one."""

    def __init__(self, optims: Iterable[keyed.KeyedOptimizer | tuple[str, keyed.KeyedOptimizer]]) -> None:
        super().__init__(optims)
        self.save_param_groups(False)


class OptimizerWrapper(keyed.OptimizerWrapper):
    """A keyed optimizer around another; write a subclass with a ``step`` of its own."""

    def __init__(self, optimizer: keyed.KeyedOptimizer) -> None:
        super().__init__(optimizer)
        self.save_param_groups(False)


class GradientClippingOptimizer(clipping.GradientClippingOptimizer):
    """Clips the gradients before each step.

    Args:
        optimizer, clipping, max_gradient, norm_type: as there.
        enable_global_grad_clip, param_to_pgs: must be left out.
        track_grad_norm: changes nothing: ``last_total_grad_norm`` is always there.
    """

    def __init__(
        self,
        optimizer: keyed.KeyedOptimizer,
        clipping: clipping.GradientClipping = clipping.GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Any] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        if enable_global_grad_clip or param_to_pgs:
            raise ValueError(
                "gradients of tables are used up in backward, and those of the dense part are equal on "
                "all ranks: there is no norm over groups of ranks. Leave enable_global_grad_clip and "
                "param_to_pgs out."
            )
        super().__init__(optimizer, clipping, max_gradient, norm_type)
        self.save_param_groups(False)


class WarmupOptimizer(warmup.WarmupOptimizer):
    """Sets the learning rate by stages."""

    def __init__(
        self,
        optimizer: keyed.KeyedOptimizer,
        stages: list[warmup.WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer, stages, lr, lr_param, param_name)
        self.save_param_groups(False)


_STAGE = ("policy", "max_iters", "value", "lr_scale", "decay_iters", "sgdr_period")


def _stage(*args: Any, **kwargs: Any) -> warmup.WarmupStage:
    """TorchRec's ``WarmupStage(policy, max_iters, value, ...)``."""
    return warmup.WarmupStage(**dict(zip(_STAGE, args, strict=False)), **kwargs)


WarmupStage = Adapted(warmup.WarmupStage, _stage)
