"""A quantised model beside the one that it was made from."""

import copy
import pickle

import pytest
import torch
from torch import nn

from meshrec import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    fuse,
)
from meshrec.modules.feature_processor import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
)
from meshrec.ops import nbit
from meshrec.optim import RowWiseAdagrad
from meshrec.quant import quantize, table_bytes

INT8, INT4, INT2, FP16, FP32 = (DataType[n] for n in ("INT8", "INT4", "INT2", "FP16", "FP32"))
STEPS = {INT8: 1 / 255, INT4: 1 / 15, INT2: 1 / 3}


def configs(cls=EmbeddingBagConfig, **options):
    more = {} if cls is EmbeddingConfig else {"pooling": PoolingType.MEAN}
    return [
        cls(name="t0", num_embeddings=50, embedding_dim=16, feature_names=["a", "b"], **options),
        cls(name="t1", num_embeddings=9, embedding_dim=5, feature_names=["b"], **options, **more),
    ]


def batch(weighted=False):
    lengths = torch.tensor([2, 0, 1, 3, 1, 1])
    values = torch.tensor([1, 49, 7, 0, 8, 3, 2, 5])
    weights = torch.rand(8) if weighted else None
    return KeyedJaggedTensor(keys=["a", "b"], values=values, lengths=lengths, weights=weights)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = EmbeddingBagCollection(configs())
        self.over = nn.Linear(16 * 2 + 5, 3)

    def forward(self, features):
        return self.over(self.bags(features).values())


