import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import PlaceholderObserver

from meshrec import DataType, KeyedJaggedTensor
from meshrec.compat.bridge import embeddings, quant
from meshrec.compat.bridge.feature_processor_ import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from meshrec.compat.bridge.inference import (
    DEFAULT_SHARDERS,
    PredictModule,
    quantize_dense,
    shard_quant_model,
)
from meshrec.compat.bridge.model_parallel import DistributedModelParallel, shard_modules
from meshrec.compat.bridge.optimizers import EmbOptimType
from meshrec.compat.bridge.pruning import set_pruning_data
from meshrec.compat.bridge.quant import QuantConfig
from meshrec.compat.bridge.quant_sharders import QuantEmbeddingBagCollectionSharder
from meshrec.compat.bridge.sharders import EmbeddingBagCollectionSharder
from meshrec.compat.bridge.sharding_env import ShardingEnv


def tables():
    return [
        embeddings.EmbeddingBagConfig(
            num_embeddings=20, embedding_dim=8, name=name, feature_names=[f"f{name}"]
        )
        for name in ("t0", "t1")
    ]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc = embeddings.EmbeddingBagCollection(tables())

    def forward(self, features):
        return self.ebc(features).values()


def batch():
    return KeyedJaggedTensor(["ft0", "ft1"], torch.tensor([1, 19, 7]), lengths=torch.tensor([2, 0, 0, 1]))


def observer(dtype):
    return PlaceholderObserver.with_args(dtype=dtype)


def types_of(module):
    return [config.data_type for config in module.embedding_bag_configs()]


def test_from_float_as_torchrecs_introduction_does():
    ebc = embeddings.EmbeddingBagCollection(tables())
    ebc.qconfig = QuantConfig(
        activation=observer(torch.float),
        weight=observer(torch.int8),
        per_table_weight_dtype={"t1": torch.quint4x2},
    )
    made = quant.EmbeddingBagCollection.from_float(ebc)
    assert isinstance(made, quant.EmbeddingBagCollection)
    assert types_of(made) == [DataType.INT8, DataType.INT4]
    assert torch.allclose(made(batch()).values(), ebc(batch()).values(), atol=0.03)
    del ebc.qconfig
    with pytest.raises(ValueError, match="qconfig"):
        quant.EmbeddingBagCollection.from_float(ebc)


def test_models_in_place_and_not():
    model = Model()
    expected = model(batch())
    made = quant.quantize_embeddings(
        model,
        torch.int8,
        False,
        output_dtype=torch.float16,
        per_table_weight_dtype={"t0": torch.half, "x": torch.half},
    )
    assert types_of(made.ebc) == [DataType.FP16, DataType.INT8]
    assert made(batch()).dtype == torch.float16
    assert types_of(model.ebc) == [DataType.FP32] * 2
    assert quant.quantize_inference_model(model, quantization_dtype=torch.int8) is model
    assert types_of(model.ebc) == [DataType.INT8] * 2
    assert torch.allclose(model(batch()), expected, atol=0.01)


def test_a_model_is_sharded_over_devices_of_one_process():
    model = quant.quantize_inference_model(Model())
    expected = model(batch())
    made, plan = shard_quant_model(model, world_size=2, compute_device="cpu", sharding_device="cpu")
    assert made is model
    assert {placed.compute_kernel for placed in plan.plan["ebc"].values()} <= {"fused", "quant"}
    assert {placed.sharding_type for placed in plan.plan["ebc"].values()} == {"table_wise"}
    assert torch.equal(made(batch()), expected)
    again, _ = shard_quant_model(
        quant.quantize_inference_model(Model()), 2, "cpu", sharding_plan=plan, sharders=DEFAULT_SHARDERS
    )
    assert again(batch()).shape == expected.shape
    with pytest.raises(ValueError, match="'cuda'"):
        shard_quant_model(model, world_size=1000)


def test_sharders_take_no_optimizer():
    sharder = QuantEmbeddingBagCollectionSharder({"register_tbes": True})
    assert sharder.compute_kernels("table_wise", "cpu") == ["quant"]
    with pytest.raises(ValueError, match="fused_params"):
        QuantEmbeddingBagCollectionSharder({"optimizer": "sgd"})
    with pytest.raises(ValueError, match="shardable_params"):
        QuantEmbeddingBagCollectionSharder(shardable_params={"t0"})


