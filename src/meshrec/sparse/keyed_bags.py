"""Protocol with the KeyedJaggedTensor methods called by other files in this package.

KeyedJaggedTensor imports these files. Since their parameters have the protocol as type, they need not import
KeyedJaggedTensor in turn.
"""

from typing import Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

InverseIndices = tuple[list[str], Tensor]
"""Pair of keys, and a bag index per key and sample, int64 [K, batch size].

If duplicate bags were removed from a batch, entry (k, i) says which bag of key k belongs to sample i.
"""
Strides = list[list[int]] | Tensor
"""Bag count per key and source rank, as nested lists [K][R] or a tensor [K, R]."""


class ValueBags(Protocol):
    """Interface shared by JaggedTensor and KeyedJaggedTensor, which document the methods."""

    def values(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def lengths(self) -> Tensor: ...


# Only the methods needed elsewhere; KeyedJaggedTensor has more.
class KeyedBags(ValueBags, Protocol):
    """Interface of KeyedJaggedTensor, which documents the methods."""

    def keys(self) -> list[str]: ...
    def lengths_or_none(self) -> Tensor | None: ...
    def offsets(self) -> Tensor: ...
    def offsets_or_none(self) -> Tensor | None: ...
    def device(self) -> torch.device: ...
    def stride(self) -> int: ...
    def stride_per_key(self) -> list[int]: ...
    def stride_per_key_per_rank(self) -> list[list[int]]: ...
    def variable_stride_per_key(self) -> bool: ...
    def segments_or_none(self) -> Tensor | None: ...
    def index_per_key(self) -> dict[str, int]: ...
    def length_per_key(self) -> list[int]: ...
    def length_per_key_or_none(self) -> list[int] | None: ...
    def offset_per_key(self) -> list[int]: ...
    def offset_per_key_or_none(self) -> list[int] | None: ...
    def lengths_offset_per_key(self) -> list[int]: ...
    def inverse_indices_or_none(self) -> InverseIndices | None: ...

    @classmethod
    def unchecked(
        cls,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None = None,
        *,
        stride: int | None = None,
        strides: Strides | None = None,
        length_per_key: list[int] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> Self:
        """Build a KeyedJaggedTensor without checking that the arguments match.

        Args:
            keys, values, weights, lengths, offsets, stride, strides, length_per_key, inverse_indices: As in
                :meth:`KeyedJaggedTensor.unchecked`.
        """
        ...


Bags = TypeVar("Bags", bound=KeyedBags)
"""KeyedJaggedTensor or a subclass. Functions return the type that they get."""
