"""Jagged operators in plain torch: the reference for the kernels, and the fallback without them.

Shape legend: B bags over all keys, K keys, M keys in a result, N IDs. All bags for key 0 come first, then
all bags for key 1, etc. ``segments`` holds the index where the bags for each key start, followed by B; int64
[K+1] on the CPU. With ``segments=None``, each key has B / K bags.
"""

from typing import Any

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.library import implement, register_fakes

_LENGTH_DTYPES = (torch.int32, torch.int64)


def lengths_to_offsets(lengths_B: Tensor) -> Tensor:
    """Return the cumulative sums of the bag lengths, with a leading 0.

    Returns:
        Offsets [B+1] in the same dtype. Bag ``b`` holds the IDs ``offsets[b]`` to ``offsets[b+1]``
            (exclusive).

    Raises:
        ValueError: lengths are not an integer vector, or int32 lengths on the CPU have a larger sum than
            int32 can hold.
    """
    _check_integers(lengths_B, "lengths_to_offsets: lengths")
    # On a GPU, reading the sum would wait for the device.
    if lengths_B.dtype == torch.int32 and lengths_B.is_cpu:
        total = int(lengths_B.sum(dtype=torch.int64))
        if total > torch.iinfo(torch.int32).max:
            raise ValueError(
                f"lengths_to_offsets: the lengths sum to {total}, which int32 offsets cannot hold; pass "
                "int64 lengths"
            )
    # cumsum writes to a slice, which saves a concatenation.
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
    """Return the bags for key ``order[0]``, then for key ``order[1]``, etc. Keys may be omitted or repeated.

    Args:
        values_N: any dtype; may have trailing dimensions.
        weights_N: any dtype and trailing dimensions, or None.
        num_bags: number of bags in the result. B if each key occurs once.
        num_values: number of values in the result. N if each key occurs once. Both sizes are arguments, so
            that tracing and memory allocation know them without reading tensors.

    Returns:
        Lengths [num_bags], values [num_values, ...], and weights [num_values, ...]. If ``weights_N`` is None,
            the weights are an empty tensor [0].

    Raises:
        ValueError: lengths do not sum to N, ``num_bags`` or ``num_values`` is wrong, or ``order`` has an
            invalid key.
    """
    op = "permute_jagged"
    _check_integers(lengths_B, f"{op}: lengths")
    num_ids = _num_rows(values_N, f"{op}: values")
    if weights_N is not None and _num_rows(weights_N, f"{op}: weights") != num_ids:
        raise ValueError(f"{op}: {weights_N.size(0)} weights do not match {num_ids} values")
    bags = _first_bags(segments, num_keys, lengths_B.numel(), op)
    offsets = torch.cat([lengths_B.new_zeros(1, dtype=torch.int64), lengths_B.cumsum(0, dtype=torch.int64)])
    # Where the values for each key start. A single transfer; on a GPU it synchronizes.
    ids = offsets[torch.tensor(bags, device=offsets.device)].tolist()
    # Checked per key, so that the message names the key.
    for key in range(num_keys):
        # A key can only shrink the offset if some length is negative.
        if ids[key + 1] < ids[key]:
            total = ids[key + 1] - ids[key]
            raise ValueError(f"{op}: the lengths of key {key} sum to {total}; lengths are 0 or more")
    if ids[-1] != num_ids:
        raise ValueError(f"{op}: the lengths sum to {ids[-1]}, but there are {num_ids} values")
    for key in order:
        if not 0 <= key < num_keys:
            raise ValueError(f"{op}: order names key {key}; there are {num_keys} keys")
    for expected, name, starts in ((num_bags, "bags", bags), (num_values, "values", ids)):
        # Kernels allocate the result with the caller's sizes, so these must be right.
        total = sum(starts[key + 1] - starts[key] for key in order)
        if total != expected:
            raise ValueError(f"{op}: the keys in order hold {total} {name}, but num_{name} is {expected}")
    return (
        _gather_ranges(lengths_B, bags, order),
        _gather_ranges(values_N, ids, order),
        no_weights(values_N) if weights_N is None else _gather_ranges(weights_N, ids, order),
    )


