"""Concatenation of jagged tensors, and the errors where they do not fit together."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from meshrec.sparse.jagged_tensor import Jagged

if TYPE_CHECKING:
    from meshrec.sparse.keyed_jagged_tensor import InverseIndices, KeyedJaggedTensor


def concatenated(kjts: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
    """Implement ``KeyedJaggedTensor.concat`` for one or more parts."""
    values, weights, lengths = concatenated_bags("concat", kjts)
    stride, strides = _strides(kjts)
    known = [kjt._length_per_key for kjt in kjts]
    return kjts[0].unchecked(
        [key for kjt in kjts for key in kjt._keys],
        values,
        weights,
        lengths,
        stride=stride,
        strides=strides,
        length_per_key=None if None in known else [n for part in known for n in part or ()],
        inverse_indices=_inverse_indices([kjt._inverse_indices for kjt in kjts]),
    )


def concatenated_bags(op: str, parts: Sequence[Jagged]) -> tuple[Tensor, Tensor | None, Tensor]:
    """Values, weights and lengths of all parts.

    Raises:
        ValueError: Only some have weights, or only some have integer values.
    """
    weights = [part._weights for part in parts if part._weights is not None]
    if 0 < len(weights) < len(parts):
        raise ValueError(
            f"KeyedJaggedTensor.{op}: {len(weights)} of {len(parts)} inputs have weights; "
            "give them to all or none"
        )
    if len({part._values.is_floating_point() for part in parts}) > 1:
        dtypes = [str(part._values.dtype).removeprefix("torch.") for part in parts]
        raise ValueError(f"KeyedJaggedTensor.{op}: values must be all integers or all floats, got {dtypes}")
    values = torch.cat([part._values for part in parts])
    return values, torch.cat(weights) if weights else None, torch.cat([part.lengths() for part in parts])


def _strides(kjts: list["KeyedJaggedTensor"]) -> tuple[int | None, list[list[int]] | None]:
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


def _inverse_indices(parts: "list[InverseIndices | None]") -> "InverseIndices | None":
    """Return the inverse indices of all keys, if all parts have them."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return [key for keys, _ in known for key in keys], torch.cat([indices for _, indices in known])