def test_pruned_tables():
    model = Model()
    assert set_pruning_data(model, {"t1": 9}) is model
    made = quant.quantize_embeddings(model, torch.int8, inplace=False)
    assert [config.num_embeddings for config in made.ebc.embedding_bag_configs()] == [20, 9]
    assert [config.num_embeddings for config in model.ebc.embedding_bag_configs()] == [20, 20]
    assert torch.allclose(made(batch()), model(batch()), atol=0.03)
    with pytest.raises(ValueError, match=r"'t1'.*20 rows.*21"):
        quant.quantize_embeddings(set_pruning_data(model, {"t1": 21}), torch.int8, inplace=False)


class Predict(PredictModule):
    def predict_forward(self, batch):
        return self.predict_module(batch["x"])


def test_dense_layers_in_fp16():
    made = quantize_dense(Predict(nn.Sequential(nn.Linear(3, 2)), "cpu"), torch.half)
    found = made({"x": torch.rand(2, 3)})
    assert found.dtype == torch.half
    assert not found.requires_grad
    assert list(made.state_dict()) == ["0.weight", "0.bias"]
    with pytest.raises(ValueError, match="fp16"):
        quantize_dense(made, torch.int8)


def test_constructors_and_refusals():
    made = quant.EmbeddingBagCollection(tables(), False, "cpu", output_dtype=torch.float16)
    assert made(batch()).values().dtype == torch.float16
    with pytest.raises(ValueError, match=r"torch\.uint8"):
        quant.quantize_embeddings(Model(), torch.uint8, True)
    made = quant.quantize_inference_model(Model(), quantization_dtype=torch.quint4x2)
    assert types_of(made.ebc) == [DataType.INT4] * 2
    processed = FeatureProcessedEmbeddingBagCollection(
        embeddings.EmbeddingBagCollection(tables(), is_weighted=True),
        PositionWeightedModuleCollection({"ft0": 3, "ft1": 3}),
    )
    with pytest.raises(ValueError, match=r"fp_weight_dtype torch\.float16"):
        quant.quantize_inference_model(processed, fp_weight_dtype=torch.half)


@pytest.mark.parametrize("need_indices", [False, True])
def test_ids_are_returned_as_weights_if_they_were(need_indices):
    config = embeddings.EmbeddingConfig(20, 8, "t0", feature_names=["ft0"])
    ec = embeddings.EmbeddingCollection([config], need_indices=need_indices)
    ec.qconfig = QuantConfig(activation=observer(torch.float), weight=observer(torch.int8))
    made = quant.EmbeddingCollection.from_float(ec)
    assert made.need_indices() == need_indices
    weights = made(batch())["ft0"].weights_or_none()
    assert (None if weights is None else weights.tolist()) == ([1, 19] if need_indices else None)


@pytest.mark.parametrize("weight", [torch.int8, torch.quint4x2, torch.float16])
def test_default_sharders_shard_quantised_collections(weight):
    config = embeddings.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=16, feature_names=["f"])
    model = nn.ModuleDict({"ebc": embeddings.EmbeddingBagCollection(tables=[config])})
    quantised = quant.quantize_embeddings(model, weight, inplace=False)
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    expected = quantised["ebc"](features).values()
    sharded = shard_modules(copy.deepcopy(quantised), ShardingEnv.from_local(1, 0), torch.device("cpu"))
    assert torch.equal(sharded["ebc"](features).values(), expected)
    dmp = DistributedModelParallel(quantised, env=ShardingEnv.from_local(1, 0))
    assert torch.equal(dmp.module["ebc"](features).values(), expected)


def test_an_optimizer_for_quantised_tables_is_refused():
    config = embeddings.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=16, feature_names=["f"])
    model = quant.quantize_embeddings(
        nn.ModuleDict({"ebc": embeddings.EmbeddingBagCollection(tables=[config])}), torch.int8, inplace=False
    )
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5})
    with pytest.raises(ValueError, match="'t'"):
        shard_modules(model, ShardingEnv.from_local(1, 0), torch.device("cpu"), sharders=[sharder])
