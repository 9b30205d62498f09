"""FBGEMM's regrouping operators under their names in ``torch.ops.fbgemm``, for processes without FBGEMM.

They consist of torch's operators, so autograd, all devices and ``meta`` work.
"""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.counts import to_offsets
from meshrec.compat.bridge.sparse.keyed import regrouped_values
from meshrec.compat.bridge.sparse.regrouping import kt_regroup_arguments


def _regroup_keyed_tensor(
    embs: list[Tensor], keys: list[list[str]], lengths: list[list[int]], groups: list[list[str]]
) -> list[Tensor]:
    return regrouped_values(embs, keys, lengths, groups, 1)


def _permute_multi_embedding(
    pooled_embs: list[Tensor],
    permutes: Tensor,
    in_shapes: Tensor,
    out_shapes: Tensor,
    out_lengths: list[int],
) -> list[Tensor]:
    if permutes.is_meta:  # which piece goes where is not to be read; how wide the results are is
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
    pieces = torch.split(pooled_embs, offset_dim_list.diff().tolist(), dim=1)
    return torch.cat([pieces[i] for i in permute_list.tolist()], dim=1)


_OPERATORS = {
    "kt_regroup_arguments(Tensor embs, str[][] keys, int[][] lengths, str[][] groups) "
    "-> (Tensor, Tensor, Tensor, int[])": kt_regroup_arguments,
    "regroup_keyed_tensor(Tensor[] embs, str[][] keys, int[][] lengths, str[][] groups) "
    "-> Tensor[]": _regroup_keyed_tensor,
    "permute_multi_embedding(Tensor[] pooled_embs, Tensor permutes, Tensor in_shapes, Tensor out_shapes, "
    "int[] out_lengths) -> Tensor[]": _permute_multi_embedding,
    "permute_pooled_embs_auto_grad(Tensor pooled_embs, Tensor offset_dim_list, Tensor permute_list, "
    "Tensor inv_offset_dim_list, Tensor inv_permute_list) -> Tensor": _permute_pooled_embs,
    "asynchronous_complete_cumsum(Tensor t_in) -> Tensor": to_offsets,
}
_registered: list[torch.library.Library] = []


def register_fbgemm_operators() -> None:
    """Register the operators that do not exist yet."""
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
        library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
    _registered.append(library)


def remove_fbgemm_operators() -> None:
    """Remove the operators, because FBGEMM, loaded later, cannot register operators that exist."""
    while _registered:
        _registered.pop()._destroy()
        for schema in _OPERATORS:
            vars(torch.ops.fbgemm).pop(schema.partition("(")[0], None)  # what was looked up is kept there
