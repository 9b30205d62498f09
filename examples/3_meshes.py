# %% [markdown]
# # Device meshes
#
# Eight processes can be more than a row of eight. This tutorial arranges them as two groups of four: first
# with process groups made by hand, then with a `DeviceMesh`, which says the same in two lines. On the mesh
# it then trains a dense model with hybrid-sharded data parallelism (HSDP), and embedding tables in two
# dimensions: sharded inside a group, replicated over groups.
#
# The eight processes run on a CPU. `RankPool` starts them and calls a function on all of them, so that each
# section below is one function.

# %%
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import meshrec
from meshrec.distributed import (
    EmbeddingBagCollectionSharder,
    ShardingEnv,
    ShardingPlan,
    construct_module_sharding_plan,
    measure_traffic,
    row_wise,
)
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad
from meshrec.testing import RankPool

NUM_REPLICAS, NUM_SHARDS = 2, 4


def on_all(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the result of ``function`` on each of the eight processes."""
    with RankPool(NUM_REPLICAS * NUM_SHARDS) as pool:
        return pool.run(function, *args)


# %% [markdown]
# ## Process groups by hand
#
# Shard groups are the rows of the arrangement, replicate groups its columns. All processes must call
# `new_group` for all groups, in the same order, also for groups that a process is not in; each process
# keeps the two it is in.


# %%
def groups_by_hand() -> tuple[list[int], list[int]]:
    """Return the ranks of this process's shard group and of its replicate group."""
    mine: dict[str, dist.ProcessGroup] = {}
    for replica in range(NUM_REPLICAS):
        ranks = [replica * NUM_SHARDS + shard for shard in range(NUM_SHARDS)]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine["shard"] = group
    for shard in range(NUM_SHARDS):
        ranks = [replica * NUM_SHARDS + shard for replica in range(NUM_REPLICAS)]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine["replicate"] = group
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=mine["replicate"])  # they are real groups: they can sum
    shard_ranks, replicate_ranks = (
        dist.get_process_group_ranks(mine[name]) for name in ("shard", "replicate")
    )
    assert total == sum(replicate_ranks)
    return shard_ranks, replicate_ranks


if __name__ == "__main__":
    by_hand = on_all(groups_by_hand)
    for rank, (shard_ranks, replicate_ranks) in enumerate(by_hand):
        print(f"rank {rank}: shard group {shard_ranks}, replicate group {replicate_ranks}")


# %% [markdown]
# ## The same in two lines
#
# `init_device_mesh` makes all groups, and `get_group` gives the one of an axis, by its name.


# %%
def groups_of_mesh() -> tuple[list[int], list[int]]:
    """Return the groups of ``groups_by_hand``, made by a DeviceMesh."""
    mesh = init_device_mesh("cpu", (NUM_REPLICAS, NUM_SHARDS), mesh_dim_names=("replicate", "shard"))
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    return dist.get_process_group_ranks(groups[0]), dist.get_process_group_ranks(groups[1])


if __name__ == "__main__":
    of_mesh = on_all(groups_of_mesh)
    print("equal on all ranks:", of_mesh == by_hand)
    assert of_mesh == by_hand


# %% [markdown]
# ## HSDP for a dense model
#
# FSDP2 (`fully_shard`) splits every parameter over the processes of an axis, gathers it when a layer needs
# it, and scatters the gradients' sums. On a two-axis mesh it splits over the second axis only, and
# all-reduces over the first: hybrid-sharded. The traffic that needs the fast network stays inside a group.


