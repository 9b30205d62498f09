"""KeyedTensor: dense columns in a single tensor, which are read by key, such as pooled embeddings."""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.sparse.printing import format_per_key, format_rows, format_shapes, is_readable


class _ColumnRange(NamedTuple):
    """Columns of a key, or of several adjacent keys, in an input KeyedTensor."""

    tensor: int
    """Position in the list of input tensors."""
    start: int
    """First column."""
    stop: int
    """End column, exclusive."""


class KeyedTensor:
    """A tensor that consists of a piece for each key, side by side along the dimension ``key_dim``.

    Reading a piece returns a view. All pieces are split off at once, so the backward pass builds a single
    gradient for the whole tensor. For this reason, torch forbids in-place changes to a piece that requires
    grad.

    Args:
        keys: Piece names.
        length_per_key: Piece sizes along ``key_dim``.
        values: The pieces, concatenated, such as [B, sum(length_per_key)].
        key_dim: Dimension to split.
        offset_per_key: Piece starts, followed by the total size; computed if None.
        index_per_key: Key positions in ``keys``; computed if None.

    Raises:
        ValueError: The lengths do not match the keys or the tensor.

    Example::

        >>> kt = KeyedTensor(["user", "item"], [2, 3], torch.zeros(8, 5))
        >>> kt["item"].shape
        torch.Size([8, 3])
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
        # Also in tracing: list lengths are known there.
        if len(keys) != len(length_per_key):
            raise ValueError(f"KeyedTensor: {len(keys)} keys need as many lengths, got {len(length_per_key)}")
        # Symbolic sizes under tracing would turn the comparison into a guard.
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
        """Set all fields without checks."""
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim
        # Both None until given or first read.
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._pieces: list[Tensor] = []  # views cached by the first read in the current grad mode
        self._pieces_grad: bool | None = None  # grad mode when _pieces was cached; None: nothing cached

    @staticmethod
    def unchecked(keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int) -> "KeyedTensor":
        """Build a KeyedTensor without the constructor's checks, from arguments known to match.

        Args:
            keys: Piece names.
            length_per_key: Piece sizes along ``key_dim``.
            values: The pieces, concatenated.
            key_dim: Dimension to split.
        """
        kt = KeyedTensor.__new__(KeyedTensor)
        # Fills every field that the constructor sets.
        kt._fill(keys, length_per_key, values, key_dim)
        return kt

    @staticmethod
    def from_tensor_list(
        keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Concatenate a list with a tensor per key into a KeyedTensor.

        Args:
            keys: Tensor names.
            tensors: Tensors to concatenate.
            key_dim: Dimension to split when a key is read.
            cat_dim: Dimension to concatenate along. Must equal ``key_dim`` if there are several tensors.

        Raises:
            ValueError: The list is empty, or the sizes do not match.
        """
        if not tensors:
            raise ValueError("KeyedTensor.from_tensor_list: the list is empty; pass one tensor per key")
        return KeyedTensor(
            keys, [tensor.size(key_dim) for tensor in tensors], torch.cat(tensors, dim=cat_dim), key_dim
        )

    def keys(self) -> list[str]:
        """Return the piece names."""
        return self._keys

    def values(self) -> Tensor:
        """Return the concatenated pieces."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension along which the pieces are concatenated."""
        return self._key_dim

    def device(self) -> torch.device:
        """Return the value device."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Return the piece sizes along ``key_dim``."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return where each piece starts along ``key_dim``, followed by the total size: K+1 integers."""
        if self._offset_per_key is None:
            self._offset_per_key = list(accumulate(self._length_per_key, initial=0))
        return self._offset_per_key

    def __getitem__(self, key: str) -> Tensor:
        """Return a view of the piece for ``key``.

        Raises:
            KeyError: The key does not exist.
        """
        # Built on first read: most tensors are only concatenated or regrouped.
        if self._index_per_key is None:
            self._index_per_key = {name: i for i, name in enumerate(self._keys)}
        index = self._index_per_key.get(key)
        if index is None:
            raise KeyError(f"no key {key!r} in this KeyedTensor; its keys are {self._keys}")
        if torch.compiler.is_compiling():  # splitting all keys on every read would be quadratic
            return self._values.narrow(
                self._key_dim, self.offset_per_key()[index], self._length_per_key[index]
            )
        return self._split()[index]

    def to_dict(self) -> dict[str, Tensor]:
        """Return all pieces as views, by key."""
        return dict(zip(self._keys, self._split(), strict=True))

    def _split(self) -> list[Tensor]:
        """Return all pieces, from the cache if grad mode has not changed since they were split."""
        # Views made under no_grad are detached, so a cached piece is valid in a single grad mode only.
        if torch.compiler.is_compiling():  # a traced program must not leave tensors in an input
            return list(self._values.split(self._length_per_key, dim=self._key_dim))
        if self._pieces_grad != torch.is_grad_enabled():
            self._pieces = list(self._values.split(self._length_per_key, dim=self._key_dim))
            self._pieces_grad = torch.is_grad_enabled()
        return self._pieces

    @staticmethod
    def regroup(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[Tensor]:
        """Concatenate pieces of several KeyedTensors into a tensor per group of keys. Differentiable.

        ``groups=[["a", "c"], ["b"]]`` returns two tensors: the pieces of a and c side by side, and the piece
        of b. A group whose columns are adjacent in a single input is returned as a view.

        Args:
            keyed_tensors: Tensors for the same batch. If several tensors have the same key, the last is used.
            groups: Keys per result, in order. A key may be in several groups.

        Returns:
            A tensor per group, such as [B, total length of the group's keys].

        Raises:
            ValueError: A key is not in any tensor, the list is empty, or the ``key_dim`` differ.
        """
        dim = _common_key_dim(keyed_tensors)
        # Later tensors overwrite earlier tensors with the same key.
        # Where the columns for every key are, in any input.
        columns_per_key = {
            key: _ColumnRange(i, start, start + length)
            for i, kt in enumerate(keyed_tensors)
            for key, start, length in zip(kt._keys, kt.offset_per_key(), kt._length_per_key, strict=False)
        }
        ranges_per_group = [_column_ranges(group, columns_per_key) for group in groups]
        # Every input is split once, at the boundaries that any group needs.
        pieces = [
            _split_at(kt, [columns for group in ranges_per_group for columns in group if columns.tensor == i])
            for i, kt in enumerate(keyed_tensors)
        ]
        # Result for an empty group: keeps the batch size, dtype and autograd connection.
        empty = keyed_tensors[0]._values.narrow(dim, 0, 0)
        grouped = []
        for group in ranges_per_group:
            # A merged range is cut again where another group has a boundary.
            parts = [
                piece for columns in group for piece in _range_pieces(columns, pieces[columns.tensor], dim)
            ]
            # A single piece needs no copy: the result is a view.
            grouped.append(parts[0] if len(parts) == 1 else torch.cat(parts or [empty], dim=dim))
        return grouped

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list["KeyedTensor"], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """Concatenate pieces as :meth:`regroup` does, and return the results as a dict.

        Args:
            keyed_tensors: Tensors for the same batch.
            groups: Keys per result.
            keys: Group names in the returned dict.

        Raises:
            ValueError: Groups and names differ in number, or :meth:`regroup` fails.
        """
        if len(groups) != len(keys):
            raise ValueError(
                f"KeyedTensor.regroup_as_dict: {len(groups)} groups, but {len(keys)} keys for them; "
                "give each group one key"
            )
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedTensor":
        """Copy to another device."""
        # Keeps the per-key positions, but not the cached views of this device.
        return KeyedTensor(
            self._keys,
            self._length_per_key,
            self._values.to(device, non_blocking=non_blocking),
            self._key_dim,
            self._offset_per_key,
            self._index_per_key,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the value memory allocated until the work now queued on ``stream`` has run."""
        self._values.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Return the value size in bytes."""
        return self._values.numel() * self._values.element_size()

    # The cache holds views, which pickle would store a second time.
    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without cached views."""
        return {**self.__dict__, "_pieces": [], "_pieces_grad": None}

    def __str__(self) -> str:
        if not is_readable(self._values):
            return format_shapes("KeyedTensor", keys=self._keys, values=self._values)
        pieces = self._values.split(self._length_per_key, dim=self._key_dim)
        return format_per_key("KeyedTensor", self._keys, [format_rows(piece) for piece in pieces])

    def __repr__(self) -> str:
        return str(self)


def _common_key_dim(keyed_tensors: list[KeyedTensor]) -> int:
    """Return the ``key_dim`` shared by all tensors. Raises ValueError if they differ or the list is empty."""
    if not keyed_tensors:
        raise ValueError("KeyedTensor.regroup: there are no tensors; pass at least one")
    # Pieces are concatenated along this dimension, so it must be the same for all inputs.
    dims = [kt.key_dim() for kt in keyed_tensors]
    if any(dim != dims[0] for dim in dims):
        raise ValueError(f"KeyedTensor.regroup: key_dim must be equal for all tensors, got {dims}")
    return dims[0]


def _column_ranges(group: list[str], columns_per_key: dict[str, _ColumnRange]) -> list[_ColumnRange]:
    """Return the column ranges of the keys in a group. Adjacent ranges are merged."""
    joined: list[_ColumnRange] = []
    for key in group:
        columns = columns_per_key.get(key)
        if columns is None:
            raise ValueError(
                f"KeyedTensor.regroup: no tensor has the key {key!r}; the keys are {list(columns_per_key)}"
            )
        if joined and joined[-1].tensor == columns.tensor and joined[-1].stop == columns.start:
            # Adjacent keys are merged so that the copy below runs over few, wide pieces.
            columns = _ColumnRange(columns.tensor, joined.pop().start, columns.stop)
        joined.append(columns)
    return joined


def _split_at(kt: KeyedTensor, ranges: list[_ColumnRange]) -> dict[int, Tensor]:
    """Split a tensor at the boundaries of all ranges, and return the pieces by first column.

    Ranges 0-4 and 2-6 of a tensor with 8 columns give pieces starting at columns 0, 2, 4 and 6.
    """
    # A single split per tensor: autograd then builds one gradient for it, not one per group.
    width = kt.offset_per_key()[-1]
    borders = sorted({0, width, *(s.start for s in ranges), *(s.stop for s in ranges)})
    # The whole tensor is used: returning it avoids a split node in the autograd graph.
    if len(borders) <= 2:
        return {0: kt.values()}
    sizes = [stop - start for start, stop in pairwise(borders)]
    return dict(zip(borders, kt.values().split(sizes, dim=kt.key_dim()), strict=False))


def _range_pieces(columns: _ColumnRange, pieces: dict[int, Tensor], dim: int) -> Iterator[Tensor]:
    """Yield the pieces from ``_split_at`` that together cover a column range, in order."""
    border = columns.start
    while border < columns.stop:
        yield pieces[border]
        border += pieces[border].size(dim)
