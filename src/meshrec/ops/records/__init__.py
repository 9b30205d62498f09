"""Table rows in fixed-size file records, and the cache replacement policy; see ``naive.py``."""

from collections.abc import Sequence

from torch import Tensor

from meshrec.ops import operators
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
    """Read rows from a file into memory; see ``naive.records_read``.

    Args:
        file: open file descriptor.
        layout: record layout.
        keys: int64 [N], ascending.
        parts: row memory, ``[height, ...]`` per tensor.
        slots: destination row in ``parts`` per key, int64 [N].
        in_flight: concurrent disk requests; 0: sequential reads by the caller.
        ring: use io_uring where available, instead of threads.

    Returns:
        Failures, int64 [failures, 2]: position in ``keys``, and the cause.
    """
    failures: Tensor = operators.records_read(
        file, list(layout), keys, [part.detach() for part in parts], slots, in_flight, ring
    )
    return failures


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
    """Write rows from memory to a file; see ``naive.records_write``.

    Args:
        file: open file descriptor.
        layout: record layout.
        keys: int64 [N], ascending.
        parts: row memory, ``[height, ...]`` per tensor.
        slots: source row in ``parts`` per key, int64 [N].
        in_flight: concurrent disk requests; 0: sequential writes by the caller.
        ring: use io_uring where available, instead of threads.

    Returns:
        Failures, int64 [failures, 2]: position in ``keys``, and the cause.
    """
    failures: Tensor = operators.records_write(
        file, list(layout), keys, [part.detach() for part in parts], slots, in_flight, ring
    )
    return failures


def used(slots: Tensor, stamps: Tensor, batch: int) -> Tensor:
    """Return the slots used for the first time by a batch, and stamp them; see ``naive.cache_used``.

    Args:
        slots: int64 [N]; -1: no slot.
        stamps: last batch per cache slot, int64. Modified in place.
        batch: batch number.
    """
    newly_used: Tensor = operators.cache_used(slots, stamps, batch)
    return newly_used


def victims(counts: Tensor, pins: Tensor, hand: int, num_victims: int) -> tuple[Tensor, int]:
    """Choose slots to evict; see ``naive.cache_victims``.

    Args:
        counts: reference count per slot, uint8. Modified in place.
        pins: pin count per slot, int32.
        hand: clock hand position.
        num_victims: number of slots to evict.

    Returns:
        Victims, int64, and the new hand position.
    """
    result: tuple[Tensor, int] = operators.cache_victims(counts, pins, hand, num_victims)
    return result
