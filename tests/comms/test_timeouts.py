import time

import torch
import torch.distributed as dist

from meshrec.comms.collectives import Splits, all_to_all, set_timeout, wait_for_message
from meshrec.comms.mesh import default_env
from meshrec.distributed import CollectiveError
from meshrec.testing.rank_pool import RankPool


def wait_in_vain(way):
    """Rank 1 does not come; rank 0 does not wait for it as long as the group was made for."""
    axis = default_env().world
    splits, mine = Splits([1, 1], [1, 1]), torch.ones(2)
    all_to_all(mine, splits, axis, "first").wait()
    set_timeout(0.5)
    if axis.rank:
        return 0.0
    began = time.monotonic()
    try:
        if way == "all-reduce":
            dist.all_reduce(mine)
        elif way == "message":  # which gloo lets wait as long as the group was made for
            wait_for_message(axis.group.recv([mine], 1, 0), axis.group)
        else:
            all_to_all(mine, splits, axis, "second").wait()
    except (CollectiveError, RuntimeError):
        return time.monotonic() - began
    return 0.0


def test_ranks_wait_no_longer_than_they_are_told():
    for way in ("all-to-all", "all-reduce", "message"):
        with RankPool(2, timeout_seconds=60) as pool:
            assert 0.4 < pool.run(wait_in_vain, way)[0] < 20, way
