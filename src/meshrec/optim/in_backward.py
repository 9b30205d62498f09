"""Choice of the optimizer that the backward pass applies, parameter by parameter."""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshrec.optim.from_torch import from_torch
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.optim.parts import part_of

_logger = logging.getLogger("meshrec")

_checked: WeakSet[torch.optim.Optimizer] = WeakSet()
_accepts_fused = False
_hooks: list[Any] = []
_SPEC = "_meshrec_in_backward"
_SHARDED = "_meshrec_sharded"
# Where torch.distributed.optim._apply_optimizer_in_backward records its optimizers.
_TORCH_OPTIMIZERS = "_in_backward_optimizers"
_TORCH_CLASSES, _TORCH_ARGUMENTS = "_optimizer_classes", "_optimizer_kwargs"


def apply_optimizer_in_backward(
    optimizer_class: type, params: Iterable[torch.nn.Parameter], optimizer_kwargs: Mapping[str, Any]
) -> None:
    """Record on parameters which optimizer updates them in the backward pass; `fuse` reads the record.

    Args:
        optimizer_class: ``torch.optim.SGD``, ``Adagrad``, ``Adam``, ``AdamW``, or a spec of
            ``meshrec.optim``.
        params: embedding tables, before they are fused or sharded.
        optimizer_kwargs: arguments of the class, such as ``{"lr": 0.02}``; see `from_torch`.

    Raises:
        ValueError: the optimizer has no fused form, or a parameter already has an optimizer. No parameter is
            changed then.
    """
    if isinstance(params, Tensor):
        raise ValueError("params must be an iterable of parameters, got one parameter. Wrap it in a list.")
    spec = from_torch(optimizer_class, optimizer_kwargs)
    chosen = list(params)
    for index, parameter in enumerate(chosen):
        what = f"parameter {index} of shape {list(parameter.shape)}"
        present = _choices(parameter)
        if not present and any(parameter is other for other in chosen[:index]):
            present = [str(spec)]
        if present:
            raise ValueError(
                f"{what} already has an optimizer in backward, {' and '.join(present)}, and is given {spec}. "
                "One parameter takes one; remove one of the choices."
            )
        if hasattr(parameter, _SHARDED):
            raise ValueError(
                f"{what} belongs to a sharded table, whose optimizer was chosen when it was sharded. Choose "
                "it before sharding, or in the sharder's fused_params."
            )
    for parameter in chosen:
        mark_in_backward(parameter, spec)


def mark_in_backward(parameter: Tensor, spec: OptimizerSpec) -> None:
    """Record a parameter's optimizer, so that ``in_backward_optimizer_filter`` knows it."""
    setattr(parameter, _SPEC, spec)


def mark_sharded(parameter: Tensor) -> None:
    """Record that a parameter is a rank's part of a sharded table, whose optimizer can no longer be
    chosen.
    """
    setattr(parameter, _SHARDED, True)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_parameters))


def accept_fused_parameters() -> None:
    """Let torch's optimizers hold sharded tables that the backward pass updates, from now on. They then do
    nothing to these, as TorchRec's programs expect.
    """
    global _accepts_fused
    _accepts_fused = True


def _check_parameters(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Look at an optimizer's sharded tables at its first step, and not when its state is saved.

    Raises:
        ValueError: The backward pass updates one of them: the optimizer would never change it.
    """
    if optimizer in _checked or hasattr(optimizer, "updates_in_backward"):
        return
    name = type(optimizer).__name__
    tables = [each for group in optimizer.param_groups for each in group["params"] if hasattr(each, _SHARDED)]
    fused = [each for each in tables if hasattr(each, _SPEC)]
    if fused and not _accepts_fused:
        raise ValueError(
            f"{name} was given a parameter of shape {list(fused[0].shape)} of a sharded table, which "
            f"{getattr(fused[0], _SPEC)} updates in the backward pass: {name} would never change it. Give "
            "it the parameters that meshrec.optim.in_backward_optimizer_filter(model.named_parameters()) "
            "yields."
        )
    if any(part_of(each) is not None for each in tables if not hasattr(each, _SPEC)):
        _logger.warning(
            "%s trains a table that is split over ranks: its state cannot be saved in a checkpoint. Give "
            "the table an optimizer that is fused into the backward pass: the sharder's, or "
            "apply_optimizer_in_backward.",
            name,
        )
    _checked.add(optimizer)


def in_backward_spec(parameter: Tensor) -> OptimizerSpec | None:
    """Return the optimizer that was chosen for a parameter.

    It was chosen by ``apply_optimizer_in_backward``, ``fuse``, sharding, or torch's own function
    ``torch.distributed.optim._apply_optimizer_in_backward``.

    Raises:
        ValueError: two choices differ, or torch's record has an optimizer without a fused form.
    """
    spec: OptimizerSpec | None = getattr(parameter, _SPEC, None)
    classes = getattr(parameter, _TORCH_CLASSES, [])
    if not classes:
        return spec
    if len(classes) == 1:
        arguments = getattr(parameter, _TORCH_ARGUMENTS)[0]
        if spec is None:
            return from_torch(classes[0], arguments)
        with contextlib.suppress(ValueError):  # without a fused form it is another choice
            if spec == from_torch(classes[0], arguments):
                return spec
    choices = _choices(parameter)
    raise ValueError(
        f"a parameter of shape {list(parameter.shape)} has {len(choices)} optimizers in backward, "
        f"{' and '.join(choices)}. One table takes one; remove the others."
    )


def _choices(parameter: Tensor) -> list[str]:
    """Return the names of all optimizers that were chosen for a parameter."""
    spec = getattr(parameter, _SPEC, None)
    if hasattr(parameter, _TORCH_CLASSES):
        pairs = zip(getattr(parameter, _TORCH_CLASSES), getattr(parameter, _TORCH_ARGUMENTS), strict=True)
        recorded = [f"{optimizer_class.__name__}({dict(kwargs)})" for optimizer_class, kwargs in pairs]
    else:
        recorded = [type(optimizer).__name__ for optimizer in getattr(parameter, _TORCH_OPTIMIZERS, [])]
    return [*([] if spec is None else [str(spec)]), *(f"torch's {words}" for words in recorded)]


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Return the parameters without an optimizer in backward; ``include=True``: those with one.

    Parameters marked by ``torch.distributed.optim._apply_optimizer_in_backward`` count as well.
    """
    for name, parameter in named_parameters:
        if (hasattr(parameter, _SPEC) or hasattr(parameter, _TORCH_OPTIMIZERS)) == include:
            yield name, parameter
