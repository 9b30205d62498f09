"""Lookups by raw 64-bit ID in plain torch: the reference for the kernels, and the fallback without them.

A read-only table has three tensors that map keys (hashed IDs) to rows:

- ``buckets``: int64 [b, 8], the keys of the exported rows in ascending order, packed so that a bucket is a
  cache line; see ``pack_buckets``.
- ``added_rows``: [c, columns], the rows added to the table after the export.
- ``added``: int64 [2, m], the keys of the added rows in ascending order, and their positions in
  ``added_rows``.

An ID without a key reads its initial row (``ops.first_rows``), in the table's dtype. If the table is
quantized, the initial row is quantized by its minimum and maximum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshrec.ops.index.naive import index_find, mix
from meshrec.ops.initial_rows import first_rows
from meshrec.ops.library import implement, register_fakes
from meshrec.ops.nbit import naive as nbit
from meshrec.ops.tbe import Lookups

# Shape legend: F features, N IDs, n rows, U unknown IDs, b buckets.

KEYS_PER_BUCKET = 7
"""Keys per bucket. Together with the first row number, they fill a 64-byte cache line."""
PER_TABLE = 3
"""Number of key index tensors per table."""


def num_home_buckets(num_rows: int) -> int:
    """Return the number of equal intervals into which `pack_buckets` divides the key range.

    With this number, the keys of an interval fill 72 % of a bucket on average.
    """
    # 126 / 25 rows per interval, rounded up: 5.04 keys for the 7 entries of a bucket.
    return max(1, (25 * num_rows + 125) // 126)


def _home_buckets(keys_N: Tensor, num_rows: int) -> Tensor:
    """Return the home bucket of each key: the number of the interval that contains the key, int64 [N].

    The interval number is the key times the number of intervals, divided by 2^64. The product has 96 bits, so
    it is computed from two halves of the key.
    """
    number, half = num_home_buckets(num_rows), (1 << 32) - 1
    # Keys are ordered as signed integers, so shift the range to start from 0.
    high = (keys_N >> 32) + (1 << 31)
    return (high * number + ((keys_N & half) * number >> 32)) >> 32


def pack_buckets(keys_n: Tensor) -> Tensor:
    """Pack ascending keys into buckets of cache line size: int64 [b, 8].

    A row is the position of a key in ``keys_n``. A bucket holds the number of a row, then the keys of this
    row and of the next six rows. The key range is divided into equal intervals (see ``num_home_buckets``),
    and bucket i belongs to interval i. A bucket starts at the first key of the interval. If the previous
    bucket ends before this key, the bucket starts where the previous bucket ends, so that no key is left out.
    A search for a key therefore begins at the bucket of the key's interval. If that bucket ends before the
    key, the search continues with the next bucket. The last bucket is filled up with copies of the last key.

    Args:
        keys_n: int64 [n], ascending.
    """
    num, count = len(keys_n), num_home_buckets(len(keys_n))
    sizes = torch.bincount(_home_buckets(keys_n, num), minlength=count)
    # If every bucket before it were full, bucket i would start at 7 i. A bucket starts at the first key of
    # its interval, but never after the end of the bucket before it: cummin applies both limits to all
    # buckets.
    full = KEYS_PER_BUCKET * torch.arange(count)
    firsts = full + (sizes.cumsum(0) - sizes - full).cummin(0).values
    # Keys of the last intervals may overflow the last bucket, so append buckets for them.
    more = max(0, -(-(num - int(firsts[-1])) // KEYS_PER_BUCKET) - 1)
    firsts = torch.cat([firsts, firsts[-1] + KEYS_PER_BUCKET * torch.arange(1, more + 1)])
    buckets = torch.zeros(len(firsts), 1 + KEYS_PER_BUCKET, dtype=torch.int64)
    buckets[:, 0] = firsts
    for column in range(KEYS_PER_BUCKET if num else 0):
        buckets[:, 1 + column] = keys_n[(firsts + column).clamp_(max=num - 1)]
    return buckets


def find_rows(buckets_b: Tensor, num_rows: int, keys_N: Tensor) -> Tensor:
    """Return the row of every key, or -1 for a key that is absent: int64 [N].

    Args:
        buckets_b: int64 [b, 8], from ``pack_buckets``.
        num_rows: number of keys in the buckets.
        keys_N: keys to search, int64 [N]; may repeat.
    """
    rows = torch.full_like(keys_N, -1)
    pending, bucket = torch.arange(len(keys_N) if num_rows else 0), _home_buckets(keys_N, num_rows)
    while len(pending):
        # Search all pending keys in parallel, starting at the bucket of the interval.
        entries, keys = buckets_b[bucket[pending]], keys_N[pending]
        equal = entries[:, 1:] == keys[:, None]
        is_here = equal.any(1)
        rows[pending[is_here]] = entries[is_here, 0] + equal[is_here].to(torch.uint8).argmax(1)
        # Continue in the next bucket while the last key of this one is smaller than the key.
        bucket[pending] += 1
        pending = pending[~is_here & (entries[:, -1] < keys) & (bucket[pending] < len(buckets_b))]
    return rows


def keyed_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    """Look up rows as ``nbit_forward`` does. Keyed tables are read by raw ID, other tables by row number.

    A raw ID is any int64 value. The key index of a table maps the hash of the ID to a row.

    Args:
        arguments: the arguments to ``nbit_forward``, followed by four lists: the numbers of the keyed tables;
            their key index tensors (three per table, see the module docstring); their seeds (two per table,
            for keys and for initial rows); and floats (two per table, minimum initial value and distance
            between adjacent initial values).

    Raises:
        ValueError: as for ``nbit_forward``, or the tensors of a table do not fit together.
    """
    lookups, options = Lookups.split(arguments)
    *options, keyed, key_tensors, seeds, firsts = options
    if len(key_tensors) != PER_TABLE * len(keyed) or not len(seeds) == len(firsts) == 2 * len(keyed):
        raise ValueError(
            "there must be three tensors, two seeds and two numbers for each of the "
            f"{len(keyed)} tables with keys."
        )

    def find_rows(table: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return a tensor of rows, and for each ID the number of its row in this tensor.

        The tensor has the exported rows, the rows added after the export, and an initial row for every
        unknown ID.
        """
        k = keyed.index(table)
        tensors = key_tensors[PER_TABLE * k : PER_TABLE * (k + 1)]
        row, slots = _find_rows_and_added(ids, weights[table], tensors, seeds[2 * k], table)
        # Compute initial rows for unknown IDs, and append them to the rows of the table.
        unknown, dim = slots < 0, lookups.dims[lookups.tables.index(table)]
        low, step = firsts[2 * k : 2 * k + 2]
        first = first_rows(ids[unknown], seeds[2 * k + 1], low, step, 0, dim)
        first = nbit.nbit_quantize(first, bits[table], None) if bits[table] else first.to(row.dtype)
        # Row numbers after the last table row.
        slots[unknown] = torch.arange(len(row), len(row) + len(first))
        return torch.cat([row, first]), slots

    return _look_up_by_table(weights, bits, lookups, options, keyed, find_rows)


