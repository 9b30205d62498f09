"""Lookups of raw 64-bit IDs: in tables that only read, where every ID has a row, by its key or by a formula;
and in tables with a hash index, as long as each ID has a slot.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.first_rows import step_of
from meshrec.ops.index import HashIndex
from meshrec.ops.keyed import fakes  # noqa: F401 - registers the shape
from meshrec.ops.keyed.naive import buckets_of, rows_of
from meshrec.ops.tbe import LookupOptions, Lookups

__all__ = ["FirstRows", "FoundBy", "buckets_of", "forward", "hashed_forward", "rows_of"]

_forward: Callable[..., Tensor] = torch.ops.meshrec.keyed_forward.default
_hashed_forward: Callable[..., tuple[Tensor, Tensor]] = torch.ops.meshrec.hashed_forward.default


class FirstRows(NamedTuple):
    """The formula of the first rows of a table: uniform in [low, high)."""

    seed: int
    low: float
    high: float


class FoundBy(NamedTuple):
    """The tensors that find the rows of a table by key; see ``naive``."""

    buckets: Tensor
    added: Tensor
    added_rows: Tensor
    seed: int
    """The seed of the mix that makes keys of IDs."""
    first: FirstRows


def forward(
    bits: Sequence[int],
    keyed: Mapping[int, FoundBy],
    weights: Sequence[Tensor],
    lookups: Lookups,
    options: LookupOptions,
) -> Tensor:
    """Look up in tables of which some are read by raw IDs, and some are quantised.

    Args:
        bits: bits per code of each table; 0 for floating-point rows.
        keyed: how the rows of tables with keys are found, by the table's number.
        weights: the rows of each table.
        lookups: the batch, and the tables that its features read.
        options: size and dtype of the result, and whether IDs and weights are checked.

    Raises:
        ValueError: as for ``ops.tbe.forward``, or the keys of a table do not fit its rows.
    """
    found_by = [tensor for each in keyed.values() for tensor in each[:3]]
    seeds = [seed for each in keyed.values() for seed in (each.seed, each.first.seed)]
    firsts = [
        number
        for each in keyed.values()
        for number in (each.first.low, step_of(each.first.low, each.first.high))
    ]
    return _forward(list(weights), list(bits), *lookups, *options, list(keyed), found_by, seeds, firsts)


def hashed_forward(
    bits: Sequence[int],
    indexes: Mapping[int, tuple[HashIndex, int]],
    weights: Sequence[Tensor],
    lookups: Lookups,
    options: LookupOptions,
) -> Tensor | None:
    """Find the rows of IDs in hash indexes and look them up, in one call.

    Args:
        bits: bits per code of each table; 0 for floating-point rows.
        indexes: by the table's number, its index, and the seed of the mix that makes keys of IDs.
        weights: the rows of each table, by slot.
        lookups: the batch, and the tables that its features read.
        options: size and dtype of the result, and whether IDs and weights are checked.

    Returns:
        None if an ID has no slot, or an index is not one of the kernels.

    Raises:
        ValueError: as for ``ops.tbe.forward``.
    """
    memory: list[Tensor] = []
    seeds: list[int] = []
    for index, mix_seed in indexes.values():
        if index.kernel_parts is None:
            return None
        tensors, seed = index.kernel_parts
        memory += tensors
        seeds += [seed, mix_seed]
    found, absent = _hashed_forward(
        list(weights), list(bits), *lookups, *options, list(indexes), memory, seeds
    )
    return found if int(absent) == 0 else None