def permute_samples(
    order_B: Tensor,
    fields: list[Tensor],
    values: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
    tables: list[Tensor],
    firsts: list[int],
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Copy B of n samples in the given order, and look up their IDs; indices may repeat.

    Args:
        order_B: sample indices from 0 to n - 1, int64.
        fields: other tensors of the samples, [n, ...] each, such as labels. At least one.
        values: IDs or codes per key, int32 or int64. Sample i has those from ``offsets[key][i]`` to
            ``offsets[key][i + 1]``, exclusive.
        offsets: as above, int64 [n + 1] per key. The first offset need not be 0.
        weights: weight per ID, float32, per key. Empty: no weights.
        tables: IDs of consecutive codes, int64, per key; codes outside the table have its last ID. An empty
            table: the values are IDs.
        firsts: code of the first ID in the table, per key.

    Returns:
        - IDs of all keys, int64 [N]: those of the first key first.
        - Start per key and sample, followed by N, int64 [K * B + 1].
        - Weights, float32 [N]; without weights, an empty tensor.
        - Fields, [B, ...] each.

    Raises:
        ValueError: an argument has another type or size, or an index is out of range.
    """
    op = "permute_samples"
    sizes = [len(argument) for argument in (values, offsets, tables, firsts, weights or values)]
    if not fields or len(set(sizes)) > 1:
        raise ValueError(
            f"{op}: needs a field or more, and as many offsets, tables, firsts (and weights, if any) as "
            f"values; got {len(fields)} fields, and the others {sizes}"
        )
    num = len(fields[0])
    if any(len(field) != num for field in fields):
        raise ValueError(f"{op}: fields have the sizes {[len(field) for field in fields]}; give equal ones")
    _check_range(op, "order", order_B, 0, num - 1)
    lengths, positions = [], []
    for ids, bounds in zip(values, offsets, strict=True):
        _check_range(op, "offsets", bounds, 0, len(ids))
        if len(bounds) != num + 1 or (bounds.diff() < 0).any():
            raise ValueError(f"{op}: {len(bounds)} offsets of {num} samples must ascend")
        lengths_B = bounds.diff()[order_B]
        # Of the key's IDs, by sample.
        within = torch.arange(int(lengths_B.sum())) - (lengths_B.cumsum(0) - lengths_B).repeat_interleave(
            lengths_B
        )
        positions.append(bounds[order_B].repeat_interleave(lengths_B) + within)
        lengths.append(lengths_B)
    if any(len(weight) != len(ids) for weight, ids in zip(weights, values, strict=False)):
        raise ValueError(f"{op}: a key has another number of weights than of values")
    all_ids = [
        _looked_up(codes[index], table, first)
        for codes, index, table, first in zip(values, positions, tables, firsts, strict=True)
    ]
    return (
        torch.cat([order_B[:0], *all_ids]),
        lengths_to_offsets(torch.cat([order_B[:0], *lengths])),
        torch.cat([no_weights(order_B), *map(torch.Tensor.__getitem__, weights, positions)]),
        [field[order_B] for field in fields],
    )


def _looked_up(codes: Tensor, table: Tensor, first: int) -> Tensor:
    """Return the IDs of codes, int64; see `permute_samples`."""
    if not len(table):
        return codes.long()
    # Differences beyond int64 wrap to negative numbers, or are too large: both are outside the table.
    index = codes.long() - first
    return table[torch.where((index < 0) | (index >= len(table)), len(table) - 1, index)]


def concat_samples(
    starts: list[int],
    stops: list[int],
    num_keys: int,
    fields: list[Tensor],
    values: list[Tensor],
    offsets: list[Tensor],
    weights: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Concatenate ranges of samples from P pieces, the results of `permute_samples`, to a batch of B samples.

    Args:
        starts: first sample per piece.
        stops: end of the samples, exclusive, per piece.
        num_keys: K.
        fields: fields, with as many rows as the piece has samples: field 0 of all pieces, then field 1, etc.
        values: IDs of all keys, int64, per piece.
        offsets: start per key and sample, int64, per piece.
        weights: weights, float32, per piece. Empty: no weights.

    Returns:
        - IDs of all keys, int64 [N], in the layout of KeyedJaggedTensor.
        - Number of IDs per key and sample, int64 [K * B].
        - Weights, float32 [N]; without weights, an empty tensor.
        - Number of IDs per key, int64 [K].
        - Fields, [B, ...] each.

    Raises:
        ValueError: keys or pieces are missing, an argument has another type or size, or a range is outside
            its piece.
    """
    op, num = "concat_samples", len(starts)
    sizes = [len(argument) for argument in (stops, values, offsets, weights or values)]
    if not num or num_keys < 1 or set(sizes) != {num} or len(fields) % num:
        raise ValueError(
            f"{op}: needs a key and a piece or more, and for each piece a stop, values, offsets and fields; "
            f"got {num_keys} keys, {num} starts, {sizes} others and {len(fields)} fields"
        )
    # Range of the IDs, by key and piece.
    ranges: list[list[slice]] = [[] for _ in range(num_keys)]
    lengths: list[list[Tensor]] = [[] for _ in range(num_keys)]
    for start, stop, ids, bounds in zip(starts, stops, values, offsets, strict=True):
        size, remainder = divmod(len(bounds) - 1, num_keys)
        if remainder or not 0 <= start <= stop <= size:
            raise ValueError(
                f"{op}: samples {start} to {stop} of a piece with {len(bounds)} offsets for {num_keys} keys"
            )
        _check_range(op, "offsets", bounds, 0, len(ids))
        for key in range(num_keys):
            of_key = bounds[key * size + start : key * size + stop + 1]
            ranges[key].append(slice(int(of_key[0]), int(of_key[-1])))
            lengths[key].append(of_key.diff())
    totals = [sum(map(len, (range(part.start, part.stop) for part in parts))) for parts in ranges]
    num_rows = [(len(bounds) - 1) // num_keys for bounds in offsets] * (len(fields) // num)
    if [len(field) for field in fields] != num_rows:
        raise ValueError(f"{op}: fields have the sizes {[len(field) for field in fields]}, not {num_rows}")
    parts = [slice(*bounds) for bounds in zip(starts, stops, strict=True)]
    return (
        torch.cat([ids[part] for of_key in ranges for ids, part in zip(values, of_key, strict=True)]),
        torch.cat([part for of_key in lengths for part in of_key]),
        torch.cat(
            [
                no_weights(values[0]),
                *(w[p] for of_key in ranges for w, p in zip(weights, of_key, strict=False)),
            ]
        ),
        torch.tensor(totals),
        [
            torch.cat([field[part] for field, part in zip(fields[at : at + num], parts, strict=True)])
            for at in range(0, len(fields), num)
        ],
    )


def _check_range(op: str, name: str, integers: Tensor, least: int, greatest: int) -> None:
    """Raise ValueError unless a tensor is an int64 vector with values in the range."""
    if integers.dtype != torch.int64 or integers.dim() != 1:
        raise ValueError(f"{op}: {name} must be a vector of int64, got {integers.dtype} {integers.shape}")
    if len(integers) and (integers.min() < least or integers.max() > greatest):
        raise ValueError(
            f"{op}: {name} must lie in [{least}, {greatest}], got {integers.min()} to {integers.max()}"
        )


def no_weights(like: Tensor) -> Tensor:
    """Return the empty float32 tensor that stands for absent weights in an operator result."""
    return like.new_empty(0, dtype=torch.float32)


def _gather_ranges(tensor: Tensor, starts: list[int], order: list[int]) -> Tensor:
    """Concatenate the rows ``starts[i]`` to ``starts[i+1]`` (exclusive) for each ``i`` in ``order``."""
    # Slices along the first dimension keep trailing dimensions.
    pieces = [tensor[starts[part] : starts[part + 1]] for part in order]
    return torch.cat(pieces) if pieces else tensor[:0].clone()


def _first_bags(segments: Tensor | None, num_keys: int, num_bags: int, op: str) -> list[int]:
    """Return the index where the bags for each key start, followed by B."""
    if num_keys < 0:
        raise ValueError(f"{op}: num_keys must be 0 or more, got {num_keys}")
    if segments is None:
        # Without keys there can be no bags, which the next line checks too.
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
    # On the CPU by contract, so this does not synchronize.
    bags: list[int] = segments.tolist()
    if bags[0] != 0 or bags[-1] != num_bags or bags != sorted(bags):
        raise ValueError(f"{op}: segments must rise from 0 to the number of bags, {num_bags}")
    return bags


def _check_integers(tensor: Tensor, name: str) -> None:
    """Raise ValueError unless the tensor is an int32 or int64 vector."""
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have 1 dimension, got {tensor.dim()}")
    if tensor.dtype not in _LENGTH_DTYPES:
        raise ValueError(f"{name} must be int32 or int64")


def _num_rows(tensor: Tensor, name: str) -> int:
    """Return the size in the first dimension. Raises ValueError for a tensor without dimensions."""
    if tensor.dim() < 1:
        raise ValueError(f"{name} must have at least 1 dimension")
    return tensor.size(0)


implement([concat_samples, lengths_to_offsets, permute_jagged, permute_samples])


# Shapes for tracing, and gradients, shared by all kernels.


def _fake_permute_jagged(order: list[int], num_keys: int, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result shapes of ``permute_jagged``, for tracing."""
    lengths, values, weights, _, num_bags, num_values = arguments
    return (
        lengths.new_empty(num_bags),
        values.new_empty(num_values, *values.shape[1:]),
        no_weights(values) if weights is None else weights.new_empty(num_values, *weights.shape[1:]),
    )


def _fake_permute_samples(
    order: Tensor, fields: list[Tensor], values: list[Tensor], _: Any, weights: list[Tensor], *__: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the result shapes of ``permute_samples``, for tracing."""
    num, num_values = len(order), torch.library.get_ctx().new_dynamic_size()
    return (
        order.new_empty(num_values),
        order.new_empty(len(values) * num + 1),
        order.new_empty(num_values if weights else 0, dtype=torch.float32),
        [field.new_empty(num, *field.shape[1:]) for field in fields],
    )


def _fake_concat_samples(
    starts: list[int],
    stops: list[int],
    num_keys: int,
    fields: list[Tensor],
    values: list[Tensor],
    *offsets_and_weights: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """Return the result shapes of ``concat_samples``, for tracing."""
    num, num_values = sum(stops) - sum(starts), torch.library.get_ctx().new_dynamic_size()
    return (
        values[0].new_empty(num_values),
        values[0].new_empty(num_keys * num),
        values[0].new_empty(num_values if offsets_and_weights[-1] else 0, dtype=torch.float32),
        values[0].new_empty(num_keys),
        [field.new_empty(num, *field.shape[1:]) for field in fields[:: len(starts)]],
    )


register_fakes(
    concat_samples=_fake_concat_samples,
    lengths_to_offsets=lambda lengths: lengths.new_empty(lengths.numel() + 1),
    permute_jagged=_fake_permute_jagged,
    permute_samples=_fake_permute_samples,
)


def _permute_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save the order and the bag lengths of ``permute_jagged`` for the backward pass."""
    ctx.order, ctx.num_keys, lengths, values, weights, segments, ctx.num_bags, ctx.num_values = inputs
    # Only bag lengths are saved: the gradient needs positions, not values.
    ctx.save_for_backward(lengths, segments)
    ctx.values_shape = values.shape
    ctx.weights_shape = None if weights is None else weights.shape


def _permute_backward(
    ctx: Any, grad_lengths: Tensor, grad_values: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return a gradient per argument of ``permute_jagged``; None for all but values and weights."""
    lengths, segments = ctx.saved_tensors
    # Permuting positions gives the source for every result value. Recomputed here, because saving it would
    # hold an int64 per value through the whole forward pass.
    ids = torch.arange(ctx.values_shape[0], device=lengths.device)
    _, sources, _ = operators.permute_jagged(
        ctx.order, ctx.num_keys, lengths, ids, None, segments, ctx.num_bags, ctx.num_values
    )

    def _scatter(grad: Tensor | None, shape: torch.Size | None, needed: bool) -> Tensor | None:
        """Return the gradient of an input with this shape; None if it is missing or not needed."""
        if grad is None or shape is None or not needed:
            return None
        # A repeated key receives the sum of the gradients of all copies.
        return grad.new_zeros(shape).index_add(0, sources, grad)

    values_grad = _scatter(grad_values, ctx.values_shape, ctx.needs_input_grad[3])
    weights_grad = _scatter(grad_weights, ctx.weights_shape, ctx.needs_input_grad[4])
    return None, None, None, values_grad, weights_grad, None, None, None


torch.library.register_autograd("meshrec::permute_jagged", _permute_backward, setup_context=_permute_context)
