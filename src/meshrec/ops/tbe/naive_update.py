"""Optimizer step on the table rows touched by a batch, in plain torch, with stochastic rounding.

``formulas.py`` has the formula of every optimizer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.ops.tbe.formulas import Hyper, Rows, formula_of

# Shape legend: U touched rows, D width.


def update_rows(
    weight: Tensor,
    state: list[Tensor],
    rows_U: Tensor,
    gradient_UD: Tensor,
    stats_U3: Tensor | None,
    optimizer: int,
    h: Hyper,
    origin: Sequence[int] = (0, 0),
    keys_U: Tensor | None = None,
) -> None:
    """Apply an optimizer step to table rows and their optimizer state, in place.

    Args:
        weight: the table or a shard of it, [num_rows, D], fp32, fp16 or bf16.
        state: optimizer state, an fp32 tensor per slot: [num_rows, D] or [num_rows].
        rows_U: the rows to update, int64, without repeats.
        stats_U3: sums of squares over whole rows, see `RowSum`, fp32, for a table sharded by columns. None:
            ``weight`` has whole rows, and the formula computes the sums.
        optimizer: optimizer code, the index in ``formulas.FORMULAS``.
        origin: row and column of the whole table at which ``weight`` starts. Only stochastic rounding reads
            them, so that a shard gets the same random bits as the whole table.
        keys_U: row numbers for stochastic rounding, int64. Hashed tables pass them, because they do not store
            rows in order. None: use ``rows_U + origin[0]``.
    """
    # Indexing copies. The formula modifies the copies, which are written back below.
    slots = [slot[rows_U] for slot in state]
    updated = formula_of(optimizer).apply(Rows(weight[rows_U].float(), gradient_UD, slots, stats_U3), h)
    # Rows do not repeat, so the write order does not matter.
    weight[rows_U] = _round_to_dtype(
        updated, weight.dtype, rows_U + origin[0] if keys_U is None else keys_U, h, origin[1]
    )
    for slot, values in zip(state, slots, strict=True):
        slot[rows_U] = values


def _round_to_dtype(x_UD: Tensor, dtype: torch.dtype, rows_U: Tensor, h: Hyper, first_column: int) -> Tensor:
    """Convert updated rows to the table dtype: stochastically if ``h.seed`` is not 0, else to nearest."""
    if dtype == torch.float32 or h.seed == 0:
        return x_UD.to(dtype)
    # Column numbers in the whole table.
    columns_D = torch.arange(first_column, first_column + x_UD.shape[1], device=x_UD.device)
    return stochastic_round(x_UD, dtype, random_bits(rows_U, columns_D, h.seed, h.step))


def to_signed(x: int) -> int:
    """Return the int64 value with the same 64 bits as an unsigned integer. torch has no uint64 arithmetic."""
    x %= 1 << 64
    return x - (1 << 64) if x >= 1 << 63 else x


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift the 64 bits of every value right, and fill with zeros: ``>>`` on int64 repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def random_bits(rows_U: Tensor, columns_D: Tensor, seed: int, step: int) -> Tensor:
    """Return 16 pseudo-random bits for every element of the given rows and columns, int64 [U, D].

    The bits depend only on the arguments, not on the order of updates. The counter
    ``x = row * 0x9E3779B97F4A7C15 + column * 0xC2B2AE3D27D4EB4F + seed * 0x165667B19E3779F9 +
    step * 0x27D4EB2F165667C5`` modulo 2^64 goes through the splitmix64 finalizer (Steele, Lea, Flood: "Fast
    splittable pseudorandom number generators", 2014). The low 16 bits are returned.

    Args:
        step: number of the update, so that every update rounds differently.
    """
    start = to_signed(seed * 0x165667B19E3779F9 + step * 0x27D4EB2F165667C5)
    # int64 products wrap modulo 2^64, like those in uint64.
    x = rows_U.long()[:, None] * to_signed(0x9E3779B97F4A7C15)
    x = x + columns_D * to_signed(0xC2B2AE3D27D4EB4F) + start
    x = (x ^ shift_right(x, 30)) * to_signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * to_signed(0x94D049BB133111EB)
    return (x ^ shift_right(x, 31)) & 0xFFFF


def stochastic_round(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """Round fp32 values up or down at random, so that the expected result equals the input.

    bf16 drops the low 16 bits of an fp32 value: add 16 random bits to them, then truncate. fp16 drops 13 bits
    and works likewise, for magnitudes from 2^-14 to 65504 (normal numbers). All other values (fp16
    subnormals, overflow, inf, NaN) are rounded to nearest.

    Args:
        x: fp32.
        dtype: bf16 or fp16.
        bits: 16 random bits per element, int64.
    """
    # The fp32 bit patterns as unsigned integers in int64.
    raw = x.view(torch.int32).long() & 0xFFFFFFFF
    if dtype == torch.bfloat16:
        dropped, in_range = 16, x.isfinite()
    else:
        assert dtype == torch.float16, dtype
        dropped, in_range = 13, (x.abs() >= 2.0**-14) & (x.abs() <= 65504.0)
    mask = (1 << dropped) - 1
    # A carry out of the dropped bits rounds up. Its probability is the dropped fraction.
    raw = (raw + (bits & mask)) & ~mask
    # Sign-extend by hand: a cast from int64 to int32 is only defined for values in int32's range.
    cut = torch.where(raw >= 1 << 31, raw - (1 << 32), raw).to(torch.int32).view(torch.float32)
    return torch.where(in_range, cut, x).to(dtype)
