"""Quantized table lookups that torch.fx records as single calls and TorchScript compiles."""

import torch
from torch import Tensor

from meshrec.ops import operators

# B bags, N IDs, D width. A table shard is a rectangle of rows and columns, on some device.


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
    """Return pooled rows [B, D] for a feature; see ``ops.nbit``.

    Args:
        weight: quantized rows with scales and biases, uint8 [rows, bytes].
        values: IDs [N].
        offsets: bag boundaries [B + 1].
        sample_weights: per-sample weights [N], or None.
        pooling: 0: sum, 1: mean.
    """
    return _forward(weight, values, offsets, sample_weights, bits, dim, pooling, offsets.numel() - 1, dtype)


def id_rows(
    weight: Tensor, values: Tensor, offsets: Tensor, bits: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """Return a row per ID, [N, D], for a feature.

    Args:
        weight: quantized rows with scales and biases, uint8 [rows, bytes].
        values: IDs [N].
        offsets: bag boundaries [B + 1].
    """
    return _forward(weight, values, offsets, None, bits, dim, 2, values.numel() * dim, dtype).view(-1, dim)


def _forward(
    weight: Tensor,
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    bits: int,
    dim: int,
    pooling: int,
    out_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Look up a feature in a table with the quantized kernel.

    Args:
        weight: quantized rows, uint8 [rows, bytes].
        values: IDs [N].
        offsets: bag boundaries [B + 1].
        sample_weights: per-sample weights [N], or None.
        pooling: 0: sum, 1: mean, 2: none.
        out_size: number of bags B; with ``pooling`` 2, number of elements in the result, N times D.

    Returns:
        Pooled rows [B, D]; the rows of all IDs as a flat tensor if ``pooling`` is 2.
    """
    tables, features, names = [weight], [0], torch.empty(0, dtype=torch.uint8)
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        return operators.nbit_forward(  # type: ignore[no-any-return]
            tables,
            [bits],
            values,
            offsets,
            sample_weights,
            None,
            1,
            features,
            features,
            [pooling],
            pooling == 2,
            [dim],
            out_size,
            dtype,
            True,
            names,
        )
    # TorchScript has no exceptions, so it calls the operator without the wrapper's error translation.
    return torch.ops.meshrec.nbit_forward(  # type: ignore[no-any-return]
        tables,
        [bits],
        values,
        offsets,
        sample_weights,
        None,
        1,
        features,
        features,
        [pooling],
        pooling == 2,
        [dim],
        out_size,
        dtype,
        True,
        names,
    )


def rows_within(
    weight: Tensor,
    location: list[int],
    values: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    bits: int,
    dim: int,
    pooling: int,
    dtype: torch.dtype,
) -> Tensor:
    """Look up a feature in one shard of a table.

    IDs whose rows are in other shards contribute nothing to sums and means.

    Args:
        location: five numbers: index of the shard's first element in the flat parameter, number of rows in
            the shard, elements per stored row, table row at which the shard starts, and number of rows in the
            table.
        values: IDs [N].
        offsets: bag boundaries [B + 1].
        sample_weights: per-sample weights [N], or None.
        pooling: 0: sum, 1: mean, 2: a row per ID, with zeros for IDs in other shards.

    Returns:
        Pooled rows [B, dim], or a row per ID [N, dim], on the device of the IDs.

    Raises:
        ValueError: an ID is outside the table.
    """
    # A list of ints and no tuple unpacking: torch.fx records the argument as a constant, TorchScript compiles
    # it.
    start, num_rows, width, first, total = location[0], location[1], location[2], location[3], location[4]
    rows = weight.flatten()[start : start + num_rows * width].view(num_rows, width)
    ids, ends = values, offsets
    scale: Tensor | None = sample_weights
    inside = torch.ones(0, dtype=torch.bool, device=values.device)
    if num_rows != total:
        # The kernel checks against the shard only, and the filter below would drop such IDs in silence.
        if bool(((values < 0) | (values >= total)).any()):
            raise ValueError("an id is outside its table. Raise num_embeddings, or hash the ids.")
        inside = (values >= first) & (values < first + num_rows)
        ids = values[inside] - first
        counts = torch.zeros(values.numel() + 1, dtype=torch.long, device=values.device)
        counts[1:] = inside.cumsum(0)
        ends = counts[offsets.long()].to(offsets.dtype)
        if sample_weights is not None:
            scale = sample_weights[inside]
    # IDs travel to the shard's device, and rows come back.
    home, there = values.device, weight.device
    if scale is not None:
        scale = scale.to(there)
    if pooling < 2:
        return bag_rows(rows, ids.to(there), ends.to(there), scale, bits, dim, pooling, dtype).to(home)
    shard_rows = id_rows(rows, ids.to(there), ends.to(there), bits, dim, dtype).to(home)
    if num_rows == total:
        return shard_rows
    result = torch.zeros(values.numel(), dim, dtype=dtype, device=home)
    result[inside] = shard_rows
    return result


def mean_of(total: Tensor, offsets: Tensor) -> Tensor:
    """Divide bag sums [B, D] by bag lengths. The mean of an empty bag is 0."""
    return total / (offsets[1:] - offsets[:-1]).clamp(min=1).unsqueeze(1).to(total.dtype)
