import math

import pytest
import torch

from meshrec import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

GOOD = {"num_embeddings": 16, "embedding_dim": 4, "name": "t", "feature_names": ["f"]}


@pytest.mark.parametrize("config", [EmbeddingBagConfig, EmbeddingConfig])
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_embeddings", 0, r"table 't': num_embeddings must be an integer >= 1, got 0"),
        ("embedding_dim", -4, r"table 't': embedding_dim must be an integer >= 1, got -4"),
        ("embedding_dim", 4.0, r"table 't': embedding_dim must be an integer >= 1, got 4\.0"),
        ("name", "", r"name must not be empty nor contain a dot, got ''"),
        ("name", "a.b", r"name must not be empty nor contain a dot, got 'a\.b'"),
        ("name", "training", "a table cannot be named 'training': every torch module has that attribute"),
        ("feature_names", [], r"table 't': feature_names must be a list with at least one name, got \[\]"),
        ("feature_names", "user", r"feature_names must be a list with at least one name, got 'user'"),
        ("feature_names", ["f", "g", "f"], r"table 't': features \['f'\] are given twice"),
    ],
)
def test_wrong_values_are_named(config, field, value, message):
    with pytest.raises(ValueError, match=message):
        config(**{**GOOD, field: value})


def test_bags_are_pooled():
    with pytest.raises(ValueError, match=r"table 't': pooling must be SUM or MEAN, got PoolingType.NONE"):
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
