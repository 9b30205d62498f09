"""Search for the scale and bias of quantized rows, with a lower squared error than minimum and maximum give.

A quantized value is ``code * scale + bias``, with a scale and a bias per row and an integer code per value.
If they follow from minimum and maximum, a single outlier makes the quantization steps of the whole row
larger. The search therefore starts from ranges that are smaller by several factors. From every start it
alternates two steps, which both reduce the squared error: assign values to the nearest codes, then fit scale
and bias to the codes by linear regression. This is Lloyd's algorithm for a uniform quantizer.
"""

import torch
from torch import Tensor

from meshrec.ops.nbit.naive import split_rows

# Shape legend: D width.

_SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6)  # starting ranges, relative to the range from minimum to maximum
_ITERATIONS = 4  # alternations per starting range; more gain little


def search_params(original: Tensor, rows: Tensor, bits: int) -> Tensor:
    """Search for a scale and a bias per row with a low squared error.

    Args:
        original: row values before quantization, [n, D].
        rows: the same rows, quantized with the scale and bias that follow from minimum and maximum.
        bits: bits per code.

    Returns:
        Scale and bias per row, fp16 [n, 2]. No row has a larger squared error than with the scale and bias in
            ``rows``.
    """
    values32, top = original.float(), (1 << bits) - 1
    # The best parameters so far are at first those in ``rows``, so the result is never worse.
    best = split_rows(rows, bits, original.shape[1])[1].clone()
    least_error = _squared_errors(values32, best, top)
    scale, bias = best.float().unbind(1)
    # Ranges shrink around their middle, which cuts outliers at both ends.
    middle = bias + scale * top / 2
    for shrink in _SHRINKS:
        params = _to_half(scale * shrink, middle - scale * shrink * top / 2)
        for _ in range(_ITERATIONS):
            error = _squared_errors(values32, params, top)
            better = error < least_error
            best[better], least_error = params[better], torch.minimum(error, least_error)
            params = _fit_params(values32, params, top)
        # The loop has not checked the error of the last fit.
        error = _squared_errors(values32, params, top)
        better = error < least_error
        best[better], least_error = params[better], torch.minimum(error, least_error)
    return best


def _to_half(scale: Tensor, bias: Tensor) -> Tensor:
    """Return scale and bias in fp16, [n, 2]. A scale of 0 becomes 1."""
    scale = scale.half()
    # Round before the error is measured, because rows store fp16. Replace a scale of 0, by which ``_codes``
    # would divide.
    return torch.stack([torch.where(scale == 0, torch.ones_like(scale), scale), bias.half()], 1)


def _codes(values: Tensor, params: Tensor, top: int) -> Tensor:
    """Return the nearest code per value, an integer from 0 to ``top``, as fp32 [n, D]."""
    scale, bias = params.float().unbind(1)
    # Multiplies by the inverse as the kernel does, so that both choose the same codes.
    return ((values - bias[:, None]) * (1 / scale)[:, None]).clamp_(0, top).round_()


def _squared_errors(values: Tensor, params: Tensor, top: int) -> Tensor:
    """Return the squared quantization error per row, fp32 [n]; infinite if scale or bias is NaN."""
    scale, bias = params.float().unbind(1)
    error = (_codes(values, params, top) * scale[:, None] + bias[:, None] - values).square_().sum(1)
    return error.nan_to_num_(nan=torch.inf)


def _fit_params(values: Tensor, params: Tensor, top: int) -> Tensor:
    """Fit scale and bias per row to the present codes, by least squares.

    Args:
        params: present scale and bias, fp16 [n, 2], which give the codes.

    Returns:
        New scale and bias, fp16 [n, 2]. Rows in which all codes are equal keep the present ones.
    """
    codes = _codes(values, params, top)
    code_mean, value_mean = codes.mean(1, keepdim=True), values.mean(1, keepdim=True)
    spread = (codes - code_mean).square().sum(1)
    scale = ((codes - code_mean) * (values - value_mean)).sum(1) / spread
    bias = value_mean[:, 0] - scale * code_mean[:, 0]
    fitted = _to_half(scale, bias)
    usable = (spread > 0) & fitted.isfinite().all(1)
    return torch.where(usable[:, None], fitted, params)
