"""A linear layer that uses the faster of torch's two matrix libraries."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """``nn.Linear``, more than twice as fast for fp32 on some CPUs.

    torch multiplies fp32 matrices with MKL, which uses AVX-512 on Intel's processors only. On other
    processors with AVX-512 this layer uses oneDNN, which is part of torch, forward and backward. Everywhere
    else, while torch compiles or exports, and under autocast, it is ``nn.Linear``. Parameters and results are
    the same, up to the order of sums.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        # TorchScript compiles this method: it skips what is not for it, and stumbles over comments on types.
        if not torch.jit.is_scripting():  # type: ignore
            if not torch.compiler.is_compiling() and _onednn_is_faster() and self._fits(input):
                return _product(input, self.weight, self.bias)
        return nn.functional.linear(input, self.weight, self.bias)

    def _fits(self, input: Tensor) -> bool:
        return (
            type(input) is Tensor  # first: of a proxy nothing can be asked
            and input.is_cpu
            and input.dtype == self.weight.dtype == torch.float32
            and input.dim() == 2
            and input.numel() > 0
            and type(self.weight) is nn.Parameter
            and not torch.is_autocast_enabled("cpu")
        )


@functools.cache
def _onednn_is_faster() -> bool:
    mkldnn = torch.backends.mkldnn
    if not (torch.backends.mkl.is_available() and mkldnn.is_available() and mkldnn.enabled):
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        cpus = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "GenuineIntel" not in cpus


def _product(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return _Product.apply(x, w, b)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    """The product of x [B, I] and the transpose of w [O, I], plus b [O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad
        return (
            _Product.apply(grad, w.t(), None) if needs_x else None,  # type: ignore[no-untyped-call]
            _Product.apply(grad.t(), x.t(), None) if needs_w else None,  # type: ignore[no-untyped-call]
            grad.sum(0) if needs_b else None,
        )
