"""First values of rows as a function of (seed, ID, column), for tables whose IDs nobody can number.

A row can be made again wherever and whenever its ID is met: on any rank, in any order, in a server.
"""

import torch
from torch import Tensor

from meshrec.ops.index.naive import mix
from meshrec.ops.library import implement

# N ids, D columns

_WORD = (1 << 32) - 1


def first_rows(ids: Tensor, seed: int, low: float, step: float, c0: int, c1: int) -> Tensor:
    """Return values that are uniform in ``[low, low + 2^24 step)``, fp32 [N, c1 - c0].

    The reference, in plain torch. ``step`` must be an fp32 value, so that its product with 24 random bits is
    exact in fp64.

    Args:
        ids: int64 [N].
        seed: any int64.
        low: the least value.
        step: the distance between neighbouring values.
        c0: the first column of the row that is wanted.
        c1: the end of the columns.
    """
    bits_N = mix(ids, seed)
    lower_N, upper_N = bits_N & _WORD, (bits_N >> 32) & _WORD
    columns_D = torch.arange(c0, c1, device=ids.device) * 0x9E3779B9
    x_ND = ((lower_N[:, None] + columns_D) & _WORD) ^ upper_N[:, None]
    x_ND = ((x_ND ^ (x_ND >> 16)) * 0x7FEB352D) & _WORD
    x_ND = ((x_ND ^ (x_ND >> 15)) * 0x846CA68B) & _WORD
    x_ND = x_ND ^ (x_ND >> 16)
    return (low + (x_ND >> 8).double() * step).float()


def uniform_rows(ids: Tensor, *, seed: int, low: float, high: float, columns: tuple[int, int]) -> Tensor:
    """Return the first values of rows, uniform in [low, high), fp32 [N, columns]."""
    found: Tensor = torch.ops.meshrec.first_rows.default(ids, seed, low, step_of(low, high), *columns)
    return found


def write_uniform_rows(
    rows: Tensor, slots: Tensor, ids: Tensor, *, seed: int, low: float, high: float, column: int
) -> None:
    """Write the first values of rows, uniform in [low, high), to their slots.

    Args:
        rows: fp32 [S, D], contiguous; their columns begin at ``column``.
        slots: the slot of each ID's row, int64 [N].
        ids: int64 [N].
        seed: any int64.
        low: the least value.
        high: the end of the values.
        column: the first column.
    """
    torch.ops.meshrec.begin_rows.default(rows, slots, ids, seed, low, step_of(low, high), column)


def begin_rows(rows: Tensor, slots: Tensor, ids: Tensor, seed: int, low: float, step: float, c0: int) -> None:
    """Write the first values of rows to their slots; see ``first_rows``.

    Args:
        rows: fp32 [S, D]; their columns begin at ``c0``.
        slots: the slot of each ID's row, int64 [N].
        ids: int64 [N].
        seed: any int64.
        low: the least value.
        step: the distance between neighbouring values.
        c0: the first column.
    """
    rows[slots] = first_rows(ids, seed, low, step, c0, c0 + rows.shape[1])


def step_of(low: float, high: float) -> float:
    """Return the distance between neighbouring values, an fp32 value."""
    return torch.tensor((high - low) * 2.0**-24, dtype=torch.float32).item()


implement([first_rows, begin_rows])


def _fake(
    ids: Tensor, seed: int, low: float, step: float, c0: int | torch.SymInt, c1: int | torch.SymInt
) -> Tensor:
    return ids.new_empty([ids.shape[0], c1 - c0], dtype=torch.float32)


torch.library.register_fake("meshrec::first_rows", _fake)
torch.library.register_fake("meshrec::begin_rows", lambda *arguments: None)
