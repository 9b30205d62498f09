"""Search for the scale and bias of a row with a smaller squared error than its minimum and maximum give.

A few outliers stretch the steps between all codes. So we start from ranges that are shrunk by several
factors, and alternate two steps, each of which reduces the squared error: every value takes the nearest code,
and the codes take the scale and bias that fit them best (a line through the points (code, value), by least
squares). This is Lloyd's algorithm for a quantiser with evenly spaced levels.
"""

import torch
from torch import Tensor

from meshrec.ops.nbit.naive import split_rows

# D width

_SHRINKS = (1.0, 0.9, 0.8, 0.7, 0.6)
_TURNS = 4


def searched_params(numbers: Tensor, rows: Tensor, bits: int) -> Tensor:
    """Return the best scale and bias found for each row, fp16 [n, 2]. They are never worse than the given
    ones.

    Args:
        numbers: the rows, [n, D].
        rows: the rows, quantised by their minimum and maximum.
        bits: bits per code.
    """
    values, top = numbers.float(), (1 << bits) - 1
    best = split_rows(rows, bits, numbers.shape[1])[1].clone()
    least_error = _error(values, best, top)
    scale, bias = best.float().unbind(1)
    middle = bias + scale * top / 2
    for shrink in _SHRINKS:
        params = _halves(scale * shrink, middle - scale * shrink * top / 2)
        for _ in range(_TURNS):
            error = _error(values, params, top)
            better = error < least_error
            best[better], least_error = params[better], torch.minimum(error, least_error)
            params = _fitted(values, params, top)
        error = _error(values, params, top)
        better = error < least_error
        best[better], least_error = params[better], torch.minimum(error, least_error)
    return best


def _halves(scale: Tensor, bias: Tensor) -> Tensor:
    scale = scale.half()
    return torch.stack([torch.where(scale == 0, torch.ones_like(scale), scale), bias.half()], 1)


def _codes(values: Tensor, params: Tensor, top: int) -> Tensor:
    scale, bias = params.float().unbind(1)
    return ((values - bias[:, None]) * (1 / scale)[:, None]).clamp_(0, top).round_()


def _error(values: Tensor, params: Tensor, top: int) -> Tensor:
    """Return the squared error of each row; infinite if its scale or bias is NaN."""
    scale, bias = params.float().unbind(1)
    error = (_codes(values, params, top) * scale[:, None] + bias[:, None] - values).square_().sum(1)
    return error.nan_to_num_(nan=torch.inf)


def _fitted(values: Tensor, params: Tensor, top: int) -> Tensor:
    """Fit the line through (code, value) by least squares. Keep ``params`` for rows whose codes are all
    equal.
    """
    codes = _codes(values, params, top)
    code_mean, value_mean = codes.mean(1, keepdim=True), values.mean(1, keepdim=True)
    spread = (codes - code_mean).square().sum(1)
    scale = ((codes - code_mean) * (values - value_mean)).sum(1) / spread
    bias = value_mean[:, 0] - scale * code_mean[:, 0]
    fitted = _halves(scale, bias)
    usable = (spread > 0) & fitted.isfinite().all(1)
    return torch.where(usable[:, None], fitted, params)
