"""Choosing, parameter by parameter, the optimizer that the backward pass applies."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshrec.optim.from_torch import from_torch
from meshrec.optim.optimizers import OptimizerSpec

_SPEC = "_meshrec_in_backward"
# Where torch.distributed.optim._apply_optimizer_in_backward records its optimizers.
_TORCH_OPTIMIZERS = "_in_backward_optimizers"
_TORCH_CLASSES, _TORCH_ARGUMENTS = "_optimizer_classes", "_optimizer_kwargs"


def apply_optimizer_in_backward(
    optimizer_class: type, params: Iterable[torch.nn.Parameter], optimizer_kwargs: Mapping[str, Any]
) -> None:
    """Records on parameters which optimizer is to update them in the backward pass; ``fuse`` reads it.

    Args: optimizer_class: ``torch.optim.SGD``, ``Adagrad``, ``Adam``, ``AdamW``, or a spec of
        ``meshrec.optim``. params: embedding tables, before they are fused or sharded. optimizer_kwargs: the
        arguments of the class, such as ``{"lr": 0.02}``; see ``from_torch``.

    Raises: ValueError: for an optimizer without a fused form, and for a parameter that has an optimizer
        already; no
            parameter is changed then.
    """
    if isinstance(params, Tensor):
        raise ValueError("params must be an iterable of parameters, got one parameter. Wrap it in a list.")
    spec = from_torch(optimizer_class, optimizer_kwargs)
    chosen = list(params)
    for index, parameter in enumerate(chosen):
        present = in_backward_spec(parameter)
        if present is None and any(parameter is other for other in chosen[:index]):
            present = spec
        if present is not None or hasattr(parameter, _TORCH_OPTIMIZERS):
            raise ValueError(
                f"parameter {index} of shape {list(parameter.shape)} already has an optimizer in backward"
                f"{'' if present is None else f', {present}'}. One parameter takes one; remove this choice."
            )
    for parameter in chosen:
        mark_in_backward(parameter, spec)


def mark_in_backward(parameter: Tensor, spec: OptimizerSpec) -> None:
    """Records a parameter's optimizer, so that ``in_backward_optimizer_filter`` knows it."""
    setattr(parameter, _SPEC, spec)


def in_backward_spec(parameter: Tensor) -> OptimizerSpec | None:
    """What ``apply_optimizer_in_backward`` recorded on a parameter, or torch's function of that purpose
    (``torch.distributed.optim._apply_optimizer_in_backward``).

    Raises:
        ValueError: for an optimizer of torch's record without a fused form, and for several.
    """
    spec: OptimizerSpec | None = getattr(parameter, _SPEC, None)
    classes = getattr(parameter, _TORCH_CLASSES, [])
    if spec is not None or not classes:
        return spec
    if len(classes) > 1:
        names = [optimizer_class.__name__ for optimizer_class in classes]
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} has {len(names)} optimizers in backward, {names}. "
            "One table takes one; remove the others."
        )
    return from_torch(classes[0], getattr(parameter, _TORCH_ARGUMENTS)[0])


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters without an optimizer in backward, for a dense one; ``include=True``: those with.

    Those that ``torch.distributed.optim._apply_optimizer_in_backward`` marked count as well.
    """
    for name, parameter in named_parameters:
        if (hasattr(parameter, _SPEC) or hasattr(parameter, _TORCH_OPTIMIZERS)) == include:
            yield name, parameter
