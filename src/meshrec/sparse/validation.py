"""Checks of jagged tensors: cheap ones of shapes, and thorough ones that say which sample is wrong."""

from collections.abc import Callable

import torch
from torch import Tensor

Place = Callable[[int], str]
"""Names a bag: ``key 'user', sample 3``."""


_COUNT_DTYPES = (torch.int32, torch.int64)


def check_layout(
    name: str, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> None:
    """Raise ValueError for shapes, dtypes and devices that cannot belong together; reads no numbers."""
    if not isinstance(values, Tensor) or values.dim() < 1:
        raise ValueError(f"{name}: values must be a tensor of at least 1 dimension, got {kind_of(values)}")
    if lengths is None and offsets is None:
        raise ValueError(f"{name}: neither lengths nor offsets are given; pass one of them")
    for what, counts in (("lengths", lengths), ("offsets", offsets)):
        if counts is None:
            continue
        if not isinstance(counts, Tensor) or counts.dtype not in _COUNT_DTYPES:
            raise ValueError(f"{name}: {what} must be an int32 or int64 tensor, got {kind_of(counts)}")
        if counts.device != values.device:
            raise ValueError(f"{name}: {what} are on {counts.device}, values on {values.device}; move one")
    if offsets is not None:
        if offsets.dim() != 1 or offsets.numel() == 0:
            raise ValueError(
                f"{name}: offsets must have 1 dimension and at least the 0, got {kind_of(offsets)}"
            )
        if lengths is not None and lengths.numel() + 1 != offsets.numel():
            raise ValueError(
                f"{name}: {lengths.numel()} lengths need {lengths.numel() + 1} offsets, got {offsets.numel()}"
            )
    if weights is not None:
        if not isinstance(weights, Tensor) or weights.dim() < 1 or weights.size(0) != values.size(0):
            raise ValueError(
                f"{name}: weights must be one per value ({values.size(0)}), got {kind_of(weights)}; "
                "leave them out for an unweighted input"
            )
        if weights.device != values.device:
            raise ValueError(f"{name}: weights are on {weights.device}, values on {values.device}; move one")


def kind_of(thing: object) -> str:
    """Describe a tensor by dtype and shape, and anything else by its type."""
    if isinstance(thing, Tensor):
        return f"{str(thing.dtype).removeprefix('torch.')} {list(thing.shape)}"
    return f"{type(thing).__name__} {thing!r}"


def count_bags(lengths: Tensor | None, offsets: Tensor | None) -> int:
    """Return the number of bags, from lengths or offsets."""
    if lengths is not None:
        return lengths.numel()
    assert offsets is not None
    return offsets.numel() - 1


def check_bags(
    values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None, place: Place
) -> None:
    """Raise ValueError unless the bags cut ``values`` completely and the weights are numbers."""
    num_values = values.size(0)
    if lengths is not None:
        _check_lengths(lengths, num_values, place)
    if offsets is not None:
        _check_offsets(offsets, num_values, place)
    if lengths is not None and offsets is not None:
        _check_agreement(lengths, offsets, place)
    if weights is not None:
        _check_weights(weights, offsets if offsets is not None else _offsets_of(lengths), place)


def _first(wrong: Tensor) -> int | None:
    found = wrong.nonzero()
    return int(found[0, 0]) if found.numel() else None


def _offsets_of(lengths: Tensor | None) -> Tensor:
    assert lengths is not None
    return torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.cumsum(0, dtype=torch.int64)])


def _check_lengths(lengths: Tensor, num_values: int, place: Place) -> None:
    bag = _first(lengths < 0)
    if bag is not None:
        raise ValueError(f"{place(bag)}: the length is {int(lengths[bag])}; lengths are 0 or more")
    ends = _offsets_of(lengths)
    if int(ends[-1]) > num_values:
        bag = _first(ends[1:] > num_values)
        assert bag is not None
        raise ValueError(
            f"{place(bag)}: its ids are {int(ends[bag])} to {int(ends[bag + 1])}, but there are {num_values} "
            f"values; the lengths sum to {int(ends[-1])}"
        )
    if int(ends[-1]) < num_values:
        raise ValueError(
            f"the lengths sum to {int(ends[-1])}, but there are {num_values} values: "
            f"the last {num_values - int(ends[-1])} belong to no sample; count or drop them"
        )


def _check_offsets(offsets: Tensor, num_values: int, place: Place) -> None:
    bag = _first(offsets.diff() < 0)
    if bag is not None:
        raise ValueError(
            f"{place(bag)}: the offsets fall from {int(offsets[bag])} to {int(offsets[bag + 1])}; "
            "they may only rise"
        )
    if int(offsets[0]) != 0:
        raise ValueError(f"the offsets start at {int(offsets[0])}; the first must be 0")
    if int(offsets[-1]) > num_values:
        bag = _first(offsets[1:] > num_values)
        where = "" if bag is None else f"{place(bag)}: "
        raise ValueError(
            f"{where}the offsets reach {int(offsets[-1])}, but there are {num_values} values; "
            "make offsets from the lengths of these values"
        )
    if int(offsets[-1]) < num_values:
        raise ValueError(
            f"the offsets end at {int(offsets[-1])}, but there are {num_values} values: "
            f"the last {num_values - int(offsets[-1])} belong to no sample; count or drop them"
        )


def _check_agreement(lengths: Tensor, offsets: Tensor, place: Place) -> None:
    bag = _first(offsets.diff() != lengths)
    if bag is not None:
        raise ValueError(
            f"{place(bag)}: the length is {int(lengths[bag])}, but the offsets "
            f"{int(offsets[bag])} to {int(offsets[bag + 1])} hold {int(offsets[bag + 1] - offsets[bag])} ids"
            "; give only one of the two"
        )


def _check_weights(weights: Tensor, offsets: Tensor, place: Place) -> None:
    if not weights.is_floating_point():
        return
    i = _first(weights.isnan().flatten(1).any(1) if weights.dim() > 1 else weights.isnan())
    if i is not None:
        bag = int(torch.searchsorted(offsets, i, right=True)) - 1
        raise ValueError(f"{place(bag)}: weight {i - int(offsets[bag])} is NaN; look where weights are made")
