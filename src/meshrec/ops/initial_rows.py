"""Initial rows of hashed tables: each value is a pseudo-random function of (seed, ID, column).

Any rank or server can compute the initial row for an ID again, in any order, so these rows are never stored.
"""

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.index.naive import mix
from meshrec.ops.library import implement, register_fakes

# Shape legend: N IDs, D columns, S slots.

# For 32-bit arithmetic in int64.
_WORD = (1 << 32) - 1


def first_rows(ids: Tensor, seed: int, low: float, step: float, c0: int, c1: int) -> Tensor:
    """Return the initial rows for some IDs, uniform in ``[low, low + 2^24 * step)``, fp32 [N, c1 - c0].

    The reference for the kernel.

    Args:
        ids: int64 [N].
        step: distance between adjacent possible values. It must be an fp32 number, so that the product with
            a 24-bit random integer is exact in fp64.
    """
    # Hash the ID to 64 bits once, then hash the column with these bits in 32-bit arithmetic, which is faster.
    bits_N = mix(ids, seed)
    lower_N, upper_N = bits_N & _WORD, (bits_N >> 32) & _WORD
    # 2^32 divided by the golden ratio, so that adjacent columns get very different bits.
    columns_D = torch.arange(c0, c1, device=ids.device) * 0x9E3779B9
    x_ND = ((lower_N[:, None] + columns_D) & _WORD) ^ upper_N[:, None]
    # The 32-bit finalizer "lowbias32", which csrc/index/first_rows.cpp vectorizes with 32-bit products. Here
    # the products are int64, so mask to 32 bits.
    x_ND = ((x_ND ^ (x_ND >> 16)) * 0x7FEB352D) & _WORD
    x_ND = ((x_ND ^ (x_ND >> 15)) * 0x846CA68B) & _WORD
    x_ND = x_ND ^ (x_ND >> 16)
    # The top 24 bits, as many as fp32 can represent exactly.
    return (low + (x_ND >> 8).double() * step).float()


def uniform_rows(ids: Tensor, *, seed: int, low: float, high: float, columns: tuple[int, int]) -> Tensor:
    """Return the initial rows for some IDs, uniform in [low, high), fp32 [N, number of columns].

    Args:
        ids: int64 [N].
        high: upper bound, exclusive.
    """
    # Spacing is computed here, so that kernels and this version round it in the same way.
    rows: Tensor = operators.first_rows(ids, seed, low, value_spacing(low, high), *columns)
    return rows


def write_uniform_rows(
    rows: Tensor, slots: Tensor, ids: Tensor, *, seed: int, low: float, high: float, column: int
) -> None:
    """Write the initial rows for some IDs, uniform in [low, high), to their slots in a table.

    Args:
        rows: table shard with the columns from ``column`` on, fp32 [S, D], contiguous. Modified in place.
        slots: row in ``rows`` for each ID, int64 [N].
        ids: int64 [N].
        high: upper bound, exclusive.
    """
    operators.begin_rows(rows, slots, ids, seed, low, value_spacing(low, high), column)


def begin_rows(rows: Tensor, slots: Tensor, ids: Tensor, seed: int, low: float, step: float, c0: int) -> None:
    """Write the initial rows for some IDs to their slots; see ``first_rows``. Reference for the kernel.

    Args:
        rows: table shard with the columns from ``c0`` on, fp32 [S, D]. Modified in place.
        slots: row in ``rows`` for each ID, int64 [N].
        ids: int64 [N].
    """
    rows[slots] = first_rows(ids, seed, low, step, c0, c0 + rows.shape[1])


def value_spacing(low: float, high: float) -> float:
    """Return the distance between 2^24 evenly spaced values in [low, high), rounded to fp32."""
    return torch.tensor((high - low) * 2.0**-24, dtype=torch.float32).item()


implement([first_rows, begin_rows])
register_fakes(
    first_rows=lambda ids, seed, low, step, c0, c1: ids.new_empty(
        [ids.shape[0], c1 - c0], dtype=torch.float32
    ),
    begin_rows=lambda *_: None,
)
