"""Gradient clipping for any keyed optimizer, with dense and sparse gradients."""

from collections.abc import Collection, Sequence
from enum import Enum, unique
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.optim.keyed import Closure, KeyedOptimizer, run_closure
from meshrec.optim.parts import shard_info_of


@unique
class GradientClipping(Enum):
    """Gradient clipping methods."""

    NORM = "norm"
    """Multiply all gradients by the same factor, so the total norm is at most the limit."""
    VALUE = "value"
    """Clamp every gradient element to [-limit, limit]."""
    NONE = "none"
    """Do not clip."""


class GradientClippingOptimizer(KeyedOptimizer):
    """Optimizer wrapper clipping all gradients before every step.

    NORM clips like ``torch.nn.utils.clip_grad_norm_``: all gradients are multiplied by ``min(1, max_gradient
    / (total_norm + 1e-6))``. Repeated rows in a sparse gradient are summed first, so it is clipped like the
    equivalent dense gradient. For a sharded model the norm covers the whole model: sharded parameters count
    with all ranks' shards and replicated parameters count once. ``step`` is then collective.

    Args:
        optimizer: Wrapped optimizer. Parameters, state and groups are shared with it.
        clipping: NORM, VALUE or NONE.
        max_gradient: Maximum total norm for NORM, maximum absolute value for VALUE.
        norm_type: p in the p-norm; ``inf`` and ``"inf"`` are allowed.

    Raises:
        ValueError: ``max_gradient`` or ``norm_type`` is not above 0, or ``optimizer`` updates parameters in
            the backward pass, when the total norm is not known yet.

    Example::

        >>> from meshrec.optim import KeyedOptimizerWrapper
        >>> layer = torch.nn.Linear(2, 1)
        >>> params = dict(layer.named_parameters())
        >>> sgd = KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, lr=0.1))
        >>> optimizer = GradientClippingOptimizer(sgd, GradientClipping.NORM, max_gradient=1.0)
        >>> layer(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> bool(optimizer.last_total_grad_norm > 1.0)
        True
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
        # NONE is allowed with fused tables, so that configurations with and without clipping share code.
        if clipping is not GradientClipping.NONE and optimizer.updates_in_backward:
            raise ValueError(
                "gradients of parameters that are updated in backward cannot be clipped: they are used up "
                'before all are known. Fuse with update="on_step", or wrap only the dense optimizer.'
            )
        self._optimizer = optimizer
        self._clipping = clipping
        self._max_gradient = max_gradient
        self._norm_type = float(norm_type)
        self._last_total_grad_norm: Tensor | None = None  # set by every step with NORM clipping
        super().__init__(optimizer.params, optimizer.state, optimizer.param_groups, [("", optimizer)])

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """Total gradient norm before clipping in the last step; None before any step with NORM clipping."""
        return self._last_total_grad_norm

    @property
    def updates_in_backward(self) -> bool:
        """Whether the wrapped optimizer updates parameters in the backward pass."""
        return self._optimizer.updates_in_backward

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Run the closure, clip all gradients, then step the wrapped optimizer."""
        loss = run_closure(closure)
        if self._clipping is not GradientClipping.NONE:
            parameters = [parameter for group in self.param_groups for parameter in group["params"]]
            if self._clipping is GradientClipping.VALUE:
                for parameter in parameters:
                    if parameter.grad is not None:
                        # Local elements only: value clipping needs no communication.
                        _elements(parameter).clamp_(-self._max_gradient, self._max_gradient)
            else:
                self._last_total_grad_norm = _clip_norm(parameters, self._max_gradient, self._norm_type)
        # Without the closure, which has already run: the gradients are clipped now.
        self._optimizer.step(None)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self._optimizer.add_param_group(param_group)

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Create state in the wrapped optimizer."""
        self._optimizer.create_state(names, sparse_names)


def _elements(parameter: Tensor) -> Tensor:
    """Return this rank's elements of a parameter's gradient, as a tensor sharing memory with the gradient.

    A sparse gradient is first replaced by a coalesced one.
    """
    gradient = parameter.grad
    assert gradient is not None
    # A DTensor. Not isinstance, because importing the class is slow.
    if hasattr(gradient, "to_local"):
        local: Tensor = gradient.to_local()
        return local
    if not gradient.is_sparse:
        return gradient.detach()
    # Repeated rows must be summed before they are clipped.
    parameter.grad = gradient = gradient.coalesce()
    return gradient._values()


def _clip_norm(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor | None:
    """Scale all gradients in place, so the total norm is at most ``max_norm``.

    Returns:
        Total norm before scaling, a scalar tensor; None if no parameter has a gradient and none belongs to a
            sharded model.
    """
    norms = _norms(parameters, norm_type)
    if not norms:
        return None
    device = norms[0].device
    # The p-norm of partial p-norms is the p-norm of all elements, for any division of the elements.
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    # Multiply by 1 instead of branching on the norm: a branch would make the host wait for the GPU.
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            elements = _elements(parameter)
            elements.mul_(scale.to(elements.device))
    return total


def _norms(parameters: Sequence[Tensor], norm_type: float) -> list[Tensor]:
    """Return a list of partial norms. The p-norm of this list is the total gradient norm.

    The list has the gradient norm of every parameter that is not marked as sharded (see `shard_info_of`). For
    every rank group that shards parameters, the list also has the joint gradient norm of these parameters.
    Collective if there is such a group.
    """
    norms: list[Tensor] = []
    groups: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        shard = shard_info_of(parameter)
        if shard is not None:
            # Before the check for a gradient: every rank must enter the group's all-reduce, or the others
            # hang.
            groups.setdefault(shard.group, [])
        if parameter.grad is None:
            continue
        # Replicated parameters are equal on all ranks, so they count once, without a reduction over ranks.
        norm = _norm(parameter, norm_type)
        (groups[shard.group] if shard is not None and shard.is_sharded else norms).append(norm)
    device = (norms[0] if norms else torch.zeros(())).device
    return norms + [
        _norm_over_ranks(group, local_norms, norm_type, device) for group, local_norms in groups.items()
    ]


def _norm(parameter: Tensor, norm_type: float) -> Tensor:
    """Return a parameter's gradient norm: over all shards for a DTensor, otherwise over local elements."""
    gradient = parameter.grad
    assert gradient is not None
    if hasattr(gradient, "full_tensor"):
        sharded: Any = torch.linalg.vector_norm(gradient, norm_type, dtype=_norm_dtype(gradient))
        full: Tensor = sharded.full_tensor()
        if norm_type == torch.inf:
            # The shards' maximum loses a NaN, as in `max_over_ranks`.
            has_nan: Any = gradient.isnan().any()
            full = full.masked_fill(has_nan.full_tensor(), torch.nan)
        return full
    elements = _elements(parameter)
    # A rank may hold an empty shard, and vector_norm rejects empty input for p = inf.
    if elements.numel() == 0:
        return elements.new_zeros((), dtype=_norm_dtype(elements))
    norm: Tensor = torch.linalg.vector_norm(elements, norm_type, dtype=_norm_dtype(elements))
    return norm


