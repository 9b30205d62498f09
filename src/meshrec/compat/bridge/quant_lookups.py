"""Lookups in quantised tables that torch.fx records as one call each and TorchScript compiles."""

import torch
from torch import Tensor

# B bags, N ids, D width; a part of a table is a rectangle of its rows and columns, kept on some device


def bag_rows(
    weight: Tensor,
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    bits: int,
    dim: int,
    pooling: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``[B, D]``: the pooled bags of one feature in one table; see ``ops.nbit``."""
    nameless = torch.empty(0, dtype=torch.uint8)
    num_bags = offsets.numel() - 1
    return torch.ops.meshrec.nbit_forward(  # type: ignore[no-any-return]
        [weight],
        [bits],
        values,
        offsets,
        sample_weights,
        None,
        1,
        [0],
        [0],
        [pooling],
        False,
        [dim],
        num_bags,
        dtype,
        True,
        nameless,
    )


def id_rows(
    weight: Tensor, values: Tensor, offsets: Tensor, bits: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """Return ``[N, D]``: the row of each id of one feature in one table."""
    nameless = torch.empty(0, dtype=torch.uint8)
    rows = torch.ops.meshrec.nbit_forward(
        [weight],
        [bits],
        values,
        offsets,
        None,
        None,
        1,
        [0],
        [0],
        [2],
        True,
        [dim],
        values.numel() * dim,
        dtype,
        True,
        nameless,
    )
    return rows.view(-1, dim)  # type: ignore[no-any-return]


def rows_within(
    weight: Tensor,
    place: list[int],
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    bits: int,
    dim: int,
    pooling: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return the rows that one part of a table gives for one feature, on the device of the IDs.

    Args:
        weight: the parameter that holds the part.
        place: start of the part in the parameter, shape of the part, its first row in the table, and the
            number of rows of the whole table.
        values: IDs of the feature.
        offsets: start of each bag.
        sample_weights: per-sample weights, or None.
        bits: bits per code.
        dim: number of columns of the part.
        pooling: 0: sum, 1: mean; 2: a row for each ID, 0 for IDs of other parts.
        dtype: type of the result.

    Raises:
        ValueError: an ID is outside the table.
    """
    start, num_rows, width, first, total = place[0], place[1], place[2], place[3], place[4]
    rows = weight.flatten()[start : start + num_rows * width].view(num_rows, width)
    ids, ends = values, offsets
    scale: Tensor | None = sample_weights
    inside = torch.ones(0, dtype=torch.bool, device=values.device)
    if num_rows != total:
        if bool(((values < 0) | (values >= total)).any()):
            raise ValueError("an id is outside its table. Raise num_embeddings, or hash the ids.")
        inside = (values >= first) & (values < first + num_rows)
        ids = values[inside] - first
        counts = torch.zeros(values.numel() + 1, dtype=torch.long, device=values.device)
        counts[1:] = inside.cumsum(0)
        ends = counts[offsets.long()].to(offsets.dtype)
        if sample_weights is not None:
            scale = sample_weights[inside]
    home, there = values.device, weight.device
    if scale is not None:
        scale = scale.to(there)
    if pooling < 2:
        return bag_rows(rows, ids.to(there), ends.to(there), scale, bits, dim, pooling, dtype).to(home)
    found = id_rows(rows, ids.to(there), ends.to(there), bits, dim, dtype).to(home)
    if num_rows == total:
        return found
    result = torch.zeros(values.numel(), dim, dtype=dtype, device=home)
    result[inside] = found
    return result


def mean_of(total: Tensor, offsets: Tensor) -> Tensor:
    """Return the mean over each bag from its sum; 0 for empty bags."""
    return total / (offsets[1:] - offsets[:-1]).clamp(min=1).unsqueeze(1).to(total.dtype)
