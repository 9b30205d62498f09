"""TorchRec names that MeshRec lacks, with the reason and the nearest alternative.

A module entry covers all names in it. An entry for a longer path takes precedence.
"""

_LOOP = "Nearest: TrainPipelineSparseDist."
_QUANT = (
    "a feature-processed collection needs no sharder of its own. Nearest: QuantEmbeddingBagCollectionSharder."
)
_PLANNER = "the planner searches by itself. Nearest: ParameterConstraints."
_TIMES = "the planner has its own model of time. Nearest: `meshrec calibrate`, which measures this machine."
_REMAP = (
    "managed collisions run on one rank. Nearest: EmbeddingBagConfig(keys=meshrec.Hashed(max_rows=...)), "
    "which is sharded under every plan."
)
_ZCH = (
    "IDs are not probed into a fixed table. Nearest: HashZchManagedCollisionModule, and "
    "EmbeddingBagConfig(keys=meshrec.Hashed(max_rows=...)), in which no two IDs share a row."
)
_MIXED = (
    "it weighs several signals. Nearest: EmbeddingBagConfig(keys=meshrec.Hashed(max_rows=..., "
    "evict=meshrec.tables.Score(...))), a score of your own."
)
_PRUNE = "tables are not pruned while training. Nearest: fewer num_embeddings."
_TWO_D = (
    "2D training needs no class of its own. Nearest: meshrec.distributed.ShardingEnv.from_mesh with the axes "
    "('replicate', 'shard'), which trains exactly as 1D does."
)
_ONE_BAG = "a single nn.EmbeddingBag is not sharded. Nearest: an EmbeddingBagCollection with one table."
_FUSED_OPTIMIZER = "Nearest: a module's fused_optimizer, a meshrec.tables.FusedOptimizer."
_CRITEO = "data pipes are gone from PyTorch. Nearest: meshrec.data.criteo, a Dataset with a resumable reader."
_MOVIELENS = "data pipes are gone from PyTorch. Nearest: meshrec.data.movielens."

MISSING: dict[str, str] = {
    "fbgemm_gpu": "kernels are MeshRec's own. Nearest: meshrec.fuse, and torch.ops.meshrec.",
    "torchrec.datasets.criteo": _CRITEO,
    "torchrec.datasets.movielens": _MOVIELENS,
    "torchrec.datasets.utils": "data pipes are gone from PyTorch. Nearest: the readers of meshrec.data.",
    "torchrec.distributed.ShardedModule": "sharded modules have no common interface to implement. Nearest: "
    "ShardedEmbeddingBagCollection.",
    "torchrec.distributed.embeddingbag.EmbeddingBagSharder": _ONE_BAG,
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBag": _ONE_BAG,
    "torchrec.distributed.fp_embeddingbag": "a feature-processed collection needs no sharder of its own: the "
    "collection inside it is sharded, its processors are dense. Nearest: EmbeddingBagCollectionSharder.",
    "torchrec.distributed.fused_embedding": "Nearest: EmbeddingCollectionSharder, which fuses.",
    "torchrec.distributed.fused_embeddingbag": "Nearest: EmbeddingBagCollectionSharder, which fuses.",
    "torchrec.distributed.mc_embedding": _REMAP,
    "torchrec.distributed.mc_embeddingbag": _REMAP,
    "torchrec.distributed.model_parallel.DMPCollection": _TWO_D,
    "torchrec.distributed.planner.constants": "speeds and sizes of machines are in hardware profiles. "
    "Nearest: "
    "meshrec.planner.HardwareProfile.",
    "torchrec.distributed.planner.dry_run": "plans are not made for kinds of machines by name. Nearest: "
    "EmbeddingShardingPlanner(topology=...).plan(model, sharders) for each topology.",
    "torchrec.distributed.planner.enumerators": _PLANNER,
    "torchrec.distributed.planner.estimator": _TIMES,
    "torchrec.distributed.planner.partitioners": _PLANNER,
    "torchrec.distributed.planner.perf_models": _TIMES,
    "torchrec.distributed.planner.proposers": _PLANNER,
    "torchrec.distributed.planner.shard_estimators": _TIMES,
    "torchrec.distributed.planner.stats": "Nearest: print(plan.planned), and `meshrec plan`.",
    "torchrec.distributed.planner.types.PlannerError": "a plan that cannot be raises ValueError, with what "
    "would help.",
    "torchrec.distributed.planner.types.ShardingOption": "plans are made of rectangles. Nearest: "
    "ParameterSharding.sharding_spec.shards.",
    "torchrec.distributed.planner.types.TopologyFactory": "Nearest: Topology.",
    "torchrec.distributed.quant_embedding": _QUANT,
    "torchrec.distributed.quant_embeddingbag": _QUANT,
    "torchrec.distributed.train_pipeline": _LOOP,
    "torchrec.distributed.types.CacheParams": "tables are not cached. Nearest: tables on CPU.",
    "torchrec.distributed.types.ShardedModule": "sharded modules have no common interface to implement. "
    "Nearest: ShardedEmbeddingBagCollection.",
    "torchrec.distributed.types.ShardingEnv2D": _TWO_D,
    "torchrec.inference.modules": "Nearest: `meshrec export`, meshrec.export.Predictor, and `meshrec serve`.",
    "torchrec.metrics": "metrics are computed otherwise. Nearest: meshrec.metrics.MetricSet, whose "
    "auprc=True is TorchRec's binned AUPRC, with binary_metrics.",
    "torchrec.models.experimental": "Nearest: torchrec.models.dlrm.DLRM.",
    "torchrec.modules.embedding_configs.CountTimestampMixedEvictionPolicy": _MIXED,
    "torchrec.modules.embedding_configs.EmbeddingTableConfig": "Nearest: EmbeddingBagConfig.",
    "torchrec.modules.embedding_configs.FeatureScoreBasedEvictionPolicy": _MIXED,
    "torchrec.modules.embedding_tower": "Nearest: a module of your own around a collection and an "
    "interaction.",
    "torchrec.modules.hash_mc_modules": _ZCH,
    "torchrec.modules.itep_embedding_modules": _PRUNE,
    "torchrec.modules.itep_modules": _PRUNE,
    "torchrec.modules.utils": "they are private helpers there.",
    "torchrec.optim.FusedOptimizer": _FUSED_OPTIMIZER,
    "torchrec.optim.FusedOptimizerModule": _FUSED_OPTIMIZER,
    "torchrec.optim.fused": _FUSED_OPTIMIZER,
    "torchrec.quant.embedding_modules": "Nearest: meshrec.quant.quantize, which takes a whole model.",
    "torchrec.quant.utils": "Nearest: meshrec.quant.table_bytes, and a quantized model's state_dict.",
    "torchrec.schema": "interfaces have no schemas of their own.",
}
