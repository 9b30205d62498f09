"""Choice of the fused optimizer that updates a parameter in the backward pass, recorded on the parameter."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshrec.optim.optimizers import OptimizerSpec
from meshrec.optim.parts import shard_info_of

_logger = logging.getLogger("meshrec")

_checked: WeakSet[torch.optim.Optimizer] = WeakSet()  # optimizers whose first step passed the check
_accepts_fused = False  # set once per process by accept_fused_parameters
_hooks: list[Any] = []  # the step hook, registered once, by the first sharded parameter
_SPEC = "_meshrec_in_backward"  # attribute on a parameter: the OptimizerSpec
_SHARDED = "_meshrec_sharded"  # attribute on a parameter: True for a shard
# Attributes in which torch.distributed.optim._apply_optimizer_in_backward records optimizers.
_TORCH_OPTIMIZERS = "_in_backward_optimizers"
_TORCH_CLASSES, _TORCH_ARGUMENTS = "_optimizer_classes", "_optimizer_kwargs"


def apply_optimizer_in_backward(
    optimizer_class: type, params: Iterable[torch.nn.Parameter], optimizer_kwargs: Mapping[str, Any]
) -> None:
    """Choose the optimizer with which the backward pass will update some embedding tables.

    The choice is recorded on the parameters, and takes effect in ``meshrec.fuse`` or the sharder.

    Args:
        optimizer_class: ``torch.optim.SGD``, ``Adagrad``, ``Adam``, ``AdamW``, or a spec from
            ``meshrec.optim``.
        params: Embedding tables, before they are fused or sharded.
        optimizer_kwargs: Constructor arguments, such as ``{"lr": 0.02}``; see `from_torch`.

    Raises:
        ValueError: The optimizer has no fused equivalent, or a parameter already has an optimizer. No
            parameter is changed.

    Example::

        >>> table = torch.nn.Parameter(torch.zeros(10, 4))
        >>> apply_optimizer_in_backward(torch.optim.Adagrad, [table], {"lr": 0.02})
        >>> in_backward_spec(table).lr
        0.02
    """
    from meshrec.optim.torch_optimizers import from_torch

    if isinstance(params, Tensor):
        raise ValueError("params must be an iterable of parameters, got one parameter. Wrap it in a list.")
    spec = from_torch(optimizer_class, optimizer_kwargs)
    parameters = list(params)
    # Check all before marking any, so that an error leaves every parameter unchanged.
    for index, parameter in enumerate(parameters):
        description = f"parameter {index} of shape {list(parameter.shape)}"
        existing = _recorded_optimizers(parameter)
        # The same parameter may be listed twice, before any mark is set.
        if not existing and any(parameter is earlier for earlier in parameters[:index]):
            existing = [str(spec)]
        if existing:
            raise ValueError(
                f"{description} already has an optimizer in backward, {' and '.join(existing)}, and is given "
                f"{spec}. "
                "One parameter takes one; remove one of the choices."
            )
        if hasattr(parameter, _SHARDED):
            raise ValueError(
                f"{description} belongs to a sharded table, whose optimizer was fixed when it was sharded. "
                "Choose "
                "it before sharding, or in the sharder's fused_params."
            )
    for parameter in parameters:
        mark_in_backward(parameter, spec)


def mark_in_backward(parameter: Tensor, spec: OptimizerSpec) -> None:
    """Record on a parameter the optimizer that updates it in the backward pass; see ``in_backward_spec``."""
    setattr(parameter, _SPEC, spec)


def mark_sharded(parameter: Tensor) -> None:
    """Mark a parameter as part of a sharded table, so that its optimizer can no longer be changed.

    From the first call on, every torch optimizer in the process is checked in its first step: an error is
    raised if it was given tables updated by the backward pass.
    """
    setattr(parameter, _SHARDED, True)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_parameters))


def accept_fused_parameters() -> None:
    """Allow torch optimizers to be given fused tables, in the whole process. By default this is an error.

    TorchRec programs pass all parameters to the dense optimizer. That optimizer skips fused tables,
    because these have no gradient.
    """
    global _accepts_fused
    _accepts_fused = True


def _check_parameters(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Check that a torch optimizer was not given tables updated by the backward pass.

    Also warns if the optimizer has a table that is split over ranks and has no fused optimizer.

    Registered as a pre-hook on ``step`` of all torch optimizers. Checks only the first step of each
    optimizer. A check in the constructor would be too early: programs may build an optimizer only to save its
    state.
    """
    # Keyed optimizers know their fused tables and need no check.
    if optimizer in _checked or hasattr(optimizer, "updates_in_backward"):
        return
    name = type(optimizer).__name__
    tables = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if hasattr(parameter, _SHARDED)
    ]
    fused = [parameter for parameter in tables if hasattr(parameter, _SPEC)]
    if fused and not _accepts_fused:
        raise ValueError(
            f"{name} was given a parameter of shape {list(fused[0].shape)} of a sharded table, which "
            f"{getattr(fused[0], _SPEC)} updates in the backward pass: {name} would never change it. Give "
            "it the parameters that meshrec.optim.in_backward_optimizer_filter(model.named_parameters()) "
            "yields."
        )
    if any(shard_info_of(parameter) is not None for parameter in tables if not hasattr(parameter, _SPEC)):
        _logger.warning(
            "%s trains a table that is split over ranks: its state cannot be saved in a checkpoint. Give "
            "the table an optimizer that is fused into the backward pass: the sharder's, or "
            "apply_optimizer_in_backward.",
            name,
        )
    # Not reached after the error: the next step of the same optimizer raises it again.
    _checked.add(optimizer)


