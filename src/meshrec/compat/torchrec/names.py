"""TorchRec's names, module by module, and what each is in MeshRec (``module:name``, or a module)."""

_C = "meshrec.compat.torchrec"
_T = "torch.distributed._shard"
_OWN_PLAN = "meshrec.distributed.sharding_plan"


def _of(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


_EMBEDDING_CONFIGS = {
    **_of("meshrec.modules.embedding_configs", "BaseEmbeddingConfig DataType PoolingType"),
    **_of(
        f"{_C}.embeddings",
        "EmbeddingBagConfig EmbeddingConfig data_type_to_dtype dtype_to_data_type pooling_type_to_str",
    ),
}
_COLLECTIONS = {
    **_of(f"{_C}.embeddings", "EmbeddingBagCollection EmbeddingCollection"),
    "EmbeddingBagCollectionInterface": "meshrec.modules.embedding_modules:EmbeddingBagCollection",
    "EmbeddingCollectionInterface": "meshrec.modules.embedding_modules:EmbeddingCollection",
}
_SPARSE = _of("meshrec.sparse", "JaggedTensor KeyedJaggedTensor KeyedTensor")
_STREAMABLE = _of(f"{_C}.streamable", "Multistreamable Pipelineable")
_AWAITABLES = _of(f"{_C}.awaitables", "Awaitable LazyAwaitable LazyNoWait NoWait")
_PLANS = {
    **_of(f"{_C}.plans", "EmbeddingModuleShardingPlan ParameterSharding ShardingPlan"),
    "ModuleShardingPlan": f"{_C}.plans:EmbeddingModuleShardingPlan",
    **_of(_OWN_PLAN, "ShardingType"),
    **_of(f"{_T}.sharding_spec", "EnumerableShardingSpec ShardMetadata ShardingSpec"),
    **_of(f"{_T}.sharded_tensor", "Shard ShardedTensor ShardedTensorMetadata TensorProperties"),
}
_ENV = {**_of(f"{_C}.sharding_env", "ShardingEnv"), **_of(f"{_C}.sharders", "ModuleSharder")}
_PLANNER = _of(f"{_C}.planner", "EmbeddingShardingPlanner ParameterConstraints Topology")
_COMM = _of(f"{_C}.comm", "get_local_rank get_local_size")
_PARALLEL = _of(f"{_C}.model_parallel", "DistributedModelParallel")
_WRAPPERS = _of(f"{_C}.model_parallel", "DataParallelWrapper DefaultDataParallelWrapper")
_SHARD = _of(f"{_C}.model_parallel", "shard shard_modules")
_OPTIMIZERS = _of(f"{_C}.optimizers", "Adagrad Adam LAMB LarsSGD PartialRowWiseAdam PartialRowWiseLAMB SGD")
_FILTER = _of("meshrec.optim.in_backward", "in_backward_optimizer_filter")
_APPLY = _of(f"{_C}.optimizers", "apply_optimizer_in_backward")
_KEYED = {
    **_of("meshrec.optim.keyed", "KeyedOptimizer"),
    **_of(f"{_C}.keyed", "CombinedOptimizer KeyedOptimizerWrapper OptimizerWrapper"),
}
_CLIPPING = {
    **_of("meshrec.optim.clipping", "GradientClipping"),
    **_of(f"{_C}.keyed", "GradientClippingOptimizer"),
}
_WARMUP = {
    **_of("meshrec.optim.warmup", "WarmupPolicy"),
    **_of(f"{_C}.keyed", "WarmupOptimizer WarmupStage"),
}
_ROWWISE = _of("meshrec.optim.rowwise_adagrad", "RowWiseAdagrad")
_BATCH = _of(f"{_C}.random_dataset", "Batch")

MODULES: dict[str, dict[str, str]] = {
    "torchrec": {
        **{name: _EMBEDDING_CONFIGS[name] for name in ("DataType", "PoolingType")},
        **{name: _EMBEDDING_CONFIGS[name] for name in ("EmbeddingBagConfig", "EmbeddingConfig")},
        **_COLLECTIONS,
        **_SPARSE,
        **_STREAMABLE,
        "__version__": f"{_C}.names:VERSION",
    },
    "torchrec.types": _of("meshrec.modules.embedding_configs", "DataType"),
    "torchrec.streamable": _STREAMABLE,
    "torchrec.sparse": {},
    "torchrec.sparse.jagged_tensor": _SPARSE,
    "torchrec.modules": {},
    "torchrec.modules.activation": _of("meshrec.modules.activation", "SwishLayerNorm"),
    "torchrec.modules.crossnet": _of(
        "meshrec.modules.crossnet", "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet"
    ),
    "torchrec.modules.deepfm": _of("meshrec.modules.deepfm", "DeepFM FactorizationMachine"),
    "torchrec.modules.embedding_configs": _EMBEDDING_CONFIGS,
    "torchrec.modules.embedding_modules": _COLLECTIONS,
    "torchrec.modules.feature_processor": _of(
        f"{_C}.feature_processor",
        "PositionWeightedModule PositionWeightedProcessor offsets_to_range_traceble",
    ),
    "torchrec.modules.feature_processor_": _of(
        "meshrec.modules.feature_processor",
        "FeatureProcessor FeatureProcessorsCollection PositionWeightedModule PositionWeightedModuleCollection",
    ),
    "torchrec.modules.fp_embedding_modules": _of(
        "meshrec.modules.feature_processor", "FeatureProcessedEmbeddingBagCollection"
    ),
    "torchrec.modules.mlp": _of("meshrec.modules.mlp", "MLP Perceptron"),
    "torchrec.modules.regroup": _of("meshrec.modules.regroup", "KTRegroupAsDict"),
    "torchrec.models": {},
    "torchrec.models.dlrm": _of(
        "meshrec.models.dlrm",
        "DLRM DLRMTrain DLRM_DCN DenseArch InteractionArch InteractionDCNArch OverArch SparseArch",
    ),
    "torchrec.distributed": {
        **_PARALLEL,
        **_COMM,
        **{name: _AWAITABLES[name] for name in ("Awaitable", "NoWait")},
        **_ENV,
        **{name: _PLANS[name] for name in ("ParameterSharding", "ShardedTensor")},
        "ShardingPlanner": f"{_C}.planner:EmbeddingShardingPlanner",
    },
    "torchrec.distributed.comm": _of(
        f"{_C}.comm", "get_group_rank get_local_rank get_local_size get_num_groups"
    ),
    "torchrec.distributed.types": {
        **_AWAITABLES,
        **_PLANS,
        **_ENV,
        **_of(f"{_OWN_PLAN}", "ShardingType"),
        "ShardingPlanner": f"{_C}.planner:EmbeddingShardingPlanner",
    },
    "torchrec.distributed.embedding_types": {
        **_of(_OWN_PLAN, "EmbeddingComputeKernel ShardingType"),
        **{name: _PLANS[name] for name in ("ShardMetadata", "ShardedTensorMetadata")},
        **_of(f"{_C}.sharders", "ModuleSharder"),
        **{name: _EMBEDDING_CONFIGS[name] for name in ("DataType", "PoolingType")},
        "KeyedJaggedTensor": _SPARSE["KeyedJaggedTensor"],
    },
    "torchrec.distributed.embeddingbag": {
        **_of(f"{_C}.sharders", "EmbeddingBagCollectionSharder"),
        **_of("meshrec.distributed.embedding_modules", "ShardedEmbeddingBagCollection"),
    },
    "torchrec.distributed.embedding": {
        **_of(f"{_C}.sharders", "EmbeddingCollectionSharder"),
        **_of("meshrec.distributed.embedding_modules", "ShardedEmbeddingCollection"),
    },
    "torchrec.distributed.model_parallel": {
        **_PARALLEL,
        **_WRAPPERS,
        **_of("meshrec.model_parallel", "get_unwrapped_module"),
        **_of(f"{_C}.sharding_plan", "get_default_sharders"),
    },
    "torchrec.distributed.planner": {**_PLANNER, **_of(f"{_C}.planner", "bytes_to_gb sharder_name")},
    "torchrec.distributed.planner.types": {
        **_of(f"{_C}.planner", "ParameterConstraints Topology"),
    },
    "torchrec.distributed.planner.planners": _of(f"{_C}.planner", "EmbeddingShardingPlanner"),
    "torchrec.distributed.planner.storage_reservations": _of(
        f"{_C}.planner", "FixedPercentageStorageReservation HeuristicalStorageReservation"
    ),
    "torchrec.distributed.planner.utils": _of(f"{_C}.planner", "bytes_to_gb sharder_name"),
    "torchrec.distributed.shard": _SHARD,
    "torchrec.distributed.sharding_plan": {
        **_of(
            f"{_C}.sharding_plan",
            "ParameterShardingGenerator apply_to_all column_wise construct_module_sharding_plan data_parallel "
            "get_default_sharders get_module_to_default_sharders grid_shard row_wise table_row_wise table_wise",
        ),
    },
    "torchrec.distributed.utils": _of(f"{_C}.comm", "get_device_type"),
    "torchrec.optim": {
        **_APPLY,
        **_CLIPPING,
        **_KEYED,
        **_OPTIMIZERS,
        **_ROWWISE,
        **_WARMUP,
    },
    "torchrec.optim.apply_optimizer_in_backward": _APPLY,
    "torchrec.optim.clipping": _CLIPPING,
    "torchrec.optim.keyed": _KEYED,
    "torchrec.optim.optimizers": {**_OPTIMIZERS, **_FILTER},
    "torchrec.optim.rowwise_adagrad": _ROWWISE,
    "torchrec.optim.warmup": _WARMUP,
    "torchrec.datasets": {},
    "torchrec.datasets.random": {**_of(f"{_C}.random_dataset", "RandomRecDataset"), **_BATCH},
    "torchrec.datasets.utils": _BATCH,
    "fbgemm_gpu": {},
    "fbgemm_gpu.split_embedding_configs": _of(f"{_C}.optimizers", "EmbOptimType"),
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": {
        **_of(f"{_C}.optimizers", "WeightDecayMode"),
    },
}

