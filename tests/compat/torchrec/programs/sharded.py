"""Training with DistributedModelParallel on two gloo processes, and on one.

Rank 0 writes what it finds as JSON, ``sharded-2.json`` and ``sharded-1.json``, to the folder that the
argument names.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import LazyAwaitable, ModuleSharder, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SHARDING = {
    "t0": ShardingType.TABLE_WISE,
    "t1": ShardingType.TABLE_WISE,
    "t2": ShardingType.COLUMN_WISE,
    "t3": ShardingType.DATA_PARALLEL,
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=name,
                    embedding_dim=64,
                    num_embeddings=16,
                    feature_names=[f"f{index}"],
                    init_fn=lambda weight, index=index: torch.nn.init.constant_(weight, 0.01 * (index + 1)),
                )
                for index, name in enumerate(SHARDING)
            ],
        )
        self.ec = EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingConfig(
                    name="s",
                    embedding_dim=4,
                    num_embeddings=16,
                    feature_names=["f1"],
                    init_fn=lambda weight: torch.nn.init.constant_(weight, 0.02),
                )
            ],
        )
        torch.manual_seed(0)
        self.over = torch.nn.Linear(64 * len(SHARDING) + 4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(features).values()
        sequence = self.ec(features)["f1"].to_padded_dense(3).sum(1)
        return self.over(torch.cat([pooled, sequence], dim=1)).squeeze(1)


def batch(rank: int, step: int) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    lengths = torch.randint(0, 4, (4 * len(SHARDING),), generator=generator)
    values = torch.randint(0, 16, (int(lengths.sum()),), generator=generator)
    keys = [f"f{index}" for index in range(len(SHARDING))]
    labels = torch.randint(0, 2, (4,), generator=generator).float()
    return KeyedJaggedTensor.from_lengths_sync(keys, values, lengths), labels


def train(rank: int, world_size: int, port: str, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 0.002}
    sharders = [
        cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder(fused_params=fused)),
        cast(ModuleSharder[torch.nn.Module], EmbeddingCollectionSharder(fused_params=fused)),
    ]
    model = Model()
    # TorchRec's row-wise Adagrad sees only a part of each row of a table that is split by columns.
    apply_optimizer_in_backward(torch.optim.SGD, [model.ebc.embedding_bags["t2"].weight], {"lr": 0.05})
    constraints = {
        name: ParameterConstraints(sharding_types=[kind.value], min_partition=32)
        for name, kind in SHARDING.items()
    }
    constraints["s"] = ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"), constraints=constraints
    )
    pg = dist.GroupMember.WORLD
    plan = planner.collective_plan(model, sharders, pg)
    sharded = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(pg),
        plan=plan,
        sharders=sharders,
        device=torch.device("cpu"),
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    optimizer = CombinedOptimizer([sharded.fused_optimizer, dense])
    losses = []
    for step in range(5):
        features, labels = batch(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(sharded(features), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    all_losses: list[Any] = [None] * world_size
    dist.all_gather_object(all_losses, losses)
    inner = get_unwrapped_module(sharded)
    lazy = inner.ebc(batch(rank, 9)[0])
    pooled = lazy.values().detach()
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, pooled.tolist())
    if rank == 0:
        found = {
            "types": {name: p.sharding_type for name, p in sharded.plan.plan["ebc"].items()},
            "losses": all_losses,
            "pooled": results,
            "keys": lazy.keys(),
            "dense": {name: p.tolist() for name, p in inner.over.named_parameters()},
            "dense names": sorted(dense.params),
            "state": sorted(sharded.state_dict()),
            "is sharded": isinstance(inner.ebc, ShardedEmbeddingBagCollection),
            "is lazy": isinstance(lazy, LazyAwaitable),
            "rates": sorted({group["lr"] for group in sharded.fused_optimizer.param_groups}),
        }
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()
    # At once: a thread of gloo's that outlives the interpreter aborts it (pytorch issues 38228 and 190489).
    os._exit(0)


if __name__ == "__main__":
    for world_size in (2, 1):  # one: in this process, which ends with it
        path = str(Path(sys.argv[1]) / f"sharded-{world_size}.json")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = str(store.port)
        del store
        if world_size == 1:
            train(0, 1, port, path)
        else:
            mp.spawn(train, args=(world_size, port, path), nprocs=world_size)
