"""Updates from gradients that are known by row, not by lookup."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.ops import tbe
from meshrec.ops.tbe.layout import NONE

# U touched rows, D width


def rows_as_lookups(rows: Sequence[Tensor], dims: Sequence[int], tables: Sequence[int]) -> tbe.Lookups:
    """Return lookups that read every row once, unpooled, so that their gradients are the sparse gradients.

    The matching gradient is that of each table, ``[U, D]``, flattened, one table after the other.

    Args:
        rows: the touched rows of each table, int64 [U]. Gradients of repeated rows are added.
        dims: the width of each table.
        tables: the index of each table.
    """
    counts = torch.tensor([0, *(len(rows_U) for rows_U in rows)], dtype=torch.int64)
    num_tables = len(tables)
    return tbe.Lookups(
        values=torch.cat(list(rows)) if num_tables > 1 else rows[0],
        offsets=counts.cumsum(0).to(rows[0].device),
        per_sample_weights=None,
        segments=None,
        num_keys=num_tables,
        keys=list(range(num_tables)),
        tables=list(tables),
        pooling=[NONE] * num_tables,
        flat=True,
        dims=list(dims),
    )


def update_rows(
    weight: Tensor,
    state: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    *,
    optimizer: int,
    hyper: Tensor,
) -> None:
    """Update distinct rows [U] of a whole table in place, from their gradients [U, D]."""
    lookups = rows_as_lookups([rows], [grad.shape[1]], [0])
    tbe.update(grad.reshape(-1), *lookups, [weight], list(state), optimizer, hyper, None, [])


def slot_major(state: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return slot 0 of all tables, then slot 1."""
    return [slot for slots in zip(*state, strict=True) for slot in slots]
