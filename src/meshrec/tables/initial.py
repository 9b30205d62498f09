"""Initial rows of tables built on ``meta``: the same under any plan and on any number of ranks.

Rows are drawn in blocks of consecutive whole rows. Every block has a separate random seed, derived from
(seed, table name, block number). So a rank draws only the blocks that overlap local rectangles, and gets the
same values as any other rank.
"""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

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
        init_fn: fills an fp32 tensor [n, columns] on the CPU in place, from torch's default generator. If it
            does something else for another number of rows, as ``torch.nn.init.xavier_uniform_`` does, it
            fills the whole table at once, which takes the memory of the whole table on every rank.
        seed: random seed.

    Yields:
        The first row's number, and values for consecutive rows, fp32 [n, columns]. The next block
            overwrites the values.
    """
    num_rows, dim = size
    r0, r1 = rows
    height = block_rows(num_rows, dim)
    if height < num_rows and not _fills_rows_alike(init_fn, dim):
        height = num_rows
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


# Functions of torch.nn.init whose result does not depend on the number of rows. Known ones are not tried out,
# because the first use of a dispatch mode imports torch._dynamo, which takes seconds.
_ALIKE = ("constant_", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_", "trunc_normal_", "uniform_")
_FILL_ROWS_ALIKE = [getattr(nn.init, name) for name in (*_ALIKE, "zeros_")]
# Operators without a tag that treat all rows alike: they fill, copy, create or read tensors.
_ROW_BY_ROW = {
    getattr(torch.ops.aten, name)
    for name in (
        *("copy_", "zero_", "empty", "empty_like", "new_empty", "zeros", "zeros_like", "ones", "ones_like"),
        *("full", "full_like", "detach", "_to_copy", "lift_fresh", "fill_", "any", "_local_scalar_dense"),
    )
}


class _Recorder(TorchDispatchMode):
    """Records the operators that are called, and their arguments, with ``None`` for a tensor.

    Args:
        num_rows: number of rows of the filled tensor, which is recorded as -1 in shapes.

    Attributes:
        is_row_by_row: whether all operators treat all rows alike.
        calls: operators and arguments.
    """

    def __init__(self, num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_rows = num_rows
        self.is_row_by_row = True
        self.calls: list[str] = []

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tags = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded}
        if not tags.intersection(func.tags) and func.overloadpacket not in _ROW_BY_ROW:
            self.is_row_by_row = False
        self.calls.append(f"{func} {[self._plain(arg) for arg in (*args, *kwargs.items())]}")
        return func(*args, **kwargs)

    def _plain(self, value: object) -> object:
        if isinstance(value, Tensor):
            return None
        if isinstance(value, list | tuple):
            return [
                -1 if isinstance(item, int) and item == self._num_rows else self._plain(item)
                for item in value
            ]
        return str(value)


def _fills_rows_alike(init_fn: Callable[[Tensor], Any], dim: int) -> bool:
    """Return whether ``init_fn`` treats all rows alike, so that a table may be filled block by block.

    A function that is not known is called with two small tensors: the operators and their arguments must be
    the same for both.

    Args:
        init_fn: see ``initial_rows``; or the method ``init_weight`` of a table's config, which calls the
            config's ``init_fn``, or fills all rows alike if that is None.
    """
    config = getattr(init_fn, "__self__", None)
    function = getattr(config, "init_fn", init_fn)
    while isinstance(function, functools.partial):
        function = function.func
    # By identity, because a callable object may have no hash.
    if function is None or any(function is known for known in _FILL_ROWS_ALIKE):
        return True
    calls = []
    # Row counts that differ from the column count, so that the recorder recognizes them.
    for num_rows in (dim + 1, dim + 2):
        recorder = _Recorder(num_rows)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), recorder:
            init_fn(torch.zeros(num_rows, dim))
        if not recorder.is_row_by_row:
            return False
        # A set, because functions that draw until all values fit call operators a random number of times.
        calls.append(set(recorder.calls))
    return calls[0] == calls[1]


def block_rows(num_rows: int, dim: int) -> int:
    """Return how many rows of a table are drawn at a time; see ``initial_rows``."""
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
    """Return the random seed of the initial rows in a hashed table, 62 bits of a hash of name and seed."""
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
