from types import SimpleNamespace

import pytest

from meshrec.distributed import ShardingEnv


def test_single_process_has_one_rank_on_every_axis():
    env = ShardingEnv.single_process()
    assert (env.world.size, env.shard.size, env.replicate.size, env.local_size) == (1, 1, 1, 1)
    assert env.shard.group is None
    assert env.shard_mesh is None


def test_axes_must_be_known():
    mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"a mesh with axes \('dp', 'tp'\) cannot carry sharded tables"):
        ShardingEnv.from_mesh(mesh)
