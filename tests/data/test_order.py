import pytest

from meshrec.data import Position
from meshrec.data.order import LanePart, Step, Stream, check_seed, generator, lane_parts, lane_sizes, steps


def test_lanes_are_read_in_turn():
    assert lane_sizes(10, 4).tolist() == [3, 3, 2, 2]
    assert lane_parts(Step(0, 8), 4, 0, 1) == [LanePart(lane, 0, 2) for lane in range(4)]
    # Samples 5 .. 8 are the second of lanes 1, 2, 3 and the third of lane 0.
    assert lane_parts(Step(5, 9), 4, 0, 2) == [LanePart(0, 2, 3), LanePart(1, 1, 2)]
    assert lane_parts(Step(5, 9), 4, 1, 2) == [LanePart(2, 1, 2), LanePart(3, 1, 2)]


def test_steps_go_on_from_a_position():
    found = list(steps(20, 3, Position(0, 5), 0, 2, drop_last=False))
    assert found == [Step(5, 11), Step(11, 17), Step(17, 20)]
    assert list(steps(20, 3, Position(0, 5), 0, 2, drop_last=True)) == found[:2]
    assert list(steps(20, 3, Position(0, 20), 0, 2, drop_last=False)) == []


def test_random_streams_are_independent():
    draws = [
        generator(1, Stream.WINDOW, 2, 3),
        generator(1, Stream.WINDOW, 3, 2),
        generator(1, Stream.BLOCKS),
    ]
    values = [each.random() for each in draws]
    assert len(set(values)) == 3
    assert generator(1, Stream.WINDOW, 2, 3).random() == values[0]


def test_seeds_are_checked():
    with pytest.raises(ValueError, match=r"0.*'x'"):
        check_seed("x")
