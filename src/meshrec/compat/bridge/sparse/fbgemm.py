"""FBGEMM's jagged and keyed tensor operators in ``torch.ops.fbgemm``, for processes without FBGEMM.

They are compositions of torch operators, so autograd, all devices and ``meta`` work.
"""

from itertools import pairwise

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.keyed import regrouped_values
from meshrec.compat.bridge.sparse.regrouping import kt_regroup_arguments
from meshrec.compat.bridge.sparse.segments import to_offsets


def _regroup_keyed_tensor(
    embs: list[Tensor], keys: list[list[str]], lengths: list[list[int]], groups: list[list[str]]
) -> list[Tensor]:
    return regrouped_values(embs, keys, lengths, groups, 1)


def _permute_multi_embedding(
    pooled_embs: list[Tensor], permutes: Tensor, in_shapes: Tensor, out_shapes: Tensor, out_lengths: list[int]
) -> list[Tensor]:
    """Return a tensor per group, concatenated from slices of the inputs.

    The rows of ``permutes`` describe the slices; see `kt_regroup_arguments`.
    """
    if permutes.is_meta:  # Slice sources are not readable on meta, but the result widths are.
        return [pooled_embs[0].new_empty(pooled_embs[0].size(0), width) for width in out_lengths]
    parts: list[list[Tensor]] = [[] for _ in out_lengths]
    for source, output, first, _, width, _ in permutes.tolist():
        parts[output].append(pooled_embs[source].narrow(1, first, width))
    return [torch.cat(part, dim=1) for part in parts]


