"""Lookups by raw 64-bit ID in read-only tables, in plain torch: the reference for the kernel.

Three tensors map keys to rows:

- ``buckets``: int64 [b, 8]: the keys (mixed IDs) for the rows, ascending, in cache-line buckets, see
  ``pack_buckets``;
- ``added``: int64 [2, m]: keys for rows added after the export, ascending, and their rows in
- ``added_rows``: [c, columns].

An ID without a key reads the initial row (``ops.first_rows``), in the table's dtype. For quantized tables,
initial rows are quantized by their minimum and maximum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshrec.ops.index.naive import index_find, mix
from meshrec.ops.initial_rows import first_rows
from meshrec.ops.library import implement
from meshrec.ops.nbit import naive as nbit
from meshrec.ops.tbe import Lookups

# Shape legend: F features, N IDs, n rows, U unknown IDs, b buckets.

KEYS_PER_BUCKET = 7
"""Keys per bucket. Together with the first row number, they fill a cache line."""
PER_TABLE = 3
"""Key index tensors per table."""


def num_homes(num_rows: int) -> int:
    """Return the number of equal intervals that divide all keys: a bucket each, 72 % full."""
    return max(1, (25 * num_rows + 125) // 126)


def _homes(keys_N: Tensor, num_rows: int) -> Tensor:
    """Return the interval per key, int64 [N]: the top bits in the 96-bit product key times intervals."""
    number, half = num_homes(num_rows), (1 << 32) - 1
    high = (keys_N >> 32) + (1 << 31)
    return (high * number + ((keys_N & half) * number >> 32)) >> 32


def pack_buckets(keys_n: Tensor) -> Tensor:
    """Pack ascending keys into buckets: int64 [b, 8].

    A bucket holds a row number, then the keys for that row and the six rows after it. Every key interval (see
    ``num_homes``) has a bucket starting at or before the interval's first key, and no later than the
    previous bucket's end. A key therefore lies in the interval's bucket or shortly after. The last bucket
    repeats the last key.

    Args:
        keys_n: int64 [n], ascending.
    """
    num, count = len(keys_n), num_homes(len(keys_n))
    sizes = torch.bincount(_homes(keys_n, num), minlength=count)
    full = KEYS_PER_BUCKET * torch.arange(count)
    firsts = full + (sizes.cumsum(0) - sizes - full).cummin(0).values
    more = max(0, -(-(num - int(firsts[-1])) // KEYS_PER_BUCKET) - 1)
    firsts = torch.cat([firsts, firsts[-1] + KEYS_PER_BUCKET * torch.arange(1, more + 1)])
    buckets = torch.zeros(len(firsts), 1 + KEYS_PER_BUCKET, dtype=torch.int64)
    buckets[:, 0] = firsts
    for column in range(KEYS_PER_BUCKET if num else 0):
        buckets[:, 1 + column] = keys_n[(firsts + column).clamp_(max=num - 1)]
    return buckets


def find_rows(buckets_b: Tensor, num_rows: int, keys_N: Tensor) -> Tensor:
    """Return the row per key, -1 where absent: int64 [N].

    Args:
        buckets_b: int64 [b, 8], from ``pack_buckets``.
        num_rows: key count in the buckets.
        keys_N: int64 [N]; may repeat.
    """
    rows = torch.full_like(keys_N, -1)
    pending, bucket = torch.arange(len(keys_N) if num_rows else 0), _homes(keys_N, num_rows)
    while len(pending):
        entries, keys = buckets_b[bucket[pending]], keys_N[pending]
        equal = entries[:, 1:] == keys[:, None]
        is_here = equal.any(1)
        rows[pending[is_here]] = entries[is_here, 0] + equal[is_here].to(torch.uint8).argmax(1)
        bucket[pending] += 1
        pending = pending[~is_here & (entries[:, -1] < keys) & (bucket[pending] < len(buckets_b))]
    return rows


def keyed_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    """Run ``nbit_forward`` on tables, some (``keyed``) read by raw ID.

    Args:
        weights: see ``nbit_forward``.
        bits: see ``nbit_forward``.
        arguments: as ``nbit_forward``; then the numbers of tables with a key index, three key index
            tensors per keyed table, two seeds (keys, initial rows) per keyed table, and two floats (minimum
            initial value, step between values) per keyed table.

    Raises:
        ValueError: as for ``nbit_forward``, or a table's tensors do not fit together.
    """
    lookups, options = Lookups.split(arguments)
    *options, keyed, key_tensors, seeds, firsts = options
    if len(key_tensors) != PER_TABLE * len(keyed) or not len(seeds) == len(firsts) == 2 * len(keyed):
        raise ValueError(
            "there must be three tensors, two seeds and two numbers for each of the "
            f"{len(keyed)} tables with keys."
        )

    def find_rows(table: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        k = keyed.index(table)
        tensors = key_tensors[PER_TABLE * k : PER_TABLE * (k + 1)]
        row, slots = _find_rows_and_added(ids, weights[table], tensors, seeds[2 * k], table)
        unknown, dim = slots < 0, lookups.dims[lookups.tables.index(table)]
        low, step = firsts[2 * k : 2 * k + 2]
        first = first_rows(ids[unknown], seeds[2 * k + 1], low, step, 0, dim)
        first = nbit.nbit_quantize(first, bits[table], None) if bits[table] else first.to(row.dtype)
        slots[unknown] = torch.arange(len(row), len(row) + len(first))
        return torch.cat([row, first]), slots

    return _look_up_by_table(weights, bits, lookups, options, keyed, find_rows)


def hashed_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> tuple[Tensor, Tensor]:
    """Run ``nbit_forward`` on tables, some (``hashed``) read through a hash index.

    Args:
        weights: see ``nbit_forward``.
        bits: see ``nbit_forward``.
        arguments: as ``nbit_forward``; then hashed table numbers, four tensors per hashed table
            (``index_find``), and two seeds per hashed table (index, mix from IDs to keys).

    Returns:
        The result, and the count of IDs without a slot, int64 [1]. If not 0, the result is meaningless and
            the count is a lower bound.
    """
    lookups, options = Lookups.split(arguments)
    *options, hashed, memory, seeds = options
    if len(memory) != 4 * len(hashed) or len(seeds) != 2 * len(hashed):
        raise ValueError(
            f"there must be four tensors and two seeds for each of the {len(hashed)} hashed tables."
        )
    # A count instead of an exception: the caller then assigns slots, and looks up again.
    absent = torch.zeros(1, dtype=torch.int64)

    def find_rows(table: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        k = hashed.index(table)
        slots = index_find(memory[4 * k : 4 * k + 4], mix(ids, seeds[2 * k + 1]), seeds[2 * k])
        for piece in lookups.layout().pieces:
            if lookups.tables[piece.feature] == table:
                absent.add_((slots[piece.ids] < 0).sum())
        slots[slots < 0] = len(weights[table])  # also IDs from other tables
        return torch.cat([weights[table], weights[table].new_zeros(1, weights[table].shape[1])]), slots

    return _look_up_by_table(weights, bits, lookups, options, hashed, find_rows), absent


def _look_up_by_table(
    weights: list[Tensor],
    bits: list[int],
    lookups: Lookups,
    options: Sequence[Any],
    indexed_tables: list[int],
    find_rows: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Run ``nbit_forward`` table by table, because tables may map equal IDs to different rows.

    Args:
        weights: see ``nbit_forward``.
        bits: see ``nbit_forward``.
        lookups: the batch.
        options: further arguments to ``nbit_forward``.
        indexed_tables: numbers of the tables with an index.
        find_rows: maps a table number and IDs to all rows in the table, and the row per ID among them.
    """
    out_size, out_dtype, check_ids, names = options
    layout = lookups.layout()
    if layout.out_size != out_size:
        raise ValueError(f"out_size is {out_size} but the lookups give {layout.out_size}.")
    out = torch.zeros(lookups.output_shape(out_size), dtype=out_dtype, device=lookups.values.device)
    lines = bytes(names.tolist()).splitlines(keepends=True)
    for table in sorted(set(lookups.tables)):
        features = [f for f, read in enumerate(lookups.tables) if read == table]
        table_lookups = lookups._replace(
            keys=[lookups.keys[f] for f in features],
            tables=[table] * len(features),
            pooling=[lookups.pooling[f] for f in features],
            dims=[lookups.dims[f] for f in features],
        )
        rows = weights
        if table in indexed_tables:
            row, slots = find_rows(table, table_lookups.values.long())
            rows = [*weights[:table], row, *weights[table + 1 :]]
            table_lookups = table_lookups._replace(values=slots)
        table_layout = table_lookups.layout()
        table_names = torch.tensor(
            list(b"".join(lines[f] for f in features if f < len(lines))), dtype=torch.uint8
        )
        result = nbit.nbit_forward(
            rows, bits, *table_lookups, table_layout.out_size, out_dtype, check_ids, table_names
        )
        targets = [piece for piece in layout.pieces if piece.feature in features]
        for piece, target in zip(table_layout.pieces, targets, strict=True):
            dim = table_lookups.dims[piece.feature]
            target.view_of(out, dim).copy_(piece.view_of(result, dim))
    return out


