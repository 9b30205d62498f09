"""Gradient clipping for any keyed optimizer, with dense and sparse gradients."""

from collections.abc import Collection, Sequence
from enum import Enum, unique
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.optim.keyed import Closure, KeyedOptimizer, evaluated
from meshrec.optim.parts import part_of


@unique
class GradientClipping(Enum):
    """The methods of gradient clipping."""

    NORM = "norm"
    """Scale all gradients together so that their total norm is at most the limit."""
    VALUE = "value"
    """Clamp every element to [-limit, limit]."""
    NONE = "none"


class GradientClippingOptimizer(KeyedOptimizer):
    """Optimizer wrapper that clips the gradients of all parameters before each step.

    The norm is that of ``torch.nn.utils.clip_grad_norm_``: gradients are multiplied by ``min(1, max_gradient
    / (total_norm + 1e-6))``. The duplicate rows of a sparse gradient are summed, so it is clipped like its
    dense form. In a sharded model the norm is that of the whole model: shards of all ranks count together,
    replicated parameters count once, and ``step`` is collective.

    Args:
        optimizer: the optimizer to wrap, which shares its parameters, state and groups.
        clipping: NORM, VALUE or NONE.
        max_gradient: the limit.
        norm_type: the p of the p-norm; ``inf`` and ``"inf"`` are allowed.

    Raises:
        ValueError: the limit or the norm is not above 0, or ``optimizer`` updates parameters during backward,
            where all gradients are never known at the same time.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
    ) -> None:
        if not max_gradient > 0 or not float(norm_type) > 0:
            raise ValueError(
                f"max_gradient and norm_type must be above 0, got {max_gradient} and {norm_type!r}."
            )
        if clipping is not GradientClipping.NONE and optimizer.updates_in_backward:
            raise ValueError(
                "gradients of parameters that are updated in backward cannot be clipped: they are used up "
                'before all are known. Fuse with update="on_step", or wrap only the dense optimizer.'
            )
        self._optimizer = optimizer
        self._clipping = clipping
        self._max_gradient = max_gradient
        self._norm_type = float(norm_type)
        self._last_total_grad_norm: Tensor | None = None
        super().__init__(optimizer.params, optimizer.state, optimizer.param_groups, [("", optimizer)])

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """Total norm before clipping in the last step; None before the first step, and without NORM
        clipping.
        """
        return self._last_total_grad_norm

    @property
    def updates_in_backward(self) -> bool:
        """Whether the wrapped optimizer updates parameters during backward."""
        return self._optimizer.updates_in_backward

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Run the closure, clip, and step the wrapped optimizer."""
        loss = evaluated(closure)
        if self._clipping is not GradientClipping.NONE:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            if self._clipping is GradientClipping.VALUE:
                for parameter in parameters:
                    if parameter.grad is not None:
                        _elements(parameter).clamp_(-self._max_gradient, self._max_gradient)
            else:
                self._last_total_grad_norm = _clip_norm(parameters, self._max_gradient, self._norm_type)
        self._optimizer.step(None)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self._optimizer.add_param_group(param_group)

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Create state in the wrapped optimizer."""
        self._optimizer.create_state(names, sparse_names)


def _elements(parameter: Tensor) -> Tensor:
    """Return the elements of a gradient that are here, to be changed in place. A sparse gradient is coalesced
    first.
    """
    gradient = parameter.grad
    assert gradient is not None
    if hasattr(gradient, "to_local"):  # a DTensor: imports of its class cost much
        local: Tensor = gradient.to_local()
        return local
    if not gradient.is_sparse:
        return gradient.detach()
    parameter.grad = gradient = gradient.coalesce()
    return gradient._values()


def _clip_norm(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
    norms = _norms(parameters, norm_type)
    if not norms:
        return None
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            elements = _elements(parameter)
            elements.mul_(scale.to(elements.device))
    return total


def _norms(parameters: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return norms of disjoint parts of the whole gradient. Collective if parameters are parts of split
    ones.
    """
    norms: list[Tensor] = []
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        part = part_of(parameter)
        if part is not None:
            groups.setdefault(part.group, [])
        if parameter.grad is None:
            continue
        norm = _norm(parameter, norm_type)
        (groups[part.group] if part is not None and part.counts else norms).append(norm)
    device = next((each for each in norms), torch.zeros(())).device
    return norms + [_norm_over(group, own, norm_type, device) for group, own in groups.items()]


def _norm(parameter: Tensor, norm_type: float) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    if hasattr(gradient, "full_tensor"):
        split: Any = torch.linalg.vector_norm(gradient, norm_type, dtype=_wide(gradient))
        whole: Tensor = split.full_tensor()
        return whole
    elements = _elements(parameter)
    if elements.numel() == 0:
        return elements.new_zeros((), dtype=_wide(elements))
    norm: Tensor = torch.linalg.vector_norm(elements, norm_type, dtype=_wide(elements))
    return norm


def _norm_over(
    group: "dist.ProcessGroup", own: Sequence[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """Return the norm over all ranks of a group."""
    own = [norm.to(own[0].device) for norm in own] or [torch.zeros((), device=device)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(own), norm_type)
    if norm_type == torch.inf:
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=group)
        return norm
    power = norm.pow_(norm_type)
    dist.all_reduce(power, group=group)
    return power.pow_(1.0 / norm_type)


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)
