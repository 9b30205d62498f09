"""KeyedJaggedTensor: the bags of several features (keys) in one set of tensors.

Shape legend: K keys, B bags of all keys, N values, R ranks.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from meshrec.sparse.concatenation import concatenated, concatenated_bags
from meshrec.sparse.counting import count_per_key, total
from meshrec.sparse.jagged_tensor import Jagged, JaggedTensor
from meshrec.sparse.keyed_bags import InverseIndices, Strides
from meshrec.sparse.keyed_validation import check_keyed_numbers, check_keys_and_strides
from meshrec.sparse.printing import keyed_jagged_text
from meshrec.sparse.rearranging import cut_keys, permuted_keys, split_keys
from meshrec.sparse.validation import check_layout, count_bags


class KeyedJaggedTensor(Jagged):
    """The bags of several features: all bags of the first key, then those of the second, ...

    Every key has ``stride`` bags (the batch size), unless ``stride_per_key`` or ``stride_per_key_per_rank``
    give each its own number. What follows from the arguments is computed when first read, and kept.
    ``length_per_key``, ``offset_per_key``, ``split``, ``kjt[key]`` and ``to_dict`` need counts on the host;
    :meth:`sync` reads them at a moment of the caller's choice.

    Args:
        keys: The features' names.
        values: Ids [N, ...], key after key, bag after bag.
        weights: One weight per value [N].
        lengths: Values per bag [B] (or [K, stride]), int32 or int64.
        offsets: Start of each bag, and N [B+1], int32 or int64. At least one of lengths and offsets.
        stride: Bags per key; without it, B / K.
        stride_per_key_per_rank: Bags per key and source rank, K lists of R numbers.
        stride_per_key: Bags per key, where they differ.
        length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: What the methods of
            these names return (``to_dict`` for the last), where the caller knows it already.
        inverse_indices: Keys, and an int64 tensor [K, batch size]: which bag of its key each sample of the
            batch takes, where equal bags were dropped and keys therefore have different numbers of bags.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit. The numbers are not read; :meth:`validate` does.

    Example::

        >>> values, lengths = torch.tensor([5, 7, 1, 2]), torch.tensor([1, 2, 0, 1])
        >>> KeyedJaggedTensor(["user", "item"], values, lengths=lengths)
        KeyedJaggedTensor({
            "user": [[5], [7, 1]],
            "item": [[], [2]]
        })
    """

    _keys: list[str]
    _stride: int | None  # of all keys, unless _strides tells the bags of each key and rank
    _strides: Strides | None
    _stride_per_key: list[int] | None
    _bag_offset_per_key: list[int] | None
    _length_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None
    _segments: Tensor | None
    _jt_dict: dict[str, JaggedTensor] | None
    _jt_dict_grad: bool | None  # whether made while gradients were recorded; None: given by the caller
    _inverse_indices: InverseIndices | None

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        strides = stride_per_key_per_rank
        if strides is None and stride_per_key:
            if any(size != stride_per_key[0] for size in stride_per_key):
                strides = [[size] for size in stride_per_key]
            elif stride is None:
                stride = stride_per_key[0]
        if isinstance(lengths, Tensor) and lengths.dim() > 1:
            lengths = lengths.flatten()
        if not torch.compiler.is_compiling():
            check_layout("KeyedJaggedTensor", values, weights, lengths, offsets)
            if stride_per_key is not None and len(stride_per_key) != len(keys):
                raise ValueError(
                    f"KeyedJaggedTensor: {len(keys)} keys need as many stride_per_key, got {stride_per_key}"
                )
            check_keys_and_strides(keys, count_bags(lengths, offsets), stride, strides)
        self._fill(keys, values, weights, lengths, offsets, stride, strides, length_per_key, inverse_indices)
        self._bag_offset_per_key = lengths_offset_per_key
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._jt_dict = jt_dict

    def _fill(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        strides: Strides | None,
        length_per_key: list[int] | None,
        inverse_indices: InverseIndices | None,
    ) -> None:
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._by_offsets = lengths is None
        self._stride = stride
        self._strides = strides
        self._length_per_key = length_per_key
        self._inverse_indices = inverse_indices
        self._stride_per_key = None
        self._bag_offset_per_key = None
        self._offset_per_key = None
        self._index_per_key = None
        self._segments = None
        self._jt_dict = None
        self._jt_dict_grad = None

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
        """Make a KeyedJaggedTensor without checks; ``strides`` is its stride_per_key_per_rank."""
        kjt = cls.__new__(cls)
        kjt._fill(keys, values, weights, lengths, offsets, stride, strides, length_per_key, inverse_indices)
        return kjt

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> "KeyedJaggedTensor":
        """Make one from lengths, and read all numbers that the host needs at once; see :meth:`sync`."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> "KeyedJaggedTensor":
        """Make one from offsets, and read all numbers that the host needs at once; see :meth:`sync`."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """Concatenate JaggedTensors, which may have different numbers of bags.

        Raises:
            ValueError: There are none, or only some have weights.
        """
        if not jt_dict:
            raise ValueError(
                "KeyedJaggedTensor.from_jt_dict: the dict is empty; pass one JaggedTensor per key"
            )
        jts = list(jt_dict.values())
        values, weights, lengths = concatenated_bags("from_jt_dict", jts)
        return KeyedJaggedTensor(
            list(jt_dict), values, weights, lengths, stride_per_key=[jt._num_bags() for jt in jts]
        )

    @staticmethod
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Concatenate the keys of several KeyedJaggedTensors.

        Raises:
            ValueError: The list is empty, only some have weights, or the batch sizes differ (they may where
                every input has its own batch size per key).
        """
        if not kjt_list:
            raise ValueError("KeyedJaggedTensor.concat: the list is empty; pass at least one")
        return concatenated(kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """Make a KeyedJaggedTensor without keys, bags and values."""
        jt = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor.unchecked([], jt._values, jt._weights, jt._lengths, stride=0)

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None = None) -> "KeyedJaggedTensor":
        """Make one without keys and values, with the dtypes, weights and batch size of ``kjt``."""
        weights = kjt._weights
        empty = KeyedJaggedTensor.empty(
            weights is not None,
            kjt.device() if device is None else device,
            kjt._values.dtype,
            None if weights is None else weights.dtype,
            kjt.lengths().dtype,
        )
        empty._stride = kjt.stride()
        return empty

    def keys(self) -> list[str]:
        """Return the names of the features, in order."""
        return self._keys

    def stride(self) -> int:
        """Return the number of bags per key.

        If keys differ, this is the batch size of ``inverse_indices``, or else the largest number of bags.
        """
        stride = self._stride
        if stride is None:
            if self._strides is None:
                stride = self._num_bags() // len(self._keys) if self._keys else 0
            elif self._inverse_indices is not None:
                stride = self._inverse_indices[1].size(-1)
            else:
                stride = max(self.stride_per_key(), default=0)
            self._stride = stride
        return stride

    def variable_stride_per_key(self) -> bool:
        """Return whether each key has its own number of bags."""
        return self._strides is not None

    def stride_per_key(self) -> list[int]:
        """Return the number of bags of each key."""
        if self._stride_per_key is None:
            if self._strides is None:
                self._stride_per_key = [self.stride()] * len(self._keys)
            else:
                self._stride_per_key = [total(row) for row in self.stride_per_key_per_rank()]
        return self._stride_per_key

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the number of bags of each key and source rank; empty if all keys have ``stride()`` bags."""
        if isinstance(self._strides, Tensor):
            self._strides = self._strides.tolist()
        return [] if self._strides is None else self._strides

    def lengths_offset_per_key(self) -> list[int]:
        """Return the first bag of each key, and the number of bags at the end."""
        if self._bag_offset_per_key is None:
            self._bag_offset_per_key = list(accumulate(self.stride_per_key(), initial=0))
        return self._bag_offset_per_key

    def segments_or_none(self) -> Tensor | None:
        """Return the first bag of each key, and B: int64 [K+1] on the CPU. None if all keys have equal bags.

        This is the argument ``segments`` of ``torch.ops.meshrec``.
        """
        if self._strides is not None and self._segments is None:
            self._segments = torch.tensor(self.lengths_offset_per_key(), dtype=torch.int64)
        return self._segments

    def inverse_indices(self) -> InverseIndices:
        """Return the bag of each sample; see the class.

        Raises:
            ValueError: There are none.
        """
        if self._inverse_indices is None:
            raise ValueError("this KeyedJaggedTensor has no inverse indices; inverse_indices_or_none() tells")
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return the bag of each sample, or None if every bag is a sample."""
        return self._inverse_indices

    def index_per_key(self) -> dict[str, int]:
        """Return the position of each key; the last position if a key occurs twice."""
        if self._index_per_key is None:
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

    def length_per_key(self) -> list[int]:
        """Return the number of values of each key. The first call reads the lengths on the host."""
        if self._length_per_key is None:
            self._length_per_key = count_per_key(self)
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the number of values of each key if it is known on the host, otherwise None."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the first value of each key, and N. The first call reads the lengths on the host."""
        if self._offset_per_key is None:
            self._offset_per_key = list(accumulate(self.length_per_key(), initial=0))
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return the first value of each key, and N, if they are known on the host, otherwise None."""
        return self._offset_per_key

    def sync(self) -> "KeyedJaggedTensor":
        """Read on the host what ``split``, ``to_dict`` and ``kjt[key]`` need; return itself."""
        self.offset_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        """Forget what :meth:`sync` read; return itself."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """Return itself: its lengths are flat from the start."""
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the bags of one key, as views.

        Raises:
            KeyError: There is no such key.
        """
        index = self.index_per_key().get(key)
        if index is None:
            raise KeyError(f"no key {key!r} in this KeyedJaggedTensor; its keys are {self._keys}")
        known = self._known_dict()
        if known is not None:
            return known[key]
        group = cut_keys(self, [index, 1, len(self._keys) - index - 1])[1]
        return JaggedTensor.unchecked(*group, None)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return the bags of every key, as views.

        Args:
            compute_offsets: Has no effect: a JaggedTensor computes its offsets when they are first read.
        """
        known = self._known_dict()
        if known is not None:
            return known
        groups = cut_keys(self, [1] * len(self._keys))
        jt_dict = {
            key: JaggedTensor.unchecked(*group, None) for key, group in zip(self._keys, groups, strict=True)
        }
        if not torch.compiler.is_compiling():
            self._jt_dict = jt_dict
            self._jt_dict_grad = torch.is_grad_enabled()
        return jt_dict

    def _known_dict(self) -> dict[str, JaggedTensor] | None:
        if self._jt_dict is None or torch.compiler.is_compiling():
            return None
        return self._jt_dict if self._jt_dict_grad in (None, torch.is_grad_enabled()) else None

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Cut into groups of neighbouring keys, as views.

        Args:
            segments: The number of keys of each group. Keys after the last group are left out.

        Raises:
            ValueError: A number is negative, or they sum to more than there are keys.
        """
        return split_keys(self, segments)

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> "KeyedJaggedTensor":
        """Put the keys in another order; some may be left out, or come twice.

        Args:
            indices: Positions of the result's keys.
            indices_tensor: Has no effect: the host's list is enough.

        Raises:
            ValueError: There is no key at a position.
        """
        return permuted_keys(self, indices)

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """Return a copy on another device.

        Args:
            device: Where to.
            non_blocking: Do not wait for copies from pinned memory.
            dtype: Of the weights.
        """

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        result = self._with_tensors(moved)
        if dtype is not None and result._weights is not None:
            result._weights = result._weights.to(dtype)
        return result

    def pin_memory(self) -> "KeyedJaggedTensor":
        """Return a copy in pinned host memory, from which copies to a GPU do not block."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "KeyedJaggedTensor":
        """Return a copy with changed tensors, which keeps what is known on the host."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        inverse = self._inverse_indices
        result = KeyedJaggedTensor.unchecked(
            self._keys,
            change(self._values),
            changed(self._weights),
            changed(self._lengths),
            stride=self._stride,
            strides=self._strides,
            length_per_key=self._length_per_key,
            inverse_indices=None if inverse is None else (inverse[0], change(inverse[1])),
        )
        result._offsets = changed(self._offsets)
        result._by_offsets = self._by_offsets
        result._offset_per_key = self._offset_per_key
        result._stride_per_key = self._stride_per_key
        result._bag_offset_per_key = self._bag_offset_per_key
        result._index_per_key = self._index_per_key
        result._segments = self._segments
        return result

    def _tensors(self) -> list[Tensor]:
        inverse = self._inverse_indices
        return [*super()._tensors(), *([] if inverse is None else [inverse[1]])]

    def validate(self) -> None:
        """Read all numbers and check that keys, bags, weights and indices fit; synchronizes with a GPU.

        Raises:
            ValueError: A number does not fit. The message names the key and the sample.
        """
        check_layout("KeyedJaggedTensor", self._values, self._weights, self._lengths, self._offsets)
        check_keys_and_strides(self._keys, self._num_bags(), self._stride, self._strides)
        check_keyed_numbers(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_jt_dict": None, "_jt_dict_grad": None}

    def __str__(self) -> str:
        return keyed_jagged_text(self)
