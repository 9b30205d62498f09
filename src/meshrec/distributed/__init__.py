"""Sharded execution: plans, meshes, and the modules that run them."""

from meshrec.distributed.mesh import ShardingEnv
from meshrec.distributed.plan_builders import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from meshrec.distributed.plan_checks import verify_module_plan, verify_plan, verify_same_plan
from meshrec.distributed.sharding_plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    Placement,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
    TableSize,
)

__all__ = [
    "EmbeddingComputeKernel",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "ParameterSharding",
    "Placement",
    "ShardMetadata",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "TableSize",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "grid_shard",
    "row_wise",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
    "verify_module_plan",
    "verify_plan",
    "verify_same_plan",
]
