"""Compute a model's dense part in bf16 on CPUs, with fp32 master weights and a bf16 copy of every weight.

[Note: bf16 dense part]
Parameters stay fp32. Optimizers, gradient averaging and checkpoints see only these master weights, so updates
smaller than bf16 resolution accumulate, and a checkpoint resumes in either precision. ``torch.autocast``
turns bf16 on. Under it, our dense layers on a CPU multiply bf16 copies of their weights, keep activations in
bf16, and fuse bias and ReLU into the product. oneDNN accumulates in fp32. All other operators, and GPUs,
follow autocast's rules. Logits are computed in fp32, because bf16 logits have many ties.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Copy(NamedTuple):
    """A bf16 copy of a weight. It is valid as long as the weight has the same version."""

    weight: Tensor
    version: int
    """Version counter of ``weight`` when it was copied."""
    values: Tensor


# A dict inside `cast_weights_once`, else None. Keyed by id: tensors compare by value.
_copies: ContextVar[dict[int, _Copy] | None] = ContextVar("bf16_weights", default=None)


@contextmanager
def cast_weights_once() -> Iterator[None]:
    """Context in which each weight is cast to bf16 only once, unless it changes.

    The trainer runs every training step in this context, so all batches in the step share the copies. Outside
    the context, every use of a weight casts it again.
    """
    # A context variable, so that other threads have separate copies.
    token = _copies.set({})
    try:
        yield
    finally:
        _copies.reset(token)


def computes_in_bf16(input: Tensor) -> bool:
    """Return whether MeshRec's dense layers cast ``input`` and their weights to bf16 themselves.

    True on a CPU under bf16 autocast, except in traced or compiled code. On GPUs, the layers leave the casts
    to autocast, so the result is False.
    """
    # Traced, compiled, vmapped and wrapped tensors follow autocast's own rules.
    return (
        type(input) is Tensor  # first: proxies fail on the other attributes
        and input.is_cpu
        and input.dtype in (torch.float32, torch.bfloat16)
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def is_autocast(input: Tensor) -> bool:
    """Return whether autocast is enabled for operators on ``input``; False for traced and meta tensors."""
    device = input.device.type if type(input) is Tensor else ""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def as_activations(input: Tensor) -> Tensor:
    """Return ``input`` as bf16 if dense layers compute in bf16 for this input, else unchanged."""
    return input.to(torch.bfloat16) if computes_in_bf16(input) else input


def bf16_copy(weight: Tensor) -> Tensor:
    """Return a detached bf16 copy of an fp32 parameter.

    Inside `cast_weights_once`, the copy is reused until the parameter changes. Inference tensors are copied
    in every call.
    """
    copies = _copies.get()
    if copies is None or weight.is_inference():  # inference tensors have no version counter
        return weight.detach().to(torch.bfloat16)
    copy = copies.get(id(weight))
    # An optimizer in the backward pass changes weights between the batches of a step.
    if copy is None or copy.weight is not weight or copy.version != weight._version:
        copy = _Copy(weight, weight._version, weight.detach().to(torch.bfloat16))
        # The entry holds the weight, so no other tensor gets its id in the meantime.
        copies[id(weight)] = copy
    return copy.values


def bf16_weight(weight: Tensor) -> Tensor:
    """Return a differentiable bf16 copy of an fp32 parameter. Its gradients are fp32."""
    return _Cast.apply(weight)  # type: ignore[no-any-return, no-untyped-call]


class _Cast(torch.autograd.Function):
    """Cast of an fp32 weight to bf16, with an fp32 gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        # Every use gets its own tensor, because autograd attaches a graph node to it.
        return bf16_copy(weight).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].float()
