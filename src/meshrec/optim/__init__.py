"""Fused optimizer specs, keyed optimizers and gradient clipping."""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.optim.clipping import GradientClipping, GradientClippingOptimizer
    from meshrec.optim.in_backward import (
        apply_optimizer_in_backward,
        in_backward_optimizer_filter,
        in_backward_spec,
    )
    from meshrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
    from meshrec.optim.optimizers import (
        FTRL,
        LAMB,
        LARS,
        SGD,
        Adagrad,
        Adam,
        OptimizerSpec,
        PartialRowWiseAdam,
        PartialRowWiseLAMB,
        RowWiseAdagrad,
        RowWiseRMSpropAR,
        StateSlot,
    )
    from meshrec.optim.torch_optimizers import from_torch

__all__ = [
    "FTRL",
    "LAMB",
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "CombinedOptimizer",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerSpec",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "RowWiseRMSpropAR",
    "StateSlot",
    "apply_optimizer_in_backward",
    "from_torch",
    "in_backward_optimizer_filter",
    "in_backward_spec",
]

import_on_use(__name__)