def in_backward_spec(parameter: Tensor) -> OptimizerSpec | None:
    """Return the optimizer that updates a parameter in the backward pass; None if none was chosen.

    It may have been chosen with ``apply_optimizer_in_backward``, ``fuse``, sharding, or torch's
    ``torch.distributed.optim._apply_optimizer_in_backward``.

    Raises:
        ValueError: Two recorded optimizers differ, or torch's has no fused equivalent.
    """
    spec: OptimizerSpec | None = getattr(parameter, _SPEC, None)
    classes = getattr(parameter, _TORCH_CLASSES, [])
    if not classes:
        return spec
    from meshrec.optim.torch_optimizers import from_torch

    # torch allows several optimizers per parameter; a table has one.
    if len(classes) == 1:
        arguments = getattr(parameter, _TORCH_ARGUMENTS)[0]
        if spec is None:
            return from_torch(classes[0], arguments)
        # The same choice recorded by both functions is not a conflict.
        with contextlib.suppress(ValueError):  # no fused equivalent: reported as a conflict below
            if spec == from_torch(classes[0], arguments):
                return spec
    recorded = _recorded_optimizers(parameter)
    raise ValueError(
        f"a parameter of shape {list(parameter.shape)} has {len(recorded)} optimizers in backward, "
        f"{' and '.join(recorded)}. One table takes one; remove the others."
    )


def _recorded_optimizers(parameter: Tensor) -> list[str]:
    """Return descriptions of all optimizers recorded for a parameter, for error messages."""
    spec = getattr(parameter, _SPEC, None)
    if hasattr(parameter, _TORCH_CLASSES):
        pairs = zip(getattr(parameter, _TORCH_CLASSES), getattr(parameter, _TORCH_ARGUMENTS), strict=True)
        torch_optimizers = [
            f"{optimizer_class.__name__}({dict(kwargs)})" for optimizer_class, kwargs in pairs
        ]
    else:
        torch_optimizers = [
            type(optimizer).__name__ for optimizer in getattr(parameter, _TORCH_OPTIMIZERS, [])
        ]
    return [*([] if spec is None else [str(spec)]), *(f"torch's {text}" for text in torch_optimizers)]


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters to give to a dense optimizer, that is, all not updated by the backward pass.

    Args:
        named_parameters: (name, parameter) pairs, as from ``module.named_parameters()``.
        include: True: yield the parameters updated by the backward pass instead.
    """
    # torch's own function records a list of optimizers instead of a spec.
    for name, parameter in named_parameters:
        if (hasattr(parameter, _SPEC) or hasattr(parameter, _TORCH_OPTIMIZERS)) == include:
            yield name, parameter
