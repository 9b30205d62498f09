"""First values of tables that were built on ``meta``: the same under every plan and on any number of ranks.

A table is drawn in blocks of whole rows. Each block has its own generator, seeded by (seed, table, block),
so a rank draws only the blocks that its rectangles touch, and draws what every other rank would.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 18


def init_rectangle(
    target: Tensor,
    *,
    table: str,
    size: tuple[int, int],
    first: tuple[int, int],
    init_fn: Callable[[Tensor], Any],
    seed: int,
) -> None:
    """Fills ``target`` with its part of a table of ``size``, from row and column ``first`` on.

    ``init_fn`` gets blocks of whole rows, fp32, on the CPU, one after the other, and draws from torch's
    default generator; it must treat all rows alike, since it does not see which rows it gets.
    """
    num_rows, dim = size
    block_rows = max(1, _BLOCK_ELEMENTS // dim)
    (r0, c0), (rows, columns) = first, target.shape
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for block in range(r0 // block_rows, -(-(r0 + rows) // block_rows)):
            begin = block * block_rows
            torch.manual_seed(_seed(seed, table, block))
            values = torch.empty(min(block_rows, num_rows - begin), dim)
            init_fn(values)
            low, high = max(begin, r0), min(begin + values.shape[0], r0 + rows)
            target[low - r0 : high - r0].copy_(values[low - begin : high - begin, c0 : c0 + columns])


def _seed(seed: int, table: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}\n{table}\n{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
