"""Validation of jagged tensors: shape checks for constructors, full checks naming the invalid sample."""

from collections.abc import Callable

import torch
from torch import Tensor

from meshrec.sparse.printing import is_readable

BagName = Callable[[int], str]
"""Function returning a bag name for error messages, such as ``key 'user', sample 3``."""

# Integer types that the operators' kernels are compiled for.
_COUNT_DTYPES = (torch.int32, torch.int64)


def check_layout(
    name: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> None:
    """Check the shapes, dtypes and devices of constructor arguments. Reads no tensor data.

    Args:
        name: Class name for error messages.
        values: [N, ...].
        weights: [N].
        lengths: [B], int32 or int64.
        offsets: [B+1], int32 or int64.

    Raises:
        ValueError: A shape, dtype or device does not match, or neither lengths nor offsets are given.
    """
    # Users may pass lists, so check the type first, for a clear message.
    if not isinstance(values, Tensor) or values.dim() < 1:
        raise ValueError(f"{name}: values must be a tensor of at least 1 dimension, got {describe(values)}")
    if lengths is None and offsets is None:
        raise ValueError(f"{name}: neither lengths nor offsets are given; pass one of them")
    for kind, counts in (("lengths", lengths), ("offsets", offsets)):
        if counts is None:
            continue
        if not isinstance(counts, Tensor) or counts.dtype not in _COUNT_DTYPES:
            raise ValueError(f"{name}: {kind} must be an int32 or int64 tensor, got {describe(counts)}")
        # A kernel gets all tensors of a batch on a single device.
        if counts.device != values.device:
            raise ValueError(f"{name}: {kind} are on {counts.device}, values on {values.device}; move one")
    if offsets is not None:
        if offsets.dim() != 1 or offsets.numel() == 0:
            raise ValueError(
                f"{name}: offsets must have 1 dimension and at least 1 element, got {describe(offsets)}"
            )
        if lengths is not None and lengths.numel() + 1 != offsets.numel():
            raise ValueError(
                f"{name}: {lengths.numel()} lengths need {lengths.numel() + 1} offsets, got {offsets.numel()}"
            )
    if weights is not None:
        if not isinstance(weights, Tensor) or weights.dim() < 1 or weights.size(0) != values.size(0):
            raise ValueError(
                f"{name}: weights must be one per value ({values.size(0)}), got {describe(weights)}; "
                "leave them out for an unweighted input"
            )
        if weights.device != values.device:
            raise ValueError(f"{name}: weights are on {weights.device}, values on {values.device}; move one")


def consistent_offsets(lengths: Tensor | None, offsets: Tensor | None, name_bag: BagName) -> Tensor | None:
    """Return the offsets that a constructor should store. None: compute them from the lengths later.

    If both lengths and offsets are given, they are compared on the CPU. On other devices this would wait for
    the device, so the offsets are ignored there.

    Args:
        lengths: Value count per bag, [B].
        offsets: Bag boundaries, [B+1].
        name_bag: Returns the bag name for error messages.

    Raises:
        ValueError: Lengths and offsets disagree. The message names the bag.
    """
    # In tracing there is nothing to compare, so keep both as given.
    if lengths is None or offsets is None or not is_readable(lengths, offsets):
        return offsets
    # Ignore the offsets, not the lengths: the diff of wrong offsets could be negative.
    if lengths.device.type != "cpu":
        return None
    _check_agreement(lengths, offsets, name_bag)
    return offsets


def describe(argument: object) -> str:
    """Describe an argument for an error message: tensors by dtype and shape, others by type and value."""
    if isinstance(argument, Tensor):
        return f"{str(argument.dtype).removeprefix('torch.')} {list(argument.shape)}"
    return f"{type(argument).__name__} {argument!r}"


def count_bags(lengths: Tensor | None, offsets: Tensor | None) -> int:
    """Return the number of bags, given lengths [B] or offsets [B+1]."""
    if lengths is not None:
        return lengths.numel()
    assert offsets is not None
    return offsets.numel() - 1


def check_bags(
    values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None, name_bag: BagName
) -> None:
    """Check that the bags cover all values exactly, and that no weight is NaN.

    Args:
        values: [N, ...].
        weights: [N].
        lengths: [B].
        offsets: [B+1].
        name_bag: Returns the bag name for error messages.

    Raises:
        ValueError: A value is invalid. The message names the bag.
    """
    num_values = values.size(0)
    if lengths is not None:
        _check_lengths(lengths, num_values, name_bag)
    if offsets is not None:
        _check_offsets(offsets, num_values, name_bag)
    if lengths is not None and offsets is not None:
        _check_agreement(lengths, offsets, name_bag)
    if weights is not None:
        _check_weights(weights, offsets if offsets is not None else _offsets_from_lengths(lengths), name_bag)


def _first_index(mask: Tensor) -> int | None:
    """Return the index of the first True, or None if there is none."""
    indices = mask.nonzero()
    return int(indices[0, 0]) if indices.numel() else None


def _offsets_from_lengths(lengths: Tensor | None) -> Tensor:
    """Return the bag boundaries for some lengths, int64 [B+1].

    This uses only torch operators, because the lengths may be invalid and must not reach a MeshRec kernel.
    """
    assert lengths is not None
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)])


