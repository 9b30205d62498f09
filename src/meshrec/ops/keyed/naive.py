"""Lookups of raw 64-bit IDs in tables that only read, in plain torch: the reference for the kernel.

A table with keys is found by three tensors:

- ``buckets``: int64 [b, 8]: the mixed IDs of its rows in ascending order, in buckets of one cache line, see
  ``buckets_of``;
- ``added``: int64 [2, m]: further keys, ascending, and for each its row in
- ``added_rows`` [c, columns].

An ID with none of these keys reads its first row (``ops.first_rows``), in the table's type. First rows of
codes are rounded by their minimum and maximum.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshrec.ops.first_rows import first_rows
from meshrec.ops.index.naive import index_find, mix
from meshrec.ops.library import implement
from meshrec.ops.nbit import naive as nbit
from meshrec.ops.tbe import Lookups
from meshrec.ops.tbe.layout import OutputLayout, make_layout

# F features, N ids, n rows, U unknown IDs, b buckets

KEYS_PER_BUCKET = 7
"""Keys of a bucket: with the number of the first row, they fill a cache line."""
PER_TABLE = 3
"""Tensors that find the rows of a table."""


def num_homes(num_rows: int) -> int:
    """Return the number of equal intervals of keys: a bucket each, full to 0.72."""
    return max(1, (25 * num_rows + 125) // 126)


def _homes(keys_N: Tensor, num_rows: int) -> Tensor:
    """Return the interval of each key, in the order of keys: the first 64 bits of a product of 96."""
    number, half = num_homes(num_rows), (1 << 32) - 1
    high = (keys_N >> 32) + (1 << 31)
    return (high * number + ((keys_N & half) * number >> 32)) >> 32


def buckets_of(keys_n: Tensor) -> Tensor:
    """Return ascending keys in buckets: int64 [b, 8].

    A bucket has the number of its first row, and then the keys of this row and the next ones, seven in all.
    Each interval of keys (``num_homes``) has a bucket, which begins at its first key, or before it: no bucket
    begins later than where the one before ends. So a key lies in the bucket of its interval or a little
    further on. After the last key, its bucket repeats it.

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
    for place in range(KEYS_PER_BUCKET if num else 0):
        buckets[:, 1 + place] = keys_n[(firsts + place).clamp_(max=num - 1)]
    return buckets


def rows_of(buckets_b: Tensor, num_rows: int, keys_N: Tensor) -> Tensor:
    """Return the row of each key, -1 where it has none: int64 [N].

    Args:
        buckets_b: int64 [b, 8], see ``buckets_of``.
        num_rows: the number of keys in the buckets.
        keys_N: int64 [N], which may repeat.
    """
    rows = torch.full_like(keys_N, -1)
    left, place = torch.arange(len(keys_N) if num_rows else 0), _homes(keys_N, num_rows)
    while len(left):
        own, wanted = buckets_b[place[left]], keys_N[left]
        equal = own[:, 1:] == wanted[:, None]
        is_here = equal.any(1)
        rows[left[is_here]] = own[is_here, 0] + equal[is_here].to(torch.uint8).argmax(1)
        place[left] += 1
        left = left[~is_here & (own[:, -1] < wanted) & (place[left] < len(buckets_b))]
    return rows


