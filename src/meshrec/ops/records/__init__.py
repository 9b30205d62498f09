"""Rows in records of a file, and which of them are in memory; see ``naive.py``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.ops.records import fakes  # noqa: F401 - registers the shapes
from meshrec.ops.records.naive import DAMAGED, END_OF_FILE, RecordLayout

__all__ = ["DAMAGED", "END_OF_FILE", "RecordLayout", "read", "used", "victims", "write"]


def read(
    file: int,
    layout: RecordLayout,
    keys: Tensor,
    parts: Sequence[Tensor],
    slots: Tensor,
    *,
    in_flight: int = 0,
    ring: bool = True,
) -> Tensor:
    """Read rows into memory; see ``naive.records_read``."""
    found: Tensor = torch.ops.meshrec.records_read.default(
        file, list(layout), keys, [part.detach() for part in parts], slots, in_flight, ring
    )
    return found


def write(
    file: int,
    layout: RecordLayout,
    keys: Tensor,
    parts: Sequence[Tensor],
    slots: Tensor,
    *,
    in_flight: int = 0,
    ring: bool = True,
) -> Tensor:
    """Write rows from memory; see ``naive.records_write``."""
    found: Tensor = torch.ops.meshrec.records_write.default(
        file, list(layout), keys, [part.detach() for part in parts], slots, in_flight, ring
    )
    return found


def used(slots: Tensor, stamps: Tensor, batch: int) -> Tensor:
    """Return the slots that a batch uses for the first time, and stamp them; see ``naive.cache_used``."""
    found: Tensor = torch.ops.meshrec.cache_used.default(slots, stamps, batch)
    return found


def victims(counts: Tensor, pins: Tensor, hand: int, number: int) -> tuple[Tensor, int]:
    """Choose slots to evict; see ``naive.cache_victims``."""
    found: tuple[Tensor, int] = torch.ops.meshrec.cache_victims.default(counts, pins, hand, number)
    return found
