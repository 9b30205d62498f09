"""JaggedTensor for eager code, TorchScript and torch.fx."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.kinds import AssertedError, Kind, is_traced, with_methods_of
from meshrec.compat.bridge.sparse.printing import jagged_text
from meshrec.compat.bridge.sparse.segments import to_lengths, to_offsets
from meshrec.sparse import jagged_tensor as core

torch.fx.wrap("masked")
torch.fx.wrap("counting")


class JaggedParts:
    """Mixin with the tensor accessors that JaggedTensor and KeyedJaggedTensor share.

    `with_methods_of` copies them into both classes, because TorchScript does not compile inherited methods.
    """

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def device(self) -> torch.device:
        return self._values.device

    def values(self) -> Tensor:
        """Return all values [N, ...], key after key, bag after bag."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weight per value.

        Raises:
            AssertedError: the tensor has none.
        """
        weights = self._weights
        if weights is None:
            if not torch.jit.is_scripting():
                raise AssertedError("this tensor has no weights; weights_or_none() tells without error")
            raise RuntimeError("this tensor has no weights; weights_or_none() tells without error")
        return weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weight per value; None without weights."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the bag lengths [B], key after key."""
        lengths, offsets = self._lengths, self._offsets
        if lengths is None:
            assert offsets is not None
            lengths = to_lengths(offsets)
            self._lengths = lengths
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if given or already computed."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the bag boundaries [B + 1]."""
        lengths, offsets = self._lengths, self._offsets
        if offsets is None:
            assert lengths is not None
            offsets = to_offsets(lengths)
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if given or already computed."""
        return self._offsets


@with_methods_of(JaggedParts)
class JaggedTensor(JaggedParts, core.JaggedTensor, metaclass=Kind):
    """Batch of variable-length bags. As in TorchRec, the constructor only checks dtypes.

    Args:
        values: concatenated bags [N, ...].
        weights: weight per value [N, ...].
        lengths: values per bag [B].
        offsets: bag boundaries [B + 1]. Lengths or offsets must be given.

    Raises:
        AssertedError: lengths or offsets are not integers, or both are missing.
    """

    _like = core.JaggedTensor
    _fields = ("_values", "_weights", "_lengths", "_offsets")

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        if not torch.jit.is_scripting():
            # A separate condition: TorchScript skips a branch only if is_scripting() is all of the condition.
            if not is_traced():
                if lengths is None and offsets is None:
                    raise AssertedError("JaggedTensor: got neither lengths nor offsets. Pass one of them.")
                check_counts(lengths, offsets)

    @staticmethod
    def unchecked(
        values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> "JaggedTensor":
        """Construct a JaggedTensor without checks.

        Args:
            values: concatenated bags [N, ...].
            weights: weight per value [N, ...], or None.
            lengths: values per bag [B], or None.
            offsets: bag boundaries [B + 1], or None.
        """
        jt = JaggedTensor.__new__(JaggedTensor)
        vars(jt).update(_values=values, _weights=weights, _lengths=lengths, _offsets=offsets)
        return jt

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """Return a JaggedTensor without bags.

        Args:
            is_weighted: whether it has weights.
            device: device.
            values_dtype: dtype of the values (default: torch's default dtype).
            weights_dtype: dtype of the weights (default: torch's default dtype).
            lengths_dtype: dtype of lengths and offsets.
        """
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            offsets=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: torch.device | None = None) -> "JaggedTensor":
        """Return a JaggedTensor without bags, with the dtypes of ``jt``.

        With a device, instead allocate uninitialized tensors there with the shapes of ``jt``.
        """
        weights, lengths, offsets = jt.weights_or_none(), jt.lengths_or_none(), jt.offsets_or_none()
        if device is None:
            return JaggedTensor(
                values=torch.empty(0, dtype=jt.values().dtype, device=jt.device()),
                weights=None if weights is None else torch.empty(0, dtype=weights.dtype, device=jt.device()),
                lengths=torch.empty(0, dtype=jt.lengths().dtype, device=jt.device()),
                offsets=torch.empty(0, dtype=jt.lengths().dtype, device=jt.device()),
            )
        return JaggedTensor(
            values=torch.empty_like(jt.values(), device=device),
            weights=None if weights is None else torch.empty_like(weights, device=device),
            lengths=None if lengths is None else torch.empty_like(lengths, device=device),
            offsets=None if offsets is None else torch.empty_like(offsets, device=device),
        )

    def copy_(self, jt: "JaggedTensor", non_blocking: bool = False) -> "JaggedTensor":
        """Copy the values of ``jt``, which must have the same tensors with the same shapes."""
        self._values.copy_(jt._values, non_blocking=non_blocking)
        copy_if_present(self._weights, jt._weights, non_blocking)
        copy_if_present(self._lengths, jt._lengths, non_blocking)
        copy_if_present(self._offsets, jt._offsets, non_blocking)
        return self

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> "JaggedTensor":
        """Construct a JaggedTensor from a padded tensor.

        Args:
            values: padded values [B, T, ...].
            lengths: entries to take per row [B].
            weights: padded weights [B, T, ...], or None.
        """
        counts = counting(values, lengths)
        return JaggedTensor(
            values=values[counts], weights=masked(weights, counts), lengths=lengths, offsets=None
        )

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> "JaggedTensor":
        lengths = torch.tensor([bag.size(0) for bag in values], dtype=torch.int32, device=values[0].device)
        return JaggedTensor(
            values=torch.cat(values),
            weights=None if weights is None else torch.cat(weights),
            lengths=lengths,
            offsets=to_offsets(lengths),
        )

    def to_dense(self) -> list[Tensor]:
        sizes: list[int] = self.lengths().tolist()
        return list(torch.split(self._values, sizes)) if len(sizes) > 0 else []

    def to_dense_weights(self) -> list[Tensor] | None:
        weights = self._weights
        if weights is None:
            return None
        sizes: list[int] = self.lengths().tolist()
        return list(torch.split(weights, sizes))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return the values as [B, T, ...]. Shorter bags are padded, longer bags truncated."""
        return padded(self._values, self.lengths(), self.offsets(), desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        weights = self._weights
        if weights is None:
            return None
        return padded(weights, self.lengths(), self.offsets(), desired_length, padding_value)

    def to(self, device: torch.device, non_blocking: bool = False) -> "JaggedTensor":
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        return JaggedTensor(
            values=self._values.to(device, non_blocking=non_blocking),
            weights=None if weights is None else weights.to(device, non_blocking=non_blocking),
            lengths=None if lengths is None else lengths.to(device, non_blocking=non_blocking),
            offsets=None if offsets is None else offsets.to(device, non_blocking=non_blocking),
        )

    @torch.jit.unused
    def __str__(self) -> str:
        return jagged_text(self)


def check_counts(lengths: Tensor | None, offsets: Tensor | None) -> None:
    """Raise AssertedError if lengths or offsets are not integers."""
    for name, counts in (("lengths", lengths), ("offsets", offsets)):
        if (
            counts is not None
            and counts.numel()
            and (counts.is_floating_point() or counts.dtype is torch.bool)
        ):
            raise AssertedError(f"{name} must be integers, got {counts.dtype}. Convert them with .long().")


def copy_if_present(target: Tensor | None, source: Tensor | None, non_blocking: bool) -> None:
    """Copy ``source`` to ``target`` unless either is None.

    Args:
        target: tensor to write, or None.
        source: tensor to read, or None.
    """
    if target is not None and source is not None:
        target.copy_(source, non_blocking=non_blocking)


def padded(
    rows: Tensor, lengths: Tensor, offsets: Tensor, desired_length: int | None, padding_value: float
) -> Tensor:
    """Pad bags to a dense tensor [B, T, ...]. Longer bags are truncated.

    Args:
        rows: concatenated bags [N, ...].
        lengths: bag lengths [B].
        offsets: bag boundaries [B + 1].
        desired_length: T; None: the longest bag.
    """
    longest = 0
    if desired_length is not None:
        longest = desired_length
    elif lengths.numel() > 0:
        longest = lengths.max().item()
        if not torch.jit.is_scripting():
            if torch.compiler.is_compiling():
                # torch.compile cannot bound a size that is read from data otherwise.
                torch._check(longest >= 0)
    columns = torch.arange(longest, device=rows.device)
    # A padding row is appended, and every position without a value reads it: a single gather, no masking.
    sources = torch.where(columns < lengths[:, None], offsets[:-1, None] + columns, rows.size(0))
    padding = torch.full([1] + list(rows.shape[1:]), padding_value, dtype=rows.dtype, device=rows.device)
    return torch.cat([rows, padding])[sources]


def counting(values: Tensor, lengths: Tensor) -> Tensor:
    """Return a mask of the entries in a padded tensor that are not padding, bool [B, T].

    Args:
        values: padded tensor [B, T, ...].
        lengths: bag lengths [B].
    """
    return torch.arange(values.size(1), device=values.device) < lengths[:, None]


def masked(rows: Tensor | None, mask: Tensor) -> Tensor | None:
    """Return the rows selected by a bool mask; None if ``rows`` is None."""
    return None if rows is None else rows[mask]