def _check_lengths(lengths: Tensor, num_values: int, name_bag: BagName) -> None:
    """Check that no length is negative, and that the lengths sum to the value count."""
    bag = _first_index(lengths < 0)
    # Name the first invalid bag, so that the user can find the sample.
    if bag is not None:
        raise ValueError(f"{name_bag(bag)}: the length is {int(lengths[bag])}; lengths are 0 or more")
    # int64: a corrupt int32 length must not overflow the sum before it is reported.
    ends = _offsets_from_lengths(lengths)
    if int(ends[-1]) > num_values:
        # The first bag that needs values after the end.
        bag = _first_index(ends[1:] > num_values)
        assert bag is not None
        raise ValueError(
            f"{name_bag(bag)}: its ids are {int(ends[bag])} to {int(ends[bag + 1])}, but there are "
            f"{num_values} values; the lengths sum to {int(ends[-1])}"
        )
    if int(ends[-1]) < num_values:
        raise ValueError(
            f"the lengths sum to {int(ends[-1])}, but there are {num_values} values: "
            f"the last {num_values - int(ends[-1])} belong to no sample; count or drop them"
        )


def _check_offsets(offsets: Tensor, num_values: int, name_bag: BagName) -> None:
    """Check that the offsets rise from 0 to the value count."""
    bag = _first_index(offsets.diff() < 0)
    if bag is not None:
        raise ValueError(
            f"{name_bag(bag)}: the offsets fall from {int(offsets[bag])} to {int(offsets[bag + 1])}; "
            "they may only rise"
        )
    # Monotonicity alone does not show a wrong first offset.
    if int(offsets[0]) != 0:
        raise ValueError(f"the offsets start at {int(offsets[0])}; the first must be 0")
    if int(offsets[-1]) > num_values:
        bag = _first_index(offsets[1:] > num_values)
        where = "" if bag is None else f"{name_bag(bag)}: "
        raise ValueError(
            f"{where}the offsets reach {int(offsets[-1])}, but there are {num_values} values; "
            "make offsets from the lengths of these values"
        )
    if int(offsets[-1]) < num_values:
        raise ValueError(
            f"the offsets end at {int(offsets[-1])}, but there are {num_values} values: "
            f"the last {num_values - int(offsets[-1])} belong to no sample; count or drop them"
        )


def _check_agreement(lengths: Tensor, offsets: Tensor, name_bag: BagName) -> None:
    """Check that lengths and offsets describe the same bags."""
    bag = _first_index(offsets.diff() != lengths)
    if bag is not None:
        raise ValueError(
            f"{name_bag(bag)}: the length is {int(lengths[bag])}, but the offsets "
            f"{int(offsets[bag])} to {int(offsets[bag + 1])} hold {int(offsets[bag + 1] - offsets[bag])} ids"
            "; give only one of the two"
        )


def _check_weights(weights: Tensor, offsets: Tensor, name_bag: BagName) -> None:
    """Check that no weight is NaN."""
    # Integer tensors cannot hold NaN.
    if not weights.is_floating_point():
        return
    i = _first_index(weights.isnan().flatten(1).any(1) if weights.dim() > 1 else weights.isnan())
    if i is not None:
        # right=True skips empty bags that start at the same value.
        bag = int(torch.searchsorted(offsets, i, right=True)) - 1
        raise ValueError(
            f"{name_bag(bag)}: weight {i - int(offsets[bag])} is NaN; check how the weights are computed"
        )