def _norm_over_ranks(
    group: "dist.ProcessGroup", local_norms: Sequence[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """Return the norm over the shards on all ranks in a group. Collective.

    Args:
        device: Device of the result if ``local_norms`` is empty.
    """
    local_norms = [norm.to(local_norms[0].device) for norm in local_norms] or [torch.zeros((), device=device)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(local_norms), norm_type)
    if norm_type == torch.inf:
        return max_over_ranks(norm, group)
    # Powers add up over ranks, norms do not.
    power = norm.pow_(norm_type)
    dist.all_reduce(power, group=group)
    return power.pow_(1.0 / norm_type)


def max_over_ranks(value: Tensor, group: "dist.ProcessGroup") -> Tensor:
    """Return the maximum of scalars over the ranks in a group, NaN if any of them is NaN. Collective.

    gloo's maximum loses the NaN of a later rank (findings/torch_gloo_maximum_forgets_nan.sh).

    Args:
        value: This rank's scalar.
        group: Ranks to reduce over.
    """
    pair = torch.stack([value, value.isnan().to(value.dtype)])
    dist.all_reduce(pair, dist.ReduceOp.MAX, group=group)
    return pair[0].masked_fill(pair[1] > 0, torch.nan)


def _norm_dtype(gradient: Tensor) -> torch.dtype:
    """Return the dtype in which to compute a norm: the gradient's dtype, but at least fp32."""
    # Sums of squares overflow fp16 at 65504.
    return torch.promote_types(gradient.dtype, torch.float32)
