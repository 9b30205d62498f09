import pytest
import torch.distributed as dist

from meshrec.comms import mesh
from meshrec.compat.bridge.sharding_env import ShardingEnv, local_devices


def test_one_process():
    env = ShardingEnv.from_local(world_size=1, rank=0)
    assert (env.world_size, env.rank, env.process_group) == (1, 0, None)
    assert isinstance(env, mesh.ShardingEnv)
    assert len(ShardingEnv.from_local(2, 0).devices) == ShardingEnv.from_local(2, 0).world_size == 2
    with pytest.raises(ValueError, match=r"rank 1.*2"):
        ShardingEnv.from_local(2, 1)
    with pytest.raises(ValueError, match=r"compute_device.*'cpu'"):
        local_devices(1000, "cuda")


def tell_numbers():
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return env.world_size, env.rank, env.process_group is dist.group.WORLD


def test_a_group(ranks):
    assert ranks(2).run(tell_numbers) == [(2, 0, True), (2, 1, True)]
