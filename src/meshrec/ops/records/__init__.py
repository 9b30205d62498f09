"""Table rows in fixed-size file records, and the cache replacement policy; see ``naive.py``."""

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.records.naive import DAMAGED, END_OF_FILE, RecordLayout

__all__ = ["DAMAGED", "END_OF_FILE", "RecordLayout", "read", "used", "victims", "write"]


def _transfer(
    operator: Callable[..., Tensor],
    file: int,
    layout: RecordLayout,
    keys: Tensor,
    parts: Sequence[Tensor],
    slots: Tensor,
    *,
    in_flight: int = 0,
    ring: bool = True,
) -> Tensor:
    """Copy rows between a file and memory.

    Args:
        operator: the direction.
        file: open file descriptor.
        layout: record layout.
        keys: int64 [N], ascending.
        parts: row memory, ``[height, ...]`` per tensor.
        slots: row in ``parts`` per key, int64 [N].
        in_flight: concurrent disk requests; 0: sequential requests by the caller.
        ring: use io_uring where available, instead of threads.

    Returns:
        Failures, int64 [failures, 2]: position in ``keys``, and the cause.
    """
    memory = [part.detach() for part in parts]
    return operator(file, list(layout), keys, memory, slots, in_flight, ring)


read = functools.partial(_transfer, operators.records_read)
"""Read rows from a file into memory; see ``naive.records_read`` and ``_transfer``."""
write = functools.partial(_transfer, operators.records_write)
"""Write rows from memory to a file; see ``naive.records_write`` and ``_transfer``."""
used: Callable[[Tensor, Tensor, int], Tensor] = operators.cache_used
"""Return the slots used for the first time by a batch, and stamp them; see ``naive.cache_used``."""
victims: Callable[[Tensor, Tensor, int, int], tuple[Tensor, int]] = operators.cache_victims
"""Choose slots to evict; see ``naive.cache_victims``."""