def keyed_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    """Run ``nbit_forward`` on tables of which some (``keyed``) are read by raw IDs.

    Args:
        weights: see ``nbit_forward``.
        bits: see ``nbit_forward``.
        arguments: those of ``nbit_forward``, and then the numbers of the tables with keys; three tensors
            for each of them; two seeds for each (of its keys and of its first rows); and two numbers for each
            (the least first value, and the distance of two values).

    Raises:
        ValueError: as for ``nbit_forward``, or the tensors of a table do not fit together.
    """
    lookups, options = Lookups.split(arguments)
    *options, keyed, found_by, seeds, firsts = options
    if len(found_by) != PER_TABLE * len(keyed) or not len(seeds) == len(firsts) == 2 * len(keyed):
        raise ValueError(
            "there must be three tensors, two seeds and two numbers for each of the "
            f"{len(keyed)} tables with keys."
        )

    def found(table: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        k = keyed.index(table)
        tensors = found_by[PER_TABLE * k : PER_TABLE * (k + 1)]
        row, slots = _found(ids, weights[table], tensors, seeds[2 * k], table)
        unknown, dim = slots < 0, lookups.dims[lookups.tables.index(table)]
        low, step = firsts[2 * k : 2 * k + 2]
        first = first_rows(ids[unknown], seeds[2 * k + 1], low, step, 0, dim)
        first = nbit.nbit_quantize(first, bits[table], None) if bits[table] else first.to(row.dtype)
        slots[unknown] = torch.arange(len(row), len(row) + len(first))
        return torch.cat([row, first]), slots

    return _looked_up(weights, bits, lookups, options, keyed, found)


def hashed_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> tuple[Tensor, Tensor]:
    """Run ``nbit_forward`` on tables of which some (``hashed``) are read by IDs that have a slot in an index.

    Args:
        weights: see ``nbit_forward``.
        bits: see ``nbit_forward``.
        arguments: those of ``nbit_forward``, and then the numbers of the tables with an index; the four
            tensors of each (``index_find``); and two seeds for each (of the index, and of the mix that makes
            keys of IDs).

    Returns:
        The result, and the number of IDs without a slot, int64 [1]. If there are any, the result has no
        meaning, and they need not all be counted.
    """
    lookups, options = Lookups.split(arguments)
    *options, hashed, memory, seeds = options
    if len(memory) != 4 * len(hashed) or len(seeds) != 2 * len(hashed):
        raise ValueError(
            f"there must be four tensors and two seeds for each of the {len(hashed)} hashed tables."
        )
    absent = torch.zeros(1, dtype=torch.int64)

    def found(table: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        k = hashed.index(table)
        slots = index_find(memory[4 * k : 4 * k + 4], mix(ids, seeds[2 * k + 1]), seeds[2 * k])
        for piece in _layout(lookups).pieces:
            if lookups.tables[piece.feature] == table:
                absent.add_((slots[piece.ids] < 0).sum())
        slots[slots < 0] = len(weights[table])  # also IDs of other tables
        return torch.cat([weights[table], weights[table].new_zeros(1, weights[table].shape[1])]), slots

    return _looked_up(weights, bits, lookups, options, hashed, found), absent


def _looked_up(
    weights: list[Tensor],
    bits: list[int],
    lookups: Lookups,
    options: Sequence[Any],
    chosen: list[int],
    found: Callable[[int, Tensor], tuple[Tensor, Tensor]],
) -> Tensor:
    """Run ``nbit_forward`` for one table after the other, as some have slots of their own for the same IDs.

    ``found`` returns the rows of one of the ``chosen`` tables, and the row of each ID.
    """
    out_size, out_dtype, check_ids, names = options
    layout = _layout(lookups)
    if layout.out_size != out_size:
        raise ValueError(f"out_size is {out_size} but the lookups give {layout.out_size}.")
    shape = [out_size] if lookups.flat else [out_size, sum(lookups.dims)]
    out = torch.zeros(shape, dtype=out_dtype, device=lookups.values.device)
    lines = bytes(names.tolist()).splitlines(keepends=True)
    for table in sorted(set(lookups.tables)):
        features = [f for f, each in enumerate(lookups.tables) if each == table]
        own = lookups._replace(
            keys=[lookups.keys[f] for f in features],
            tables=[table] * len(features),
            pooling=[lookups.pooling[f] for f in features],
            dims=[lookups.dims[f] for f in features],
        )
        rows = weights
        if table in chosen:
            row, slots = found(table, own.values.long())
            rows = [*weights[:table], row, *weights[table + 1 :]]
            own = own._replace(values=slots)
        part = _layout(own)
        said = torch.tensor(list(b"".join(lines[f] for f in features if f < len(lines))), dtype=torch.uint8)
        result = nbit.nbit_forward(rows, bits, *own, part.out_size, out_dtype, check_ids, said)
        targets = [piece for piece in layout.pieces if piece.feature in features]
        for piece, target in zip(part.pieces, targets, strict=True):
            dim = own.dims[piece.feature]
            target.of(out, dim).copy_(piece.of(result, dim))
    return out


def _layout(lookups: Lookups) -> OutputLayout:
    return make_layout(
        lookups.offsets,
        lookups.segments,
        lookups.num_keys,
        lookups.keys,
        lookups.dims,
        pooling=lookups.pooling,
        flat=lookups.flat,
    )


def _found(
    ids: Tensor, weight: Tensor, tensors: list[Tensor], seed: int, table: int
) -> tuple[Tensor, Tensor]:
    """Return the rows of a table, those added last, and the row of each ID; -1 for unknown IDs."""
    buckets, added, added_rows = tensors
    num_rows = len(weight)
    if buckets.dim() != 2 or buckets.shape[1] != 1 + KEYS_PER_BUCKET or len(buckets) < num_homes(num_rows):
        raise ValueError(
            f"table {table} has {num_rows} rows and buckets {list(buckets.shape)}, which do not fit "
            "together. Export the model again."
        )
    wanted = mix(ids, seed)
    slots = rows_of(buckets, num_rows, wanted)
    if added.shape[1]:
        place = torch.searchsorted(added[0], wanted).clamp(max=added.shape[1] - 1)
        slots = torch.where((slots < 0) & (added[0][place] == wanted), num_rows + added[1][place], slots)
    return torch.cat([weight, added_rows]), slots


implement([keyed_forward, hashed_forward])
