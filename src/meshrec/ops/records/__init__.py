"""Table rows in fixed-size file records, and selection of rows to evict from a cache.

``naive.py`` documents the record format and the cache replacement policy.
"""

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
    """Copy table rows between a file and memory. The direction is that of ``operator``.

    Args:
        layout: positions and sizes of the records in the file.
        keys: key of each row, int64 [N], ascending.
        parts: memory for the rows, a tensor ``[height, ...]`` per row part (weight, optimizer state).
        slots: row index in ``parts`` for each key, int64 [N].
        in_flight: number of concurrent disk requests; 0: the calling thread transfers sequentially.
        ring: use io_uring where available, instead of threads.

    Returns:
        Failures, int64 [number of failures, 2]. A row has the index in ``keys`` and the cause, as for
            ``naive.records_read``. The result is empty if all went well.
    """
    # Parts may be parameters, which autograd protects from in-place writes.
    memory = [part.detach() for part in parts]
    return operator(file, list(layout), keys, memory, slots, in_flight, ring)


read = functools.partial(_transfer, operators.records_read)
"""Read rows from a file into memory; see ``naive.records_read`` and ``_transfer``."""
write = functools.partial(_transfer, operators.records_write)
"""Write rows from memory to a file; see ``naive.records_write`` and ``_transfer``."""
newly_used: Callable[[Tensor, Tensor, int], Tensor] = operators.cache_used
"""Return the cache slots that a batch uses for the first time; see ``naive.cache_used``."""
select_victims: Callable[[Tensor, Tensor, int, int], tuple[Tensor, int]] = operators.cache_victims
"""Select cache slots to evict; see ``naive.cache_victims``."""
