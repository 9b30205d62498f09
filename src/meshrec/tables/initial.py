"""Initial rows of tables built on ``meta``: the same under any plan and on any number of ranks.

Rows are drawn in blocks of whole rows. Each block has its own random seed, derived from (seed, table, block),
so a rank draws only the blocks that its rectangles touch, and gets the same values as any other rank.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshrec.tables.table import Span

# Part of the format: another value changes the initial rows for a given seed. 1 MiB of fp32.
_BLOCK_ELEMENTS = 1 << 18


def initial_rows(
    rows: Span, *, table: str, size: Span, init_fn: Callable[[Tensor], Any], seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Draw the initial fp32 values of rows [r0, r1). Yields (first row, values) for one block after another.

    The next block overwrites the values. ``init_fn`` fills blocks on the CPU from torch's default generator.
    It must treat all rows alike, because it does not know which rows it gets.

    Args:
        rows: the row interval [r0, r1).
        table: table name, part of the seed.
        size: (rows, columns) of the whole table.
        init_fn: fills a block in place.
        seed: the seed.
    """
    num_rows, dim = size
    r0, r1 = rows
    height = block_rows(num_rows, dim)
    memory = torch.empty(height, dim)
    for block in range(r0 // height, -(-r1 // height)):
        start = block * height
        # Always draw the whole block, even if only some rows are needed.
        values = memory[: num_rows - start]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_block_seed(seed, table, block))
            init_fn(values)
        low, high = max(start, r0), min(start + len(values), r1)
        yield low, values[low - start : high - start]


def block_rows(num_rows: int, dim: int) -> int:
    """Return the number of rows in a block."""
    return min(num_rows, max(1, _BLOCK_ELEMENTS // dim))


@torch.no_grad()
def init_table(target: Tensor, *, table: str, init_fn: Callable[[Tensor], Any], seed: int) -> None:
    """Fill a whole table with initial values; see ``initial_rows``.

    Args:
        target: the table, [rows, columns].
        table: table name, part of the seed.
        init_fn: fills a block in place.
        seed: the seed.
    """
    num_rows, dim = target.shape
    for first, rows in initial_rows(
        (0, num_rows), table=table, size=(num_rows, dim), init_fn=init_fn, seed=seed
    ):
        target[first : first + len(rows)].copy_(rows)


def _block_seed(seed: int, table: str, block: int) -> int:
    """Return the seed of one block: 63 bits of a hash."""
    digest = hashlib.blake2b(f"{seed}\n{table}\n{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_of_rows(name: str, seed: int) -> int:
    """Return the seed of the initial rows of a hashed table: 62 bits of a hash of table name and seed."""
    digest = hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def draw_rows(seeds: Tensor, init_fn: Callable[[Tensor], object], dim: int, columns: Span) -> Tensor:
    """Draw rows one by one, each with its own seed, from torch's default generator.

    Args:
        seeds: seed of each row, int64 [N].
        init_fn: fills a row ``[1, dim]``.
        dim: width of a whole row.
        columns: columns to return.

    Returns:
        fp32 [N, columns].
    """
    rows = torch.empty(len(seeds), columns[1] - columns[0])
    row = torch.empty(1, dim)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number, seed in enumerate(seeds.tolist()):
            torch.default_generator.manual_seed(seed & ((1 << 63) - 1))
            init_fn(row)
            rows[number] = row[0, columns[0] : columns[1]]
    return rows
