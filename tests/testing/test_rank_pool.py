import os

import pytest
import torch.distributed as dist

from meshrec.testing import RankError, RankPool


def rank_and_size(offset):
    return dist.get_rank() + offset, dist.get_world_size()


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("bad luck")
    return "fine"


def die():
    if dist.get_rank() == 0:
        os._exit(3)


def test_results_come_by_rank(ranks):
    assert ranks(2).run(rank_and_size, 10) == [(10, 2), (11, 2)]


def test_an_error_leaves_the_pool_usable(ranks):
    with pytest.raises(RankError, match=r"rank 1:\n(.|\n)*ValueError: bad luck"):
        ranks(2).run(fail_on_one)
    assert ranks(2).run(rank_and_size, 0) == [(0, 2), (1, 2)]


def test_a_dead_process_is_reported():
    with RankPool(2, timeout_seconds=30) as pool, pytest.raises(RankError, match="ended with exit code 3"):
        pool.run(die)
