"""Sharded embedding modules, with the plans, meshes and wire formats they need.

Start with ``routing.py`` ([Note: how a plan becomes routes]) and ``sharded_tables.py`` ([Note: the stages of
a batch]).
"""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.comms.agreement import verify_same_plan
    from meshrec.comms.collectives import measure_traffic
    from meshrec.comms.failures import CollectiveError
    from meshrec.comms.leaving import leave_process_group
    from meshrec.comms.mesh import ShardingEnv
    from meshrec.comms.phase_clock import record_phases
    from meshrec.comms.wire import CommsPrecision
    from meshrec.distributed.awaitable import LazyAwaitable
    from meshrec.distributed.embedding_modules import (
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
    )
    from meshrec.distributed.sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
    from meshrec.plan.builders import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        grid_shard,
        row_wise,
        table_column_wise,
        table_row_wise,
        table_wise,
    )
    from meshrec.plan.checks import verify_module_plan, verify_plan
    from meshrec.plan.sharding_plan import (
        EmbeddingComputeKernel,
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        RemoteDevice,
        ShardingPlan,
        ShardingType,
        ShardMetadata,
        TableSize,
    )

__all__ = [
    "CollectiveError",
    "CommsPrecision",
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "LazyAwaitable",
    "ParameterSharding",
    "RemoteDevice",
    "ShardMetadata",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "TableSize",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "grid_shard",
    "leave_process_group",
    "measure_traffic",
    "record_phases",
    "row_wise",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
    "verify_module_plan",
    "verify_plan",
    "verify_same_plan",
]

import_on_use(__name__)
