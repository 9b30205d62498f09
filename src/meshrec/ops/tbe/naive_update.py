"""One optimizer step on the touched rows of one table, in plain torch, with stochastic rounding.

The formulas are in ``formulas.py``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.ops.tbe.formulas import Hyper, Rows, formula_of

# U touched rows, D width


def update_rows(
    weight: Tensor,
    state: list[Tensor],
    rows_U: Tensor,
    gradient_UD: Tensor,
    stats_U3: Tensor | None,
    optimizer: int,
    h: Hyper,
    origin: Sequence[int] = (0, 0),
) -> None:
    """Apply one optimizer step to the distinct rows ``rows_U`` of one table, in place.

    ``origin`` is the row and the column of the whole table at which ``weight`` begins.
    """
    slots = [slot[rows_U] for slot in state]
    updated = formula_of(optimizer).apply(Rows(weight[rows_U].float(), gradient_UD, slots, stats_U3), h)
    weight[rows_U] = _rounded(updated, weight.dtype, rows_U, h, origin)
    for slot, values in zip(state, slots, strict=True):
        slot[rows_U] = values


def _rounded(x_UD: Tensor, dtype: torch.dtype, rows_U: Tensor, h: Hyper, origin: Sequence[int]) -> Tensor:
    if dtype == torch.float32 or h.seed == 0:
        return x_UD.to(dtype)
    first_row, first_column = origin
    columns_D = torch.arange(first_column, first_column + x_UD.shape[1], device=x_UD.device)
    return stochastic_round(x_UD, dtype, random_bits(rows_U + first_row, columns_D, h.seed, h.step))


def signed(x: int) -> int:
    """Return the int64 with the bits of an unsigned 64-bit integer."""
    x %= 1 << 64
    return x - (1 << 64) if x >= 1 << 63 else x


def shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right, filling with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_bits(rows_U: Tensor, columns_D: Tensor, seed: int, step: int) -> Tensor:
    """Return 16 random bits for every element, int64 [U, D]. They come from a counter, so the order of
    updates does not matter.

    ``x = row * 0x9E3779B97F4A7C15 + column * 0xC2B2AE3D27D4EB4F + seed * 0x165667B19E3779F9 + step *
    0x27D4EB2F165667C5`` modulo 2^64 goes through the finalizer of splitmix64 (Steele, Lea, Flood: "Fast
    splittable pseudorandom number generators", 2014), and the low 16 bits remain.
    """
    start = signed(seed * 0x165667B19E3779F9 + step * 0x27D4EB2F165667C5)
    x = rows_U.long()[:, None] * signed(0x9E3779B97F4A7C15) + columns_D * signed(0xC2B2AE3D27D4EB4F) + start
    x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
    return (x ^ shifted(x, 31)) & 0xFFFF


def stochastic_round(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round fp32 up or down at random. The nearer value has the higher probability, so the mean is exact.

    bf16: the 16 random bits are added below the precision, and the bits below it are cut off. fp16: likewise
    with the low 13 random bits, in the range of normal numbers (2^-14 to 65504). Everything else (fp16
    subnormals and overflow, inf, NaN) is rounded to nearest.
    """
    raw = x.view(torch.int32).long() & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        dropped, in_range = 16, x.isfinite()
    else:
        assert dtype == torch.float16, dtype
        dropped, in_range = 13, (x.abs() >= 2.0**-14) & (x.abs() <= 65504.0)
    mask = (1 << dropped) - 1
    raw = (raw + (bits & mask)) & ~mask
    # Extend the sign by hand: int64 to int32 keeps the low 32 bits only of values that int32 can hold.
    cut = torch.where(raw >= 1 << 31, raw - (1 << 32), raw).to(torch.int32).view(torch.float32)
    return torch.where(in_range, cut, x).to(dtype)
