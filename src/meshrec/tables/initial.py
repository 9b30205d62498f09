"""Initial rows of tables built on ``meta``: the same under any plan and on any number of ranks.

Rows are drawn in blocks of whole rows. Every block has a random seed, derived from (seed, table, block),
so a rank draws only the blocks touched by local rectangles, and gets the same values as any other rank.
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
    """Draw initial fp32 values for rows [r0, r1). Yields (first row, values) for one block after another.

    The next block overwrites the values. ``init_fn`` fills blocks on the CPU from torch's default generator.
    It must treat all rows alike, because it cannot know the row numbers.

    Args:
        rows: the row interval [r0, r1).
        table: table name, used in the seed.
        size: whole-table (rows, columns).
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
    """Return the row count per block."""
    return min(num_rows, max(1, _BLOCK_ELEMENTS // dim))


@torch.no_grad()
def init_table(target: Tensor, *, table: str, init_fn: Callable[[Tensor], Any], seed: int) -> None:
    """Fill a whole table with initial values; see ``initial_rows``.

    Args:
        target: the table, [rows, columns].
        table: table name, used in the seed.
        init_fn: fills a block in place.
        seed: the seed.
    """
    num_rows, dim = target.shape
    for first, rows in initial_rows(
        (0, num_rows), table=table, size=(num_rows, dim), init_fn=init_fn, seed=seed
    ):
        target[first : first + len(rows)].copy_(rows)


def _block_seed(seed: int, table: str, block: int) -> int:
    """Return a block's seed: 63 hash bits."""
    digest = hashlib.blake2b(f"{seed}\n{table}\n{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_of_rows(name: str, seed: int) -> int:
    """Return the seed for a hashed table's initial rows: 62 bits from a hash over table name and seed."""
    digest = hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def draw_rows(seeds: Tensor, init_fn: Callable[[Tensor], object], dim: int, columns: Span) -> Tensor:
    """Draw rows one by one, with a seed per row, from torch's default generator.

    Args:
        seeds: row seeds, int64 [N].
        init_fn: fills a row ``[1, dim]``.
        dim: whole-row width.
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
