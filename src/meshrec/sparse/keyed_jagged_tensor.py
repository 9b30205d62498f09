"""KeyedJaggedTensor: the bags of several features (keys) in shared tensors.

Shape legend: K keys, B bags of all keys, N values, R ranks.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from meshrec.sparse.concatenation import concatenate_bags, concatenate_keys
from meshrec.sparse.counting import count_per_key, sum_counts
from meshrec.sparse.jagged_tensor import Jagged, JaggedTensor
from meshrec.sparse.keyed_bags import InverseIndices, Strides
from meshrec.sparse.keyed_validation import check_given_counts, check_keyed_values, check_keys_and_strides
from meshrec.sparse.printing import format_keyed_jagged
from meshrec.sparse.rearranging import permute_keys, slice_keys, split_keys
from meshrec.sparse.validation import check_layout, consistent_offsets, count_bags


class KeyedJaggedTensor(Jagged):
    """Bags of several features (keys) in shared tensors: all bags of the first key, then of the second, etc.

    Each key has ``stride`` bags (the batch size), unless ``stride_per_key`` or ``stride_per_key_per_rank`` is
    given. Derived values are computed at the first read, and cached. ``length_per_key``, ``offset_per_key``,
    ``split``, ``kjt[key]`` and ``to_dict`` need counts on the host, so the first such call waits for the
    device. Call :meth:`sync` to choose when.

    Args:
        keys: Feature names.
        values: IDs from all bags, concatenated in key order, [N, ...].
        weights: Weight per value, [N].
        lengths: Value count per bag, [B] or [K, stride], int32 or int64.
        offsets: Index in ``values`` where each bag starts, followed by N: [B+1], int32 or int64. Pass
            lengths, offsets or both. If both are given, they are compared on the CPU. On other devices, the
            lengths count and the offsets are ignored.
        stride: Bag count per key; B / K if None.
        stride_per_key_per_rank: Bag count per key and source rank, [K][R] or a tensor [K, R].
        stride_per_key: Bag count per key, [K], if the keys differ.
        length_per_key: Value count per key, [K]. Computed if None; checked on the CPU if given.
        lengths_offset_per_key: First bag index per key, followed by B: K+1 integers. Computed if None;
            checked on the CPU if given.
        offset_per_key: First value index per key, followed by N: K+1 integers. Computed if None;
            checked on the CPU if given.
        index_per_key: Key positions in ``keys``. Computed if None; not checked.
        jt_dict: Result of :meth:`to_dict`. Computed if None; not checked.
        inverse_indices: Keys, and an int64 tensor [K, batch size] that says which bag of a key belongs to a
            sample. Pass it if duplicate bags were removed, which leaves keys with different bag counts.

    Raises:
        ValueError: Shapes, dtypes or devices do not match, or lengths, offsets and per-key counts disagree.
            The constructor does not check the data in other tensors; :meth:`validate` does.

    Example::

        >>> values, lengths = torch.tensor([5, 7, 1, 2]), torch.tensor([1, 2, 0, 1])
        >>> KeyedJaggedTensor(["user", "item"], values, lengths=lengths)
        KeyedJaggedTensor({
            "user": [[5], [7, 1]],
            "item": [[], [2]]
        })
    """

    # Given by the caller. Copies share the list, so it must not be modified.
    _keys: list[str]
    _stride: int | None  # None until given or first read
    _strides: Strides | None  # set only with variable strides; a tensor until first read on the host
    # Caches. None until given by the caller or first read; the tensor is immutable, so they never expire.
    _stride_per_key: list[int] | None
    _bag_offset_per_key: list[int] | None
    _length_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None
    # Cached by segments_or_none(), only with variable strides.
    _segments: Tensor | None
    _jt_dict: dict[str, JaggedTensor] | None
    _jt_dict_grad: bool | None  # grad mode when _jt_dict was cached; None if the caller passed it
    # Given by the caller; None if no duplicate bags were removed.
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
        # Equal strides are stored as a single stride, so that lookups need no per-key segments.
        strides = stride_per_key_per_rank
        if strides is None and stride_per_key:
            # A single source rank: the rank dimension has size 1.
            if any(size != stride_per_key[0] for size in stride_per_key):
                strides = [[size] for size in stride_per_key]
            elif stride is None:
                stride = stride_per_key[0]
        # TorchRec accepts [K, stride] lengths.
        if isinstance(lengths, Tensor) and lengths.dim() > 1:
            lengths = lengths.flatten()
        if not torch.compiler.is_compiling():
            check_layout("KeyedJaggedTensor", values, weights, lengths, offsets)
            if stride_per_key is not None and len(stride_per_key) != len(keys):
                raise ValueError(
                    f"KeyedJaggedTensor: {len(keys)} keys need as many stride_per_key, got {stride_per_key}"
                )
            check_keys_and_strides(keys, count_bags(lengths, offsets), stride, strides)
            offsets = consistent_offsets(lengths, offsets, "bag {}".format)
        # _fill clears the caches, so set those that the caller passed afterwards.
        self._fill(keys, values, weights, lengths, offsets, stride, strides, length_per_key, inverse_indices)
        self._bag_offset_per_key = lengths_offset_per_key
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._jt_dict = jt_dict
        # Wrong counts could make split() return wrong bags without an error.
        if length_per_key or offset_per_key or lengths_offset_per_key:
            check_given_counts(self)

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
        """Set the fields to the arguments, and the caches to None."""
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
        """Build a KeyedJaggedTensor without the constructor's checks, from tensors known to match.

        Args:
            keys: Feature names.
            values: Values from all bags, [N, ...].
            weights: Weight per value, [N].
            lengths: Value count per bag, [B].
            offsets: Bag starts, followed by N: [B+1]. Lengths or offsets must be given.
            stride: Bag count per key, if equal for all keys.
            strides: ``stride_per_key_per_rank`` as in the constructor.
            length_per_key: Value count per key; None: computed at the first read.
            inverse_indices: As in the constructor.
        """
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
        """Build from lengths, and copy the per-key counts to the host as :meth:`sync` does.

        Args:
            keys: Feature names.
            values: [N, ...].
            lengths: Value count per bag, [B].
            weights: [N].
            stride: Bag count per key.
            stride_per_key_per_rank: Bag count per key and source rank.
            inverse_indices: As in the constructor.
        """
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
        """Build from offsets, and copy the per-key counts to the host as :meth:`sync` does.

        Args:
            keys: Feature names.
            values: [N, ...].
            offsets: Bag starts in ``values``, followed by N: [B+1].
            weights: [N].
            stride: Bag count per key.
            stride_per_key_per_rank: Bag count per key and source rank.
            inverse_indices: As in the constructor.
        """
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
        """Build a KeyedJaggedTensor from a JaggedTensor per key. Their bag counts may differ.

        Raises:
            ValueError: The dict is empty, or only some inputs have weights.
        """
        # Dtype and device cannot be derived from an empty dict.
        if not jt_dict:
            raise ValueError(
                "KeyedJaggedTensor.from_jt_dict: the dict is empty; pass one JaggedTensor per key"
            )
        # Bag counts come from shapes, so this does not synchronize.
        jts = list(jt_dict.values())
        values, weights, lengths = concatenate_bags("from_jt_dict", jts)
        return KeyedJaggedTensor(
            list(jt_dict), values, weights, lengths, stride_per_key=[jt._num_bags() for jt in jts]
        )

    @staticmethod
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Concatenate along the keys: keys ``["a"]`` and ``["b", "c"]`` give ``["a", "b", "c"]``.

        Raises:
            ValueError: The list is empty, only some inputs have weights, or the batch sizes differ without
                variable strides.
        """
        if not kjt_list:
            raise ValueError("KeyedJaggedTensor.concat: the list is empty; pass at least one")
        return concatenate_keys(kjt_list)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """Build a KeyedJaggedTensor with zero keys, bags and values.

        Args:
            is_weighted: Whether the result has weights, of size 0.
            device: Device for all tensors.
            values_dtype: Value dtype; torch's default dtype if None.
            weights_dtype: Weight dtype; torch's default dtype if None.
            lengths_dtype: Length dtype.
        """
        # Shares the dtype defaults with JaggedTensor.empty.
        jt = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        return KeyedJaggedTensor.unchecked([], jt._values, jt._weights, jt._lengths, stride=0)

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None = None) -> "KeyedJaggedTensor":
        """Build a KeyedJaggedTensor with zero keys and the dtypes and ``stride()`` of ``kjt``.

        It has weights (of size 0) if ``kjt`` has.

        Args:
            kjt: Template.
            device: Result device; None: as ``kjt``.
        """
        weights = kjt._weights
        empty = KeyedJaggedTensor.empty(
            weights is not None,
            kjt.device() if device is None else device,
            kjt._values.dtype,
            None if weights is None else weights.dtype,
            kjt.lengths().dtype,
        )
        # Without keys, the stride cannot be derived from the lengths.
        empty._stride = kjt.stride()
        return empty

    def keys(self) -> list[str]:
        """Return the feature names."""
        return self._keys

    def stride(self) -> int:
        """Return the bag count per key (the batch size).

        If the keys differ, return the batch size of ``inverse_indices`` if given, else the largest bag count.
        """
        stride = self._stride
        # With inverse indices, a key has fewer bags than the batch has samples.
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
        """Return whether keys may have different bag counts."""
        return self._strides is not None

    def stride_per_key(self) -> list[int]:
        """Return the bag count per key."""
        if self._stride_per_key is None:
            if self._strides is None:
                self._stride_per_key = [self.stride()] * len(self._keys)
            else:
                self._stride_per_key = [sum_counts(row) for row in self.stride_per_key_per_rank()]
        return self._stride_per_key

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the bag count per key and source rank, [K][R]; empty if strides are not variable."""
        # A tensor if rebuilt from pytree leaves. Read here, on first use, because reading synchronizes.
        if isinstance(self._strides, Tensor):
            self._strides = self._strides.tolist()
        return [] if self._strides is None else self._strides

    def lengths_offset_per_key(self) -> list[int]:
        """Return the first bag index per key, followed by B: K+1 integers."""
        if self._bag_offset_per_key is None:
            self._bag_offset_per_key = list(accumulate(self.stride_per_key(), initial=0))
        return self._bag_offset_per_key

    def segments_or_none(self) -> Tensor | None:
        """Return ``lengths_offset_per_key`` as an int64 CPU tensor [K+1]. None unless strides are variable.

        This is the ``segments`` argument of the operators in ``torch.ops.meshrec``.
        """
        # On the CPU: kernels read it as host metadata, also for GPU tensors.
        if self._strides is not None and self._segments is None:
            self._segments = torch.tensor(self.lengths_offset_per_key(), dtype=torch.int64)
        return self._segments

    def inverse_indices(self) -> InverseIndices:
        """Return the inverse indices: the keys, and the bag index per key and sample, int64 [K, batch size].

        Raises:
            ValueError: The tensor was built without inverse indices.
        """
        if self._inverse_indices is None:
            raise ValueError("this KeyedJaggedTensor has no inverse indices; call inverse_indices_or_none()")
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return the inverse indices; None if the tensor was built without them.

        Without inverse indices, bag i of every key belongs to sample i.
        """
        return self._inverse_indices

    def index_per_key(self) -> dict[str, int]:
        """Return the key positions in ``keys()``; the last position if a key is repeated."""
        if self._index_per_key is None:
            # Later duplicates overwrite earlier ones, as in TorchRec.
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

    def length_per_key(self) -> list[int]:
        """Return the value count per key. The first call waits for the device."""
        if self._length_per_key is None:
            self._length_per_key = count_per_key(self)
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the value count per key if it is known on the host, otherwise None."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the first value index per key, followed by N: K+1 integers.

        The first call waits for the device.
        """
        if self._offset_per_key is None:
            self._offset_per_key = list(accumulate(self.length_per_key(), initial=0))
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return ``offset_per_key()`` if it is known on the host, otherwise None."""
        return self._offset_per_key

    def sync(self) -> "KeyedJaggedTensor":
        """Copy the per-key counts to the host, where ``split``, ``to_dict`` and ``kjt[key]`` need them.

        Returns:
            This tensor.
        """
        # Caches length_per_key, too.
        self.offset_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        """Drop the per-key counts copied by :meth:`sync`. Returns this tensor."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """Return this tensor. The constructor has already flattened the lengths."""
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the bags of a key as a JaggedTensor, whose tensors are views.

        Raises:
            KeyError: The key does not exist.
        """
        index = self.index_per_key().get(key)
        if index is None:
            raise KeyError(f"no key {key!r} in this KeyedJaggedTensor; its keys are {self._keys}")
        # A dict that exists already saves the split.
        cached = self._cached_dict()
        if cached is not None:
            return cached[key]
        # Three groups: the keys before it, the key itself, and the keys after it. to_dict() would make views
        # of all keys.
        group = slice_keys(self, [index, 1, len(self._keys) - index - 1])[1]
        return JaggedTensor.unchecked(*group, None)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return the bags per key as JaggedTensors, whose tensors are views.

        Args:
            compute_offsets: Ignored, for compatibility with TorchRec. Offsets are computed at the first read.
        """
        cached = self._cached_dict()
        if cached is not None:
            return cached
        groups = slice_keys(self, [1] * len(self._keys))
        jt_dict = {
            key: JaggedTensor.unchecked(*group, None) for key, group in zip(self._keys, groups, strict=True)
        }
        # A traced program must not leave its tensors in an input. Views made without grad mode are detached,
        # so the cache applies to a single grad mode only.
        if not torch.compiler.is_compiling():
            self._jt_dict = jt_dict
            self._jt_dict_grad = torch.is_grad_enabled()
        return jt_dict

    def _cached_dict(self) -> dict[str, JaggedTensor] | None:
        """Return the cached result of ``to_dict``, or None if missing or if grad mode has changed since."""
        if self._jt_dict is None or torch.compiler.is_compiling():
            return None
        return self._jt_dict if self._jt_dict_grad in (None, torch.is_grad_enabled()) else None

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Split into groups of adjacent keys: a KeyedJaggedTensor per group, whose tensors are views.

        Args:
            segments: Key count per group. Keys after the last group are left out.

        Raises:
            ValueError: A segment is negative, or the segments sum to more than the key count.
        """
        return split_keys(self, segments)

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> "KeyedJaggedTensor":
        """Select keys by position. Keys may be repeated or left out.

        Args:
            indices: Position in ``keys()`` for each key of the result.
            indices_tensor: Ignored, for compatibility with TorchRec.

        Raises:
            ValueError: A position is out of range.
        """
        return permute_keys(self, indices)

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """Copy to another device.

        Args:
            device: Target device.
            non_blocking: Do not wait for copies from pinned memory.
            dtype: New dtype for the weights; values and lengths keep theirs.
        """

        def copy(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        result = self._with_tensors(copy)
        if dtype is not None and result._weights is not None:
            # Only the weights: IDs must keep their integer type.
            result._weights = result._weights.to(dtype)
        return result

    def pin_memory(self) -> "KeyedJaggedTensor":
        """Copy to pinned host memory, so later copies to a GPU need not block."""
        return self._with_tensors(Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "KeyedJaggedTensor":
        """Return a KeyedJaggedTensor with the results of applying ``change`` to every tensor.

        The result reuses the counts that this tensor has cached on the host.
        """

        def changed(tensor: Tensor | None) -> Tensor | None:
            """Apply ``change`` to an optional tensor."""
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
        # Set after construction: ``unchecked`` derives ``_by_offsets`` from missing lengths, and the copy
        # must flatten to the same pytree leaves as the original.
        result._offsets = changed(self._offsets)
        result._by_offsets = self._by_offsets
        result._offset_per_key = self._offset_per_key
        result._stride_per_key = self._stride_per_key
        result._bag_offset_per_key = self._bag_offset_per_key
        result._index_per_key = self._index_per_key
        result._segments = self._segments
        # Without the cached dict, whose views belong to the tensors of this object.
        return result

    def _tensors(self) -> list[Tensor]:
        """Return all existing tensors on the device, including the inverse indices."""
        inverse = self._inverse_indices
        # Host caches (segments, jt_dict) own no device memory.
        tensors = super()._tensors()
        return tensors if inverse is None else [*tensors, inverse[1]]

    def validate(self) -> None:
        """Check the data in all tensors, and the per-key counts. Waits for the device.

        Raises:
            ValueError: A value is invalid. The message names the key and sample.
        """
        # The constructor's checks again: ``unchecked`` may have skipped them.
        check_layout("KeyedJaggedTensor", self._values, self._weights, self._lengths, self._offsets)
        check_keys_and_strides(self._keys, self._num_bags(), self._stride, self._strides)
        check_keyed_values(self)

    # The cache holds views, which pickle would store a second time.
    def __getstate__(self) -> dict[str, Any]:
        """Return the fields to pickle, without cached views."""
        return {**self.__dict__, "_jt_dict": None, "_jt_dict_grad": None}

    def __str__(self) -> str:
        return format_keyed_jagged(self)
