"""KeyedJaggedTensor for eager code, TorchScript and torch.fx."""

from typing import Any

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.jagged import JaggedParts, JaggedTensor, check_counts, copy_if_present
from meshrec.compat.bridge.sparse.keyed_parts import KeyedParts
from meshrec.compat.bridge.sparse.kinds import Kind, is_traced, with_methods_of
from meshrec.compat.bridge.sparse.printing import keyed_jagged_text
from meshrec.compat.bridge.sparse.segments import permuted_segments, received
from meshrec.sparse import keyed_jagged_tensor as core

torch.fx.wrap("concatenated")
torch.fx.wrap("empty_of_stride")
torch.fx.wrap("empty_on")


@with_methods_of(KeyedParts, JaggedParts)
class KeyedJaggedTensor(KeyedParts, JaggedParts, core.KeyedJaggedTensor, metaclass=Kind):
    """Bags for several features; ``meshrec.sparse.KeyedJaggedTensor`` documents the arguments.

    As in TorchRec, the constructor only checks dtypes. ``validate`` and ``jagged_tensor_validator`` check
    everything.

    Raises:
        AssertedError: lengths or offsets are not integers.
    """

    _fields = ("_values", "_weights", "_lengths", "_offsets", "_stride_per_key_per_rank", "_inverse_indices")
    __jit_unused_properties__ = ("_strides",)
    _like = core.KeyedJaggedTensor
    _segments: Tensor | None = None

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> None:
        strides: Tensor | None = None
        if stride_per_key_per_rank is not None:
            if isinstance(stride_per_key_per_rank, Tensor):
                strides = stride_per_key_per_rank
            else:
                strides = torch.tensor(stride_per_key_per_rank, dtype=torch.int32)
        if strides is None and stride_per_key is not None and len(stride_per_key) > 0:
            if max(stride_per_key) > min(stride_per_key):
                strides = torch.tensor(stride_per_key, dtype=torch.int32)[:, None]
            elif stride is None:
                stride = stride_per_key[0]
        if lengths is not None and lengths.dim() > 1:
            lengths = lengths.flatten()
        # TorchScript requires every attribute to be declared here. Counts are host-side caches, filled on
        # first use.
        self._keys: list[str] = keys
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        self._stride: int | None = stride
        self._stride_per_key_per_rank: Tensor | None = strides
        self._stride_per_key: list[int] | None = stride_per_key
        self._length_per_key: list[int] | None = length_per_key
        self._offset_per_key: list[int] | None = offset_per_key
        self._lengths_offset_per_key: list[int] | None = lengths_offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key
        self._jt_dict: dict[str, JaggedTensor] | None = jt_dict
        self._inverse_indices: tuple[list[str], Tensor] | None = inverse_indices
        if not torch.jit.is_scripting():
            # A separate condition: TorchScript skips a branch only if is_scripting() is all of the condition.
            if not is_traced():
                check_counts(lengths, offsets)

    @property
    def _strides(self) -> Tensor | None:
        # MeshRec's own name of it.
        return self._stride_per_key_per_rank

    # First among the methods: TorchScript learns of torch.dtype from the annotation of an argument.
    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """Return a KeyedJaggedTensor without keys.

        Args:
            is_weighted: whether it has weights.
            device: device.
            values_dtype: dtype of the values (default: torch's default dtype).
            weights_dtype: dtype of the weights (default: torch's default dtype).
            lengths_dtype: dtype of the lengths.
        """
        values = torch.empty(0, dtype=values_dtype, device=device)
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        keys = torch.jit.annotate(list[str], [])
        return KeyedJaggedTensor._build(keys, values, weights, lengths, None, 0, None, None, None)

    @staticmethod
    def unchecked(
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None = None,
        *,
        stride: int | None = None,
        strides: Any = None,
        length_per_key: list[int] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """Construct a KeyedJaggedTensor without checks.

        Args:
            keys: feature names.
            values: values [N, ...], key-major.
            weights: weight per value, or None.
            lengths: bag lengths, key-major, or None.
            offsets: bag boundaries, or None.
            stride: bags per key.
            strides: ``stride_per_key_per_rank``, if keys differ in batch size.
            length_per_key: value count per key, if known on the host.
            inverse_indices: keys and bag index per key and sample [K, B].
        """
        kjt = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
        if isinstance(strides, list):
            strides = torch.tensor(strides, dtype=torch.int32).view(len(keys), -1)
        # Fields that are None here are computed and stored at the first use.
        vars(kjt).update(
            _keys=keys,
            _values=values,
            _weights=weights,
            _lengths=lengths,
            _offsets=offsets,
            _stride=stride,
            _stride_per_key_per_rank=strides,
            _stride_per_key=None,
            _length_per_key=length_per_key,
            _offset_per_key=None,
            _lengths_offset_per_key=None,
            _index_per_key=None,
            _jt_dict=None,
            _inverse_indices=inverse_indices,
        )
        return kjt

    @staticmethod
    def _build(
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        strides: Tensor | list[list[int]] | None,
        length_per_key: list[int] | None,
        inverse_indices: tuple[list[str], Tensor] | None,
    ) -> "KeyedJaggedTensor":
        # All arguments, because TorchScript ignores the defaults of a class while it compiles the methods.
        # Its instance methods cannot call this function either, so they repeat it.
        return KeyedJaggedTensor(
            keys=keys,
            values=values,
            weights=weights,
            lengths=lengths,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=strides,
            stride_per_key=None,
            length_per_key=length_per_key,
            lengths_offset_per_key=None,
            offset_per_key=None,
            index_per_key=None,
            jt_dict=None,
            inverse_indices=inverse_indices,
        )

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """Construct a KeyedJaggedTensor from offsets, and read all host-side counts at once; see ``sync``.

        Args:
            keys: feature names.
            values: values [N, ...], key-major.
            offsets: bag boundaries, key-major.
            weights: weight per value.
            stride: bags per key.
            stride_per_key_per_rank: bags per key and source rank, if keys differ in batch size.
            inverse_indices: keys and bag index per key and sample [K, B].
        """
        return KeyedJaggedTensor._build(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, None, inverse_indices
        ).sync()

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> "KeyedJaggedTensor":
        """Construct a KeyedJaggedTensor from lengths, and read all host-side counts at once; see ``sync``.

        Args:
            keys: feature names.
            values: values [N, ...], key-major.
            lengths: bag lengths, key-major.
            weights: weight per value.
            stride: bags per key.
            stride_per_key_per_rank: bags per key and source rank, if keys differ in batch size.
            inverse_indices: keys and bag index per key and sample [K, B].
        """
        return KeyedJaggedTensor._build(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, None, inverse_indices
        ).sync()

    @staticmethod
    def from_jt_dict(
        jt_dict: dict[str, JaggedTensor], force_variable_stride: bool = False
    ) -> "KeyedJaggedTensor":
        """Concatenate JaggedTensors by key. Batch sizes may differ.

        With ``force_variable_stride``, every key has a separate batch size, even if all are equal.
        """
        values: list[Tensor] = []
        weights: list[Tensor] = []
        lengths: list[Tensor] = []
        strides: list[int] = []
        for jt in jt_dict.values():
            values.append(jt.values())
            lengths.append(jt.lengths())
            strides.append(jt.lengths().numel())
            jt_weights = jt.weights_or_none()
            if jt_weights is not None:
                weights.append(jt_weights)
        # Weights are stored in one tensor for all keys, which needs a weight for every value.
        assert len(weights) in (0, len(values)), "give weights to all keys or none"
        variable: Tensor | None = None
        if force_variable_stride or max(strides) > min(strides):
            # A single source rank: [K, 1].
            variable = torch.tensor(strides, dtype=torch.int32)[:, None]
        return KeyedJaggedTensor._build(
            list(jt_dict.keys()),
            torch.cat(values),
            torch.cat(weights) if len(weights) > 0 else None,
            torch.cat(lengths),
            None,
            strides[0] if variable is None else None,
            variable,
            None,
            None,
        ).sync()

    @staticmethod
    def concat(kjt_list: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        return concatenated(kjt_list)

    @staticmethod
    def empty_like(kjt: "KeyedJaggedTensor", device: torch.device | None = None) -> "KeyedJaggedTensor":
        """Return a KeyedJaggedTensor without keys, with the dtypes and batch size of ``kjt``.

        With a device, instead allocate uninitialized tensors there with the shapes of ``kjt``.
        """
        return empty_of_stride(kjt) if device is None else empty_on(kjt, device)

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> "KeyedJaggedTensor":
        """Construct a KeyedJaggedTensor from tensors received from all ranks.

        Args:
            keys: keys on this rank.
            tensors: received tensors, in ``dist_labels`` order.
            variable_stride_per_key: whether keys differ in batch size.
            num_workers: number of sending ranks.
            recat: permutation from (rank, key) to (key, rank) order.
            stride_per_rank: batch size per rank.
            stagger: number of equal rank blocks that ``recat`` interleaves; 1: rank order.
        """
        values, weights, lengths, strides, stride = received(
            len(keys), tensors, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger
        )
        return KeyedJaggedTensor._build(
            keys, values, weights, lengths, None, stride, strides, None, None
        ).sync()

    def copy_(self, kjt: "KeyedJaggedTensor", non_blocking: bool = False) -> "KeyedJaggedTensor":
        """Copy the values of ``kjt``, which must have the same tensors with the same shapes."""
        self._values.copy_(kjt._values, non_blocking=non_blocking)
        copy_if_present(self._weights, kjt._weights, non_blocking)
        copy_if_present(self._lengths, kjt._lengths, non_blocking)
        copy_if_present(self._offsets, kjt._offsets, non_blocking)
        target, source = self._inverse_indices, kjt._inverse_indices
        if target is not None and source is not None:
            self._inverse_indices = (source[0], target[1].copy_(source[1], non_blocking=non_blocking))
        self._stride_per_key_per_rank = kjt._stride_per_key_per_rank
        self._stride_per_key = kjt._stride_per_key
        self._length_per_key = kjt._length_per_key
        self._offset_per_key = kjt._offset_per_key
        self._lengths_offset_per_key = kjt._lengths_offset_per_key
        self._index_per_key = kjt._index_per_key
        # The cached bags are views of the old values' layout: lengths may have changed.
        self._jt_dict = None
        return self

    def sync(self) -> "KeyedJaggedTensor":
        self.offset_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        return self

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        groups: list[KeyedJaggedTensor] = []
        starts, bags, counts = self.offset_per_key(), self.lengths_offset_per_key(), self.length_per_key()
        weights, strides = self._weights, self._stride_per_key_per_rank
        stride = self.stride()
        first = 0
        for segment in segments:
            last = first + segment
            # All keys in one group: the same object, with the counts cached in it.
            if segment == len(self._keys):
                groups.append(self)
            else:
                start, end = starts[first], starts[last]
                groups.append(
                    KeyedJaggedTensor(
                        self._keys[first:last],
                        self._values[start:end],
                        None if weights is None else weights[start:end],
                        self.lengths()[bags[first] : bags[last]],
                        None,
                        stride,
                        None if strides is None else strides[first:last],
                        None,
                        counts[first:last],
                        None,
                        None,
                        None,
                        None,
                        None,
                    )
                )
            first = last
        return groups

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> "KeyedJaggedTensor":
        # `length_per_key` reads from the device once. The result carries the counts on, without another read.
        counts, strides = self.length_per_key(), self._stride_per_key_per_rank
        values, weights, lengths = permuted_segments(
            indices, self._values, self._weights, self.lengths(), counts, self.lengths_offset_per_key()
        )
        return KeyedJaggedTensor(
            keys=[self._keys[i] for i in indices],
            values=values,
            weights=weights,
            lengths=lengths,
            offsets=None,
            # Given, because it cannot be computed if no key is left.
            stride=self.stride(),
            stride_per_key_per_rank=None if strides is None else strides[torch.tensor(indices).long()],
            stride_per_key=None,
            length_per_key=[counts[i] for i in indices],
            lengths_offset_per_key=None,
            offset_per_key=None,
            index_per_key=None,
            jt_dict=None,
            inverse_indices=None,
        )

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> "KeyedJaggedTensor":
        """Return a copy on another device.

        Args:
            device: target device.
            non_blocking: whether copies may be asynchronous.
            dtype: dtype for the weights; None: unchanged.
        """
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        inverse = self._inverse_indices
        if inverse is not None:
            inverse = (inverse[0], inverse[1].to(device, non_blocking=non_blocking))
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
            if dtype is not None:
                weights = weights.to(dtype)
        return KeyedJaggedTensor(
            keys=self._keys,
            values=self._values.to(device, non_blocking=non_blocking),
            weights=weights,
            lengths=None if lengths is None else lengths.to(device, non_blocking=non_blocking),
            offsets=None if offsets is None else offsets.to(device, non_blocking=non_blocking),
            stride=self._stride,
            stride_per_key_per_rank=self._stride_per_key_per_rank,
            stride_per_key=self._stride_per_key,
            length_per_key=self._length_per_key,
            lengths_offset_per_key=self._lengths_offset_per_key,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
            # The stored JaggedTensors are on the old device.
            jt_dict=None,
            inverse_indices=inverse,
        )

    @torch.jit.unused
    def __str__(self) -> str:
        return keyed_jagged_text(self)


def concatenated(kjts: list["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
    if len(kjts) == 0:
        raise ValueError("KeyedJaggedTensor.concat: the list is empty; pass at least one")
    keys: list[str] = []
    values: list[Tensor] = []
    weights: list[Tensor] = []
    lengths: list[Tensor] = []
    strides: list[Tensor] = []
    counts: list[int] = []
    are_counted = True
    inverse_keys: list[str] = []
    inverses: list[Tensor] = []
    for kjt in kjts:
        keys += kjt.keys()
        values.append(kjt.values())
        lengths.append(kjt.lengths())
        kjt_weights, kjt_counts = kjt.weights_or_none(), kjt.length_per_key_or_none()
        inverse = kjt.inverse_indices_or_none()
        if kjt_weights is not None:
            weights.append(kjt_weights)
        variable = kjt._stride_per_key_per_rank
        if variable is not None:
            strides.append(variable)
        # The counts of the result are known without a read from the device only if all inputs have theirs.
        if kjt_counts is None:
            are_counted = False
        else:
            counts += kjt_counts
        if inverse is not None:
            inverse_keys += inverse[0]
            inverses.append(inverse[1])
    if len(weights) not in (0, len(kjts)):
        raise ValueError("KeyedJaggedTensor.concat: only some inputs have weights; give them to all or none")
    assert len(strides) in (0, len(kjts)), "only some inputs have strides per key; pass them to all or none"
    assert len(inverses) in (0, len(kjts)), "only some inputs have inverse indices; pass them to all or none"
    stride: int | None = None
    if len(strides) == 0:
        stride = kjts[0].stride()
        for kjt in kjts:
            assert kjt.stride() == stride, "the inputs must have one batch size"
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat(values),
        weights=torch.cat(weights) if len(weights) > 0 else None,
        # Lengths are stored key by key, so appending them appends the keys.
        lengths=torch.cat(lengths),
        stride=stride,
        stride_per_key_per_rank=torch.cat(strides) if len(strides) > 0 else None,
        length_per_key=counts if are_counted else None,
        inverse_indices=(inverse_keys, torch.cat(inverses)) if len(inverses) > 0 else None,
    )


def empty_of_stride(kjt: "KeyedJaggedTensor") -> "KeyedJaggedTensor":
    """Return a KeyedJaggedTensor without keys, with the dtypes and batch size of ``kjt``."""
    weights, strides = kjt.weights_or_none(), kjt._stride_per_key_per_rank
    return KeyedJaggedTensor(
        keys=torch.jit.annotate(list[str], []),
        values=torch.empty(0, dtype=kjt.values().dtype, device=kjt.device()),
        weights=None if weights is None else torch.empty(0, dtype=weights.dtype, device=kjt.device()),
        lengths=torch.empty(0, dtype=kjt.lengths().dtype, device=kjt.device()),
        # A batch size per key and rank leaves no common batch size, so only one of both is given.
        stride=kjt.stride() if strides is None else None,
        stride_per_key_per_rank=strides,
    )


def empty_on(kjt: "KeyedJaggedTensor", device: torch.device) -> "KeyedJaggedTensor":
    """Allocate uninitialized tensors on ``device`` with the shapes of ``kjt``."""
    weights, lengths, offsets = kjt.weights_or_none(), kjt.lengths_or_none(), kjt.offsets_or_none()
    inverse, strides = kjt.inverse_indices_or_none(), kjt._stride_per_key_per_rank
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=torch.empty_like(kjt.values(), device=device),
        weights=None if weights is None else torch.empty_like(weights, device=device),
        lengths=None if lengths is None else torch.empty_like(lengths, device=device),
        offsets=None if offsets is None else torch.empty_like(offsets, device=device),
        stride=kjt.stride() if strides is None else None,
        stride_per_key_per_rank=strides,
        stride_per_key=kjt._stride_per_key,
        length_per_key=kjt.length_per_key_or_none(),
        offset_per_key=kjt.offset_per_key_or_none(),
        inverse_indices=None
        if inverse is None
        else (inverse[0], torch.empty_like(inverse[1], device=device)),
    )
