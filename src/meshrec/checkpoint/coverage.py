"""An exact check that boxes cover a tensor: every element lies in exactly one of them."""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The offset of a box in the tensor, and the shape of the box."""

MOST_SPLIT_DIMS = 6
"""The largest number of dimensions along which a tensor may be cut. Each one doubles the time of the
check.
"""


def flaw_of_cover(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Describe what is wrong with boxes that should cover a tensor; None if nothing is.

    The time is linear in the number of boxes. Take each box as a function that is 1 inside and 0 outside, and
    take its differences along every dimension: what remains is +1 or -1 at each corner. Differences lose no
    information, so the boxes add up to the tensor exactly if their corners add up to the tensor's corners.

    Args:
        shape: the tensor's shape.
        boxes: the boxes, with as many dimensions as the tensor. An empty box covers nothing.
    """
    total = prod(shape)
    for offset, size in boxes:
        if any(o + n > whole for o, n, whole in zip(offset, size, shape, strict=True)):
            return f"the piece of shape {list(size)} at {list(offset)} leads out of its shape {list(shape)}"
    filled = [box for box in boxes if 0 not in box[1]]
    covered = sum(prod(size) for _, size in filled)
    if covered != total:
        how = "leave out elements" if covered < total else "overlap"
        return f"its pieces {how}: they have {covered:,}, and the tensor has {total:,}"
    if total == 0:
        return None
    dims = [dim for dim, whole in enumerate(shape) if any(size[dim] != whole for _, size in filled)]
    if len(dims) > MOST_SPLIT_DIMS:
        return f"it is cut along {len(dims)} dimensions, and {MOST_SPLIT_DIMS} is the most"
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (offset, size) in [(-1, ((0,) * len(shape), tuple(shape))), *((1, box) for box in filled)]:
        ends = [((offset[dim], 1), (offset[dim] + size[dim], -1)) for dim in dims]
        for corner in product(*ends):
            corners[tuple(at for at, _ in corner)] += sign * prod(part for _, part in corner)
    if any(corners.values()):
        return "its pieces overlap and leave out some elements"
    return None
