"""What TorchRec's tests of quantised collections ask, condensed: a function for each of theirs."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.ao.quantization import PlaceholderObserver, QConfig

from meshrec.compat.bridge import quant
from meshrec.compat.bridge.embeddings import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from meshrec.compat.bridge.fx import symbolic_trace
from meshrec.compat.bridge.model_parallel import DistributedModelParallel
from meshrec.compat.bridge.sharding_env import ShardingEnv
from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.modules.embedding_configs import DataType, PoolingType

# torch warns of the end of TorchScript; TorchRec's programs use it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning"),  # torch's own GraphModule
]

HALVES, WEIGHTS = (torch.half, torch.float), (torch.half, torch.qint8)


def config(name, *features, kind=EmbeddingBagConfig, **options):
    return kind(
        name=name, embedding_dim=16, num_embeddings=10, feature_names=list(features or ["f1"]), **options
    )


def batch(keys, values, lengths):
    return KeyedJaggedTensor(keys=keys, values=torch.as_tensor(values), lengths=torch.as_tensor(lengths))


TWO = (["f1", "f2"], [0, 1], [1, 1])


def with_qconfig(module, weight=torch.qint8, output=torch.float, per_table=None):
    observers = [PlaceholderObserver.with_args(dtype=dtype) for dtype in (output, weight)]
    module.qconfig = quant.QuantConfig(*observers, per_table) if per_table else QConfig(*observers)
    return module


def check_bags(tables, features, weight=torch.qint8, output=torch.float, per_table=None):
    ebc = EmbeddingBagCollection(tables=tables)
    quant.quant_prep_enable_quant_state_dict_split_scale_bias(ebc)
    expected = ebc(features)
    qebc = quant.EmbeddingBagCollection.from_float(with_qconfig(ebc, weight, output, per_table))
    found = qebc(features)
    assert found.values().dtype == output
    assert found.keys() == expected.keys()
    for key in expected.keys():  # noqa: SIM118 - a KeyedTensor is no dict
        assert torch.allclose(found[key].float(), expected[key].float(), atol=0.1)
    assert set(ebc.state_dict()) <= set(qebc.state_dict())


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
@pytest.mark.parametrize("permuted", [False, True])
def test_ebc(data_type, permuted):
    first = config("t1", data_type=data_type)
    mean = replace(first, name="t1_mean", pooling=PoolingType.MEAN, embedding_dim=32)
    tables = [first, mean, replace(first, name="t2", feature_names=["f2"])]
    features = batch(["f1", "f2"], [0, 2, 1, 3], [1, 1, 2, 0])
    if permuted:
        features = batch(["f2", "f1"], [1, 3, 0, 2], [2, 0, 1, 1])
    for weight, output in itertools.product(WEIGHTS, HALVES):
        check_bags(tables, features, weight, output)
    check_bags(tables, features, per_table={"t1": torch.quint4x2, "t2": torch.qint8})


def test_create_on_meta_device_without_providing_weights():
    quant.EmbeddingBagCollection([config("t1")], is_weighted=False, device=torch.device("meta"))
    quant.EmbeddingCollection([config("t1", kind=EmbeddingConfig)], device=torch.device("meta"))


def test_ebc_shared_tables():
    check_bags([config("t1", "f1", "f2")], batch(*TWO))


def test_ebc_shared_features():
    check_bags([config("t1"), config("t2")], batch(["f1"], [0, 1], [1, 1]))


def test_ebc_multiple_features():
    tables = [config("t1", "f1", "f2"), config("t2", "f3")]
    check_bags(tables, batch(["f1", "f2", "f3"], [0, 1, 2], [1, 1, 1]))


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
def test_save_load_state_dict(data_type):
    tables = [config(name, data_type=data_type) for name in ("t1", "t2")]
    for weight, output in itertools.product(WEIGHTS, HALVES):
        one, other = (
            quant.EmbeddingBagCollection.from_float(
                with_qconfig(EmbeddingBagCollection(tables=tables), weight, output)
            )
            for _ in range(2)
        )
        state = one.state_dict()
        other.load_state_dict(state)
        for key, value in other.state_dict().items():
            torch.testing.assert_close(value, state[key])
        assert torch.equal(one(batch(*TWO)).values(), other(batch(*TWO)).values())


class WithOverArch(nn.Module):
    def __init__(self, ebc):
        super().__init__()
        self.ebc, self.over_arch = ebc, nn.Linear(16, 1)


def test_composability():
    for data_type, weight in itertools.product((DataType.FP32, DataType.FP16), WEIGHTS):
        tables = [config(name, data_type=data_type) for name in ("t1", "t2")]
        model = WithOverArch(with_qconfig(EmbeddingBagCollection(tables=tables), weight))
        before = set(model.state_dict())
        model.ebc = quant.EmbeddingBagCollection.from_float(model.ebc)
        state = model.state_dict()
        assert before <= set(state)
        model.load_state_dict(state)


def test_ebc_trace_and_script():
    tables = [config(name, data_type=DataType.FP16) for name in ("t1", "t2")]
    float_module = with_qconfig(EmbeddingBagCollection(tables=tables), torch.half, torch.half)
    qebc = quant.EmbeddingBagCollection.from_float(float_module)
    traced = symbolic_trace(qebc)
    expected = qebc(batch(*TWO))
    for run in (traced, torch.jit.script(traced)):
        found = run(batch(*TWO))
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.values(), expected.values())
        assert found.offset_per_key() == expected.offset_per_key()


def check_sequences(tables, features):
    ec = EmbeddingCollection(tables=tables)
    expected = ec(features)
    qec = quant.EmbeddingCollection.from_float(with_qconfig(ec))
    found = qec(features)
    assert found.keys() == expected.keys()
    for key, jagged in expected.items():
        assert found[key].values().dtype == torch.float
        assert torch.allclose(found[key].values(), jagged.values().float(), atol=1)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.INT8])
def test_ec(data_type):
    tables = [
        config("t1", "f1", "f2", kind=EmbeddingConfig, data_type=data_type),
        config("t2", "f3", "f4", kind=EmbeddingConfig, data_type=data_type),
    ]
    check_sequences(tables, batch(["f1", "f2", "f3", "f4"], [n % 10 for n in range(42)], [9, 12, 9, 12]))


def test_ec_shared_tables():
    check_sequences([config("t1", "f1", "f2", kind=EmbeddingConfig)], batch(*TWO))


def test_ec_shared_features():
    check_sequences([config(name, kind=EmbeddingConfig) for name in ("t1", "t2")], batch(*TWO))


def test_different_quantization_dtype_per_ec_table():
    model = nn.Module()
    model.m = EmbeddingCollection([config(name, kind=EmbeddingConfig) for name in ("t1", "t2")])
    quant.quantize_embeddings(
        model,
        dtype=torch.int8,
        additional_qconfig_spec_keys=[EmbeddingCollection],
        additional_mapping={EmbeddingCollection: quant.EmbeddingCollection},
        inplace=True,
        per_table_weight_dtype={"t1": torch.float16},
    )
    assert [c.data_type for c in model.m.embedding_configs()] == [DataType.FP16, DataType.INT8]


def test_different_quantization_dtype_per_ebc_table():
    model = nn.Module()
    model.m = EmbeddingBagCollection([config("t1"), config("t2")])
    quant.quantize_embeddings(
        model, dtype=torch.int8, inplace=True, per_table_weight_dtype={"t1": torch.float16}
    )
    assert [c.data_type for c in model.m.embedding_bag_configs()] == [DataType.FP16, DataType.INT8]


def test_ec_trace_and_script():
    tables = [
        config("t1", "f1", "f2", kind=EmbeddingConfig, data_type=DataType.FP16),
        config("t2", "f3", "f4", kind=EmbeddingConfig, data_type=DataType.FP16),
    ]
    float_module = with_qconfig(EmbeddingCollection(tables=tables), torch.half, torch.half)
    qec = quant.EmbeddingCollection.from_float(float_module)
    features = batch(["f1", "f2", "f3", "f4"], list(range(8)), [1, 2, 3, 2])
    traced = symbolic_trace(qec)
    expected = qec(features)
    for run in (traced, torch.jit.script(traced)):
        found = run(features)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key].values(), each.values()) for key, each in expected.items())


@pytest.mark.parametrize("keys", [["f1", "f2", "f3", "f4"], ["f4", "f2", "f1", "f3"]])
@pytest.mark.parametrize("with_flag", [False, True])
def test_ec_with_lengths_by_feature_and_sample(keys, with_flag):
    """Lengths [F, B], as inference servers batch requests, give what flattened lengths give."""
    tables = [config(f"t{n // 2}", f"f{n}", f"f{n + 1}", kind=EmbeddingConfig) for n in (1, 3)]
    ec = EmbeddingCollection(tables=tables)
    qec = quant.EmbeddingCollection.from_float(with_qconfig(ec))
    setattr(qec, "__use_unflattened_lengths_for_batching", with_flag)
    lengths_FB = torch.tensor([[1, 0, 2], [1, 0, 3], [1, 0, 1], [1, 0, 1]])
    flat = batch(keys, torch.arange(11) % 10, lengths_FB.flatten())
    expected = ec(flat)
    traced = symbolic_trace(qec)
    for run in (qec, traced, torch.jit.script(traced)):
        for features in (flat, batch(keys, flat.values(), lengths_FB)):
            found = run(features)
            assert sorted(found) == ["f1", "f2", "f3", "f4"]
            for key, bags in expected.items():
                assert found[key].lengths().tolist() == bags.lengths().tolist()
                torch.testing.assert_close(found[key].values(), bags.values(), atol=0.01, rtol=0)


class SparseArch(nn.Module):
    def __init__(self, ebc):
        super().__init__()
        self.ebc = ebc

    def forward(self, features):
        return self.ebc(features)


def test_meta_to_cpu():
    for data_type, weight, output in itertools.product((DataType.FP32, DataType.FP16), WEIGHTS, HALVES):
        tables = [config("t1", data_type=data_type), config("t2", "f2", data_type=data_type)]
        ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        qebc = quant.EmbeddingBagCollection.from_float(with_qconfig(ebc, weight, output))
        dmp = DistributedModelParallel(
            SparseArch(qebc), env=ShardingEnv.from_local(1, 0), sharders=[], init_data_parallel=False
        )
        quant.meta_to_cpu_placement(dmp)
        assert dmp.module.ebc.device.type == "cpu"
        dmp(batch(*TWO))