# %%
def dense_model() -> nn.Module:
    """Return the model, which is equal on every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def dense_batch() -> torch.Tensor:
    """Return the global batch: eight samples for each process."""
    return torch.randn(8 * NUM_REPLICAS * NUM_SHARDS, 32, generator=torch.Generator().manual_seed(1))


def train_hsdp() -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """Shapes of this process's part, and the whole parameters after one step."""
    mesh = init_device_mesh("cpu", (NUM_REPLICAS, NUM_SHARDS), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(dense_model(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = dense_batch().chunk(dist.get_world_size())[dist.get_rank()]
    model(mine).square().mean().backward()
    optimizer.step()
    shapes = {name: list(parameter.to_local().shape) for name, parameter in model.named_parameters()}
    return shapes, {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    trained = on_all(train_hsdp)
    alone = dense_model()
    alone(dense_batch()).square().mean().backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    for name, parameter in alone.named_parameters():
        apart = max((whole[name] - parameter).abs().max().item() for _, whole in trained)
        print(f"{name:9} whole {list(parameter.shape)}, on rank 0 {trained[0][0][name]}, off by {apart:.0e}")
        assert apart < 1e-6
    first_shape = trained[0][0]["0.weight"]

# %% [markdown]
# Of the first layer's {{ alone[0].weight.shape[0] }} rows, each process keeps {{ first_shape[0] }}, and
# after a step the parameters are those of one process that saw the whole batch.
#
# ## Embedding tables in two dimensions
#
# Tables take the same mesh. Each group of {{ NUM_SHARDS }} holds all rectangles of the plan once; the
# {{ NUM_REPLICAS }} groups are replicas. A process that owns a rectangle exchanges *sparse gradients* (ids
# and gradient rows) with the owners of the same rectangle in other groups, before the fused update. So
# replicas never drift apart, and training in two dimensions gives what training in one gives. The plan
# speaks of the ranks of one group: here, all rows split over them.


# %%
def tables_on_meta() -> meshrec.EmbeddingBagCollection:
    """Return two tables without memory."""
    return meshrec.EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            meshrec.EmbeddingBagConfig(name=name, embedding_dim=64, num_embeddings=2048, feature_names=[name])
            for name in ("user", "product")
        ],
    )


def sparse_batch(rank: int, world_size: int) -> meshrec.KeyedJaggedTensor:
    """Return this process's part of 64 samples with two IDs for each feature."""
    ids = torch.randint(0, 2048, (2, 64, 2), generator=torch.Generator().manual_seed(2))
    mine = ids.chunk(world_size, dim=1)[rank]
    num_samples = mine.shape[1]
    return meshrec.KeyedJaggedTensor.from_lengths_sync(
        keys=["user", "product"],
        values=mine.reshape(-1),
        lengths=torch.full((2 * num_samples,), 2),
    )


def train_tables(axes: tuple[str, ...]) -> dict[str, object]:
    """Shards the tables over a mesh with these axes, trains three steps, and reports."""
    torch.manual_seed(0)
    shape = (NUM_REPLICAS, NUM_SHARDS) if len(axes) == 2 else (NUM_REPLICAS * NUM_SHARDS,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    tables = tables_on_meta()
    sharders = [EmbeddingBagCollectionSharder(fused_params=RowWiseAdagrad(lr=0.1))]
    env = ShardingEnv.from_mesh(mesh)
    plan = ShardingPlan(
        {
            "": construct_module_sharding_plan(
                tables, {"user": row_wise(), "product": row_wise()}, world_size=env.shard.size
            )
        }
    )
    model = DistributedModelParallel(tables, env=env, plan=plan, sharders=sharders, dense=None)
    features = sparse_batch(dist.get_rank(), dist.get_world_size())
    for _ in range(3):
        with measure_traffic() as bytes_sent:
            model(features).values().square().mean().backward()
    return {
        "rows": sum(parameter.shape[0] for parameter in model.parameters()),
        "weights": [parameter.detach().clone() for parameter in model.parameters()],
        "output": model(features).values().detach(),
        "bytes": dict(bytes_sent),
        "plan": str(plan),
    }


if __name__ == "__main__":
    in_two = on_all(train_tables, ("replicate", "shard"))
    print(in_two[0]["plan"])
    for rank in range(NUM_SHARDS):
        ours, theirs = in_two[rank]["weights"], in_two[rank + NUM_SHARDS]["weights"]
        same = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        print(f"ranks {rank} and {rank + NUM_SHARDS}: {in_two[rank]['rows']} rows, equal bit for bit: {same}")
        assert same

# %% [markdown]
# Now the same training in one dimension, all {{ NUM_REPLICAS * NUM_SHARDS }} processes on one `shard` axis.

# %%
if __name__ == "__main__":
    in_one = on_all(train_tables, ("shard",))
    one, two = (torch.cat([result["output"] for result in run]) for run in (in_one, in_two))
    apart = (one - two).abs().max().item()
    print(f"outputs after three steps differ by at most {apart:.1e}")
    torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-6)
    for name, run in (("one dimension", in_one), ("two dimensions", in_two)):
        print(f"{name}: {run[0]['rows']} rows on rank 0, which sends in a step")
        for collective, sent in run[0]["bytes"].items():
            print(f"    {collective:36} {sent:8,} bytes")

# %% [markdown]
# In one dimension rank 0 holds {{ in_one[0]["rows"] }} rows of both tables together, in two dimensions
# {{ in_two[0]["rows"] }}: replicas cost memory. In return ids and embeddings travel among {{ NUM_SHARDS }}
# processes and not among {{ NUM_REPLICAS * NUM_SHARDS }}; over the `replicate` axis go only the gradients
# of rows that were touched.
#
# Next: [data parallelism, and the dense side](4_data_parallel.md).
