"""Lookups of raw 64-bit IDs in tables that only read, in plain torch: the reference for the kernel.

A table with keys is found by four tensors:

- ``keys``: int64 [n], ascending: the mixed IDs of its rows, in the order of the rows;
- ``starts``: int64 [2^k + 1]: the first position of each of 2^k equal intervals of keys, see ``starts_of``;
- ``added``: int64 [2, m]: further keys, ascending, and for each its row in
- ``added_rows`` [c, columns].

An ID with none of these keys reads its first row (``ops.first_rows``), in the table's type. First rows of
codes are rounded by their minimum and maximum.
"""

from typing import Any

import torch
from torch import Tensor

from meshrec.ops.first_rows import first_rows
from meshrec.ops.index.naive import mix
from meshrec.ops.library import implement
from meshrec.ops.nbit import naive as nbit
from meshrec.ops.tbe import Lookups
from meshrec.ops.tbe.layout import OutputLayout, make_layout

# F features, N ids, n rows, U unknown IDs

KEYS_PER_BUCKET = 4
"""Keys of a bucket of ``starts``, at most and on average: few buckets have more than a cache line."""
PER_TABLE = 4
"""Tensors that find the rows of a table."""


def starts_of(keys_n: Tensor) -> Tensor:
    """Return where each bucket of ascending keys begins, and their number n: int64 [number of buckets + 1].

    The number of buckets is the power of 2 that gives each about ``KEYS_PER_BUCKET`` keys. The keys of a
    bucket have the same highest bits, in signed order.

    Args:
        keys_n: int64 [n], ascending.
    """
    bits = max(0, (len(keys_n) - 1) // KEYS_PER_BUCKET).bit_length()
    size = 1 << (64 - bits)
    inner = torch.empty(0, dtype=torch.int64)
    if bits:
        firsts = torch.arange(1, 1 << bits).mul_(size - (size >> 63 << 64)).add_(-(1 << 63))
        inner = torch.searchsorted(keys_n, firsts)
    return torch.cat([torch.tensor([0]), inner, torch.tensor([len(keys_n)])])


def keyed_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    """Run ``nbit_forward`` on tables of which some (``keyed``) are read by raw IDs.

    Args:
        weights: see ``nbit_forward``.
        bits: see ``nbit_forward``.
        arguments: those of ``nbit_forward``, and then the numbers of the tables with keys; four tensors for
            each of them; two seeds for each (of its keys and of its first rows); and two numbers for each
            (the least first value, and the distance of two values).

    Raises:
        ValueError: as for ``nbit_forward``, or the tensors of a table do not fit together.
    """
    lookups, options = Lookups.split(arguments)
    *options, keyed, found_by, seeds, firsts = options
    if len(found_by) != PER_TABLE * len(keyed) or not len(seeds) == len(firsts) == 2 * len(keyed):
        raise ValueError(
            "there must be four tensors, two seeds and two numbers for each of the "
            f"{len(keyed)} tables with keys."
        )
    out_size, out_dtype, check_ids, names = options
    layout = _layout(lookups)
    if layout.out_size != out_size:
        raise ValueError(f"out_size is {out_size} but the lookups give {layout.out_size}.")
    shape = [out_size] if lookups.flat else [out_size, sum(lookups.dims)]
    out = torch.zeros(shape, dtype=out_dtype, device=lookups.values.device)
    lines = bytes(names.tolist()).splitlines(keepends=True)
    # One table after the other: those with keys have slots of their own for the same IDs.
    for table in sorted(set(lookups.tables)):
        features = [f for f, each in enumerate(lookups.tables) if each == table]
        own = lookups._replace(
            keys=[lookups.keys[f] for f in features],
            tables=[table] * len(features),
            pooling=[lookups.pooling[f] for f in features],
            dims=[lookups.dims[f] for f in features],
        )
        rows = weights
        if table in keyed:
            k = keyed.index(table)
            tensors = found_by[PER_TABLE * k : PER_TABLE * (k + 1)]
            row, slots = _found(own.values.long(), weights[table], tensors, seeds[2 * k], table)
            unknown = slots < 0
            (low, step), ids = firsts[2 * k : 2 * k + 2], own.values.long()[unknown]
            first = first_rows(ids, seeds[2 * k + 1], low, step, 0, own.dims[0])
            first = nbit.nbit_quantize(first, bits[table], None) if bits[table] else first.to(row.dtype)
            slots[unknown] = torch.arange(len(row), len(row) + len(first))
            rows = [*weights[:table], torch.cat([row, first]), *weights[table + 1 :]]
            own = own._replace(values=slots)
        part = _layout(own)
        said = torch.tensor(list(b"".join(lines[f] for f in features if f < len(lines))), dtype=torch.uint8)
        found = nbit.nbit_forward(rows, bits, *own, part.out_size, out_dtype, check_ids, said)
        targets = [piece for piece in layout.pieces if piece.feature in features]
        for piece, target in zip(part.pieces, targets, strict=True):
            dim = own.dims[piece.feature]
            target.of(out, dim).copy_(piece.of(found, dim))
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
    keys, starts, added, added_rows = tensors
    if len(keys) != len(weight) or (len(starts) - 1) & (len(starts) - 2) or len(starts) < 2:
        raise ValueError(
            f"table {table} has {len(weight)} rows, {len(keys)} keys and {len(starts) - 1} buckets, which do "
            "not fit together. Export the model again."
        )
    wanted = mix(ids, seed)
    slots = torch.full_like(wanted, -1)
    for known, rows in ((keys, torch.arange(len(keys))), (added[0], added[1] + len(keys))):
        if len(known):
            place = torch.searchsorted(known, wanted).clamp(max=len(known) - 1)
            slots = torch.where((slots < 0) & (known[place] == wanted), rows[place], slots)
    return torch.cat([weight, added_rows]), slots


implement([keyed_forward])
