"""Row-wise Adagrad as a plain torch optimizer, for tables that are not fused.

``meshrec.optim.RowWiseAdagrad`` is the spec with the same formula for fused tables.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshrec.optim.optimizers import OptimizerSpec
from meshrec.optim.optimizers import RowWiseAdagrad as RowWiseAdagradSpec

# R rows, D width


class RowWiseAdagrad(torch.optim.Optimizer):
    """``s += mean(g^2); w -= lr_t * g / (sqrt(s) + eps)``, with ``s`` per row, [R, 1].

    ``g`` includes ``weight_decay * w``; ``lr_t = lr / (1 + (t - 1) * lr_decay)`` in step ``t``. A sparse
    gradient updates and decays only its rows.

    Args:
        params: parameters [R, D], or param groups.
        lr: learning rate.
        lr_decay: learning rate decay, see above.
        weight_decay: factor for ``w`` in the gradient.
        initial_accumulator_value: initial ``s``.
        eps: keeps a row's first steps finite.
        maximize: maximize instead of minimizing.

    Raises:
        ValueError: a value is negative, or a parameter is not a matrix.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        for name, value in options.items():
            if not value >= 0:
                raise ValueError(f"RowWiseAdagrad: {name} must be a number >= 0, got {value!r}.")
        super().__init__(params, {**options, "maximize": maximize})

    @staticmethod
    def fused_spec(kwargs: Mapping[str, Any]) -> OptimizerSpec:
        """Return the fused-table spec for ``RowWiseAdagrad(params, **kwargs)``.

        Raises:
            ValueError: an argument is unknown, or cannot be fused (``lr_decay``, ``maximize``).
        """
        arguments: dict[str, Any] = {"lr": 1e-2, "eps": 1e-10, **kwargs}
        if arguments.pop("lr_decay", 0.0) or arguments.pop("maximize", False):
            raise ValueError(
                "RowWiseAdagrad: lr_decay and maximize cannot be fused. Leave them out; a torch scheduler on "
                "the fused optimizer changes its learning rate."
            )
        allowed = ["eps", "initial_accumulator_value", "lr", "weight_decay"]
        if unknown := sorted(set(arguments) - set(allowed)):
            raise ValueError(f"RowWiseAdagrad has no argument {unknown[0]!r}, allowed are {allowed}.")
        return RowWiseAdagradSpec(**arguments)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and create the parameters' state."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            if parameter.dim() != 2:
                raise ValueError(
                    f"RowWiseAdagrad keeps one number per row, so it needs matrices [rows, width], got a "
                    f"parameter {list(parameter.shape)}. Give that one to another optimizer."
                )
            state = self.state[parameter]
            # Created here instead of in the first step, so that a state dict can be loaded before training.
            state["step"] = torch.tensor(0.0)
            state["sum"] = torch.full_like(parameter[:, :1], group["initial_accumulator_value"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters with a gradient. Return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], group)
        return loss


def _update(weight_RD: Tensor, gradient: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Update a parameter in place; a sparse gradient changes only its rows."""
    state["step"] += 1
    lr = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
    if gradient.is_sparse:
        # Duplicate rows must be summed first: the indexed writes below would keep only one of them.
        gradient = gradient.coalesce()
        rows = gradient.indices()[0]
        weight, total = weight_RD[rows], state["sum"][rows]
        _update_rows(weight, gradient.values(), total, lr, group)
        weight_RD[rows], state["sum"][rows] = weight, total
    else:
        _update_rows(weight_RD, gradient, state["sum"], lr, group)


def _update_rows(
    weight_RD: Tensor, gradient_RD: Tensor, sum_R1: Tensor, lr: float, group: Mapping[str, Any]
) -> None:
    """Update rows and their accumulators in place, with a dense gradient."""
    if group["maximize"]:
        gradient_RD = -gradient_RD
    if group["weight_decay"]:
        gradient_RD = gradient_RD.add(weight_RD, alpha=group["weight_decay"])
    sum_R1 += gradient_RD.square().mean(1, keepdim=True)
    weight_RD.addcdiv_(gradient_RD, sum_R1.sqrt().add_(group["eps"]), value=-lr)
