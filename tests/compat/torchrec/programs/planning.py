"""Plans: by the planner under constraints and by hand, and how they print."""

import json
import sys
from pathlib import Path
from typing import cast

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ModuleSharder,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

WORLD_SIZE = 2
found = {}
sizes = {"large_0": 4096, "large_1": 4096, "small_0": 1024, "small_1": 1024}
ebc = EmbeddingBagCollection(
    device=torch.device("meta"),
    tables=[
        EmbeddingBagConfig(name=name, embedding_dim=64, num_embeddings=rows, feature_names=[f"f_{name}"])
        for name, rows in sizes.items()
    ],
)


def plan_for(sharding_type: ShardingType) -> ShardingPlan:
    constraints = {
        name: ParameterConstraints(
            sharding_types=[sharding_type.value],
            compute_kernels=[EmbeddingComputeKernel.DENSE.value, EmbeddingComputeKernel.FUSED.value],
            min_partition=32,
        )
        for name in sizes
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=WORLD_SIZE, compute_device="cpu"),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.2),
        debug=False,
    )
    sharders = [cast(ModuleSharder[torch.nn.Module], EmbeddingBagCollectionSharder())]
    return planner.plan(ebc, sharders)


plan = plan_for(ShardingType.TABLE_WISE)
placed = plan.plan[""]
found["table wise"] = [
    sorted(placed),
    {name: [p.sharding_type, p.compute_kernel, len(p.ranks)] for name, p in placed.items()},
    {name: [[s.shard_offsets, s.shard_sizes] for s in p.sharding_spec.shards] for name, p in placed.items()},
    # Which rank gets which may differ; that each gets one large and one small table may not.
    sorted(sorted(name[:5] for name, p in placed.items() if p.ranks == [rank]) for rank in (0, 1)),
]
placed = plan_for(ShardingType.COLUMN_WISE).plan[""]
found["column wise"] = {
    name: [
        p.sharding_type,
        sorted(p.ranks),
        [[s.shard_offsets, s.shard_sizes] for s in p.sharding_spec.shards],
    ]
    for name, p in placed.items()
}
placed = plan_for(ShardingType.DATA_PARALLEL).plan[""]
found["data parallel"] = {
    name: [p.sharding_type, p.compute_kernel, p.ranks, p.sharding_spec is None] for name, p in placed.items()
}

by_hand = construct_module_sharding_plan(
    ebc,
    {
        "large_0": row_wise(),
        "large_1": column_wise(ranks=[0, 1]),
        "small_0": table_wise(rank=1),
        "small_1": data_parallel(),
    },
    local_size=2,
    world_size=2,
    device_type="cpu",
)
found["by hand"] = [
    {
        name: [
            p.sharding_type,
            p.ranks,
            [[s.shard_offsets, s.shard_sizes, str(s.placement)] for s in p.sharding_spec.shards]
            if p.sharding_spec
            else None,
        ]
        for name, p in by_hand.items()
    },
    str(by_hand),
    str(ShardingPlan(plan={"sparse.ebc": by_hand, "other": by_hand})),
]
by_node = construct_module_sharding_plan(
    ebc,
    {
        "large_0": table_row_wise(host_index=1),
        "large_1": table_row_wise(host_index=0),
        "small_0": column_wise(size_per_rank=[16, 48]),
        "small_1": table_wise(rank=3),
    },
    local_size=2,
    world_size=4,
    device_type="cpu",
)
found["by node"] = {
    name: [p.ranks, [[s.shard_offsets, s.shard_sizes] for s in p.sharding_spec.shards]]
    for name, p in by_node.items()
}
written = ParameterSharding(
    sharding_type="table_wise",
    compute_kernel="fused",
    ranks=[0],
    sharding_spec=EnumerableShardingSpec(
        shards=[ShardMetadata(shard_sizes=[4096, 64], shard_offsets=[0, 0], placement="rank:0/cpu")]
    ),
)
found["written"] = str(EmbeddingModuleShardingPlan({"large_0": written}))
Path(sys.argv[1]).write_text(json.dumps(found))
