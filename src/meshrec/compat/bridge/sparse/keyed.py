"""KeyedTensor and regrouping, for eager code, TorchScript and torch.fx."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.kinds import AssertedError, Kind, is_traced
from meshrec.compat.bridge.sparse.printing import keyed_text
from meshrec.compat.bridge.sparse.segments import positions_of, running_sum
from meshrec.sparse import keyed_tensor as core

torch.fx.wrap("regrouped")


class KeyedTensor(core.KeyedTensor, metaclass=Kind):
    """Tensor with a named slice per key along ``key_dim``; see ``meshrec.sparse.KeyedTensor``.

    Raises:
        AssertedError: the lengths do not match the keys or the tensor.
    """

    _like = core.KeyedTensor
    _pieces_grad: bool | None = None

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys: list[str] = keys
        self._length_per_key: list[int] = length_per_key
        self._values: Tensor = values
        self._key_dim: int = key_dim
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key
        # TorchScript compiles the constructor, but not the checks.
        if not torch.jit.is_scripting():
            _check(keys, length_per_key, values, key_dim)

    @staticmethod
    def unchecked(keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int) -> "KeyedTensor":
        # Without calling __init__, which checks sizes.
        """Construct a KeyedTensor without checks.

        Args:
            keys: names of the slices.
            length_per_key: size per slice along ``key_dim``.
            values: concatenated slices.
            key_dim: dimension of concatenation.
        """
        kt = KeyedTensor.__new__(KeyedTensor)
        vars(kt).update(
            _keys=keys,
            _length_per_key=length_per_key,
            _values=values,
            _key_dim=key_dim,
            _offset_per_key=None,
            _index_per_key=None,
        )
        return kt

    @staticmethod
    def from_tensor_list(
        keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Concatenate a list with a tensor per key into a KeyedTensor.

        Args:
            keys: tensor names.
            tensors: tensors to concatenate.
            key_dim: dimension to split when a key is read.
            cat_dim: dimension to concatenate along. Must equal ``key_dim`` if there are several tensors.
        """
        return KeyedTensor(
            keys=keys,
            length_per_key=[tensor.size(key_dim) for tensor in tensors],
            values=torch.cat(tensors, dim=cat_dim),
            key_dim=key_dim,
        )

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def key_dim(self) -> int:
        return self._key_dim

    def device(self) -> torch.device:
        return self._values.device

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        given = self._offset_per_key
        if given is not None:
            return given
        starts = running_sum(self._length_per_key)
        self._offset_per_key = starts
        return starts

    def _key_indices(self) -> dict[str, int]:
        """Return the index by key, computed at first use."""
        given = self._index_per_key
        if given is not None:
            return given
        positions = positions_of(self._keys)
        self._index_per_key = positions
        return positions

    def __getitem__(self, key: str) -> Tensor:
        index = self._key_indices()[key]
        if not torch.jit.is_scripting():
            # A separate condition: TorchScript skips a branch only if is_scripting() is all of the condition.
            if not is_traced():
                return core.KeyedTensor._split(self)[index]  # all at once: see MeshRec's type
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._length_per_key[index])

    def to_dict(self) -> dict[str, Tensor]:
        pieces = torch.split(self._values, self._length_per_key, dim=self._key_dim)
        result: dict[str, Tensor] = {}
        for i, key in enumerate(self._keys):
            result[key] = pieces[i]
        return result

    @staticmethod
    def regroup(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[Tensor]:
        return regrouped(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list["KeyedTensor"], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """Return the tensors from ``regroup`` by group name.

        Args:
            keyed_tensors: inputs.
            groups: keys per group.
            keys: group names.
        """
        assert len(groups) == len(keys), "each group needs a key"
        tensors = regrouped(keyed_tensors, groups)
        result: dict[str, Tensor] = {}
        for i, key in enumerate(keys):
            result[key] = tensors[i]
        return result

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedTensor":
        return KeyedTensor(
            keys=self._keys,
            length_per_key=self._length_per_key,
            values=self._values.to(device, non_blocking=non_blocking),
            key_dim=self._key_dim,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
        )

    def size_in_bytes(self) -> int:
        return self._values.numel() * self._values.element_size()

    @torch.jit.unused
    def __str__(self) -> str:
        return keyed_text(self)


def regrouped(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """Return ``KeyedTensor.regroup(keyed_tensors, groups)``."""
    if not torch.jit.is_scripting():
        return core.KeyedTensor.regroup(keyed_tensors, groups)
    # TorchScript compiles only this branch, on plain lists of tensors, keys and lengths.
    values: list[Tensor] = []
    keys: list[list[str]] = []
    lengths: list[list[int]] = []
    for kt in keyed_tensors:
        values.append(kt.values())
        keys.append(kt.keys())
        lengths.append(kt.length_per_key())
    return regrouped_values(values, keys, lengths, groups, keyed_tensors[0].key_dim())


def regrouped_values(
    values: list[Tensor], keys: list[list[str]], lengths: list[list[int]], groups: list[list[str]], dim: int
) -> list[Tensor]:
    """Return a tensor per group, concatenated from the inputs' slices.

    Args:
        values: inputs.
        keys: slice names per input.
        lengths: slice sizes per input.
        groups: keys per group.
        dim: dimension to split and concatenate along.
    """
    # If several inputs have a key, the last one counts.
    pieces: dict[str, Tensor] = {}
    for i in range(len(values)):
        parts = torch.split(values[i], lengths[i], dim=dim)
        for j in range(len(keys[i])):
            pieces[keys[i][j]] = parts[j]
    grouped: list[Tensor] = []
    for group in groups:
        grouped.append(torch.cat([pieces[key] for key in group], dim=dim))
    return grouped


def _check(keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int) -> None:
    """Raise AssertedError unless the lengths match the keys and the size of ``values``.

    Under tracing, nothing is checked, because sizes are not known.
    """
    if is_traced() or not keys:
        return
    if len(keys) != len(length_per_key):
        raise AssertedError(f"KeyedTensor: {len(keys)} keys need as many lengths, got {len(length_per_key)}")
    if sum(length_per_key) != values.size(key_dim):
        raise AssertedError(
            f"KeyedTensor: the lengths of the keys sum to {sum(length_per_key)}, "
            f"but values have size {values.size(key_dim)} in dimension {key_dim}; make them agree"
        )
