from types import SimpleNamespace

import pytest
import torch
from torch import nn

import meshrec
from meshrec.ops.index import BYTES_PER_ID
from meshrec.optim import Adam, RowWiseAdagrad, apply_optimizer_in_backward
from meshrec.planner.module_tables import (
    embedding_modules,
    estimate_from_batches,
    optimizer_kind,
    table_of_config,
    tables_of_model,
)
from meshrec.planner.types import OptimizerKind, ParameterConstraints
from meshrec.tables.hashed.keys import LFU, MinCountSketch


class Bags(nn.Module):
    """What the planner needs of an EmbeddingBagCollection."""

    def __init__(self, *configs):
        super().__init__()
        self.configs = configs
        self.embedding_bags = nn.ModuleDict(
            {c.name: nn.Embedding(c.num_embeddings, c.embedding_dim) for c in configs}
        )

    def embedding_bag_configs(self):
        return self.configs


def config(name, *features, rows=100, columns=8):
    return SimpleNamespace(
        name=name, num_embeddings=rows, embedding_dim=columns, feature_names=list(features)
    )


class Batch:
    def __init__(self, **features):
        self.features = features

    def to_dict(self):
        jagged = {}
        for key, bags in self.features.items():
            values = torch.tensor([row for bag in bags for row in bag])
            lengths = torch.tensor([len(bag) for bag in bags])
            jagged[key] = SimpleNamespace(values=lambda v=values: v, lengths=lambda n=lengths: n)
        return jagged


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 2), Bags(config("a", "f", "g"), config("b", "h", rows=50)))


def test_tables_come_with_path_constraints_and_optimizer(model):
    weight = model[1].embedding_bags["a"].weight
    apply_optimizer_in_backward(torch.optim.Adam, [weight], {"lr": 0.1})
    constraints = {"a": ParameterConstraints(pooling_factors=[3.0, 4.0], batch_sizes=[10, 20])}
    a, b = tables_of_model(model, None, constraints, default_optimizer=OptimizerKind.SGD)
    assert (a.module_path, a.ids_per_sample, a.batch_size, a.optimizer) == ("1", 7.0, 15, OptimizerKind.ADAM)
    assert (b.num_embeddings, b.ids_per_sample, b.optimizer) == (50, 1.0, OptimizerKind.SGD)


def test_sharders_choose_modules(model):
    other = SimpleNamespace(module_type=nn.Linear)
    mine = SimpleNamespace(module_type=Bags)
    assert list(embedding_modules(model, [other])) == []
    assert [path for path, *_ in embedding_modules(model, [other, mine])] == ["1"]


def test_a_sharder_brings_the_optimizer(model):
    apply_optimizer_in_backward(torch.optim.Adam, [model[1].embedding_bags["a"].weight], {"lr": 0.1})
    sharder = SimpleNamespace(module_type=Bags, optimizer=RowWiseAdagrad(lr=0.1))
    kinds = [table.optimizer for table in tables_of_model(model, [sharder])]
    assert kinds == [OptimizerKind.ADAM, OptimizerKind.ROW_WISE_ADAGRAD]


def test_kinds_of_optimizers():
    assert optimizer_kind(None) is OptimizerKind.NONE
    assert optimizer_kind(Adam(lr=0.1)) is OptimizerKind.ADAM


def test_batches_tell_pooling_and_skew(model):
    hot = [[1, 1, 1, 1], [1, 2, 2, 2]] * 16
    found = estimate_from_batches(model, [Batch(f=hot, g=[[3], []], h=[[i] for i in range(40)])])
    assert found["a"].pooling_factors == (4.0, 0.5)
    assert found["a"].effective_rows < 4
    assert found["b"].effective_rows == 50


def test_mistakes_are_named(model):
    with pytest.raises(ValueError, match="'c'"):
        tables_of_model(model, None, {"c": ParameterConstraints()})
    with pytest.raises(ValueError, match=r"'a'.*1.*pooling_factors.*2 features.*\['f', 'g'\]"):
        table_of_config(config("a", "f", "g"), ParameterConstraints(pooling_factors=[1.0]), pooled=True)
    with pytest.raises(ValueError, match=r"'b'.*'h'"):
        estimate_from_batches(model, [Batch(f=[[1]], g=[[1]])])
    twice = nn.Sequential(Bags(config("a", "f")), Bags(config("a", "f")))
    assert [table.name for table in tables_of_model(twice)] == ["0.a", "1.a"]
    with pytest.raises(ValueError, match=r"'a'.*\['0.a', '1.a'\]"):
        tables_of_model(twice, constraints={"a": ParameterConstraints()})


def test_hashed_keys_bring_an_index():
    """Memory by the greatest number of rows: the index, what the policy keeps of a row, and the sketch."""
    keys = meshrec.Hashed(max_rows=1000, evict=LFU(), admit=MinCountSketch(3, bytes=8000))
    tables = [
        meshrec.EmbeddingBagConfig(name="a", embedding_dim=16, feature_names=["f"], keys=keys),
        meshrec.EmbeddingBagConfig(name="b", embedding_dim=16, feature_names=["g"], num_embeddings=1000),
    ]
    a, b = tables_of_model(nn.Sequential(meshrec.EmbeddingBagCollection(tables=tables)))
    assert (a.index_bytes, b.index_bytes) == (BYTES_PER_ID + 12 + 8, 0)
    assert a.num_bytes - b.num_bytes == 1000 * (BYTES_PER_ID + 12 + 8)