@pytest.mark.parametrize("data_type", [INT8, INT4, INT2])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_those_of_the_numbers_that_the_codes_stand_for(data_type, weighted):
    model = EmbeddingBagCollection(configs(), is_weighted=weighted)
    made = quantize(model, data_type)
    assert isinstance(made, EmbeddingBagCollection)
    numbers = copy.deepcopy(model)
    for name, (config, weight) in numbers.tables().items():
        rows = nbit.quantize(weight, data_type.bits)
        assert torch.equal(made.get_parameter(name), rows)
        weight.data.copy_(nbit.dequantize(rows, data_type.bits, config.embedding_dim))
        assert (weight - model.get_parameter(name)).abs().max() < 0.6 * 2 * STEPS[data_type]
    features = batch(weighted)
    found, expected = made(features), numbers(features)
    assert found.keys() == expected.keys() == model(features).keys()
    assert torch.equal(found.values(), expected.values())
    assert table_bytes(made)["t0"] == 50 * (4 + 16 * data_type.bits // 8)


def test_sequences():
    model = EmbeddingCollection(configs(EmbeddingConfig))
    made, expected = quantize(model, INT8)(batch()), model(batch())
    assert made.keys() == expected.keys()
    for name, jagged in expected.items():
        assert torch.equal(made[name].lengths(), jagged.lengths())
        assert torch.allclose(made[name].values(), jagged.values(), atol=0.01)


def test_each_table_has_its_type():
    model = EmbeddingBagCollection(configs())
    made = quantize(model, INT4, per_table={"t1": FP32}, output_dtype=FP16)
    assert [config.data_type for config in made.embedding_bag_configs()] == [INT4, FP32]
    assert made.embedding_bags["t1"].weight.data_ptr() == model.embedding_bags["t1"].weight.data_ptr()
    assert made(batch()).values().dtype == torch.float16
    assert quantize(model, FP16).embedding_bags["t0"].weight.dtype == torch.float16
    assert quantize(model, INT8)(batch()).values().dtype == torch.float32


def test_a_model_is_copied_but_for_its_tables():
    model = Model()
    fuse(model, optimizer=RowWiseAdagrad(lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made = quantize(model, INT8)
    assert torch.equal(made.over.weight, model.over.weight)
    assert made.over.weight is not model.over.weight
    assert not hasattr(made, "fused_optimizer")
    assert hasattr(model, "fused_optimizer")
    assert not made.training
    assert model.training
    assert torch.allclose(made(batch()), model(batch()), atol=0.02)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_inside_feature_processors():
    ebc = EmbeddingBagCollection(configs()[:1], is_weighted=True)
    positions = PositionWeightedModuleCollection({"a": 4, "b": 4})
    model = FeatureProcessedEmbeddingBagCollection(ebc, positions)
    made = quantize(model, INT8)
    assert torch.allclose(made(batch()).values(), model(batch()).values(), atol=0.02)
    with pytest.raises(ValueError, match="quantised"):
        made(batch()).values().sum().backward()


def test_dense_layers_in_bf16():
    model = Model()
    made = quantize(model, INT8, dense=DataType.BF16)
    assert made.over.weight.dtype == torch.bfloat16
    assert torch.allclose(made(batch()), model(batch()), atol=0.02)
    with pytest.raises(ValueError, match=r"DataType\.BF16"):
        quantize(model, dense=FP16)


def test_state_dicts_go_to_a_model_quantised_alike():
    made = quantize(Model(), INT4)
    state = made.state_dict()
    assert [name for name in state if "t1" in name] == [
        f"bags.embedding_bags.t1.{part}" for part in ("weight", "weight_qscale", "weight_qbias")
    ]
    assert state["bags.embedding_bags.t1.weight"].shape == (9, 3)
    other = quantize(Model(), INT4)
    other.load_state_dict({name: value.clone() for name, value in state.items()})
    assert torch.equal(other(batch()), made(batch()))
    with pytest.raises(RuntimeError, match=r"4 bits.*torch\.float32"):
        other.load_state_dict(Model().state_dict())
    with pytest.raises(RuntimeError, match=r"t0\.weight.*\[50, 16\]"):
        other.load_state_dict(quantize(Model(), INT8).state_dict())
    assert torch.equal(other.bags(batch()).values(), made.bags(batch()).values())
    with pytest.raises(RuntimeError, match=r"t0\.weight_qbias"):
        other.load_state_dict({name: value for name, value in state.items() if not name.endswith("qbias")})


def test_collections_are_made_quantised():
    for device in ("cpu", "meta"):
        made = EmbeddingBagCollection(configs(data_type=INT4), device=device)
        assert made.embedding_bags["t1"].weight.dtype == torch.uint8
        assert made.embedding_bags["t1"].weight.shape == (9, 8)
    made = EmbeddingBagCollection(configs(data_type=INT8))
    made.reset_parameters()
    assert made(batch()).values().abs().max() < 1


def test_range_search_lessens_the_error():
    torch.manual_seed(0)
    model = EmbeddingBagCollection(configs())
    weight = torch.randn(50, 16)
    model.embedding_bags["t0"].weight.data.copy_(weight)
    errors = {}
    for rounding in ("minmax", "search"):
        rows = quantize(model, INT4, rounding=rounding).embedding_bags["t0"].weight
        errors[rounding] = (nbit.dequantize(rows, 4, 16) - weight).square().sum(1)
    assert (errors["search"] <= errors["minmax"]).all()
    assert errors["search"].sum() < 0.9 * errors["minmax"].sum()


def test_ids_are_checked():
    features = KeyedJaggedTensor(keys=["a", "b"], values=torch.tensor([50]), lengths=torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"'t0'.*id 50.*'a'.*\[0.*50"):
        quantize(Model(), INT4)(features)
    made = quantize(EmbeddingBagCollection(configs(), bounds_check=BoundsCheckMode.WARN), INT8)
    made(features)
    assert made.num_clamped_ids == 1


@pytest.mark.parametrize("name", ["UINT8", "NFP8", "FP8"])
def test_other_data_types_are_refused_by_name(name):
    with pytest.raises(AttributeError, match=f"{name}.*FP32"):
        getattr(DataType, name)
    with pytest.raises(ValueError, match=f"{name}.*UINT8.*INT8"):
        DataType(name)
    assert not hasattr(DataType, "__nothing__")
    assert copy.deepcopy(DataType.INT8) is pickle.loads(pickle.dumps(DataType.INT8)) is DataType("INT8")


def test_refusals():
    model = Model()
    with pytest.raises(ValueError, match=r"'INT3'.*DataType.*DataType\.FP32"):
        quantize(model, "INT3")
    with pytest.raises(ValueError, match=r"per_table.*'t7'.*\['t0', 't1'\]"):
        quantize(model, per_table={"t7": INT4})
    with pytest.raises(ValueError, match="EmbeddingBagCollection"):
        quantize(model.over)
    with pytest.raises(ValueError, match="'t0'"):
        quantize(quantize(model))
    with pytest.raises(ValueError, match="rounding"):
        quantize(model, rounding="best")
    with pytest.raises(ValueError, match=r"output_dtype.*FP32.*FP16.*BF16"):
        quantize(model, output_dtype=INT8)
    with pytest.raises(ValueError, match="'t0'"):
        fuse(quantize(model), optimizer=RowWiseAdagrad(lr=0.1))
    model.bags.embedding_bags["t1"].weight.data[3, 2] = float("inf")
    before = copy.deepcopy(model.state_dict())
    for data_type in (INT4, FP16, DataType.BF16):
        with pytest.raises(ValueError, match=r"'t1'.*row 3"):
            quantize(model, data_type)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
