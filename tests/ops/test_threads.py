import pytest
import torch

from meshrec.ops.threads import at_most_threads


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_threads_are_limited_within_the_block(three_threads, limit, expected):
    with at_most_threads(limit):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 3


def test_threads_are_restored_after_an_error(three_threads):
    with pytest.raises(RuntimeError, match="stop"), at_most_threads(1):
        raise RuntimeError("stop")
    assert torch.get_num_threads() == 3
