"""First values of tables that were built on ``meta``: the same under every plan and on any number of ranks.

A table is drawn in blocks of whole rows. Each block has its own generator, seeded by (seed, table, block),
so a rank draws only the blocks that its rectangles touch, and draws what every other rank would.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshrec.tables.table import Span

_BLOCK_ELEMENTS = 1 << 18


def initial_rows(
    rows: Span, *, table: str, size: Span, init_fn: Callable[[Tensor], Any], seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Draw the initial fp32 values of rows [r0, r1) in blocks of whole rows, each with its first row.

    A block is valid until you ask for the next one. ``init_fn`` fills such blocks on the CPU, one after the
    other, from torch's default generator. It must treat all rows alike, since it does not know which rows it
    gets.
    """
    num_rows, dim = size
    r0, r1 = rows
    height = block_rows(num_rows, dim)
    memory = torch.empty(height, dim)
    for block in range(r0 // height, -(-r1 // height)):
        begin = block * height
        values = memory[: num_rows - begin]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_seed(seed, table, block))
            init_fn(values)
        low, high = max(begin, r0), min(begin + len(values), r1)
        yield low, values[low - begin : high - begin]


def block_rows(num_rows: int, dim: int) -> int:
    """Return the number of rows that are drawn together."""
    return min(num_rows, max(1, _BLOCK_ELEMENTS // dim))


@torch.no_grad()
def init_table(target: Tensor, *, table: str, init_fn: Callable[[Tensor], Any], seed: int) -> None:
    """Fill a whole table; see ``initial_rows``."""
    num_rows, dim = target.shape
    for first, rows in initial_rows(
        (0, num_rows), table=table, size=(num_rows, dim), init_fn=init_fn, seed=seed
    ):
        target[first : first + len(rows)].copy_(rows)


def _seed(seed: int, table: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}\n{table}\n{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_of_rows(name: str, seed: int) -> int:
    """Return the seed of the first rows of a hashed table, from its name and seed."""
    digest = hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def drawn_rows(seeds: Tensor, init_fn: Callable[[Tensor], object], dim: int, columns: Span) -> Tensor:
    """Return rows that a function draws from torch's default generator, each with its own seed.

    Args:
        seeds: int64 [N].
        init_fn: fills a row ``[1, dim]``.
        dim: the width of whole rows.
        columns: the columns that are wanted.
    """
    found = torch.empty(len(seeds), columns[1] - columns[0])
    row = torch.empty(1, dim)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number, seed in enumerate(seeds.tolist()):
            torch.default_generator.manual_seed(seed & ((1 << 63) - 1))
            init_fn(row)
            found[number] = row[0, columns[0] : columns[1]]
    return found
