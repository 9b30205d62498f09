"""Activation functions: SwishLayerNorm, and a ReLU which reuses output memory between training steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshrec.ops.memory  # noqa: F401 - the op must exist
from meshrec.ops import operators

_LARGE = 1 << 18  # elements (1 MiB of fp32); smaller results are cheap to allocate


class SwishLayerNorm(nn.Module):
    """Swish with a layer norm: ``x * sigmoid(layer_norm(x))``.

    Args:
        input_dims: Size or sizes of the last dimensions, over which to normalize.
        device: Parameter device.
    """

    def __init__(self, input_dims: int | Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        sizes = [input_dims] if isinstance(input_dims, int) else list(input_dims)
        # A Sequential as in TorchRec, so that parameter names are equal.
        self.norm = nn.Sequential(nn.LayerNorm(sizes, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., *input_dims]`` to the same shape."""
        return input * self.norm(input)  # type: ignore[no-any-return]


def relu(input: Tensor) -> Tensor:
    """Compute ``torch.relu``. Large results on a CPU use memory which is kept from earlier training steps.

    Fresh memory would cost page faults in every step. See ``meshrec.ops.memory.keep_freed_memory``.
    """
    # TorchScript compiles this function. It skips this branch, but parses comments after `type:`.
    if not torch.jit.is_scripting():  # type: ignore
        # Subclasses, traced and functorch tensors must go through the dispatcher.
        is_plain = type(input) is Tensor and input.is_cpu and input.numel() >= _LARGE
        if is_plain and not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
            return _buffered_relu(input)
    return torch.relu(input)


def _buffered_relu(input: Tensor) -> Tensor:
    """Compute ``torch.relu`` into memory kept from earlier training steps, with a gradient."""
    # A separate function, because TorchScript cannot parse the call of an autograd function.
    return _Relu.apply(input)  # type: ignore[no-any-return, no-untyped-call]


class _Relu(torch.autograd.Function):
    """ReLU whose output uses memory kept from earlier training steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # new_buffer returns memory kept from earlier steps, without page faults.
        out: Tensor = operators.new_buffer(x, x.numel()).view(x.shape)
        torch.clamp_min(x, 0, out=out)
        # The output tells where the gradient is 0, so that the input can be freed.
        ctx.save_for_backward(out)
        # For jvp, in forward-mode differentiation.
        ctx.save_for_forward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward(grads[0], *ctx.saved_tensors, 0)  # type: ignore[no-any-return]

    jvp = backward  # a diagonal Jacobian is its own transpose
