"""Initial rows of tables built on ``meta``: the same under any plan and on any number of ranks.

Rows are drawn in blocks of consecutive whole rows. Every block has a separate random seed, derived from
(seed, table name, block number). So a rank draws only the blocks that overlap local rectangles, and gets the
same values as any other rank.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshrec.tables.table import Span

# Values per block, 1 MiB of fp32. Do not change: another value changes the initial rows for a given seed.
_BLOCK_ELEMENTS = 1 << 18


def initial_rows(
    rows: Span, *, table: str, size: Span, init_fn: Callable[[Tensor], Any], seed: int
) -> Iterator[tuple[int, Tensor]]:
    """Draw the initial values of the rows in an interval, block by block.

    Args:
        rows: first and end row.
        table: table name, which is hashed into the random seed.
        size: whole-table row and column counts.
        init_fn: fills an fp32 tensor [n, columns] on the CPU in place, from torch's default generator. It
            must treat all rows alike, because it is not told the row numbers.
        seed: random seed.

    Yields:
        The first row's number, and values for consecutive rows, fp32 [n, columns]. The next block
            overwrites the values.
    """
    num_rows, dim = size
    r0, r1 = rows
    height = block_rows(num_rows, dim)
    memory = torch.empty(height, dim)
    for block in range(r0 // height, -(-r1 // height)):
        start = block * height
        # Draw the whole block even if only some of its rows are needed, so they get the same values.
        values = memory[: num_rows - start]
        # Restores the generator afterward, so the caller's random numbers do not depend on the table sizes.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_block_seed(seed, table, block))
            init_fn(values)
        low, high = max(start, r0), min(start + len(values), r1)
        yield low, values[low - start : high - start]


def block_rows(num_rows: int, dim: int) -> int:
    """Return how many rows of a table are drawn at a time; see ``initial_rows``.

    Args:
        num_rows: whole-table rows.
        dim: whole-table columns.
    """
    return min(num_rows, max(1, _BLOCK_ELEMENTS // dim))


@torch.no_grad()
def init_table(target: Tensor, *, table: str, init_fn: Callable[[Tensor], Any], seed: int) -> None:
    """Fill a whole table with the initial values, in place; see ``initial_rows``.

    Args:
        target: the table, [rows, columns].
        table: table name, which is hashed into the random seed.
        init_fn: fills a block of rows in place.
        seed: random seed.
    """
    num_rows, dim = target.shape
    for first, rows in initial_rows(
        (0, num_rows), table=table, size=(num_rows, dim), init_fn=init_fn, seed=seed
    ):
        target[first : first + len(rows)].copy_(rows)


def _block_seed(seed: int, table: str, block: int) -> int:
    """Return the random seed of a block, 63 bits of a hash of seed, table name and block number."""
    digest = hashlib.blake2b(f"{seed}\n{table}\n{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_of_rows(name: str, seed: int) -> int:
    """Return the random seed of the initial rows in a hashed table, 62 bits of a hash of name and seed.

    Args:
        name: table name.
        seed: table seed (``Hashed.seed``).
    """
    digest = hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def draw_rows(seeds: Tensor, init_fn: Callable[[Tensor], object], dim: int, columns: Span) -> Tensor:
    """Draw rows one by one, with a random seed per row.

    Args:
        seeds: random seed per row, int64 [N].
        init_fn: fills a row [1, dim] in place, from torch's default generator.
        dim: number of columns of a whole row.
        columns: interval of columns to return.

    Returns:
        fp32 [N, columns].
    """
    # Slow for many rows: every row seeds the generator and calls ``init_fn``. Uniform rows have a kernel.
    rows = torch.empty(len(seeds), columns[1] - columns[0])
    # Always draw a whole row: a column shard must get the same values as the whole table.
    row = torch.empty(1, dim)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for number, seed in enumerate(seeds.tolist()):
            # 63 bits, because hashed IDs may be negative.
            torch.default_generator.manual_seed(seed & ((1 << 63) - 1))
            init_fn(row)
            rows[number] = row[0, columns[0] : columns[1]]
    return rows
