"""What a program gets that chooses as little as it can: default sharders, default plan, one process."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
group = dist.GroupMember.WORLD
assert group is not None
env = ShardingEnv.from_process_group(group)
cpu = torch.device("cpu")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.ebc(features).values()


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2, 2]), torch.tensor([1, 2]))


def trained(sharder: EmbeddingBagCollectionSharder, kind: str) -> dict[str, object]:
    """Whether tables move, how fast, and what the plan says about it."""
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={"t": ParameterConstraints(sharding_types=[kind])},
    )
    model = Model()
    plan = planner.collective_plan(model, [sharder], group)
    dmp = DistributedModelParallel(model, env, cpu, plan=plan, sharders=[sharder])
    weight = next(iter(dmp.parameters()))
    torch.nn.init.constant_(weight.data, 1.0)
    dmp(features()).sum().backward()
    placed = dmp.plan.plan["ebc"]["t"]
    optimizer = dmp.fused_optimizer
    inner = dmp.module.ebc.fused_optimizer
    return {
        "weights": weight.detach().flatten().tolist(),
        "has gradients": weight.grad is not None,
        "plan": [placed.sharding_type, placed.compute_kernel, placed.ranks],
        "combined": [isinstance(each, CombinedOptimizer) for each in (optimizer, inner)],
        "inside": [isinstance(each, KeyedOptimizer) for _, each in inner.optimizers],
        "rates": [group["lr"] for group in optimizer.param_groups],
    }


found = {
    "no fused_params": trained(EmbeddingBagCollectionSharder(), "table_wise"),
    "rate alone": trained(EmbeddingBagCollectionSharder({"learning_rate": 0.5}), "column_wise"),
    "copies": trained(EmbeddingBagCollectionSharder(), "data_parallel"),
}
dist.destroy_process_group()
Path(sys.argv[1]).write_text(json.dumps(found))
