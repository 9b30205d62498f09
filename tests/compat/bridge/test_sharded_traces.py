"""Sharded quantised collections, recorded by torch.fx and compiled by TorchScript."""

import itertools
import os

import pytest
import torch
from torch import nn

from meshrec.compat.bridge import embeddings, quant
from meshrec.compat.bridge import sharding_plan as sp
from meshrec.compat.bridge.fx import Tracer
from meshrec.compat.bridge.inference import shard_quant_model
from meshrec.compat.bridge.plans import ShardingPlan
from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.modules.embedding_configs import PoolingType

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning"),
]
PLANS = {
    "tables": lambda number: sp.table_wise(rank=number % 2),
    "rows": lambda number: sp.row_wise(),
    "columns": lambda number: sp.column_wise(ranks=[1, 0]),
    "two parts on a device": lambda number: sp.column_wise(ranks=[1, 1]),
    "copies": lambda number: sp.data_parallel(),
}


def configs(kind, **options):
    return [
        kind(num_embeddings=11 + 9 * n, embedding_dim=8, name=f"t{n}", feature_names=[f"f{n}", "both"], **own)
        for n, own in enumerate([{}, options])
    ]


class Bags(nn.Module):
    def __init__(self, weighted):
        super().__init__()
        tables = configs(embeddings.EmbeddingBagConfig, pooling=PoolingType.MEAN)
        self.ebc = embeddings.EmbeddingBagCollection(tables, is_weighted=weighted)

    def forward(self, features: KeyedJaggedTensor):
        return self.ebc(features).values()


class Sequences(nn.Module):
    def __init__(self, weighted):
        super().__init__()
        self.ebc = embeddings.EmbeddingCollection(configs(embeddings.EmbeddingConfig))

    def forward(self, features: KeyedJaggedTensor):
        found = self.ebc(features)
        return torch.cat([found["f0"].values(), found["both@t1"].values()])


def batch(weighted=False):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([2, 0, 1, 3, 1, 2, 0, 4, 1])
    values = torch.randint(0, 11, (14,), generator=generator)
    weights = torch.rand(14, generator=generator) if weighted else None
    return KeyedJaggedTensor(["f0", "f1", "both"], values, weights, lengths)


def recorded(model):
    return torch.fx.GraphModule(model, Tracer().trace(model))


# Every plan with one kind, and with MESHREC_THOROUGH with each.
KINDS = [(Bags, False), (Bags, True), (Sequences, False)]
PLANS_OF_KINDS = [
    (plan, *KINDS[number])
    for (place, plan), number in itertools.product(enumerate(PLANS), range(len(KINDS)))
    if place % len(KINDS) == number or "MESHREC_THOROUGH" in os.environ
]


@pytest.mark.parametrize(("plan", "kind", "weighted"), PLANS_OF_KINDS)
def test_recorded_programs_give_the_results_of_the_model(kind, weighted, plan, tmp_path):
    model = quant.quantize_inference_model(kind(weighted))
    generators = {f"t{n}": PLANS[plan](n) for n in range(2)}
    placed = sp.construct_module_sharding_plan(model.ebc, generators, None, 2, 2, "cpu")
    features = batch(weighted)
    expected = model(features)
    torch.testing.assert_close(recorded(model)(features), expected)
    plan = ShardingPlan({"ebc": placed})
    sharded, _ = shard_quant_model(model, 2, "cpu", sharding_device="cpu", sharding_plan=plan)
    torch.testing.assert_close(sharded(features), expected)
    traced = recorded(sharded)
    torch.testing.assert_close(traced(features), expected)
    scripted = torch.jit.script(traced)
    scripted.save(tmp_path / "scripted.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "scripted.pt")(features), expected)


def test_ids_outside_a_split_table_are_errors():
    model = quant.quantize_inference_model(Bags(False))
    placed = sp.construct_module_sharding_plan(
        model.ebc, {f"t{n}": sp.row_wise() for n in range(2)}, None, 2, 2, "cpu"
    )
    sharded, _ = shard_quant_model(model, 2, "cpu", sharding_plan=ShardingPlan({"ebc": placed}))
    bad = KeyedJaggedTensor(["f0", "f1", "both"], torch.tensor([99]), lengths=torch.tensor([1, 0, 0]))
    with pytest.raises(ValueError, match="outside"):
        recorded(sharded)(bad)


class Asked(nn.Module):
    """Takes tensors, as programs in C++ give them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        features = KeyedJaggedTensor(keys=["f0", "f1", "both"], values=values, lengths=lengths)
        return self.model(features)


IN_CPP = [(plan, (Bags, Sequences)[number % 2]) for number, plan in enumerate(PLANS)]
if "MESHREC_THOROUGH" in os.environ:
    IN_CPP = [*itertools.product(PLANS, (Bags, Sequences))]


@pytest.mark.parametrize(("plan", "kind"), IN_CPP)
def test_the_script_runs_in_cpp(kind, plan, run_in_cpp, tmp_path):
    quantised = quant.quantize_inference_model(kind(False))
    generators = {f"t{n}": PLANS[plan](n) for n in range(2)}
    placed = sp.construct_module_sharding_plan(quantised.ebc, generators, None, 2, 2, "cpu")
    options = {"sharding_device": "cpu", "sharding_plan": ShardingPlan({"ebc": placed})}
    model, _ = shard_quant_model(quantised, 2, "cpu", **options)
    features = batch()
    torch.jit.script(Asked(torch.jit.script(recorded(model)))).save(tmp_path / "asked.pt")
    found = run_in_cpp(tmp_path / "asked.pt", [features.values(), features.lengths()])
    torch.testing.assert_close(found, model(features))


def test_rows_are_buffers():
    model = quant.quantize_inference_model(Bags(False))
    assert isinstance(model.ebc, quant.EmbeddingBagCollection)
    assert list(model.parameters()) == []
    assert [name for name, _ in model.named_buffers()] == [
        f"ebc.embedding_bags.t{n}.weight" for n in range(2)
    ]
    state = model.state_dict()
    other = quant.quantize_inference_model(Bags(False))
    other.load_state_dict(state)
    assert torch.equal(other(batch()), model(batch()))
