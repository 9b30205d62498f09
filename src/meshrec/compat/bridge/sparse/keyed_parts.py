"""KeyedJaggedTensor fields, and host-side counts that are computed once."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.jagged import JaggedTensor
from meshrec.compat.bridge.sparse.segments import (
    positions_of,
    running_sum,
    split_by_key,
    sums_of,
    value_counts_per_key,
)
from meshrec.sparse.counting import count_per_key


class KeyedParts:
    """Mixin with the methods of KeyedJaggedTensor that do not refer to the class by name.

    The methods are copied into KeyedJaggedTensor, where TorchScript compiles them. They use the attributes of
    ``JaggedParts``, from which KeyedJaggedTensor also inherits. "Key-major" order means all bags of the first
    key, then all bags of the second key, and so on.
    """

    # Set by the constructor.
    _keys: list[str]
    # Bags per key, if equal for all keys. Given to the constructor, or computed by the first stride().
    _stride: int | None
    # Bags per key and source rank [K, ranks]; None if all keys have equally many bags.
    _stride_per_key_per_rank: Tensor | None
    # The following are host-side copies, computed at first use and then cached.
    _stride_per_key: list[int] | None
    _length_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _lengths_offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None
    # Result of to_dict(); not cached if the weights require gradients.
    _jt_dict: dict[str, JaggedTensor] | None
    # Given to the constructor, for samples that share bags.
    _inverse_indices: tuple[list[str], Tensor] | None

    def keys(self) -> list[str]:
        """Return the feature names in order."""
        return self._keys

    def stride(self) -> int:
        """Return the number of bags per key.

        If keys differ, return the batch size from ``inverse_indices``, or else the maximum.
        """
        # A local variable, because TorchScript narrows Optional types of local variables only.
        given = self._stride
        if given is not None:
            return given
        stride = 0
        strides, inverse = self._stride_per_key_per_rank, self._inverse_indices
        lengths, offsets = self._lengths, self._offsets
        if len(self._keys) > 0:
            if strides is not None and strides.numel() > 0:
                if inverse is not None and inverse[1].numel() > 0:
                    stride = inverse[1].size(-1)
                else:
                    stride = int(strides.sum(1).max().item())
            elif strides is None and offsets is not None and offsets.numel() > 0:
                stride = (offsets.numel() - 1) // len(self._keys)
            # Without strides, all keys have the same number of bags.
            elif strides is None and lengths is not None:
                stride = lengths.numel() // len(self._keys)
        self._stride = stride
        return stride

    def stride_per_key(self) -> list[int]:
        """Return the bag count per key."""
        given = self._stride_per_key
        if given is not None:
            return given
        strides = self._stride_per_key_per_rank
        if strides is None:
            bags = [self.stride()] * len(self._keys)
        else:
            bags = torch.jit.annotate(list[int], [])
            if strides.dim() == 2:
                counted: list[int] = strides.sum(1).tolist()
                bags = counted
        self._stride_per_key = bags
        return bags

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the bag count per key and source rank; empty if all keys have ``stride()`` bags."""
        strides = self._stride_per_key_per_rank
        if strides is None:
            return torch.jit.annotate(list[list[int]], [])
        rows: list[list[int]] = strides.tolist()
        return rows

    def variable_stride_per_key(self) -> bool:
        """Return whether keys have separate batch sizes."""
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """Return the keys, and a tensor [K, B] with the index of every sample's bag for every key.

        Raises:
            AssertionError: the inverse indices were not given.
        """
        inverse = self._inverse_indices
        if inverse is None:
            raise AssertionError("this KeyedJaggedTensor has no inverse indices")
        return inverse

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        return self._inverse_indices

    def _key_indices(self) -> dict[str, int]:
        return self.index_per_key()

    def index_per_key(self) -> dict[str, int]:
        given = self._index_per_key
        if given is not None:
            return given
        positions = positions_of(self._keys)
        self._index_per_key = positions
        return positions

    def length_per_key(self) -> list[int]:
        """Return the value count per key. The first call synchronizes with the device."""
        given = self._length_per_key
        if given is not None:
            return given
        counts = torch.jit.annotate(list[int], [])
        if len(self._keys) > 0 and (self._lengths is not None or self._offsets is not None):
            counts = self._counted()
        self._length_per_key = counts
        return counts

    def _counted(self) -> list[int]:
        """Compute the number of values per key.

        Synchronizes with the device, except under torch.compile.
        """
        if not torch.jit.is_scripting():
            if torch.compiler.is_compiling():
                return count_per_key(self)
        return value_counts_per_key(self.offsets(), self.lengths_offset_per_key(), self._values.size(0))

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the value count per key, or None if it has not been read from the device yet."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the index of every key's first value, followed by the number of values.

        The first call synchronizes with the device.
        """
        given = self._offset_per_key
        if given is not None:
            return given
        starts = running_sum(self.length_per_key())
        self._offset_per_key = starts
        return starts

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return the result of `offset_per_key`, or None if it has not been computed yet."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Return the index of every key's first bag, followed by the number of bags."""
        given = self._lengths_offset_per_key
        if given is not None:
            return given
        starts = running_sum(self.stride_per_key())
        self._lengths_offset_per_key = starts
        return starts

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return a key's bags as views."""
        index = self.index_per_key()[key]
        starts, bags = self.offset_per_key(), self.lengths_offset_per_key()
        start = starts[index]
        # Without lengths and offsets, `starts` is [0].
        end = starts[index + 1] if index + 1 < len(starts) else start
        weights = self._weights
        return JaggedTensor(
            values=self._values[start:end],
            weights=None if weights is None else weights[start:end],
            lengths=self.lengths()[bags[index] : bags[index + 1]],
            offsets=None,
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return all bags by key, as views. The dict is cached unless the weights require gradients."""
        cached = self._jt_dict
        if cached is not None:
            return cached
        result: dict[str, JaggedTensor] = {}
        weights, counts = self._weights, self.length_per_key()
        if len(counts) > 0:
            lengths, offsets = split_by_key(
                self.lengths(), self.stride_per_key(), self.variable_stride_per_key(), compute_offsets
            )
            values = torch.split(self._values, counts)
            pieces = [] if weights is None else list(torch.split(weights, counts))
            for i, key in enumerate(self._keys):
                result[key] = JaggedTensor(
                    values=values[i],
                    weights=None if weights is None else pieces[i],
                    lengths=lengths[i],
                    offsets=offsets[i] if compute_offsets else None,
                )
        # Cached slices would keep the graph of an earlier backward pass.
        if weights is None or not weights.requires_grad:
            self._jt_dict = result
        return result

    def size_in_bytes(self) -> int:
        """Return the total size of all tensors in bytes."""
        size = self._values.numel() * self._values.element_size()
        for part in [self._weights, self._lengths, self._offsets, self._stride_per_key_per_rank]:
            if part is not None:
                size += part.numel() * part.element_size()
        return size

    def dist_labels(self) -> list[str]:
        """Return the names of the tensors from ``dist_tensors``."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Return how many elements of every tensor in ``dist_tensors`` go to every rank.

        Returns:
            A list per tensor, in the order of ``dist_labels``, with an element count per target rank.
        """
        bags, counts = sums_of(self.stride_per_key(), key_splits), sums_of(self.length_per_key(), key_splits)
        # In the order of dist_labels().
        splits = [bags, counts]
        if self.variable_stride_per_key():
            splits.append(key_splits)
        if self._weights is not None:
            splits.append(counts)
        return splits

    def dist_tensors(self) -> list[Tensor]:
        """Return the tensors to send to other ranks."""
        tensors = [self.lengths(), self._values]
        if self.variable_stride_per_key():
            tensors.append(torch.tensor(self.stride_per_key(), device=self.device()))
        weights = self._weights
        if weights is not None:
            tensors.append(weights)
        return tensors

    @torch.jit.unused
    def clear_storage(self) -> int:
        """Free all tensor memory, and return the freed bytes."""
        size = sum(tensor.nbytes for tensor in self._tensors())
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)
        return size
