"""Updates from gradients that are known by row, not by lookup."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.ops import tbe
from meshrec.ops.tbe.layout import NONE

# U touched rows, D width


def rows_as_lookups(rows: Sequence[Tensor], dims: Sequence[int], tables: Sequence[int]) -> tbe.Lookups:
    """Sparse gradients in the form of lookups: every row is looked up once, unpooled.

    Args:
        rows: per table int64 [U]; repeated rows are added up.
        dims: the tables' widths.
        tables: their indices. The gradient that belongs to it is the tables' ``[U, D]`` flattened, one after
            the other.
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
    """Step distinct rows [U] of a whole table from their gradients [U, D], in place."""
    lookups = rows_as_lookups([rows], [grad.shape[1]], [0])
    tbe.update(grad.reshape(-1), *lookups, [weight], list(state), optimizer, hyper, None, [])


def slot_major(state: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Slot 0 of all tables, then slot 1."""
    return [slot for slots in zip(*state, strict=True) for slot in slots]