def _permute_pooled_embs(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """Reorder column blocks. ``offset_dim_list`` has the block boundaries, ``permute_list`` the order."""
    pieces = torch.split(pooled_embs, offset_dim_list.diff().tolist(), dim=1)
    return torch.cat([pieces[i] for i in permute_list.tolist()], dim=1)


def _complete_sums(t_in: Tensor) -> Tensor:
    """Return prefix sums along the last dimension, with a leading 0."""
    return torch.nn.functional.pad(torch.cumsum(t_in, -1).to(t_in.dtype), (1, 0))


def _inclusive_sums(t_in: Tensor) -> Tensor:
    """Return prefix sums which include the element itself."""
    return torch.cumsum(t_in, 0).to(t_in.dtype)


def _exclusive_sums(t_in: Tensor) -> Tensor:
    """Return prefix sums which exclude the element itself."""
    return to_offsets(t_in)[:-1]


def _offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """Return, for all ``range_size`` values, the position of the value in the bag, [range_size].

    ``offsets`` has the start of every bag, without the end of the last bag.
    """
    ends = torch.cat([offsets[1:], offsets.new_full((1,), range_size)])
    starts = torch.repeat_interleave(offsets, ends - offsets, output_size=range_size)
    return torch.arange(range_size, dtype=offsets.dtype, device=offsets.device) - starts


def _padded(values: Tensor, offsets: Tensor, length: int, padding: float = 0) -> Tensor:
    """Pad bags to a dense tensor [B, length, ...]. Longer bags are truncated."""
    shape = (offsets.numel() - 1, length, *values.shape[1:])
    if values.is_meta:
        return values.new_empty(shape)
    position = torch.arange(length, device=offsets.device)
    is_inside = position < offsets.diff()[:, None]
    rows = (offsets[:-1, None] + position)[is_inside]
    return values.new_full(shape, padding).index_put((is_inside,), values.index_select(0, rows))


def _unpadded(dense: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """Remove the padding from bags in a dense tensor [B, T, ...].

    Args:
        offsets: bag boundaries [B + 1].
        total: number of values N; None: read it from ``offsets``.

    Returns:
        Values [N, ...]. If a bag has more than T values, the remaining values are 0.
    """
    length = dense.size(1)
    total = int(offsets[-1]) if total is None else total
    bags = torch.arange(dense.size(0), device=offsets.device).repeat_interleave(offsets.diff())[:total]
    position = torch.arange(total, device=offsets.device) - offsets[bags]
    if not length:
        return dense.new_zeros(total, *dense.shape[2:])
    # Positions beyond a truncated bag's end read its last value, which the mask below replaces by 0.
    values = dense.flatten(0, 1).index_select(0, bags * length + position.clamp(max=length - 1))
    return values.masked_fill((position >= length).view(-1, *[1] * (values.dim() - 1)), 0)


def _jagged_to_padded_dense(
    values: Tensor, offsets: list[Tensor], max_lengths: list[int], padding_value: float = 0.0
) -> Tensor:
    """Pad values with one or more jagged dimensions to a dense tensor, innermost dimension first."""
    for bounds, length in zip(reversed(offsets), reversed(max_lengths), strict=True):
        values = _padded(values, bounds, length, padding_value)
    return values


def _dense_to_jagged(
    dense: Tensor, x_offsets: list[Tensor], total_L: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Remove the padding of a dense tensor, outermost jagged dimension first."""
    for bounds in x_offsets[:-1]:
        dense = _unpadded(dense, bounds)
    return _unpadded(dense, x_offsets[-1], total_L), x_offsets


def _stacked_to_dense(
    values: Tensor,
    lengths: Tensor,
    offset_per_key: list[int],
    max_lengths_per_key: list[int],
    padding_value: int = 0,
) -> list[Tensor]:
    """Pad the bags of every key to a dense tensor [B, maximum length of the key]."""
    parts = values.split([end - start for start, end in pairwise(offset_per_key)])
    return [
        _padded(part, to_offsets(counts), length, padding_value)
        for part, counts, length in zip(parts, lengths, max_lengths_per_key, strict=True)
    ]


def _add_dense(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> Tensor:
    return _jagged_to_padded_dense(x_values, x_offsets, list(y.shape[1 : 1 + len(x_offsets)])) + y


def _add_jagged(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x_values + _dense_to_jagged(y, x_offsets)[0], x_offsets


def _add_two_jagged(
    x_values: Tensor, x_offsets: list[Tensor], y_0: Tensor, y_1: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return jagged x plus two dense tensors, as a jagged tensor."""
    return _add_jagged(_add_jagged(x_values, x_offsets, y_0)[0], x_offsets, y_1)


def _multiply_jagged(x_values: Tensor, x_offsets: list[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x_values * _dense_to_jagged(y, x_offsets)[0], x_offsets


def _batched_vector_product(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> Tensor:
    """Multiply a vector per bag and head by a matrix per bag and head.

    Args:
        v: vectors [bags * heads, length], all heads of the first bag, then of the second.
        a_values: matrix rows of all bags, [N, heads * D].
        a_offsets: bag boundaries [bags + 1]. The matrix of a bag has a row per value; missing rows are 0.

    Returns:
        Products [bags * heads, D].
    """
    bags, length = a_offsets.numel() - 1, v.size(1)
    # Rows of v are bag-major: all heads of the first bag, then of the second.
    heads = v.size(0) // max(bags, 1)
    matrices = _padded(a_values, a_offsets, length, 0).view(bags, length, heads, -1)
    return torch.einsum("bhl,blhd->bhd", v.view(bags, heads, length), matrices).flatten(0, 1)


def _value_positions(lengths: Tensor, bags: Tensor) -> Tensor:
    """Return the value positions of the selected bags."""
    counts, starts = lengths[bags], to_offsets(lengths)[bags]
    here = to_offsets(counts)
    first = torch.repeat_interleave(starts - here[:-1], counts)
    return first + torch.arange(first.numel(), dtype=first.dtype, device=first.device)


def _jagged_index_select(
    values: Tensor, lengths: Tensor, indices: Tensor, num_dense_output_rows: int | None = None
) -> list[Tensor]:
    """Return the values and the lengths of the selected bags."""
    return [values.index_select(0, _value_positions(lengths, indices)), lengths[indices]]


def _permute_bags(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reorder the keys of key-major bags. Returns lengths, values, and weights or None."""
    # Indices of whole keys, [new order]; lengths are [keys, B].
    keys = permute.long()
    bags = torch.arange(lengths.numel(), device=lengths.device).view(lengths.shape)[keys].flatten()
    rows = _value_positions(lengths.flatten(), bags)
    return lengths[keys], values[rows], None if weights is None else weights[rows]


def _segment_sums(batch_size: int, csr_seg: Tensor, values: Tensor) -> Tensor:
    """Sum values by segment.

    Args:
        batch_size: number of values that ``csr_seg`` counts as 1.
        csr_seg: offsets of the segments, [segments + 1]. Segment s has the values from
            ``csr_seg[s] * batch_size`` to ``csr_seg[s + 1] * batch_size``.
    """
    counts = csr_seg.diff() * batch_size
    segments = torch.arange(counts.numel(), device=counts.device).repeat_interleave(counts)
    return values.new_zeros(counts.numel()).index_add(0, segments, values[: segments.numel()])


# Schemas as FBGEMM declares them, so that programs can pass arguments by name.
_OPERATORS = {
    "kt_regroup_arguments(Tensor embs, str[][] keys, int[][] lengths, str[][] groups) "
    "-> (Tensor, Tensor, Tensor, int[])": kt_regroup_arguments,
    "regroup_keyed_tensor(Tensor[] embs, str[][] keys, int[][] lengths, str[][] groups) "
    "-> Tensor[]": _regroup_keyed_tensor,
    "permute_multi_embedding(Tensor[] pooled_embs, Tensor permutes, Tensor in_shapes, Tensor out_shapes, "
    "int[] out_lengths) -> Tensor[]": _permute_multi_embedding,
    "permute_pooled_embs_auto_grad(Tensor pooled_embs, Tensor offset_dim_list, Tensor permute_list, "
    "Tensor inv_offset_dim_list, Tensor inv_permute_list) -> Tensor": _permute_pooled_embs,
    "asynchronous_complete_cumsum(Tensor t_in) -> Tensor": _complete_sums,
    "asynchronous_inclusive_cumsum(Tensor t_in) -> Tensor": _inclusive_sums,
    "asynchronous_exclusive_cumsum(Tensor t_in) -> Tensor": _exclusive_sums,
    "offsets_range(Tensor offsets, SymInt range_size) -> Tensor": _offsets_range,
    "jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, float padding_value=0.) "
    "-> Tensor": _jagged_to_padded_dense,
    "jagged_1d_to_dense(Tensor values, Tensor offsets, SymInt max_sequence_length, int padding_value) "
    "-> Tensor": _padded,
    "jagged_2d_to_dense(Tensor values, Tensor offsets, SymInt max_sequence_length) -> Tensor": _padded,
    "stacked_jagged_1d_to_dense(Tensor values, Tensor lengths, int[] offset_per_key, "
    "int[] max_lengths_per_key, int padding_value) -> Tensor[]": _stacked_to_dense,
    "stacked_jagged_2d_to_dense(Tensor values, Tensor lengths, int[] offset_per_key, "
    "int[] max_lengths_per_key, int padding_value=0) -> Tensor[]": _stacked_to_dense,
    "dense_to_jagged(Tensor dense, Tensor[] x_offsets, SymInt? total_L=None) "
    "-> (Tensor, Tensor[])": _dense_to_jagged,
    "jagged_dense_elementwise_add(Tensor x_values, Tensor[] x_offsets, Tensor y) -> Tensor": _add_dense,
    "jagged_dense_elementwise_add_jagged_output(Tensor x_values, Tensor[] x_offsets, Tensor y) "
    "-> (Tensor, Tensor[])": _add_jagged,
    "jagged_dense_dense_elementwise_add_jagged_output(Tensor x_values, Tensor[] x_offsets, Tensor y_0, "
    "Tensor y_1) -> (Tensor, Tensor[])": _add_two_jagged,
    "jagged_dense_elementwise_mul(Tensor x_values, Tensor[] x_offsets, Tensor y) "
    "-> (Tensor, Tensor[])": _multiply_jagged,
    "batched_dense_vec_jagged_2d_mul(Tensor v, Tensor a_values, Tensor a_offsets) "
    "-> Tensor": _batched_vector_product,
    "jagged_index_select(Tensor values, Tensor lengths, Tensor indices, int? num_dense_output_rows=None) "
    "-> Tensor[]": _jagged_index_select,
    "permute_1D_sparse_data(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None, "
    "SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)": _permute_bags,
    "permute_2D_sparse_data(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None, "
    "SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)": _permute_bags,
    "invert_permute(Tensor permute) -> Tensor": torch.argsort,
    "segment_sum_csr(SymInt batch_size, Tensor csr_seg, Tensor values) -> Tensor": _segment_sums,
}
# Keeps the registrations alive: torch removes the operators when their Library object is freed.
_registered: list[torch.library.Library] = []


def register_fbgemm_operators() -> None:
    """Register all missing operators."""
    missing = {
        schema: function
        for schema, function in _OPERATORS.items()
        if not hasattr(torch.ops.fbgemm, schema.partition("(")[0])
    }
    if not missing:
        return
    library = torch.library.Library("fbgemm", "FRAGMENT")
    for schema, function in missing.items():
        library.define(schema)
        # The functions call only differentiable torch operators, so no separate backward or meta kernel is
        # needed.
        library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
    _registered.append(library)


def remove_fbgemm_operators() -> None:
    """Remove the operators, because FBGEMM cannot register existing operators when it is loaded later."""
    while _registered:
        _registered.pop()._destroy()
        for schema in _OPERATORS:
            vars(torch.ops.fbgemm).pop(schema.partition("(")[0], None)  # torch.ops caches operators there
