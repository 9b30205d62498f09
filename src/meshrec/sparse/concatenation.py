"""Concatenation of jagged tensors, with errors for tensors that do not fit together."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from meshrec.sparse.keyed_bags import Bags, InverseIndices, KeyedBags, ValueBags


def concatenate_keys(kjts: Sequence[Bags]) -> Bags:
    """Concatenate KeyedJaggedTensors along the keys. Implements ``KeyedJaggedTensor.concat``.

    Keys ``["a", "b"]`` and ``["c"]`` give a tensor with keys ``["a", "b", "c"]``. The sequence must not be
    empty.
    """
    values, weights, lengths = concatenate_bags("concat", kjts)
    stride, strides = _common_strides(kjts)
    counts = [kjt.length_per_key_or_none() for kjt in kjts]
    return kjts[0].unchecked(
        list(chain.from_iterable(kjt.keys() for kjt in kjts)),
        values,
        weights,
        lengths,
        stride=stride,
        strides=strides,
        # Stays None unless every input has counts on the host: computing them would synchronize.
        length_per_key=None if None in counts else [n for part in counts for n in part or ()],
        inverse_indices=_inverse_indices([kjt.inverse_indices_or_none() for kjt in kjts]),
    )


def concatenate_bags(op: str, parts: Sequence[ValueBags]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Concatenate the values, weights and lengths of several jagged tensors.

    Args:
        op: Name of the calling KeyedJaggedTensor method, for error messages.
        parts: Jagged tensors, at least one.

    Returns:
        Values [N, ...], weights [N] or None, lengths [B].

    Raises:
        ValueError: Only some parts have weights, or integer and float values are mixed.
    """
    all_values = [part.values() for part in parts]
    part_weights = [part.weights_or_none() for part in parts]
    weights = [tensor for tensor in part_weights if tensor is not None]
    # Weight 1.0 for the others would change sums silently if the weights are not normalized.
    if 0 < len(weights) < len(parts):
        raise ValueError(
            f"KeyedJaggedTensor.{op}: {len(weights)} of {len(parts)} inputs have weights; "
            "give them to all or none"
        )
    # torch.cat would promote IDs to floats, which are inexact above 2**24.
    if len({values.is_floating_point() for values in all_values}) > 1:
        dtypes = [str(values.dtype).removeprefix("torch.") for values in all_values]
        raise ValueError(f"KeyedJaggedTensor.{op}: values must be all integers or all floats, got {dtypes}")
    lengths = torch.cat([part.lengths() for part in parts])
    return torch.cat(all_values), torch.cat(weights) if weights else None, lengths


def _common_strides(kjts: Sequence[KeyedBags]) -> tuple[int | None, list[list[int]] | None]:
    """Return ``stride`` and ``stride_per_key_per_rank`` for the concatenation; exactly one of them is None.

    Inputs without variable strides must share a single stride (bag count per key), which is returned as
    ``stride``. If all inputs have variable strides, ``stride_per_key_per_rank`` is the concatenation of their
    lists. It has an entry per key: the key's bag count on every source rank.
    """
    # Mixing would need a stride per key for inputs that store a single one, and hides errors.
    variable = kjts[0].variable_stride_per_key()
    if any(kjt.variable_stride_per_key() != variable for kjt in kjts):
        raise ValueError(
            "KeyedJaggedTensor.concat: some inputs have variable strides, others a single stride; "
            "pass stride_per_key_per_rank to all or none"
        )
    if variable:
        return None, [row for kjt in kjts for row in kjt.stride_per_key_per_rank()]
    # Bag i of all keys belongs to sample i, so equal strides are required.
    stride = kjts[0].stride()
    for i, kjt in enumerate(kjts):
        if kjt.stride() != stride:
            raise ValueError(
                f"KeyedJaggedTensor.concat: input {i} has batch size {kjt.stride()}, "
                f"input 0 has {stride}; they must be equal"
            )
    return stride, None


def _inverse_indices(parts: list[InverseIndices | None]) -> InverseIndices | None:
    """Concatenate the inverse indices along the keys. Return None if any input has no inverse indices."""
    given = [part for part in parts if part is not None]
    # As in TorchRec: inverse indices for only some keys could not expand the pooled embeddings.
    if len(given) < len(parts):
        return None
    # A row per key, so the rows of all inputs are stacked.
    return [key for keys, _ in given for key in keys], torch.cat([indices for _, indices in given])
