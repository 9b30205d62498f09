"""The keys of tables without a fixed number of rows, and how plans cut them.

[Note: the keys of hashed tables]

The key of an ID is its seeded mix (``ops.index.mix``), a permutation of all 2^64 values, in signed order: the
router compares int64. To a plan, a table of at most ``max_rows`` rows looks like a fixed one with so many:
"row" r of a plan is the bucket of keys from ``key_at(r)`` on, one of ``max_rows`` nearly equal parts of the
key space. So builders, planner, checks and plan files are the same for both, and the expected memory of a
shard is what the plan says. Rectangles at run time are intervals of keys. The end of the last one, 2^63, does
not fit int64: in the router's tensors 2^63 - 1 as an end means that there is none.
"""

from torch import Tensor

from meshrec.tables.table import Span

FIRST_KEY = -(1 << 63)
ALL_KEYS: Span = (FIRST_KEY, -FIRST_KEY)
"""The interval of all keys."""


def key_at(row: int, max_rows: int) -> int:
    """Return the first key of a plan's row: the least u with ``u * max_rows >= row * 2^64``, less 2^63."""
    return -(-(row << 64) // max_rows) + FIRST_KEY


def bucket_of(keys: Tensor, max_rows: int) -> Tensor:
    """Return the plan's row of each key, int64 [N]; ``max_rows`` is below 2^31."""
    upper, lower = (keys >> 32) + (1 << 31), keys & ((1 << 32) - 1)
    return (upper * max_rows + ((lower * max_rows) >> 32)) >> 32


def first_keys(rows: Tensor, max_rows: int) -> Tensor:
    """Return ``key_at`` of each row, int64 [N]; ``max_rows`` is below 2^31."""
    whole, rest = divmod(1 << 64, max_rows)
    whole = (whole - FIRST_KEY) % (1 << 64) + FIRST_KEY  # as int64, whose product wraps
    return rows * whole - (-(rows * rest) // max_rows) + FIRST_KEY
