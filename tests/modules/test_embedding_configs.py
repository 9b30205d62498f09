import math

import pytest
import torch

from meshrec import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

GOOD = {"num_embeddings": 16, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}


@pytest.mark.parametrize("config", [EmbeddingBagConfig, EmbeddingConfig])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_embeddings", 0, "'t'.*num_embeddings.*1.*0"),
        ("embedding_dim", -4, "'t'.*embedding_dim.*1.*-4"),
        ("embedding_dim", 4.0, r"'t'.*embedding_dim.*1.*4\.0"),
        ("name", "", "contain"),
        ("name", "a.b", r"'a\.b'"),
        ("name", "training", "'training'"),
        ("feature_names", [], r"'t'.*feature_names.*\[\]"),
        ("feature_names", "user", "feature_names.*'user'"),
        ("feature_names", ["f", "g", "f"], r"'t'.*\['f'\]"),
    ],
)
def test_wrong_values_are_named(config, field, value, message):
    with pytest.raises(ValueError, match=message):
        config(**{**GOOD, field: value})


def test_bags_are_pooled():
    with pytest.raises(ValueError, match=r"'t'.*SUM.*MEAN.*PoolingType.NONE"):
        EmbeddingBagConfig(**GOOD, pooling=PoolingType.NONE)


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [(DataType.FP32, torch.float32), (DataType.FP16, torch.float16), (DataType.BF16, torch.bfloat16)],
)
def test_data_types_are_torch_dtypes(data_type, dtype):
    assert data_type.dtype == dtype


def test_weights_start_uniform_within_the_default_bounds():
    weight = torch.zeros(16, 1000)
    EmbeddingBagConfig(**GOOD).init_weight(weight)
    bound = math.sqrt(1 / 16)
    assert bool((weight.abs() <= bound).all())
    assert weight.min() < -0.9 * bound
    assert weight.max() > 0.9 * bound


def test_weights_start_uniform_within_given_bounds():
    weight = torch.zeros(16, 100)
    EmbeddingConfig(**GOOD, weight_init_min=2.0, weight_init_max=3.0).init_weight(weight)
    assert bool(((weight >= 2) & (weight <= 3)).all())


def test_init_fn_fills_a_weight_that_requires_a_gradient():
    weight = torch.nn.Parameter(torch.zeros(16, 4))
    EmbeddingBagConfig(**GOOD, init_fn=lambda tensor: tensor.fill_(7)).init_weight(weight)
    assert bool((weight == 7).all())


def test_configs_are_equal_whatever_fills_them():
    assert EmbeddingBagConfig(**GOOD, init_fn=torch.nn.init.ones_) == EmbeddingBagConfig(**GOOD)
