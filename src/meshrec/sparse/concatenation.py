"""Concatenation of jagged tensors, and the errors where they do not fit together."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from meshrec.sparse.keyed_bags import Bags, InverseIndices, KeyedBags, ValueBags


def concatenated(kjts: Sequence[Bags]) -> Bags:
    """Implement ``KeyedJaggedTensor.concat`` for one or more parts."""
    values, weights, lengths = concatenated_bags("concat", kjts)
    stride, strides = _strides(kjts)
    known = [kjt.length_per_key_or_none() for kjt in kjts]
    return kjts[0].unchecked(
        list(chain.from_iterable(kjt.keys() for kjt in kjts)),
        values,
        weights,
        lengths,
        stride=stride,
        strides=strides,
        length_per_key=None if None in known else [n for part in known for n in part or ()],
        inverse_indices=_inverse_indices([kjt.inverse_indices_or_none() for kjt in kjts]),
    )


def concatenated_bags(op: str, parts: Sequence[ValueBags]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the values, weights and lengths of all parts, each concatenated.

    Raises:
        ValueError: Only some parts have weights, or only some have integer values.
    """
    all_values = [part.values() for part in parts]
    given = [part.weights_or_none() for part in parts]
    weights = [each for each in given if each is not None]
    if 0 < len(weights) < len(parts):
        raise ValueError(
            f"KeyedJaggedTensor.{op}: {len(weights)} of {len(parts)} inputs have weights; "
            "give them to all or none"
        )
    if len({values.is_floating_point() for values in all_values}) > 1:
        dtypes = [str(values.dtype).removeprefix("torch.") for values in all_values]
        raise ValueError(f"KeyedJaggedTensor.{op}: values must be all integers or all floats, got {dtypes}")
    lengths = torch.cat([part.lengths() for part in parts])
    return torch.cat(all_values), torch.cat(weights) if weights else None, lengths


def _strides(kjts: Sequence[KeyedBags]) -> tuple[int | None, list[list[int]] | None]:
    """Return the stride of all keys, or the strides per key and rank.

    Raises:
        ValueError: The strides differ, or only some inputs have strides per key.
    """
    variable = kjts[0].variable_stride_per_key()
    if any(kjt.variable_stride_per_key() != variable for kjt in kjts):
        raise ValueError(
            "KeyedJaggedTensor.concat: some inputs have a batch size per key, some one for all keys; "
            "pass stride_per_key_per_rank to all or none"
        )
    if variable:
        return None, [row for kjt in kjts for row in kjt.stride_per_key_per_rank()]
    stride = kjts[0].stride()
    for i, kjt in enumerate(kjts):
        if kjt.stride() != stride:
            raise ValueError(
                f"KeyedJaggedTensor.concat: input {i} has batch size {kjt.stride()}, "
                f"input 0 has {stride}; they must be equal"
            )
    return stride, None


def _inverse_indices(parts: list[InverseIndices | None]) -> InverseIndices | None:
    """Return the inverse indices of all keys, if all parts have them."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return [key for keys, _ in known for key in keys], torch.cat([indices for _, indices in known])
