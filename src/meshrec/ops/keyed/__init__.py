"""Lookups by raw 64-bit ID: in read-only tables with a key index, and in hashed tables with a hash index.

A raw ID is any 64-bit integer, not a row number, so the row must be found first. In a read-only (exported)
table, an ID without a stored row reads an initial row that is computed from the ID. In a hashed table that
is being trained, every ID must have a slot.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.index import HashIndex
from meshrec.ops.initial_rows import value_spacing
from meshrec.ops.keyed.naive import find_rows, pack_buckets
from meshrec.ops.tbe import LookupOptions, Lookups

__all__ = ["KeyIndex", "UniformInit", "find_rows", "forward", "hashed_forward", "pack_buckets"]

_forward: Callable[..., Tensor] = operators.keyed_forward
_hashed_forward: Callable[..., tuple[Tensor, Tensor]] = operators.hashed_forward


class UniformInit(NamedTuple):
    """Distribution of a table's initial row values: uniform in [low, high), given the seed and the ID."""

    seed: int
    low: float
    high: float


class KeyIndex(NamedTuple):
    """Tensors that map keys (hashed IDs) to the rows of a read-only table; ``naive`` documents the layout."""

    buckets: Tensor
    """Keys of the exported rows, packed into cache lines, int64 [b, 8]; see ``naive.pack_buckets``."""
    added_keys: Tensor
    """Keys of rows added after the export, and their positions in ``added_rows``; int64 [2, m]."""
    added_rows: Tensor
    """Rows added after the export."""
    seed: int
    """Seed for the hash from IDs to keys."""
    initial_values: UniformInit
    """Initial row values for an ID without a key."""


def forward(
    bits: Sequence[int],
    keyed: Mapping[int, KeyIndex],
    weights: Sequence[Tensor],
    lookups: Lookups,
    options: LookupOptions,
) -> Tensor:
    """Look up rows in several tables, and pool them. Tables may be read by raw ID, and may be quantized.

    A raw ID is any int64 value. The lookup finds the row through a `KeyIndex`. In a table without a key
    index, an ID is a row number.

    Args:
        bits: bits per quantized value, per table; 0 for a floating-point table.
        keyed: key indexes of the tables that are read by raw ID, by table number.
        lookups: the batch, and the table that every feature reads.
        options: output size and dtype, and whether to check IDs and weights.

    Returns:
        As ``ops.tbe.forward``.

    Raises:
        ValueError: as for ``ops.tbe.forward``, or a key index does not fit its rows.
    """
    # The operator takes flat lists: three tensors, two seeds and two floats per keyed table.
    key_tensors = [tensor for index in keyed.values() for tensor in index[:3]]
    seeds = [seed for index in keyed.values() for seed in (index.seed, index.initial_values.seed)]
    # Kernels take the distance between values instead of the upper bound.
    firsts = [
        x
        for _, low, high in (index.initial_values for index in keyed.values())
        for x in (low, value_spacing(low, high))
    ]
    return _forward(list(weights), list(bits), *lookups, *options, list(keyed), key_tensors, seeds, firsts)


def hashed_forward(
    bits: Sequence[int],
    indexes: Mapping[int, tuple[HashIndex, int]],
    weights: Sequence[Tensor],
    lookups: Lookups,
    options: LookupOptions,
) -> Tensor | None:
    """Find the slots for raw IDs in hash indexes, then look up and pool the rows, in a single call.

    A raw ID is any int64 value. In a hashed table, a hash index maps it to a slot, which is a row number.

    Args:
        bits: bits per quantized value, per table; 0 for a floating-point table.
        indexes: hash index of every hashed table, and the seed with which ``mix`` hashes IDs before they are
            searched in the index; by table number.
        lookups: the batch, and the table that every feature reads.
        options: output size and dtype, and whether to check IDs and weights.

    Returns:
        As ``ops.tbe.forward``. None if an ID has no slot, or if an index is not compiled. The caller must
            then find the slots in a separate step.

    Raises:
        ValueError: as for ``ops.tbe.forward``.
    """
    memory: list[Tensor] = []
    seeds: list[int] = []
    for index, mix_seed in indexes.values():
        # Without compiled kernels, the caller finds the slots in Python.
        if index.kernel_tensors is None:
            return None
        tensors, seed = index.kernel_tensors
        memory += tensors
        seeds += [seed, mix_seed]
    # Reading the count is free: hashed tables are on the CPU.
    out, absent = _hashed_forward(list(weights), list(bits), *lookups, *options, list(indexes), memory, seeds)
    return out if int(absent) == 0 else None
