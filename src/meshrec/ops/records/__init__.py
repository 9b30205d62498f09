"""Table rows in fixed-size file records, and the cache replacement policy; ``naive.py`` documents both."""

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.records.naive import DAMAGED, END_OF_FILE, RecordLayout

__all__ = ["DAMAGED", "END_OF_FILE", "RecordLayout", "newly_used", "read", "select_victims", "write"]


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
    """Copy rows between a file and memory, in the ``operator`` direction.

    Args:
        operator: ``records_read`` or ``records_write``.
        file: open file descriptor.
        layout: record layout.
        keys: record keys, int64 [N], ascending.
        parts: row memory, one tensor ``[height, ...]`` per row part.
        slots: row in ``parts`` per key, int64 [N].
        in_flight: concurrent disk requests; 0: sequential requests by the caller.
        ring: use io_uring where available, instead of threads.

    Returns:
        Failures, int64 [failures, 2]: index in ``keys``, and the cause. Empty if all went well.
    """
    memory = [part.detach() for part in parts]
    return operator(file, list(layout), keys, memory, slots, in_flight, ring)


read = functools.partial(_transfer, operators.records_read)
"""Read rows from a file into memory; see ``naive.records_read`` and ``_transfer``."""
write = functools.partial(_transfer, operators.records_write)
"""Write rows from memory to a file; see ``naive.records_write`` and ``_transfer``."""
newly_used: Callable[[Tensor, Tensor, int], Tensor] = operators.cache_used
"""Return the cache slots used by a batch, unless an earlier call for the batch returned them; see
``naive.cache_used``.
"""
select_victims: Callable[[Tensor, Tensor, int, int], tuple[Tensor, int]] = operators.cache_victims
"""Select cache slots to evict; see ``naive.cache_victims``."""
