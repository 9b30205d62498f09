"""Refusal to train quantized rows."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

import meshrec.ops.nbit.naive  # noqa: F401 - the ops must exist before gradients are registered for them

# Typed here, because torch's own is not.
_register_autograd: Callable[..., None] = torch.library.register_autograd


def _refuse(ctx: Any, grad: Tensor) -> NoReturn:
    raise ValueError(
        "quantised tables are for inference: a lookup in them has no gradient. Train the model as it was "
        "before meshrec.quant.quantize, or call this one under torch.no_grad()."
    )


_register_autograd("meshrec::nbit_forward", _refuse)