def _find_rows_and_added(
    ids: Tensor, weight: Tensor, tensors: list[Tensor], seed: int, table: int
) -> tuple[Tensor, Tensor]:
    """Return table rows followed by added rows, and the row per ID; -1 for unknown IDs."""
    buckets, added, added_rows = tensors
    num_rows = len(weight)
    if buckets.dim() != 2 or buckets.shape[1] != 1 + KEYS_PER_BUCKET or len(buckets) < num_homes(num_rows):
        raise ValueError(
            f"table {table} has {num_rows} rows and buckets {list(buckets.shape)}, which do not fit "
            "together. Export the model again."
        )
    keys = mix(ids, seed)
    slots = find_rows(buckets, num_rows, keys)
    if added.shape[1]:
        position = torch.searchsorted(added[0], keys).clamp(max=added.shape[1] - 1)
        slots = torch.where((slots < 0) & (added[0][position] == keys), num_rows + added[1][position], slots)
    return torch.cat([weight, added_rows]), slots


implement([keyed_forward, hashed_forward])


# Shapes for tracing.


def _fake(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    lookups, (out_size, out_dtype, *_) = Lookups.split(arguments)
    return lookups.values.new_empty(lookups.output_shape(out_size), dtype=out_dtype)


def _fake_hashed(weights: list[Tensor], bits: list[int], *arguments: Any) -> tuple[Tensor, Tensor]:
    out = _fake(weights, bits, *arguments)
    return out, torch.empty(1, dtype=torch.int64)


torch.library.register_fake("meshrec::keyed_forward", _fake)
torch.library.register_fake("meshrec::hashed_forward", _fake_hashed)
