"""Search for row scales and biases with a lower squared error than minimum and maximum give.

Outliers stretch all quantization steps. The search therefore starts from ranges shrunk by several factors,
and alternates two steps, both reducing the squared error: assign values to the nearest codes, then fit
scale and bias to the codes (linear regression from codes to values). This is Lloyd's algorithm for a uniform
quantizer.
"""

import torch
from torch import Tensor

from meshrec.ops.nbit.naive import split_rows

# Shape legend: D width.

_SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6)  # factors by which the initial range is shrunk
# Alternations per starting range; more gain little.
_TURNS = 4


def search_params(original: Tensor, rows: Tensor, bits: int) -> Tensor:
    """Return the best scale and bias found per row, fp16 [n, 2]; never worse than in ``rows``.

    Args:
        original: rows [n, D].
        rows: rows quantized by minimum and maximum.
        bits: bits per code.
    """
    values32, top = original.float(), (1 << bits) - 1
    # Starts from the minimum and maximum, so the result is never worse.
    best = split_rows(rows, bits, original.shape[1])[1].clone()
    least_error = _error(values32, best, top)
    scale, bias = best.float().unbind(1)
    middle = bias + scale * top / 2
    for shrink in _SHRINKS:
        params = _to_half(scale * shrink, middle - scale * shrink * top / 2)
        for _ in range(_TURNS):
            error = _error(values32, params, top)
            better = error < least_error
            best[better], least_error = params[better], torch.minimum(error, least_error)
            # The last fit's error is checked after the loop.
            params = _fit_params(values32, params, top)
        error = _error(values32, params, top)
        better = error < least_error
        best[better], least_error = params[better], torch.minimum(error, least_error)
    return best


def _to_half(scale: Tensor, bias: Tensor) -> Tensor:
    """Return scale and bias in fp16, [n, 2]."""
    scale = scale.half()
    # Rounded to fp16 before the error is measured, because the rows store fp16. A zero scale would divide by
    # zero.
    return torch.stack([torch.where(scale == 0, torch.ones_like(scale), scale), bias.half()], 1)


def _codes(values: Tensor, params: Tensor, top: int) -> Tensor:
    """Return the nearest code per value, 0 to ``top``, as floats."""
    scale, bias = params.float().unbind(1)
    return ((values - bias[:, None]) * (1 / scale)[:, None]).clamp_(0, top).round_()


def _error(values: Tensor, params: Tensor, top: int) -> Tensor:
    """Return the squared error per row; infinite if scale or bias is NaN."""
    scale, bias = params.float().unbind(1)
    error = (_codes(values, params, top) * scale[:, None] + bias[:, None] - values).square_().sum(1)
    return error.nan_to_num_(nan=torch.inf)


def _fit_params(values: Tensor, params: Tensor, top: int) -> Tensor:
    """Fit scale and bias to the present codes by least squares.

    Rows whose codes are all equal keep ``params``.
    """
    codes = _codes(values, params, top)
    code_mean, value_mean = codes.mean(1, keepdim=True), values.mean(1, keepdim=True)
    spread = (codes - code_mean).square().sum(1)
    scale = ((codes - code_mean) * (values - value_mean)).sum(1) / spread
    bias = value_mean[:, 0] - scale * code_mean[:, 0]
    fitted = _to_half(scale, bias)
    usable = (spread > 0) & fitted.isfinite().all(1)
    return torch.where(usable[:, None], fitted, params)
