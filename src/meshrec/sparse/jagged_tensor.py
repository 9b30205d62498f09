"""JaggedTensor, and the base class it shares with KeyedJaggedTensor.

Shape legend: B bags (samples), N values, T the longest bag.
"""

import operator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshrec.ops.jagged import lengths_to_offsets
from meshrec.sparse.printing import format_bags, format_shapes, is_readable
from meshrec.sparse.validation import check_bags, check_layout, consistent_offsets, count_bags, describe

# Implemented in C: a training pipeline lists the tensors of every batch in every step.
_is_not_none: Any = partial(operator.is_not, None)
"""Return whether a value is not None."""


class Jagged:
    """Base class for jagged tensors: values, optional weights, and bag boundaries.

    The boundaries are stored as lengths, offsets or both. Subclasses set all fields in the constructor.
    """

    # Set once. Consumers rely on immutability: lengths and offsets are cached from each other.
    _values: Tensor
    _weights: Tensor | None
    # At least one of the two is set from construction on; the other is cached when first read.
    _lengths: Tensor | None
    _offsets: Tensor | None
    # Constructed from offsets only. Pytree leaves follow this flag, not the caches, so that reading a tensor
    # does not change the structure a compiled program was traced with.
    _by_offsets: bool

    def values(self) -> Tensor:
        """Return the values of all bags, concatenated: [N, ...]."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weights, a number per value: [N].

        Raises:
            ValueError: The tensor is unweighted.
        """
        if self._weights is None:
            raise ValueError(
                f"this {type(self).__name__} has no weights; call weights_or_none() if weights are optional"
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, a number per value: [N]. None if the tensor is unweighted."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values per bag, [B]."""
        lengths = self._lengths
        if lengths is None:
            assert self._offsets is not None
            # Cached: lookups read both forms, and a bag layout is immutable.
            lengths = self._lengths = self._offsets.diff()
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they were given or already computed, otherwise None."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the index in ``values()`` where each bag starts, followed by N: [B+1].

        Lengths 1, 2, 0 give offsets 0, 1, 3, 3.
        """
        offsets = self._offsets
        if offsets is None:
            assert self._lengths is not None
            offsets = self._offsets = lengths_to_offsets(self._lengths)
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they were given or already computed, otherwise None."""
        return self._offsets

    def device(self) -> torch.device:
        """Return the value device."""
        return self._values.device

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep all tensor memory allocated until the work now queued on ``stream`` has run."""
        for tensor in self._tensors():
            # The caching allocator may reuse memory freed on another stream before the work has run.
            tensor.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Return the total size of all tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        """Return all existing tensors: the values, and weights, lengths and offsets if set."""
        # Boundaries that are not computed yet do not exist as tensors.
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return list(filter(_is_not_none, parts))

    def _num_bags(self) -> int:
        return count_bags(self._lengths, self._offsets)

    def __repr__(self) -> str:
        return str(self)


class JaggedTensor(Jagged):
    """A batch of variable-length bags, such as the IDs of a feature, or sequences of embeddings.

    Lengths and offsets are computed from each other at the first read, and cached.

    Args:
        values: Values from all bags, concatenated, [N, ...].
        weights: Weight per value, [N].
        lengths: Value count per bag, [B], int32 or int64.
        offsets: Index in ``values`` where each bag starts, followed by N: [B+1], int32 or int64. Pass
            lengths, offsets or both. If both are given, they are compared on the CPU. On other devices, the
            lengths count and the offsets are ignored.

    Raises:
        ValueError: Shapes, dtypes or devices do not match, or lengths and offsets disagree. The constructor
            does not check the data in other tensors; :meth:`validate` does.

    Example::

        >>> JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        JaggedTensor({[[5], [7, 1]]})
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        # Under tracing, shapes may be symbolic, and each check would become a guard or a graph break.
        if not torch.compiler.is_compiling():
            check_layout("JaggedTensor", values, weights, lengths, offsets)
            if lengths is not None and lengths.dim() != 1:
                raise ValueError(f"JaggedTensor: lengths must have 1 dimension, got {describe(lengths)}")
            offsets = consistent_offsets(lengths, offsets, "sample {}".format)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        # From the arguments, because later reads fill in the missing boundaries.
        self._by_offsets = lengths is None

    @staticmethod
    def unchecked(
        values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> "JaggedTensor":
        """Build a JaggedTensor without the constructor's checks, from tensors known to match.

        Args:
            values: Values from all bags, concatenated, [N, ...].
            weights: Weight per value, [N].
            lengths: Value count per bag, [B].
            offsets: Bag starts, followed by N: [B+1]. Lengths or offsets must be given.
        """
        jt = JaggedTensor.__new__(JaggedTensor)
        jt._values = values
        jt._weights = weights
        jt._lengths = lengths
        jt._offsets = offsets
        jt._by_offsets = lengths is None
        return jt

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """Build a JaggedTensor with zero bags and zero values.

        Args:
            is_weighted: Whether the result has weights, of size 0.
            device: Device for all tensors.
            values_dtype: Value dtype; torch's default dtype if None.
            weights_dtype: Weight dtype; torch's default dtype if None.
            lengths_dtype: Length dtype.
        """
        # Zero-length tensors keep the dtype, which concat and exchange depend on.
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return JaggedTensor(values, weights, lengths=torch.empty(0, dtype=lengths_dtype, device=device))

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: torch.device | None = None) -> "JaggedTensor":
        """Build a JaggedTensor with zero bags and the dtypes of ``jt``. It has weights if ``jt`` has weights.

        Args:
            jt: Template.
            device: Result device; None: as ``jt``.
        """
        return JaggedTensor.empty(
            jt._weights is not None,
            jt.device() if device is None else device,
            jt._values.dtype,
            None if jt._weights is None else jt._weights.dtype,
            jt.lengths().dtype,
        )

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> "JaggedTensor":
        """Build a JaggedTensor from a list with a tensor [length, ...] per bag.

        Raises:
            ValueError: The list is empty, or weights and values differ in length.
        """
        if not values:
            raise ValueError("JaggedTensor.from_dense: the list is empty; JaggedTensor.empty() has no bags")
        # int32 lengths, as TorchRec's.
        sizes = [bag.size(0) for bag in values]
        if weights is not None and [bag.size(0) for bag in weights] != sizes:
            weight_sizes = [bag.size(0) for bag in weights]
            raise ValueError(
                f"JaggedTensor.from_dense: the values have {sizes} rows, the weights {weight_sizes}; "
                "give one weight per value"
            )
        lengths = torch.tensor(sizes, dtype=torch.int32, device=values[0].device)
        return JaggedTensor(
            torch.cat(values), None if weights is None else torch.cat(weights), lengths=lengths
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "JaggedTensor":
        """Build a JaggedTensor from padded rows: keep the first ``lengths[b]`` entries in row ``b``.

        Args:
            values: Padded rows, [B, T, ...].
            lengths: Entries to keep per row, [B], int32 or int64.
            weights: Padded weights, [B, T].

        Raises:
            ValueError: The shapes do not match.
        """
        name = "JaggedTensor.from_dense_lengths"
        if values.dim() < 2 or lengths.shape != values.shape[:1]:
            raise ValueError(
                f"{name}: values must be [B, T, ...] and lengths [B], "
                f"got {list(values.shape)} and {list(lengths.shape)}"
            )
        if weights is not None and weights.shape != values.shape[:2]:
            expected, got = list(values.shape[:2]), list(weights.shape)
            raise ValueError(f"{name}: weights must be [B, T] = {expected}, got {got}")
        # [B, T]: True for entries to keep.
        mask = torch.arange(values.size(1), device=values.device) < lengths[:, None]
        # On a GPU, indexing with a mask waits for the device, which counts the result.
        return JaggedTensor(values[mask], None if weights is None else weights[mask], lengths=lengths)

    def to_dense(self) -> list[Tensor]:
        """Return the values per bag, as views. Waits for the device."""
        # Synchronizes: split needs the sizes on the host.
        return list(self._values.split(self.lengths().tolist()))

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return the weights per bag, as views; None if unweighted. Waits for the device."""
        return None if self._weights is None else list(self._weights.split(self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Pad or truncate all bags to a common length T, and return the values as [B, T, ...].

        Args:
            desired_length: T; None: the longest bag length.
            padding_value: Fill value after the end of a bag.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return the weights as [B, T], or None if unweighted. See :meth:`to_padded_dense`."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, rows: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        """Return ``rows`` [N, ...] (values or weights) as [B, T, ...]; see ``to_padded_dense``."""
        lengths_B = self.lengths()
        if desired_length is None:
            # Not int(): under torch.export item() returns a symbol, which int() cannot convert.
            # This waits for the device, because the shape of the result depends on the lengths.
            longest: Any = lengths_B.max().item() if self._num_bags() else 0
            # export refuses a size that may be negative.
            if torch.compiler.is_compiling():
                torch._check(longest >= 0)
        else:
            longest = desired_length
        # [B, T] source row per output position.
        columns_T = torch.arange(longest, device=rows.device)
        # Padded positions read an extra row at the end, so padding sends no gradient to values.
        sources_BT = torch.where(
            columns_T < lengths_B[:, None], self.offsets()[:-1, None] + columns_T, rows.size(0)
        )
        padding = rows.new_full((1, *rows.shape[1:]), padding_value)
        return torch.cat([rows, padding])[sources_BT]

    def to(self, device: torch.device, non_blocking: bool = False) -> "JaggedTensor":
        """Copy to another device."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        values = self._values.to(device, non_blocking=non_blocking)
        # Caches are copied too, so the target device need not recompute them.
        jt = JaggedTensor.unchecked(values, copy(self._weights), copy(self._lengths), copy(self._offsets))
        jt._by_offsets = self._by_offsets
        return jt

    def validate(self) -> None:
        """Check the data in lengths, offsets and weights. Waits for the device.

        Raises:
            ValueError: A value is invalid. The message names the sample.
        """
        check_layout("JaggedTensor", self._values, self._weights, self._lengths, self._offsets)
        check_bags(self._values, self._weights, self._lengths, self._offsets, "sample {}".format)

    def __str__(self) -> str:
        if not is_readable(*self._tensors()):
            return format_shapes(
                "JaggedTensor", values=self._values, weights=self._weights, lengths=self._lengths
            )
        # Synchronizes, as printing any tensor does.
        offsets = self.offsets().tolist()
        text = format_bags(self._values, offsets)
        if self._weights is not None:
            text = f'"values": {text}, "weights": {format_bags(self._weights, offsets)}'
        return f"JaggedTensor({{{text}}})"
