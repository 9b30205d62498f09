"""KeyedTensor: dense columns side by side in one tensor, read by key, such as pooled embeddings."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.sparse.printing import is_readable, keyed_text, rows_text, shape_text


class _Stretch(NamedTuple):
    """A range of neighbouring keys: columns ``start`` to ``stop`` of the tensor with index ``tensor``."""

    tensor: int
    start: int
    stop: int


class KeyedTensor:
    """A tensor whose dimension ``key_dim`` is cut into one piece per key.

    Args:
        keys: One name per piece.
        length_per_key: The size of each piece along ``key_dim``.
        values: All pieces, side by side.
        key_dim: The dimension that is cut; 1 where the batch is dimension 0.
        offset_per_key: Where each piece starts, and the end; computed without it.
        index_per_key: Position of each key; computed without it.

    Raises:
        ValueError: The lengths do not match the keys or the tensor.

    Reading a piece gives a view. Pieces are cut all at once, so that the backward pass of reading all keys
    builds one gradient, not one per key; torch therefore forbids to change a piece in place while it requires
    a gradient.
    """

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        if len(keys) != len(length_per_key):
            raise ValueError(f"KeyedTensor: {len(keys)} keys need as many lengths, got {len(length_per_key)}")
        if not torch.compiler.is_compiling() and sum(length_per_key) != values.size(key_dim):
            raise ValueError(
                f"KeyedTensor: the lengths of the keys sum to {sum(length_per_key)}, "
                f"but values have size {values.size(key_dim)} in dimension {key_dim}; make them agree"
            )
        self._fill(keys, length_per_key, values, key_dim, offset_per_key, index_per_key)

    def _fill(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._pieces: list[Tensor] = []
        self._pieces_grad: bool | None = None  # whether made while gradients were recorded

    @staticmethod
    def unchecked(keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int) -> "KeyedTensor":
        """Make a KeyedTensor without checks, of parts that are known to fit."""
        kt = KeyedTensor.__new__(KeyedTensor)
        kt._fill(keys, length_per_key, values, key_dim)
        return kt

    @staticmethod
    def from_tensor_list(
        keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Make a KeyedTensor from one tensor per key, concatenated along ``cat_dim``.

        Raises:
            ValueError: The list is empty, or the sizes do not fit.
        """
        if not tensors:
            raise ValueError("KeyedTensor.from_tensor_list: the list is empty; pass one tensor per key")
        return KeyedTensor(
            keys, [tensor.size(key_dim) for tensor in tensors], torch.cat(tensors, dim=cat_dim), key_dim
        )

    def keys(self) -> list[str]:
        """Return the names of the pieces, in order."""
        return self._keys

    def values(self) -> Tensor:
        """Return all pieces side by side."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which the pieces lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Return the size of each piece along ``key_dim``."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the start of each piece along ``key_dim``, and the end."""
        if self._offset_per_key is None:
            self._offset_per_key = list(accumulate(self._length_per_key, initial=0))
        return self._offset_per_key

    def __getitem__(self, key: str) -> Tensor:
        """Return the piece of ``key``, a view.

        Raises:
            KeyError: There is no such key.
        """
        if self._index_per_key is None:
            self._index_per_key = {name: i for i, name in enumerate(self._keys)}
        index = self._index_per_key.get(key)
        if index is None:
            raise KeyError(f"no key {key!r} in this KeyedTensor; its keys are {self._keys}")
        if torch.compiler.is_compiling():  # where cutting all keys for each one read would be quadratic
            return self._values.narrow(
                self._key_dim, self.offset_per_key()[index], self._length_per_key[index]
            )
        return self._cut()[index]

    def to_dict(self) -> dict[str, Tensor]:
        """Return all pieces by key, as views."""
        return dict(zip(self._keys, self._cut(), strict=True))

    def _cut(self) -> list[Tensor]:
        if torch.compiler.is_compiling():  # an input keeps nothing of what a compiled program made
            return list(self._values.split(self._length_per_key, dim=self._key_dim))
        if self._pieces_grad != torch.is_grad_enabled():
            self._pieces = list(self._values.split(self._length_per_key, dim=self._key_dim))
            self._pieces_grad = torch.is_grad_enabled()
        return self._pieces

    @staticmethod
    def regroup(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[Tensor]:
        """Return one tensor per group, with the pieces of its keys side by side; differentiable.

        Every tensor is cut once, at the groups' borders, and every group put together once. A group that is
        one stretch of one tensor is a view.

        Args:
            keyed_tensors: Tensors of one batch; where two have a key in common, the last one's is taken.
            groups: Keys of each result; a key may be in several groups.

        Raises:
            ValueError: A key is in no tensor, there is no tensor, or their ``key_dim`` differ.
        """
        dim = _common_key_dim(keyed_tensors)
        owners = {
            key: _Stretch(i, start, start + length)
            for i, kt in enumerate(keyed_tensors)
            for key, start, length in zip(kt._keys, kt.offset_per_key(), kt._length_per_key, strict=False)
        }
        stretches = [_stretches(group, owners) for group in groups]
        pieces = [
            _cut_at(kt, [s for group in stretches for s in group if s.tensor == i])
            for i, kt in enumerate(keyed_tensors)
        ]
        empty = keyed_tensors[0]._values.narrow(dim, 0, 0)
        grouped = []
        for group in stretches:
            parts = [piece for s in group for piece in _pieces_of(s, pieces[s.tensor], dim)]
            grouped.append(parts[0] if len(parts) == 1 else torch.cat(parts or [empty], dim=dim))
        return grouped

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list["KeyedTensor"], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """Call :meth:`regroup`, and give each group a name.

        Raises:
            ValueError: Groups and keys differ in number, and what :meth:`regroup` raises.
        """
        if len(groups) != len(keys):
            raise ValueError(
                f"KeyedTensor.regroup_as_dict: {len(groups)} groups, but {len(keys)} keys for them; "
                "give each group one key"
            )
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedTensor":
        """Return a copy on another device."""
        return KeyedTensor(
            self._keys,
            self._length_per_key,
            self._values.to(device, non_blocking=non_blocking),
            self._key_dim,
            self._offset_per_key,
            self._index_per_key,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the values until the work queued on ``stream`` is done."""
        self._values.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Return the size of the values in bytes."""
        return self._values.numel() * self._values.element_size()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pieces": [], "_pieces_grad": None}

    def __str__(self) -> str:
        if not is_readable(self._values):
            return shape_text("KeyedTensor", keys=self._keys, values=self._values)
        pieces = self._values.split(self._length_per_key, dim=self._key_dim)
        return keyed_text("KeyedTensor", self._keys, [rows_text(piece) for piece in pieces])

    def __repr__(self) -> str:
        return str(self)


def _common_key_dim(keyed_tensors: list[KeyedTensor]) -> int:
    if not keyed_tensors:
        raise ValueError("KeyedTensor.regroup: there are no tensors; pass at least one")
    dims = [kt.key_dim() for kt in keyed_tensors]
    if any(dim != dims[0] for dim in dims):
        raise ValueError(f"KeyedTensor.regroup: the tensors must have one key_dim, got {dims}")
    return dims[0]


def _stretches(group: list[str], owners: dict[str, _Stretch]) -> list[_Stretch]:
    """Return the columns of a group's keys, with neighbours joined."""
    joined: list[_Stretch] = []
    for key in group:
        stretch = owners.get(key)
        if stretch is None:
            raise ValueError(
                f"KeyedTensor.regroup: no tensor has the key {key!r}; the keys are {list(owners)}"
            )
        if joined and joined[-1].tensor == stretch.tensor and joined[-1].stop == stretch.start:
            stretch = _Stretch(stretch.tensor, joined.pop().start, stretch.stop)
        joined.append(stretch)
    return joined


def _cut_at(kt: KeyedTensor, stretches: list[_Stretch]) -> dict[int, Tensor]:
    """Cut a tensor at all borders of the stretches; return the pieces by their first column."""
    width = kt.offset_per_key()[-1]
    borders = sorted({0, width, *(s.start for s in stretches), *(s.stop for s in stretches)})
    if len(borders) <= 2:
        return {0: kt.values()}
    sizes = [stop - start for start, stop in pairwise(borders)]
    return dict(zip(borders, kt.values().split(sizes, dim=kt.key_dim()), strict=False))


def _pieces_of(stretch: _Stretch, pieces: dict[int, Tensor], dim: int) -> Iterator[Tensor]:
    border = stretch.start
    while border < stretch.stop:
        yield pieces[border]
        border += pieces[border].size(dim)
