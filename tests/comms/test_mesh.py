from types import SimpleNamespace

import pytest
import torch

from meshrec.distributed import ShardingEnv


def test_single_process_has_one_rank_on_every_axis():
    env = ShardingEnv.single_process()
    assert (env.world.size, env.shard.size, env.replicate.size, env.local_size) == (1, 1, 1, 1)
    assert env.shard.group is None
    assert env.shard_mesh is None


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (
            ("dp", "tp"),
            (2, 2),
            "'dp'.*'tp'.*'replicate'.*'shard'",
        ),
        (None, (4,), "4.*mesh_dim_names.*'shard'"),
        (None, (1, 1, 1, 1), "init_device_mesh.*'cpu'.*mesh_dim_names"),
        (("replicate", "stage"), (2, 2), "meshrec.stages.StagedOverRanks"),
    ],
)
def test_wrong_axes_say_what_would_work(names, shape, message):
    mesh = SimpleNamespace(mesh_dim_names=names, mesh=torch.empty(shape), device_type="cpu")
    with pytest.raises(ValueError, match=message):
        ShardingEnv.from_mesh(mesh)
