"""Lookups by raw 64-bit ID, in read-only tables with a key index and in tables with a hash index.

In a read-only table, an ID without a stored row reads an initial row, computed from the ID. In a
hashed table, every ID must have a slot.
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
    """Initial row distribution for a table: uniform in [low, high), a function of seed and ID."""

    seed: int
    low: float
    high: float


class KeyIndex(NamedTuple):
    """Tensors mapping keys (mixed IDs) to read-only table rows; see ``naive`` for the layout."""

    buckets: Tensor
    added: Tensor
    added_rows: Tensor
    seed: int
    """Seed for the mix from IDs to keys."""
    first: UniformInit
    """Initial row for an ID not in the index."""


def forward(
    bits: Sequence[int],
    keyed: Mapping[int, KeyIndex],
    weights: Sequence[Tensor],
    lookups: Lookups,
    options: LookupOptions,
) -> Tensor:
    """Look up and pool rows from several tables, some read by raw ID, some quantized.

    Args:
        bits: bits per code and table; 0 for floating-point rows.
        keyed: key indexes for tables read by raw ID, by table number.
        weights: rows per table.
        lookups: the batch, and the tables read by the features.
        options: output size and dtype, and whether to check IDs and weights.

    Returns:
        As ``ops.tbe.forward``.

    Raises:
        ValueError: as for ``ops.tbe.forward``, or a key index does not fit its rows.
    """
    key_tensors = [tensor for index in keyed.values() for tensor in index[:3]]
    seeds = [seed for index in keyed.values() for seed in (index.seed, index.first.seed)]
    firsts = [
        x
        for _, low, high in (index.first for index in keyed.values())
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
    """Find slots for raw IDs in hash indexes, and look up and pool the rows, in one call.

    Args:
        bits: bits per code and table; 0 for floating-point rows.
        indexes: hash index and mix seed per hashed table, by table number.
        weights: rows per table, by slot.
        lookups: the batch, and the tables read by the features.
        options: output size and dtype, and whether to check IDs and weights.

    Returns:
        As ``ops.tbe.forward``. None if an ID has no slot, or an index is not a compiled one.

    Raises:
        ValueError: as for ``ops.tbe.forward``.
    """
    memory: list[Tensor] = []
    seeds: list[int] = []
    for index, mix_seed in indexes.values():
        if index.kernel_tensors is None:
            return None
        tensors, seed = index.kernel_tensors
        memory += tensors
        seeds += [seed, mix_seed]
    out, absent = _hashed_forward(list(weights), list(bits), *lookups, *options, list(indexes), memory, seeds)
    return out if int(absent) == 0 else None
