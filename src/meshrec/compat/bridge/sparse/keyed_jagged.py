"""KeyedJaggedTensor, for TorchScript and torch.fx too."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse import making
from meshrec.compat.bridge.sparse.counts import counts_between, running_sum
from meshrec.compat.bridge.sparse.exchange import sums_of
from meshrec.compat.bridge.sparse.jagged import (
    JaggedTensor,
    check_counts,
    copy_part,
    either_lengths,
    either_offsets,
    weights_of,
)
from meshrec.compat.bridge.sparse.kinds import Kind, is_traced
from meshrec.compat.bridge.sparse.making import Makers
from meshrec.compat.bridge.sparse.printing import keyed_jagged_text
from meshrec.compat.bridge.sparse.rearranging import permuted_segments, split_bags
from meshrec.sparse import keyed_jagged_tensor as own


class KeyedJaggedTensor(Makers, own.KeyedJaggedTensor, metaclass=Kind):
    """The bags of several features; see ``meshrec.sparse.KeyedJaggedTensor`` for the arguments.

    As in TorchRec nothing but dtypes is checked before it is used; ``validate`` and
    ``jagged_tensor_validator`` check everything.

    Raises:
        AssertedError: lengths or offsets are no integers.
    """

    _fields = (
        "_values",
        "_weights",
        "_lengths",
        "_offsets",
        "_stride_per_key_per_rank",
        "_inverse_indices",
    )
    __jit_unused_properties__ = ("_strides",)
    _like = own.KeyedJaggedTensor
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
            if not is_traced():
                check_counts(lengths, offsets)

    @property
    def _strides(self) -> Tensor | None:
        # MeshRec's own name of it.
        return self._stride_per_key_per_rank

    # It stands here because TorchScript learns of torch.dtype by the annotation of an argument.
    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """No keys, no bags, no values."""
        weights: Tensor | None = None
        if is_weighted:
            weights = torch.empty(0, dtype=weights_dtype, device=device)
        values = torch.empty(0, dtype=values_dtype, device=device)
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        keys = torch.jit.annotate(list[str], [])
        return KeyedJaggedTensor._made(keys, values, weights, lengths, None, 0, None, None, None)

    def copy_(self, kjt: "KeyedJaggedTensor", non_blocking: bool = False) -> "KeyedJaggedTensor":
        """Takes over the numbers of ``kjt``, which must have the same parts of the same shapes."""
        self._values.copy_(kjt._values, non_blocking=non_blocking)
        copy_part(self._weights, kjt._weights, non_blocking)
        copy_part(self._lengths, kjt._lengths, non_blocking)
        copy_part(self._offsets, kjt._offsets, non_blocking)
        ours, others = self._inverse_indices, kjt._inverse_indices
        if ours is not None and others is not None:
            self._inverse_indices = (others[0], ours[1].copy_(others[1], non_blocking=non_blocking))
        self._stride_per_key_per_rank = kjt._stride_per_key_per_rank
        self._stride_per_key = kjt._stride_per_key
        self._length_per_key = kjt._length_per_key
        self._offset_per_key = kjt._offset_per_key
        self._lengths_offset_per_key = kjt._lengths_offset_per_key
        self._index_per_key = kjt._index_per_key
        self._jt_dict = None
        return self

    def sync(self) -> "KeyedJaggedTensor":
        """Reads on the host what ``split``, ``to_dict`` and ``kjt[key]`` need; returns itself."""
        self.offset_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        """Forgets what :meth:`sync` read; returns itself."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def keys(self) -> list[str]:
        """The features' names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """All values [N, ...], key after key, bag after bag."""
        return self._values

    def weights(self) -> Tensor:
        """One weight per value."""
        return weights_of(self._weights)

    def weights_or_none(self) -> Tensor | None:
        """One weight per value, if there are weights."""
        return self._weights

    def lengths(self) -> Tensor:
        """The number of values of each bag [B]."""
        lengths = either_lengths(self._lengths, self._offsets)
        self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """The lengths, if they were given or have been computed."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag starts, and the number of values at the end [B+1]."""
        offsets = either_offsets(self._lengths, self._offsets)
        self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets, if they were given or have been computed."""
        return self._offsets

    def stride(self) -> int:
        """Bags per key; where keys differ, the batch size of ``inverse_indices``, or else the most bags."""
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
            elif strides is None and lengths is not None:
                stride = lengths.numel() // len(self._keys)
        self._stride = stride
        return stride

    def stride_per_key(self) -> list[int]:
        """Bags of each key."""
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
        """Bags of each key and source rank; empty where all keys have ``stride()`` bags."""
        strides = self._stride_per_key_per_rank
        if strides is None:
            return torch.jit.annotate(list[list[int]], [])
        rows: list[list[int]] = strides.tolist()
        return rows

    def variable_stride_per_key(self) -> bool:
        """Whether each key has its own number of bags."""
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """Which bag each sample takes."""
        inverse = self._inverse_indices
        if inverse is None:
            raise AssertionError("this KeyedJaggedTensor has no inverse indices")
        return inverse

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Which bag each sample takes, if that was given."""
        return self._inverse_indices

    def _key_indices(self) -> dict[str, int]:
        return self.index_per_key()

    def index_per_key(self) -> dict[str, int]:
        """The position of each key."""
        given = self._index_per_key
        if given is not None:
            return given
        index: dict[str, int] = {}
        for i, key in enumerate(self._keys):
            index[key] = i
        self._index_per_key = index
        return index

    def length_per_key(self) -> list[int]:
        """The number of values of each key. Reads the lengths on the host once."""
        given = self._length_per_key
        if given is not None:
            return given
        counts = torch.jit.annotate(list[int], [])
        if len(self._keys) > 0 and (self._lengths is not None or self._offsets is not None):
            counts = self._counted()
        self._length_per_key = counts
        return counts

    def _counted(self) -> list[int]:
        if not torch.jit.is_scripting():
            if torch.compiler.is_compiling():
                return own.count_per_key(self)
        return counts_between(self.offsets(), self.lengths_offset_per_key(), self._values.size(0))

    def length_per_key_or_none(self) -> list[int] | None:
        """The number of values of each key, if it is known on the host."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """The first value of each key, and N. Reads the lengths on the host once."""
        given = self._offset_per_key
        if given is not None:
            return given
        starts = running_sum(self.length_per_key())
        self._offset_per_key = starts
        return starts

    def offset_per_key_or_none(self) -> list[int] | None:
        """The first value of each key, and N, if they are known on the host."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """The first bag of each key, and the number of bags."""
        given = self._lengths_offset_per_key
        if given is not None:
            return given
        starts = running_sum(self.stride_per_key())
        self._lengths_offset_per_key = starts
        return starts

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """Lengths are flat from the start here; returns itself."""
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one key, as views."""
        index = self.index_per_key()[key]
        starts, bags = self.offset_per_key(), self.lengths_offset_per_key()
        start = starts[index]
        end = starts[index + 1] if index + 1 < len(starts) else start
        weights = self._weights
        return JaggedTensor(
            values=self._values[start:end],
            weights=None if weights is None else weights[start:end],
            lengths=self.lengths()[bags[index] : bags[index + 1]],
            offsets=None,
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """The bags of every key, as views; kept, unless a gradient goes through the weights."""
        known = self._jt_dict
        if known is not None:
            return known
        result: dict[str, JaggedTensor] = {}
        weights, counts = self._weights, self.length_per_key()
        if len(counts) > 0:
            lengths, offsets = split_bags(
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
        if weights is None or not weights.requires_grad:
            self._jt_dict = result
        return result

    def split(self, segments: list[int]) -> list["KeyedJaggedTensor"]:
        """Groups of neighbouring keys, as views; ``segments``: the number of keys of each."""
        groups: list[KeyedJaggedTensor] = []
        starts, bags, counts = self.offset_per_key(), self.lengths_offset_per_key(), self.length_per_key()
        weights, strides = self._weights, self._stride_per_key_per_rank
        stride = self.stride()
        first = 0
        for segment in segments:
            last = first + segment
            if segment == len(self._keys):
                groups.append(self)
            else:
                begin, end = starts[first], starts[last]
                groups.append(
                    KeyedJaggedTensor(
                        self._keys[first:last],
                        self._values[begin:end],
                        None if weights is None else weights[begin:end],
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
        """The keys in another order; some may be left out, or come twice."""
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
            stride=self.stride(),  # the batch's, which the keys that are left may not tell
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
        """On another device; ``dtype``: of the weights."""
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
            jt_dict=None,
            inverse_indices=inverse,
        )

    def size_in_bytes(self) -> int:
        """The size of all tensors."""
        size = self._values.numel() * self._values.element_size()
        for part in [self._weights, self._lengths, self._offsets, self._stride_per_key_per_rank]:
            if part is not None:
                size += part.numel() * part.element_size()
        return size

    def dist_labels(self) -> list[str]:
        """What :meth:`dist_tensors` are."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """How many numbers of each of :meth:`dist_tensors` go to each rank, which gets that many keys."""
        bags, counts = sums_of(self.stride_per_key(), key_splits), sums_of(self.length_per_key(), key_splits)
        splits = [bags, counts]
        if self.variable_stride_per_key():
            splits.append(key_splits)
        if self._weights is not None:
            splits.append(counts)
        return splits

    def dist_tensors(self) -> list[Tensor]:
        """What is sent to other ranks."""
        tensors = [self.lengths(), self._values]
        if self.variable_stride_per_key():
            tensors.append(torch.tensor(self.stride_per_key(), device=self.device()))
        weights = self._weights
        if weights is not None:
            tensors.append(weights)
        return tensors

    @torch.jit.unused
    def clear_storage(self) -> int:
        """Frees the memory of all tensors; returns how many bytes they had."""
        size = sum(tensor.nbytes for tensor in self._tensors())
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)
        return size

    @torch.jit.unused
    def __str__(self) -> str:
        return keyed_jagged_text(self)


setattr(making, "KeyedJaggedTensor", KeyedJaggedTensor)  # noqa: B010  what the makers make
