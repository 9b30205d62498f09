"""Check that boxes tile a tensor, which means that every tensor element is in exactly one box.

A box is an axis-aligned block of tensor elements, given as offset and shape. A manifest lists a tensor's
pieces as boxes. A wrong list would leave elements uninitialized after a load.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of an axis-aligned box of tensor elements, both with one value per dimension."""

MAX_SPLIT_DIMS = 6
"""Maximum number of split dimensions. Every additional dimension doubles the check time."""


def find_tiling_error(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return an error message saying why the boxes do not tile a tensor, or None if they do.

    The boxes tile the tensor if every element is in exactly one box. The check takes time linear in the
    number of boxes, by this argument: consider the function that is 1 inside a box and 0 elsewhere. The
    differences of this function along all dimensions are +1 or -1 at the box corners, and 0 elsewhere. The
    differences determine the function. Boxes therefore tile the tensor if and only if the signed corners from
    all boxes add up to the tensor's signed corners.
    """
    total = prod(shape)
    for offset, size in boxes:
        if any(o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)):
            return f"the piece of shape {list(size)} at {list(offset)} lies outside the shape {list(shape)}"
    # Cheap checks first: the element counts must match before corners are compared.
    filled = [box for box in boxes if 0 not in box[1]]
    covered = sum(prod(size) for _, size in filled)
    if covered != total:
        how = "miss elements" if covered < total else "overlap"
        return f"its pieces {how}: {covered:,} elements in pieces, {total:,} in the tensor"
    if total == 0:
        return None
    # Dimensions that no box splits need no corners, because all boxes start and end at the same positions.
    dims = [dim for dim, whole in enumerate(shape) if any(size[dim] != whole for _, size in filled)]
    if len(dims) > MAX_SPLIT_DIMS:
        return f"it is split along {len(dims)} dimensions; at most {MAX_SPLIT_DIMS} are supported"
    # Signed corner sum over all boxes, minus the tensor's. A sum other than 0 shows an overlap or a gap.
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offset, size) in [(-1, ((0,) * len(shape), tuple(shape))), *((1, box) for box in filled)]:
        # Along a dimension, the difference is +1 at the start of a box and -1 at the end.
        ends = [((offset[dim], 1), (offset[dim] + size[dim], -1)) for dim in dims]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += sign * prod(part for _, part in corner)
    if any(corners.values()):
        return "its pieces overlap, and miss as many elements"
    return None
