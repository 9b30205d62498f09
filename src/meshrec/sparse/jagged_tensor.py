"""Values cut into bags of varying length: JaggedTensor, and what it shares with KeyedJaggedTensor.

Shape legend: B bags (samples), N values, T the longest bag.
"""

import torch
from torch import Tensor

from meshrec.ops.jagged import lengths_to_offsets
from meshrec.sparse.printing import bags_text, is_readable, shape_text
from meshrec.sparse.validation import check_bags, check_layout, count_bags, kind_of


class Jagged:
    """Base class of the jagged types: values, optional weights, and bags as lengths, offsets or both."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None
    _by_offsets: bool  # made of offsets alone, not of lengths

    def values(self) -> Tensor:
        """Return all values [N, ...], bag after bag."""
        return self._values

    def weights(self) -> Tensor:
        """Return one weight per value [N].

        Raises:
            ValueError: there are no weights.
        """
        if self._weights is None:
            raise ValueError(
                f"this {type(self).__name__} has no weights; weights_or_none() tells without error"
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return one weight per value [N], or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values of each bag [B]."""
        lengths = self._lengths
        if lengths is None:
            assert self._offsets is not None
            lengths = self._lengths = self._offsets.diff()
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they were given or have been computed, otherwise None."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the start of each bag, and the number of values at the end [B+1]."""
        offsets = self._offsets
        if offsets is None:
            assert self._lengths is not None
            offsets = self._offsets = lengths_to_offsets(self._lengths)
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they were given or have been computed, otherwise None."""
        return self._offsets

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until the work queued on ``stream`` is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return [tensor for tensor in parts if tensor is not None]

    def _num_bags(self) -> int:
        return count_bags(self._lengths, self._offsets)

    def __repr__(self) -> str:
        return str(self)


class JaggedTensor(Jagged):
    """A batch of bags of varying length, such as the IDs of one feature or a sequence of embeddings.

    Lengths and offsets are computed from one another when first read.

    Args:
        values: [N, ...], the bags one after another.
        weights: One weight per value [N].
        lengths: Values per bag [B], int32 or int64.
        offsets: Start of each bag, and N [B+1], int32 or int64. At least one of lengths and offsets.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit. The numbers are not read; :meth:`validate` does.

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
        if not torch.compiler.is_compiling():
            check_layout("JaggedTensor", values, weights, lengths, offsets)
            if lengths is not None and lengths.dim() != 1:
                raise ValueError(f"JaggedTensor: lengths must have 1 dimension, got {kind_of(lengths)}")
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._by_offsets = lengths is None

    @staticmethod
    def unchecked(
        values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> "JaggedTensor":
        """Make a JaggedTensor without checks, of parts that are known to fit."""
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
        """Make a JaggedTensor without bags and values."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        values = torch.empty(0, dtype=values_dtype, device=device)
        return JaggedTensor(values, weights, lengths=torch.empty(0, dtype=lengths_dtype, device=device))

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: torch.device | None = None) -> "JaggedTensor":
        """Make a JaggedTensor without bags and values, of the dtypes of ``jt``, and weighted if it is."""
        return JaggedTensor.empty(
            jt._weights is not None,
            jt.device() if device is None else device,
            jt._values.dtype,
            None if jt._weights is None else jt._weights.dtype,
            jt.lengths().dtype,
        )

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> "JaggedTensor":
        """Make a JaggedTensor from one tensor per bag.

        Raises:
            ValueError: The list is empty, or weights and values differ in number.
        """
        if not values:
            raise ValueError("JaggedTensor.from_dense: the list is empty; JaggedTensor.empty() has no bags")
        sizes = [bag.size(0) for bag in values]
        if weights is not None and [bag.size(0) for bag in weights] != sizes:
            found = [bag.size(0) for bag in weights]
            raise ValueError(
                f"JaggedTensor.from_dense: the values have {sizes} rows, the weights {found}; "
                "give one weight per value"
            )
        lengths = torch.tensor(sizes, dtype=torch.int32, device=values[0].device)
        return JaggedTensor(
            torch.cat(values), None if weights is None else torch.cat(weights), lengths=lengths
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "JaggedTensor":
        """Make a JaggedTensor from a padded tensor [B, T, ...], taking ``lengths[b]`` entries of row ``b``.

        Raises:
            ValueError: The shapes do not fit.
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
        counts = torch.arange(values.size(1), device=values.device) < lengths[:, None]
        return JaggedTensor(values[counts], None if weights is None else weights[counts], lengths=lengths)

    def to_dense(self) -> list[Tensor]:
        """Return a view of the values of each bag."""
        return list(self._values.split(self.lengths().tolist()))

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return a view of the weights of each bag, if there are weights."""
        return None if self._weights is None else list(self._weights.split(self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return the values as [B, T, ...]; shorter bags are padded, longer ones cut.

        Args:
            desired_length: T; without it, the length of the longest bag.
            padding_value: What fills the rest.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return the weights as [B, T], if there are weights; see :meth:`to_padded_dense`."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, rows: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths_B = self.lengths()
        if desired_length is None:
            desired_length = int(lengths_B.max()) if self._num_bags() else 0
        columns_T = torch.arange(desired_length, device=rows.device)
        # One row of padding at the end: every place without a value points at it, and no value is read twice.
        sources_BT = torch.where(
            columns_T < lengths_B[:, None], self.offsets()[:-1, None] + columns_T, rows.size(0)
        )
        padding = rows.new_full((1, *rows.shape[1:]), padding_value)
        return torch.cat([rows, padding])[sources_BT]

    def to(self, device: torch.device, non_blocking: bool = False) -> "JaggedTensor":
        """Return a copy on another device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        values = self._values.to(device, non_blocking=non_blocking)
        jt = JaggedTensor.unchecked(values, moved(self._weights), moved(self._lengths), moved(self._offsets))
        jt._by_offsets = self._by_offsets
        return jt

    def validate(self) -> None:
        """Read all numbers and check that the bags cut the values completely; synchronizes with a GPU.

        Raises:
            ValueError: A number does not fit. The message names the sample.
        """
        check_layout("JaggedTensor", self._values, self._weights, self._lengths, self._offsets)
        check_bags(self._values, self._weights, self._lengths, self._offsets, "sample {}".format)

    def __str__(self) -> str:
        if not is_readable(*self._tensors()):
            return shape_text(
                "JaggedTensor", values=self._values, weights=self._weights, lengths=self._lengths
            )
        offsets = self.offsets().tolist()
        text = bags_text(self._values, offsets)
        if self._weights is not None:
            text = f'"values": {text}, "weights": {bags_text(self._weights, offsets)}'
        return f"JaggedTensor({{{text}}})"