MISSING: dict[str, str] = {
    "torchrec.quant": "it does not quantize tables yet. Nearest: data_type=DataType.FP16 or BF16.",
    "torchrec.inference": "it does not serve yet. Nearest: torch.export of the model.",
    "torchrec.fx": "nothing needs to be traced by fx. Nearest: torch.compile and torch.export.",
    "torchrec.ir": "nothing has to be prepared for export. Nearest: torch.export.",
    "torchrec.schema": "it keeps no schema of its interfaces.",
    "torchrec.metrics": "metrics are computed otherwise. Nearest: meshrec.metrics, or torchmetrics.",
    "torchrec.distributed.train_pipeline": "sharded modules overlap by themselves what can be. Nearest: a plain "
    "loop over DistributedModelParallel, and meshrec.data.prefetch for the batches.",
    "torchrec.distributed.TrainPipelineSparseDist": "sharded modules overlap by themselves what can be. Nearest: "
    "a plain loop over DistributedModelParallel.",
    "torchrec.distributed.TrainPipelineBase": "Nearest: a plain loop over DistributedModelParallel.",
    "torchrec.distributed.TrainPipeline": "Nearest: a plain loop over DistributedModelParallel.",
    "torchrec.distributed.model_parallel.DMPCollection": "2D training needs no class of its own. Nearest: "
    "meshrec.distributed.ShardingEnv.from_mesh with the axes ('replicate', 'shard'), which trains exactly as 1D.",
    "torchrec.distributed.types.ShardingEnv2D": "2D training needs no class of its own. Nearest: "
    "meshrec.distributed.ShardingEnv.from_mesh with the axes ('replicate', 'shard').",
    "torchrec.distributed.types.ShardedModule": "sharded modules have no common interface to implement. "
    "Nearest: ShardedEmbeddingBagCollection.",
    "torchrec.distributed.types.QuantizedCommCodecs": "Nearest: precision=meshrec.distributed.CommsPrecision(...) "
    "of MeshRec's sharders.",
    "torchrec.distributed.types.CacheParams": "tables are not cached. Nearest: tables on CPU.",
    "torchrec.distributed.fbgemm_qcomm_codec": "Nearest: precision=meshrec.distributed.CommsPrecision(...) of "
    "MeshRec's sharders.",
    "torchrec.distributed.embeddingbag.EmbeddingBagSharder": "a single nn.EmbeddingBag is not sharded. Nearest: "
    "an EmbeddingBagCollection with one table.",
    "torchrec.distributed.embeddingbag.ShardedEmbeddingBag": "a single nn.EmbeddingBag is not sharded. Nearest: "
    "an EmbeddingBagCollection with one table.",
    "torchrec.distributed.fused_embeddingbag": "Nearest: EmbeddingBagCollectionSharder, which fuses.",
    "torchrec.distributed.fused_embedding": "Nearest: EmbeddingCollectionSharder, which fuses.",
    "torchrec.distributed.fp_embeddingbag": "a feature-processed collection needs no sharder of its own: the "
    "collection inside it is sharded, its processors are dense. Nearest: EmbeddingBagCollectionSharder.",
    "torchrec.distributed.quant_embeddingbag": "it does not quantize tables yet.",
    "torchrec.distributed.quant_embedding": "it does not quantize tables yet.",
    "torchrec.distributed.planner.enumerators": "its planner searches by itself. Nearest: constraints.",
    "torchrec.distributed.planner.proposers": "its planner searches by itself. Nearest: constraints.",
    "torchrec.distributed.planner.partitioners": "its planner searches by itself. Nearest: constraints.",
    "torchrec.distributed.planner.perf_models": "its planner has its own model of time. Nearest: `meshrec "
    "calibrate`.",
    "torchrec.distributed.planner.estimator": "its planner has its own model of time. Nearest: `meshrec "
    "calibrate`.",
    "torchrec.distributed.planner.shard_estimators": "its planner has its own model of time. Nearest: `meshrec "
    "calibrate`.",
    "torchrec.distributed.planner.stats": "Nearest: print(plan.planned), and `meshrec plan`.",
    "torchrec.distributed.planner.constants": "speeds and sizes of machines are in hardware profiles. Nearest: "
    "meshrec.planner.HardwareProfile.",
    "torchrec.distributed.planner.types.TopologyFactory": "Nearest: Topology.",
    "torchrec.distributed.planner.types.ShardingOption": "plans are made of rectangles. Nearest: "
    "ParameterSharding.sharding_spec.shards.",
    "torchrec.distributed.planner.types.PlannerError": "a plan that cannot be raises ValueError, with what would "
    "help.",
    "torchrec.modules.fused_embedding_modules": "Nearest: meshrec.fuse(EmbeddingBagCollection(...), optimizer=...).",
    "torchrec.modules.embedding_tower": "Nearest: a module of your own around a collection and an interaction.",
    "torchrec.modules.lazy_extension": "Nearest: torch.nn.LazyLinear, or sizes that are given.",
    "torchrec.modules.mc_modules": "ids are not remapped while training. Nearest: hash the ids beforehand.",
    "torchrec.modules.mc_embedding_modules": "ids are not remapped while training. Nearest: hash the ids "
    "beforehand.",
    "torchrec.modules.hash_mc_modules": "ids are not remapped while training. Nearest: hash the ids beforehand.",
    "torchrec.modules.itep_modules": "tables are not pruned while training.",
    "torchrec.modules.itep_embedding_modules": "tables are not pruned while training.",
    "torchrec.modules.keyed_jagged_tensor_pool": "Nearest: a dictionary of KeyedJaggedTensors.",
    "torchrec.modules.tensor_pool": "Nearest: torch.nn.Embedding.",
    "torchrec.modules.utils": "its helpers are private to it.",
    "torchrec.models.dlrm.DLRM_Projection": "Nearest: DLRM, or DLRM_DCN.",
    "torchrec.models.experimental": "Nearest: torchrec.models.dlrm.DLRM.",
    "torchrec.optim.fused": "Nearest: meshrec.optim.FusedOptimizer.",
    "torchrec.optim.FusedOptimizer": "Nearest: meshrec.optim.FusedOptimizer.",
    "torchrec.optim.FusedOptimizerModule": "Nearest: a module's fused_optimizer.",
    "torchrec.optim.semi_sync": "replicas exchange gradients in every step, so nothing drifts. Nearest: a mesh "
    "with a 'replicate' axis.",
    "torchrec.optim.SemisyncOptimizer": "replicas exchange gradients in every step, so nothing drifts. Nearest: a "
    "mesh with a 'replicate' axis.",
    "torchrec.datasets.criteo": "Nearest: meshrec.data.",
    "torchrec.datasets.movielens": "Nearest: meshrec.data.",
    "torchrec.datasets.utils": "data pipes are gone from PyTorch. Nearest: meshrec.data.",
    "torchrec.sparse.jagged_tensor.ComputeKJTToJTDict": "Nearest: kjt.to_dict().",
    "torchrec.sparse.jagged_tensor.ComputeJTDictToKJT": "Nearest: KeyedJaggedTensor.from_jt_dict().",
    "torchrec.sparse.jagged_tensor.jt_is_equal": "Nearest: torch.equal of values and lengths.",
    "torchrec.sparse.jagged_tensor.kjt_is_equal": "Nearest: torch.equal of values and lengths.",
    "torchrec.sparse.jagged_tensor.regroup_kts": "Nearest: KeyedTensor.regroup.",
    "torchrec.sparse.tensor_dict": "Nearest: KeyedJaggedTensor.from_jt_dict.",
    "torchrec.modules.embedding_configs.QuantConfig": "it does not quantize tables yet.",
    "torchrec.modules.embedding_configs.EmbeddingTableConfig": "Nearest: EmbeddingBagConfig.",
    "fbgemm_gpu": "its kernels are its own. Nearest: meshrec.fuse and torch.ops.meshrec.",
}

VERSION = "1.8.0"
"""The release of TorchRec whose interface the bridge has."""
