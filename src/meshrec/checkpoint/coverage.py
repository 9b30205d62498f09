"""Exact check that boxes tile a tensor: every element lies in exactly 1 box."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a box within a tensor."""

MOST_SPLIT_DIMS = 6
"""Maximum number of split dimensions; the check takes twice as long per dimension."""


def flaw_of_cover(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Describe why boxes do not tile a tensor; return None if they do.

    Linear time in the number of boxes. A box is the indicator function of its elements; the differences of
    that function along every dimension are +1 or -1 at the corners and 0 elsewhere. Differences lose no
    information, so the boxes sum to the tensor exactly if their corners sum to the tensor's corners.

    Args:
        shape: tensor shape.
        boxes: boxes with as many dimensions as the tensor; boxes without elements are ignored.
    """
    total = prod(shape)
    for offset, size in boxes:
        if any(o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)):
            return f"the piece of shape {list(size)} at {list(offset)} lies outside the shape {list(shape)}"
    filled = [box for box in boxes if 0 not in box[1]]
    covered = sum(prod(size) for _, size in filled)
    if covered != total:
        how = "miss elements" if covered < total else "overlap"
        return f"its pieces {how}: {covered:,} elements in pieces, {total:,} in the tensor"
    if total == 0:
        return None
    dims = [dim for dim, whole in enumerate(shape) if any(size[dim] != whole for _, size in filled)]
    if len(dims) > MOST_SPLIT_DIMS:
        return f"it is split along {len(dims)} dimensions; at most {MOST_SPLIT_DIMS} are supported"
    # Corners at which the summed differences do not cancel show an overlap or a gap.
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offset, size) in [(-1, ((0,) * len(shape), tuple(shape))), *((1, box) for box in filled)]:
        ends = [((offset[dim], 1), (offset[dim] + size[dim], -1)) for dim in dims]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += sign * prod(part for _, part in corner)
    if any(corners.values()):
        return "its pieces overlap, and miss as many elements"
    return None
