import random

import pytest
import torch

from meshrec.checkpoint.coverage import MAX_SPLIT_DIMS, find_tiling_error

WHOLE = ((0, 0), (4, 6))
QUARTERS = [((row, column), (2, 3)) for row in (0, 2) for column in (0, 3)]
SPIRAL = [((0, 0), (1, 4)), ((0, 4), (3, 2)), ((3, 1), (1, 5)), ((1, 0), (3, 1)), ((1, 1), (2, 3))]


@pytest.mark.parametrize("boxes", [[WHOLE], QUARTERS, SPIRAL, [*QUARTERS, ((4, 0), (0, 6))]])
def test_covers(boxes):
    assert find_tiling_error((4, 6), boxes) is None


@pytest.mark.parametrize(
    ("boxes", "flaw"),
    [
        ([], "0.*24"),
        (QUARTERS[1:], "elements"),
        ([*QUARTERS, QUARTERS[0]], "overlap.*30"),
        ([*QUARTERS[1:], QUARTERS[1]], "overlap"),
        ([((0, 0), (4, 3)), ((0, 2), (4, 3))], "overlap"),
        ([((0, 0), (4, 7))], r"shape.*\[4, 7\].*\[0, 0\].*\[4, 6\]"),
        ([((1, 0), (4, 6))], r"\[4, 6\]"),
    ],
)
def test_flaws(boxes, flaw):
    with pytest.raises(AssertionError, match=flaw):
        assert find_tiling_error((4, 6), boxes) is None, find_tiling_error((4, 6), boxes)


def test_numbers_alone_and_empty_tensors():
    assert find_tiling_error((), [((), ())]) is None
    assert find_tiling_error((), []) is not None
    assert "overlap" in find_tiling_error((), [((), ()), ((), ())])
    assert find_tiling_error((0, 2**62), [((0, 0), (0, 2**62))]) is None


def test_random_boxes_as_by_counting():
    """Cuts and shifted boxes in up to 4 dimensions, compared with a count of every element."""
    draw = random.Random(3)
    for _ in range(500):
        shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 4)))
        boxes = [((0,) * len(shape), shape)]
        for _ in range(draw.randint(0, 6)):
            boxes += cut(boxes.pop(draw.randrange(len(boxes))), draw)
        for _ in range(draw.choice([0, 0, 1, 2])):
            boxes[draw.randrange(len(boxes))] = draw.choice(boxes)
        count = torch.zeros(shape, dtype=torch.int64)
        for offset, size in boxes:
            count[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
        assert (find_tiling_error(shape, boxes) is None) == bool((count == 1).all())


def cut(box, draw):
    offset, size = box
    dim = draw.randrange(len(size))
    at = draw.randint(0, size[dim])
    first, second = list(size), list(size)
    first[dim], second[dim] = at, size[dim] - at
    moved = [*offset[:dim], offset[dim] + at, *offset[dim + 1 :]]
    return [(offset, tuple(first)), (tuple(moved), tuple(second))]


def test_many_boxes_take_linear_time():
    rows = 200_000
    assert find_tiling_error((rows, 2), [((row, 0), (1, 2)) for row in range(rows)]) is None


def test_more_dimensions_than_anything_is_cut_along():
    dims = MAX_SPLIT_DIMS + 1
    boxes = [((0,) * dims, (1,) * dims)] * 2**dims
    assert f"{dims} dimensions" in find_tiling_error((2,) * dims, boxes)
