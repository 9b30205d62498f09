"""Activations: one with parameters, and a ReLU that reuses its output buffers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import meshrec.ops.memory  # noqa: F401 - the op must exist

_LARGE = 1 << 18  # elements


class SwishLayerNorm(nn.Module):
    """Swish with a layer norm: ``x * sigmoid(layer_norm(x))``.

    Args:
        input_dims: the size, or sizes, of the last dimensions, over which to normalise.
        device: device of the parameters.
    """

    def __init__(self, input_dims: int | Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        sizes = [input_dims] if isinstance(input_dims, int) else list(input_dims)
        self.norm = nn.Sequential(nn.LayerNorm(sizes, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """Map ``[..., *input_dims]`` to the same shape."""
        return input * self.norm(input)  # type: ignore[no-any-return]


def relu(input: Tensor) -> Tensor:
    """Compute ``torch.relu``. Large results on the CPU use buffers that training steps reuse.

    See ``meshrec.ops.memory.keep_freed_memory``.
    """
    # TorchScript compiles this function: it skips what is not for it, and stumbles over comments on types.
    if not torch.jit.is_scripting():  # type: ignore
        if _has_own_relu(input):
            return _own_relu(input)
    return torch.relu(input)


def _has_own_relu(input: Tensor) -> bool:
    is_plain = type(input) is Tensor and input.is_cpu and input.numel() >= _LARGE
    return is_plain and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def _own_relu(input: Tensor) -> Tensor:
    return _Relu.apply(input)  # type: ignore[no-any-return, no-untyped-call]


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.meshrec.new_buffer.default(x, x.numel()).view(x.shape)
        torch.clamp_min(x, 0, out=out)
        ctx.save_for_backward(out)
        ctx.save_for_forward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward(grads[0], *ctx.saved_tensors, 0)  # type: ignore[no-any-return]

    jvp = backward  # it is its own transpose
