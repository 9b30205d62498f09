"""Map from TorchRec's names to MeshRec's objects (``module:name``) or modules, by TorchRec module."""

# Common prefixes, and groups of names that several TorchRec modules export.
_C = "meshrec.compat.bridge"
_T = "torch.distributed._shard"
_CORE_PLAN = "meshrec.plan.sharding_plan"


def _of(module: str, names: str) -> dict[str, str]:
    """Return a dict from every name to ``module:name``. ``names`` is separated by spaces."""
    return {name: f"{module}:{name}" for name in names.split()}


_QUANT = _of(f"{_C}.quant", "EmbeddingBagCollection EmbeddingCollection")
_QUANTIZE = _of(f"{_C}.quant", "quantize_embeddings quantize_inference_model")
_EMBEDDING_CONFIGS = {
    **_of(f"{_C}.quant", "QuantConfig"),
    **_of("meshrec.modules.embedding_configs", "BaseEmbeddingConfig DataType PoolingType"),
    **_of(
        f"{_C}.virtual_tables",
        "CountBasedEvictionPolicy FeatureL2NormBasedEvictionPolicy NoEvictionPolicy "
        "TimestampBasedEvictionPolicy VirtualTableEvictionPolicy",
    ),
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
_SKIPPING = _of(f"{_C}.embeddings", "mark_data_parallel_skip_grad_sync should_skip_data_parallel_grad_sync")
_S = f"{_C}.sparse"
_SPARSE = _of(_S, "JaggedTensor KeyedJaggedTensor KeyedTensor")
_REGROUP = ("permute_multi_embedding", "regroup_kts", "_fbgemm_permute_pooled_embs", "_regroup_keyed_tensors")
_SPARSE_ALL = {
    **_SPARSE,
    **_of(f"{_S}.helpers", "ComputeJTDictToKJT ComputeKJTToJTDict jt_is_equal kjt_is_equal"),
    **_of(f"{_S}.pytrees", "flatten_kjt_list unflatten_kjt_list"),
    **_of(f"{_S}.regrouping", "_all_keys_used_once"),
    **dict.fromkeys(_REGROUP, f"{_S}.keyed:regrouped"),
    "_kt_regroup_arguments": f"{_S}.regrouping:kt_regroup_arguments",
    "_safe_tolist": f"{_S}.helpers:safe_tolist",
    "_to_offsets": f"{_S}.segments:to_offsets",
    "JaggedTensorMeta": f"{_S}.kinds:Kind",
}
_FX = _of(f"{_C}.fx", "Tracer symbolic_trace")
_STREAMABLE = _of(f"{_C}.streamable", "Multistreamable Pipelineable")
_AWAITABLES = _of(f"{_C}.awaitables", "Awaitable LazyAwaitable LazyNoWait NoWait")
_BOUNDS = _of(f"{_C}.plans", "BoundsCheckMode")
_PLANS = {
    **_of(f"{_C}.plans", "EmbeddingModuleShardingPlan ParameterSharding ShardingPlan"),
    "ModuleShardingPlan": f"{_C}.plans:EmbeddingModuleShardingPlan",
    **_of(_CORE_PLAN, "ShardingType"),
    **_BOUNDS,
    **_of(f"{_T}.sharding_spec", "EnumerableShardingSpec ShardMetadata ShardingSpec"),
    **_of(f"{_T}.sharded_tensor", "Shard ShardedTensor ShardedTensorMetadata TensorProperties"),
}
_ENV = {**_of(f"{_C}.sharding_env", "ShardingEnv"), **_of(f"{_C}.sharders", "ModuleSharder")}
_CONSTRAINTS = _of(f"{_C}.constraints", "ParameterConstraints")
_PLANNER = {**_of(f"{_C}.planner", "EmbeddingShardingPlanner Topology"), **_CONSTRAINTS}
_COMM = _of(f"{_C}.comm", "get_local_rank get_local_size")
_PARALLEL = _of(f"{_C}.model_parallel", "DistributedModelParallel")
_WRAPPERS = _of(f"{_C}.model_parallel", "DataParallelWrapper DefaultDataParallelWrapper")
_SHARD = _of(f"{_C}.model_parallel", "_shard_modules shard shard_modules")
_OPTIMIZERS = _of(f"{_C}.optimizers", "Adagrad Adam LAMB LarsSGD PartialRowWiseAdam PartialRowWiseLAMB SGD")
_FILTER = _of("meshrec.optim.in_backward", "in_backward_optimizer_filter")
_APPLY = _of(f"{_C}.optimizers", "apply_optimizer_in_backward")
_KEYED = {**_of(f"{_C}.keyed", "KeyedOptimizer CombinedOptimizer KeyedOptimizerWrapper OptimizerWrapper")}
_SEMI_SYNC = _of(f"{_C}.semi_sync", "SemisyncOptimizer")
_SEMI_SYNC_KEYS = (
    "SEMI_SYNC_GLOBAL_OPTIM_KEY SEMI_SYNC_LOCAL_OPTIM_KEY "
    "SEMI_SYNC_GLOBAL_STATE_KEY SEMI_SYNC_LOCAL_STATE_KEY "
    "SEMISYNC_GLOBAL_STEP_COUNTER_KEY SEMISYNC_LOCAL_STEP_COUNTER_KEY"
)
_CLIPPING = {
    **_of("meshrec.optim.clipping", "GradientClipping"),
    **_of(f"{_C}.keyed", "GradientClippingOptimizer"),
}
_WARMUP = _of(f"{_C}.warmup", "WarmupOptimizer WarmupPolicy WarmupStage")
_ROWWISE = _of(f"{_C}.rowwise_adagrad", "RowWiseAdagrad")
_PIPELINES = _of(
    f"{_C}.train_pipeline",
    "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist TrainPipelineBase TrainPipelineSparseDist",
)
_STAGES = _of(f"{_C}.staged_pipeline", "PipelineStage SparseDataDistUtil StagedTrainPipeline")
_BATCH = _of(f"{_C}.datasets", "Batch")
_LOCATION = _of(f"{_C}.fused_embeddings", "EmbeddingLocation")

# Strings, not objects, so that a program imports only the counterparts it uses. An empty dict is a package
# with submodules only.
MODULES: dict[str, dict[str, str]] = {
    "torchrec": {
        **{name: _EMBEDDING_CONFIGS[name] for name in ("DataType", "PoolingType")},
        **{name: _EMBEDDING_CONFIGS[name] for name in ("EmbeddingBagConfig", "EmbeddingConfig")},
        **{name: target for name, target in _COLLECTIONS.items() if name != "EmbeddingCollectionInterface"},
        **_SPARSE,
        **_STREAMABLE,
        "__version__": f"{_C}.names:VERSION",
    },
    "torchrec.types": _of("meshrec.modules.embedding_configs", "DataType"),
    "torchrec.streamable": _STREAMABLE,
    "torchrec.sparse": {},
    "torchrec.sparse.jagged_tensor": _SPARSE_ALL,
    "torchrec.sparse.jagged_tensor_validator": _of(f"{_S}.validator", "validate_keyed_jagged_tensor"),
    "torchrec.sparse.tensor_dict": _of(f"{_S}.helpers", "maybe_td_to_kjt"),
    "torchrec.fx": _FX,
    "torchrec.fx.tracer": {**_FX, **_of(f"{_C}.fx", "is_fx_tracing")},
    "torchrec.modules": {},
    "torchrec.modules.activation": _of("meshrec.modules.activation", "SwishLayerNorm"),
    "torchrec.modules.crossnet": _of(
        "meshrec.modules.crossnet", "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet"
    ),
    "torchrec.modules.deepfm": _of("meshrec.modules.deepfm", "DeepFM FactorizationMachine"),
    "torchrec.modules.embedding_configs": _EMBEDDING_CONFIGS,
    "torchrec.modules.embedding_modules": {**_COLLECTIONS, **_SKIPPING},
    "torchrec.modules.feature_processor": _of(
        f"{_C}.feature_processor",
        "PositionWeightedModule PositionWeightedProcessor offsets_to_range_traceble",
    ),
    "torchrec.modules.feature_processor_": {
        **_of("meshrec.modules.feature_processor", "FeatureProcessor FeatureProcessorsCollection"),
        **_of(f"{_C}.feature_processor_", "PositionWeightedModule PositionWeightedModuleCollection"),
    },
    "torchrec.modules.fp_embedding_modules": _of(
        f"{_C}.feature_processor_", "FeatureProcessedEmbeddingBagCollection FeatureProcessorDictWrapper"
    ),
    "torchrec.modules.fused_embedding_modules": _of(
        f"{_C}.fused_embeddings",
        "FusedEmbeddingBagCollection FusedEmbeddingCollection fuse_embedding_optimizer",
    ),
    "torchrec.modules.hash_mc_evictions": _of(
        f"{_C}.hash_managed_collisions", "HashZchEvictionConfig HashZchEvictionPolicyName"
    ),
    "torchrec.modules.hash_mc_metrics": _of(
        f"{_C}.hash_mc_metrics", "ConsoleScalarLoggerBackend ScalarLogger ScalarLoggerBackend logging time"
    ),
    "torchrec.modules.hash_mc_modules": _of(f"{_C}.hash_managed_collisions", "HashZchManagedCollisionModule"),
    "torchrec.modules.lazy_extension": _of(f"{_C}.lazy_extension", "LazyModuleExtensionMixin lazy_apply"),
    "torchrec.modules.mc_embedding_modules": _of(
        f"{_C}.managed_collisions",
        "BaseManagedCollisionEmbeddingCollection ManagedCollisionEmbeddingBagCollection "
        "ManagedCollisionEmbeddingCollection return_custom_metadata return_remapped_lengths_as_mask",
    ),
    "torchrec.modules.mc_modules": {
        **_of(
            f"{_C}.managed_collisions",
            "ManagedCollisionCollection ManagedCollisionModule MCHManagedCollisionModule",
        ),
        **_of(
            f"{_C}.eviction",
            "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy MCHEvictionPolicy "
            "MCHEvictionPolicyMetadataInfo average_threshold_filter dynamic_threshold_filter "
            "probabilistic_threshold_filter",
        ),
    },
    "torchrec.modules.mlp": _of("meshrec.modules.mlp", "MLP Perceptron"),
    "torchrec.modules.keyed_jagged_tensor_pool": _of(f"{_C}.pools", "KeyedJaggedTensorPool"),
    "torchrec.modules.object_pool": _of(f"{_C}.pools", "ObjectPool"),
    "torchrec.modules.tensor_pool": _of(f"{_C}.pools", "TensorPool"),
    "torchrec.modules.regroup": {
        **_of(f"{_C}.regroup", "KTRegroupAsDict PermuteMultiEmbedding"),
        "_split_to_tensor_dict": f"{_C}.regroup:to_tensor_dict",
        "_to_tensor_dict": f"{_C}.regroup:to_tensor_dict",
    },
    "torchrec.modules.utils": _of(f"{_C}.hash_managed_collisions", "make_hash_zch_buckets_non_persistent"),
    "torchrec.inference": {},
    "torchrec.inference.modules": {
        **_QUANTIZE,
        **_of(f"{_C}.pruning", "set_pruning_data"),
        **_of(
            f"{_C}.inference",
            "DEFAULT_FUSED_PARAMS DEFAULT_SHARDERS PredictModule quantize_dense quantize_feature "
            "shard_quant_model",
        ),
        **_of(f"{_C}.dlrm_predict", "BatchingMetadata PredictFactory QualNameMetadata"),
        **_of(f"{_C}.quant_tables", "assign_weights_to_tbe get_table_to_weights_from_tbe"),
    },
    "torchrec.inference.dlrm_predict": _of(
        f"{_C}.dlrm_predict", "DLRMModelConfig DLRMPredictFactory DLRMPredictModule create_training_batch"
    ),
    "torchrec.inference.state_dict_transform": _of(
        f"{_C}.state_dicts", "state_dict_all_gather_keys state_dict_gather state_dict_to_device"
    ),
    "torchrec.models": {},
    "torchrec.models.deepfm": _of(
        f"{_C}.deepfm", "DenseArch FMInteractionArch OverArch SimpleDeepFMNN SimpleDeepFMNNWrapper SparseArch"
    ),
    "torchrec.models.dlrm": {
        **_of("meshrec.models.dlrm", "DLRMTrain DenseArch InteractionArch InteractionDCNArch OverArch"),
        **_of(
            f"{_C}.dlrm",
            "DLRM DLRMWrapper DLRM_DCN DLRM_Projection InteractionProjectionArch SparseArch choose",
        ),
    },
    "torchrec.quant": {"EmbeddingBagCollection": _QUANT["EmbeddingBagCollection"]},
    "torchrec.quant.embedding_modules": {
        **_QUANT,
        **_of(
            f"{_C}.quant",
            "quant_prep_enable_quant_state_dict_split_scale_bias "
            "quant_prep_enable_quant_state_dict_split_scale_bias_for_types",
        ),
    },
    "torchrec.quant.utils": _of(f"{_C}.quant", "meta_to_cpu_placement"),
    "torchrec.distributed": {
        **_PARALLEL,
        **_COMM,
        **{name: _AWAITABLES[name] for name in ("Awaitable", "NoWait")},
        **_ENV,
        **{name: _PLANS[name] for name in ("ParameterSharding", "ShardedTensor")},
        "ShardingPlanner": f"{_C}.planner:EmbeddingShardingPlanner",
        **_PIPELINES,
        "TrainPipeline": f"{_C}.train_pipeline:TrainPipelineBase",
    },
    "torchrec.distributed.comm": _of(
        f"{_C}.comm", "get_group_rank get_local_rank get_local_size get_num_groups"
    ),
    "torchrec.distributed.fbgemm_qcomm_codec": _of(
        f"{_C}.qcomms",
        "CommOp CommType QCommsConfig QuantizedCommCodec QuantizedCommCodecs get_qcomm_codecs "
        "get_qcomm_codecs_registry",
    ),
    "torchrec.distributed.fused_params": _of(
        f"{_C}.inference",
        "FUSED_PARAM_BOUNDS_CHECK_MODE FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP "
        "FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS FUSED_PARAM_REGISTER_TBE_BOOL "
        "FUSED_PARAM_TBE_ROW_ALIGNMENT",
    ),
    "torchrec.distributed.global_settings": _of(
        f"{_C}.inference", "get_propogate_device set_propogate_device"
    ),
    "torchrec.distributed.types": {
        **_AWAITABLES,
        **_of(f"{_C}.qcomms", "CommOp QuantizedCommCodec QuantizedCommCodecs"),
        **_PLANS,
        **_ENV,
        **_of(f"{_CORE_PLAN}", "ShardingType"),
        "ShardingPlanner": f"{_C}.planner:EmbeddingShardingPlanner",
    },
    "torchrec.distributed.embedding_types": {
        **_of(_CORE_PLAN, "EmbeddingComputeKernel ShardingType"),
        **{name: _PLANS[name] for name in ("ShardMetadata", "ShardedTensorMetadata")},
        **_of(f"{_C}.sharders", "ModuleSharder"),
        **{name: _EMBEDDING_CONFIGS[name] for name in ("DataType", "PoolingType")},
        "KeyedJaggedTensor": _SPARSE["KeyedJaggedTensor"],
    },
    "torchrec.distributed.embeddingbag": {
        **_of(f"{_C}.sharders", "EmbeddingBagCollectionSharder"),
        **_of(f"{_C}.sharded", "ShardedEmbeddingBagCollection"),
    },
    "torchrec.distributed.embedding": {
        **_of(f"{_C}.sharders", "EmbeddingCollectionSharder"),
        **_of(f"{_C}.sharded", "ShardedEmbeddingCollection"),
    },
    "torchrec.distributed.quant_embedding": {
        **_of(f"{_C}.quant_sharders", "QuantEmbeddingCollectionSharder"),
        "ShardedQuantEmbeddingCollection": f"{_C}.sharded:ShardedEmbeddingCollection",
    },
    "torchrec.distributed.quant_embeddingbag": {
        **_of(f"{_C}.quant_sharders", "QuantEmbeddingBagCollectionSharder"),
        "ShardedQuantEmbeddingBagCollection": f"{_C}.sharded:ShardedEmbeddingBagCollection",
    },
    "torchrec.distributed.model_parallel": {
        **_PARALLEL,
        **_WRAPPERS,
        **_of("meshrec.model_parallel", "get_unwrapped_module"),
        **_of(f"{_C}.sharding_plan", "get_default_sharders"),
    },
    "torchrec.distributed.planner": {**_PLANNER, **_of(f"{_C}.planner", "bytes_to_gb sharder_name")},
    "torchrec.distributed.planner.api": _of(
        f"{_C}.plan_requests", "ProductionPlannerOrchestrator ShardingPlannerAPI"
    ),
    "torchrec.distributed.planner.executor": _of(f"{_C}.plan_requests", "DefaultPlannerExecutor"),
    "torchrec.distributed.planner.protocols": _of(f"{_C}.plan_requests", "PlannerExecutor"),
    "torchrec.distributed.planner.provider": _of(
        f"{_C}.plan_requests", "DefaultPlannerProvider PlannerProvider"
    ),
    "torchrec.distributed.planner.reporter": _of(f"{_C}.plan_requests", "DefaultPlanReporter PlanReporter"),
    "torchrec.distributed.planner.types": {
        **_of(f"{_C}.planner", "Topology"),
        **_of(
            f"{_C}.plan_requests",
            "PlannerConfig PlannerSessionContext PlannerVariant ShardingPlanRequest ShardingPlanResult "
            "StorageReservationPolicy",
        ),
        **_CONSTRAINTS,
        "ShardingPlan": _PLANS["ShardingPlan"],
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
            "ParameterShardingGenerator apply_to_all column_wise construct_module_sharding_plan "
            "data_parallel "
            "get_default_sharders get_module_to_default_sharders grid_shard row_wise table_row_wise "
            "table_wise",
        )
    },
    "torchrec.distributed.test_utils": {},
    "torchrec.distributed.test_utils.model_input": _of(f"{_C}.dlrm", "ModelInput"),
    "torchrec.distributed.train_pipeline": {
        **_PIPELINES,
        **{name: _STAGES[name] for name in ("SparseDataDistUtil", "StagedTrainPipeline")},
        "TrainPipeline": f"{_C}.train_pipeline:TrainPipelineBase",
    },
    "torchrec.distributed.train_pipeline.pipeline_stage": {
        name: _STAGES[name] for name in ("PipelineStage", "SparseDataDistUtil")
    },
    "torchrec.distributed.train_pipeline.train_pipelines": {
        **_PIPELINES,
        **_of(f"{_C}.train_pipeline", "TrainPipelineSemiSync"),
        **{name: _STAGES[name] for name in ("PipelineStage", "StagedTrainPipeline")},
        "TrainPipeline": f"{_C}.train_pipeline:TrainPipelineBase",
    },
    "torchrec.distributed.utils": {
        **_of(f"{_C}.comm", "get_device_type"),
        **_of(f"{_C}.comm", "CopyableMixin copy_to_device init_parameters"),
    },
    "torchrec.test_utils": _of(f"{_C}.test_utils", "get_free_port skip_if_asan skip_if_asan_class"),
    "torchrec.optim": {**_APPLY, **_CLIPPING, **_KEYED, **_OPTIMIZERS, **_ROWWISE, **_SEMI_SYNC, **_WARMUP},
    "torchrec.optim.apply_optimizer_in_backward": _APPLY,
    "torchrec.optim.clipping": {
        **_CLIPPING,
        "_get_grads": f"{_C}.keyed:get_grads",
        "_batch_cal_norm": f"{_C}.keyed:batch_cal_norm",
        "_compute_total_norm": f"{_C}.keyed:compute_total_norm",
    },
    "torchrec.optim.keyed": _KEYED,
    "torchrec.optim.optimizers": {**_OPTIMIZERS, **_FILTER},
    "torchrec.optim.rowwise_adagrad": _ROWWISE,
    "torchrec.optim.semi_sync": {**_SEMI_SYNC, **_of(f"{_C}.semi_sync", _SEMI_SYNC_KEYS)},
    "torchrec.optim.test_utils": _of(f"{_C}.keyed", "DummyKeyedOptimizer"),
    "torchrec.optim.warmup": _WARMUP,
    "torchrec.datasets": {},
    "torchrec.datasets.criteo": _of(
        f"{_C}.datasets",
        "CAT_FEATURE_COUNT DAYS DEFAULT_CAT_NAMES DEFAULT_COLUMN_NAMES DEFAULT_INT_NAMES DEFAULT_LABEL_NAME "
        "INT_FEATURE_COUNT TOTAL_TRAINING_SAMPLES",
    ),
    "torchrec.datasets.movielens": _of(
        f"{_C}.datasets",
        "DEFAULT_MOVIES_COLUMN_NAMES DEFAULT_RATINGS_COLUMN_NAMES MOVIES_FILENAME RATINGS_FILENAME",
    ),
    "torchrec.datasets.random": {**_of(f"{_C}.datasets", "RandomRecDataset"), **_BATCH},
    "torchrec.datasets.utils": _BATCH,
    "fbgemm_gpu": {},
    "fbgemm_gpu.split_embedding_configs": _of(f"{_C}.optimizers", "EmbOptimType"),
    "fbgemm_gpu.split_table_batched_embeddings_ops_common": {**_BOUNDS, **_LOCATION},
    "fbgemm_gpu.split_table_batched_embeddings_ops_training": {
        **_of(f"{_C}.optimizers", "WeightDecayMode"),
        **_LOCATION,
    },
}

VERSION = "1.9.2"
"""TorchRec release with the interface that the bridge provides."""
