"""The jagged ops in plain torch: the reference for the kernels, and the fallback without one.

Shape legend: B bags (of all keys), K keys, M keys of a result, N IDs, P buckets. Bags are key-major: those of
key 0, then those of key 1, ... ``segments`` is an int64 CPU tensor [K+1] with the first bag of each key, and
B at its end. None stands for B / K bags per key.
"""

import torch
from torch import Tensor

from meshrec.ops.library import implement

_LENGTH_DTYPES = (torch.int32, torch.int64)


def lengths_to_offsets(lengths_B: Tensor) -> Tensor:
    """Return the running sums of the lengths, with a 0 before them.

    Args:
        lengths_B: int32 or int64.

    Returns:
        Offsets [B+1] of the lengths' dtype; bag ``b`` holds the IDs ``offsets[b] ... offsets[b+1]``.

    Raises:
        ValueError: The lengths are not a vector of integers.
    """
    _check_integers(lengths_B, "lengths_to_offsets: lengths")
    offsets = lengths_B.new_zeros(lengths_B.numel() + 1)
    torch.cumsum(lengths_B, 0, dtype=lengths_B.dtype, out=offsets[1:])
    return offsets


def permute_jagged(
    order: list[int],
    num_keys: int,
    lengths_B: Tensor,
    values_N: Tensor,
    weights_N: Tensor | None,
    segments: Tensor | None,
    num_bags: int,
    num_values: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the bags of key ``order[0]``, then those of ``order[1]``, ... A key may be left out or repeated.

    Args:
        order: M keys.
        num_keys: K.
        lengths_B: int32 or int64.
        values_N: Any dtype; may have more dimensions after the first.
        weights_N: Any dtype and trailing dimensions, or None.
        segments: See the module's docstring.
        num_bags: The number of bags in the result.
        num_values: The number of values in the result. It is given so that tracing and allocation know the
            sizes without reading tensors. If every key comes once, the sizes are B and N.

    Returns:
        Lengths [num_bags], values [num_values, ...], weights [num_values, ...] (without weights: [0]).

    Raises:
        ValueError: The lengths do not sum to N, ``num_bags`` or ``num_values`` is wrong, or a key of
            ``order`` does not exist.
    """
    op = "permute_jagged"
    _check_integers(lengths_B, f"{op}: lengths")
    num_ids = _num_rows(values_N, f"{op}: values")
    if weights_N is not None and _num_rows(weights_N, f"{op}: weights") != num_ids:
        raise ValueError(f"{op}: {weights_N.size(0)} weights do not match {num_ids} values")
    bags = _first_bags(segments, num_keys, lengths_B.numel(), op)
    offsets = torch.cat([lengths_B.new_zeros(1, dtype=torch.int64), lengths_B.cumsum(0, dtype=torch.int64)])
    ids = offsets[torch.tensor(bags, device=offsets.device)].tolist()
    for key in range(num_keys):
        if ids[key + 1] < ids[key]:
            total = ids[key + 1] - ids[key]
            raise ValueError(f"{op}: the lengths of key {key} sum to {total}; lengths are 0 or more")
    _check_sum(op, ids[-1], num_ids)
    for key in order:
        if not 0 <= key < num_keys:
            raise ValueError(f"{op}: order names key {key}; there are {num_keys} keys")
    for given, name, firsts in ((num_bags, "bags", bags), (num_values, "values", ids)):
        total = sum(firsts[key + 1] - firsts[key] for key in order)
        if total != given:
            raise ValueError(f"{op}: the keys in order hold {total} {name}, but num_{name} is {given}")
    return (
        _gather_ranges(lengths_B, bags, order),
        _gather_ranges(values_N, ids, order),
        no_weights(values_N) if weights_N is None else _gather_ranges(weights_N, ids, order),
    )


def bucketize_jagged(
    lengths_B: Tensor,
    values_N: Tensor,
    weights_N: Tensor | None,
    segments: Tensor | None,
    boundaries_KP: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split every bag by row intervals, and make its IDs relative to their interval.

    The result is bucket-major: all bags of bucket 0 (key by key), then those of bucket 1, ... IDs keep their
    order within a new bag.

    Args:
        lengths_B: int32 or int64.
        values_N: IDs, int32 or int64.
        weights_N: One floating-point value per ID, or None.
        segments: See the module's docstring.
        boundaries_KP: int64 [K, P+1], ascending along each row: bucket ``p`` takes the IDs of key ``k`` from
            ``boundaries[k, p]`` up to, but without, ``boundaries[k, p+1]``. An interval may be empty.

    Returns:
        Lengths [P*B], IDs [N] (minus the interval's start), weights [N] (without weights: [0]), and positions
            int64 [N]: the index in the result of each ID of the input, so that ``result[positions]`` has the
            input's order.

    Raises:
        ValueError: An ID lies outside its key's intervals, a length is negative, or the lengths do not sum to
            N.
    """
    op = "bucketize_jagged"
    _check_integers(lengths_B, f"{op}: lengths")
    _check_integers(values_N, f"{op}: values")
    _check_boundaries(boundaries_KP)
    _check_weights(weights_N, values_N)
    device, num_bags = values_N.device, lengths_B.numel()
    num_keys, num_buckets = boundaries_KP.size(0), boundaries_KP.size(1) - 1
    bags = _first_bags(segments, num_keys, num_bags, op)
    _check_lengths(lengths_B, values_N.numel())
    keys_B = torch.repeat_interleave(torch.tensor(bags, device=device).diff())
    bags_N = torch.repeat_interleave(lengths_B.long())
    keys_N = keys_B[bags_N]
    boundaries_NP = boundaries_KP.to(device)[keys_N]
    ids_N = values_N.long()
    _check_inside(ids_N, boundaries_NP, keys_N, bags_N, bags)
    buckets_N = (boundaries_NP[:, 1:] <= ids_N[:, None]).sum(1)
    local_N = ids_N - boundaries_NP.gather(1, buckets_N[:, None]).squeeze(1)
    new_bags_N = buckets_N * num_bags + bags_N
    sources_N = torch.argsort(new_bags_N, stable=True)
    positions_N = torch.empty_like(sources_N)
    positions_N[sources_N] = torch.arange(sources_N.numel(), device=device)
    return (
        torch.bincount(new_bags_N, minlength=num_buckets * num_bags).to(lengths_B.dtype),
        local_N[sources_N].to(values_N.dtype),
        no_weights(values_N) if weights_N is None else weights_N[sources_N],
        positions_N,
    )


def no_weights(like: Tensor) -> Tensor:
    """Return the empty float32 tensor that an op returns if it got no weights."""
    return like.new_empty(0, dtype=torch.float32)


def _gather_ranges(tensor: Tensor, firsts: list[int], order: list[int]) -> Tensor:
    """Return the rows ``firsts[i] ... firsts[i+1]`` for every ``i`` of ``order``."""
    pieces = [tensor[firsts[part] : firsts[part + 1]] for part in order]
    return torch.cat(pieces) if pieces else tensor[:0].clone()


def _first_bags(segments: Tensor | None, num_keys: int, num_bags: int, op: str) -> list[int]:
    if num_keys < 0:
        raise ValueError(f"{op}: num_keys must be 0 or more, got {num_keys}")
    if segments is None:
        num_bags_per_key = num_bags // num_keys if num_keys else 0
        if num_bags_per_key * num_keys != num_bags:
            raise ValueError(
                f"{op}: {num_bags} bags do not divide evenly among {num_keys} keys; "
                "pass segments, the first bag of each key"
            )
        return [key * num_bags_per_key for key in range(num_keys + 1)]
    if segments.dtype != torch.int64 or segments.dim() != 1 or segments.device.type != "cpu":
        raise ValueError(f"{op}: segments must be an int64 vector on the CPU")
    if segments.numel() != num_keys + 1:
        raise ValueError(
            f"{op}: segments must have num_keys + 1 = {num_keys + 1} elements, got {segments.numel()}"
        )
    bags: list[int] = segments.tolist()
    if bags[0] != 0 or bags[-1] != num_bags or bags != sorted(bags):
        raise ValueError(f"{op}: segments must rise from 0 to the number of bags, {num_bags}")
    return bags


def _check_integers(tensor: Tensor, what: str) -> None:
    if tensor.dim() != 1:
        raise ValueError(f"{what} must have 1 dimension, got {tensor.dim()}")
    if tensor.dtype not in _LENGTH_DTYPES:
        raise ValueError(f"{what} must be int32 or int64")


def _num_rows(tensor: Tensor, what: str) -> int:
    if tensor.dim() < 1:
        raise ValueError(f"{what} must have at least 1 dimension")
    return tensor.size(0)


def _check_sum(op: str, total: int, num_ids: int) -> None:
    if total != num_ids:
        raise ValueError(f"{op}: the lengths sum to {total}, but there are {num_ids} values")


def _check_lengths(lengths_B: Tensor, num_ids: int) -> None:
    op = "bucketize_jagged"
    negative = (lengths_B < 0).nonzero()
    if negative.numel():
        bag = int(negative[0])
        raise ValueError(f"{op}: the length of bag {bag} is {int(lengths_B[bag])}; lengths are 0 or more")
    _check_sum(op, int(lengths_B.sum()), num_ids)


def _check_boundaries(boundaries_KP: Tensor) -> None:
    if boundaries_KP.dtype != torch.int64 or boundaries_KP.dim() != 2 or boundaries_KP.size(1) < 2:
        raise ValueError("bucketize_jagged: boundaries must be an int64 tensor [num_keys, num_buckets + 1]")
    falling = (boundaries_KP.diff() < 0).any(1).nonzero()
    if falling.numel():
        raise ValueError(f"bucketize_jagged: the boundaries of key {int(falling[0])} must not fall")


def _check_weights(weights_N: Tensor | None, values_N: Tensor) -> None:
    if weights_N is None:
        return
    if weights_N.shape != values_N.shape:
        raise ValueError(
            f"bucketize_jagged: weights must be one per value, got {weights_N.numel()} "
            f"for {values_N.numel()} values"
        )
    if not weights_N.is_floating_point():
        raise ValueError("bucketize_jagged: weights must be floating point")


def _check_inside(
    ids_N: Tensor, boundaries_NP: Tensor, keys_N: Tensor, bags_N: Tensor, bags: list[int]
) -> None:
    outside = ((ids_N < boundaries_NP[:, 0]) | (ids_N >= boundaries_NP[:, -1])).nonzero()
    if outside.numel():
        i = int(outside[0])
        key = int(keys_N[i])
        low, high = int(boundaries_NP[i, 0]), int(boundaries_NP[i, -1])
        raise ValueError(
            f"bucketize_jagged: id {int(ids_N[i])} of key {key} (sample {int(bags_N[i]) - bags[key]}) "
            f"is outside [{low}, {high})"
        )


implement([lengths_to_offsets, permute_jagged, bucketize_jagged])