def hashed_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> tuple[Tensor, Tensor]:
    """Look up rows as ``nbit_forward`` does. In hashed tables, a hash index maps an ID to a slot.

    Args:
        arguments: the arguments to ``nbit_forward``, followed by three lists: the numbers of the hashed
            tables; their index tensors (four per table, see ``index_find``); and their seeds (two per table,
            of the index and for ``mix``, which maps IDs to keys).

    Returns:
        The lookup result, and the number of IDs without a slot, int64 [1]. If this number is not 0, it is
            only a lower bound, and the lookup result is meaningless.
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
        """Return the table rows followed by a zero row, and the row number for each ID.

        An ID without a slot gets the zero row. Adds the number of such IDs to ``absent``.
        """
        k = hashed.index(table)
        slots = index_find(memory[4 * k : 4 * k + 4], mix(ids, seeds[2 * k + 1]), seeds[2 * k])
        for piece in lookups.layout().pieces:
            if lookups.tables[piece.feature] == table:
                # Count only IDs of features that read this table. The batch also has IDs of other keys.
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
    """Run ``nbit_forward`` table by table, because equal IDs have different rows in different tables.

    Args:
        indexed_tables: numbers of the tables with an index.
        find_rows: called with a table number and all IDs; returns the rows of the table, and the row number
            for every ID.
    """
    out_size, out_dtype, check_ids, names = options
    layout = lookups.layout()
    if layout.out_size != out_size:
        raise ValueError(f"out_size is {out_size} but the lookups give {layout.out_size}.")
    out = torch.zeros(lookups.output_shape(out_size), dtype=out_dtype, device=lookups.values.device)
    # A call gets only the names of its features, so that errors name the right feature.
    lines = bytes(names.tolist()).splitlines(keepends=True)
    for table in sorted(set(lookups.tables)):
        features = [f for f, read in enumerate(lookups.tables) if read == table]
        table_lookups = lookups._replace(
            keys=[lookups.keys[f] for f in features],
            tables=[table] * len(features),
            pooling=[lookups.pooling[f] for f in features],
            dims=[lookups.dims[f] for f in features],
        )
        # Only the table of this pass is replaced; the others keep their numbers.
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
        # Pieces are in the same order in both layouts: block by block, then by feature.
        targets = [piece for piece in layout.pieces if piece.feature in features]
        for piece, target in zip(table_layout.pieces, targets, strict=True):
            dim = table_lookups.dims[piece.feature]
            target.view_of(out, dim).copy_(piece.view_of(result, dim))
    return out


def _find_rows_and_added(
    ids: Tensor, weight: Tensor, tensors: list[Tensor], seed: int, table: int
) -> tuple[Tensor, Tensor]:
    """Return the exported rows followed by the rows added later, and for each ID its row number or -1.

    The row number is -1 if the ID has neither an exported nor an added row.

    Args:
        ids: raw IDs, int64 [N].
        tensors: ``buckets``, ``added`` and ``added_rows``; see the module docstring.
    """
    buckets, added, added_rows = tensors
    num_rows = len(weight)
    if (
        buckets.dim() != 2
        or buckets.shape[1] != 1 + KEYS_PER_BUCKET
        or len(buckets) < num_home_buckets(num_rows)
    ):
        raise ValueError(
            f"table {table} has {num_rows} rows and buckets {list(buckets.shape)}, which do not fit "
            "together. Export the model again."
        )
    keys = mix(ids, seed)
    slots = find_rows(buckets, num_rows, keys)
    if added.shape[1]:
        # Added keys are few, so a binary search will do.
        position = torch.searchsorted(added[0], keys).clamp(max=added.shape[1] - 1)
        # Added rows are numbered after the exported rows.
        slots = torch.where((slots < 0) & (added[0][position] == keys), num_rows + added[1][position], slots)
    return torch.cat([weight, added_rows]), slots


implement([keyed_forward, hashed_forward])
register_fakes(
    keyed_forward=nbit.forward_fake,
    hashed_forward=lambda *arguments: (nbit.forward_fake(*arguments), torch.empty(1, dtype=torch.int64)),
)
