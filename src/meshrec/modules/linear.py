"""Linear layers with the fastest CPU kernels: MKL or oneDNN for fp32, oneDNN with fused ReLU for bf16."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.modules.precision import bf16_copy, bf16_weight, computes_in_bf16, is_autocast

# Shape legend: B batch, I input columns, O output columns.


class Linear(nn.Linear):
    """Replacement for ``nn.Linear`` which is more than twice as fast on some CPUs.

    torch multiplies fp32 matrices with MKL, which uses AVX-512 on Intel processors only. On other processors
    with AVX-512, this layer uses oneDNN, which is part of torch, in the forward and the backward pass. Under
    bf16 autocast on a CPU, it computes `linear`, see [Note: bf16 dense part] in ``precision.py``. In all
    other cases, and under compile or export, it computes what ``nn.Linear`` does. Parameters are the same as
    in ``nn.Linear``, and results are equal up to summation order.
    """

    def forward(self, input: Tensor, relu: bool = False) -> Tensor:
        """Map [..., in_features] to [..., out_features], followed by a ReLU if ``relu``."""
        # TorchScript compiles this method. It skips this branch, but parses comments after `type:`.
        if not torch.jit.is_scripting():  # type: ignore
            if torch.is_autocast_enabled("cpu") and computes_in_bf16(input):
                return linear(input, self.weight, self.bias, relu=relu)
            if not torch.compiler.is_compiling() and _prefer_onednn() and self._takes_onednn(input):
                out = _OneDNNLinear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
                return torch.relu(out) if relu else out
        out = nn.functional.linear(input, self.weight, self.bias)
        return torch.relu(out) if relu else out

    def _takes_onednn(self, input: Tensor) -> bool:
        """Return whether the oneDNN operator supports the input: a plain fp32 matrix on the CPU."""
        return (
            type(input) is Tensor  # first: proxies fail on the other attributes
            and input.is_cpu
            and input.dtype == self.weight.dtype == torch.float32
            and input.dim() == 2
            and input.numel() > 0
            and type(self.weight) is nn.Parameter
            and not torch.is_autocast_enabled("cpu")
        )


class LogitLinear(Linear):
    """Last layer of a model: a `Linear` that computes in fp32, also under autocast."""

    def forward(self, input: Tensor, relu: bool = False) -> Tensor:
        """Map [..., in_features] to fp32 [..., out_features], followed by a ReLU if ``relu``."""
        # Scripted and exported programs have no autocast.
        if not torch.jit.is_scripting():  # type: ignore
            if is_autocast(input):
                with torch.autocast(input.device.type, enabled=False):
                    return Linear.forward(self, input.float(), relu)
            return Linear.forward(self, input, relu)
        out = nn.functional.linear(input, self.weight, self.bias)  # TorchScript has no base class to call
        return torch.relu(out) if relu else out


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """Compute ``nn.functional.linear``, in bf16 if ``computes_in_bf16(input)``.

    Args:
        input: [..., I].
        weight: [O, I].
        bias: [O] or None.
        relu: Whether to apply a ReLU, which the bf16 kernel fuses into the product.

    Returns:
        [..., O], in bf16 if ``computes_in_bf16(input)``.
    """
    if not torch.jit.is_scripting():  # type: ignore
        in_bf16 = computes_in_bf16(input) and weight.dtype == torch.float32 and input.numel() > 0
        if in_bf16 and _has_bf16_linear():
            return _bf16_linear(input, weight, bias, relu)
    out = nn.functional.linear(input, weight, bias)
    return torch.relu(out) if relu else out


def _bf16_linear(input: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """Compute the layer in bf16, for an input [..., I] with any number of dimensions; see `linear`."""
    # The operator takes matrices only.
    rows = input.to(torch.bfloat16).reshape(-1, input.shape[-1])
    out: Tensor = _BF16Linear.apply(rows, weight, bias, relu)  # type: ignore[no-untyped-call]
    return out.view(*input.shape[:-1], -1)


@functools.cache
def _has_bf16_linear() -> bool:
    """Return whether this torch build and processor have oneDNN's bf16 linear operator."""
    # Private operators: they may be missing in other torch versions or builds.
    mkldnn = torch.ops.mkldnn
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return False
    if not (hasattr(mkldnn, "_linear_pointwise") and hasattr(mkldnn, "_is_mkldnn_bf16_supported")):
        return False
    return bool(mkldnn._is_mkldnn_bf16_supported())


class _BF16Linear(torch.autograd.Function):
    """Linear layer computed in bf16, with fp32 weights and fp32 weight gradients.

    Inputs are x (bf16 [B, I]), w (fp32 [O, I]), and b (fp32 [O] or None).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, relu: bool) -> Tensor:
        """Compute the product of bf16 copies with oneDNN.

        Args:
            ctx: Autograd context.
            x: [B, I].
            w: [O, I].
            b: [O] or None.
            relu: Apply a ReLU.
        """
        # Kept for the backward pass, so that the weight is not cast again.
        ctx.copy = bf16_copy(w)
        bias, name = None if b is None else bf16_copy(b), "relu" if relu else "none"
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, ctx.copy, bias, name, [], "")
        ctx.save_for_backward(x, w, *([out] if relu else []))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, w, *outs = ctx.saved_tensors
        needs_x, needs_w, needs_b, _ = ctx.needs_input_grad
        # The gradient of the fused ReLU: 0 where the output is 0.
        if outs:
            grad = torch.ops.aten.threshold_backward(grad, outs[0], 0)
        # The copy has no graph, which second derivatives need.
        copy = bf16_weight(w) if torch.is_grad_enabled() else ctx.copy
        return (
            grad @ copy if needs_x else None,
            (grad.t() @ x).float() if needs_w else None,
            grad.sum(0).float() if needs_b else None,
            None,
        )


@functools.cache
def _prefer_onednn() -> bool:
    """Return whether oneDNN multiplies fp32 matrices faster than MKL on this processor."""
    mkldnn = torch.backends.mkldnn
    if not (torch.backends.mkl.is_available() and mkldnn.is_available() and mkldnn.enabled):
        return False
    # A private operator: it may be missing in other torch versions or builds.
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        # Only Linux has this file; elsewhere, MKL stays.
        cpus = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    # MKL falls back to AVX2 on processors that are not Intel's.
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and "GenuineIntel" not in cpus


class _OneDNNLinear(torch.autograd.Function):
    """Linear layer in fp32 with oneDNN: x [B, I] @ w [O, I]^T + b [O]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Compute the product with oneDNN.

        Args:
            ctx: Autograd context.
            x: [B, I].
            w: [O, I].
            b: [O] or None.
        """
        ctx.save_for_backward(x, w)
        return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad
        if torch.is_grad_enabled():
            # A graph of the gradients was asked for, and oneDNN's operator has no derivative.
            grad_x, grad_w = grad @ w if needs_x else None, grad.t() @ x if needs_w else None
        else:
            # The operator multiplies by the transpose of its second argument: hence the transposed arguments.
            multiply = torch.ops.mkldnn._linear_pointwise
            grad_x = multiply(grad, w.t(), None, "none", [], "") if needs_x else None
            grad_w = multiply(grad.t(), x.t(), None, "none", [], "") if needs_w else None
        return grad_x, grad_w, grad.sum(0) if needs_b else None
