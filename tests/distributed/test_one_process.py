"""Tables over several devices of one process: the unsharded results, state dicts, and what is refused."""

import pytest
import torch

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from meshrec import distributed as md
from meshrec.checkpoint import load, save
from meshrec.comms.mesh import ShardingEnv
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad
from meshrec.quant import quantize

SIZES = {"t0": (16, 8), "t1": (9, 4), "t2": (12, 16)}
KINDS = {
    "tw": lambda number: md.table_wise(rank=number % 3),
    "rw": lambda number: md.row_wise(),
    "cw": lambda number: md.column_wise(ranks=[0, 2]),
    "dp": lambda number: md.data_parallel(),
    "mix": lambda number: [md.row_wise(), md.table_wise(rank=2), md.data_parallel()][number],
}


def bags(weighted=False):
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=dim,
            feature_names=[f"f{name}"],
            pooling=PoolingType.MEAN if name == "t2" else PoolingType.SUM,
        )
        for name, (rows, dim) in SIZES.items()
    ]
    torch.manual_seed(0)
    return EmbeddingBagCollection(tables, is_weighted=weighted)


def sequences():
    tables = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{name}"])
        for name, (rows, dim) in SIZES.items()
    ]
    torch.manual_seed(0)
    return EmbeddingCollection(tables)


def batch(seed=0, weighted=False):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(SIZES), 5), generator=generator)
    values = torch.cat(
        [
            torch.randint(0, rows, (int(n),), generator=generator)
            for (rows, _), n in zip(SIZES.values(), lengths.sum(1), strict=True)
        ]
    )
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return KeyedJaggedTensor(
        [f"f{name}" for name in SIZES], values, weights=weights, lengths=lengths.flatten()
    )


def spread(model, kind, num_devices=3):
    builders = {name: KINDS[kind](number) for number, name in enumerate(SIZES)}
    plan = md.construct_module_sharding_plan(model, builders, world_size=num_devices)
    env = ShardingEnv.from_local(["cpu"] * num_devices)
    return DistributedModelParallel(model, env=env, plan=md.ShardingPlan({"": plan}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_bags(kind, weighted):
    model = quantize(bags(weighted), DataType.INT8, per_table={"t1": DataType.INT4, "t2": DataType.FP16})
    features = batch(weighted=weighted)
    expected = model(features)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    made = spread(model, kind)
    found = made(features)
    assert found.keys() == expected.keys()
    exact = kind in ("tw", "cw", "dp")
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.values(), expected.values(), **tolerance)
    whole = made.state_dict()
    assert list(whole) == list(state)
    assert all(torch.equal(value, whole[name]) for name, value in state.items())


@pytest.mark.parametrize("kind", KINDS)
def test_sequences(kind):
    model = quantize(sequences(), DataType.INT4)
    expected, found = model(batch()), spread(model, kind)(batch())
    for name, jagged in expected.items():
        assert torch.equal(found[name].values(), jagged.values())
        assert torch.equal(found[name].lengths(), jagged.lengths())


def test_the_planner_spreads_a_model():
    model = quantize(bags(), DataType.INT8)
    expected = model(batch()).values()
    made = DistributedModelParallel(model, env=ShardingEnv.from_local(["cpu", "cpu"]))
    torch.testing.assert_close(made(batch()).values(), expected)


def test_state_is_loaded_whole_or_not_at_all():
    made = spread(quantize(bags(), DataType.INT8), "rw")
    other = bags()
    for parameter in other.parameters():
        parameter.data.mul_(3)
    state = {name: value.clone() for name, value in quantize(other, DataType.INT8).state_dict().items()}
    before = {name: value.clone() for name, value in made.state_dict().items()}
    broken = {**state, "embedding_bags.t0.weight_qbias": torch.zeros(3, dtype=torch.float16)}
    with pytest.raises(RuntimeError, match=r"t0\.weight_qbias.*\[16\]"):
        made.load_state_dict({name: value for name, value in broken.items() if ".t0." in name}, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    made.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in made.state_dict().items())


def test_checkpoints_go_there_and_back(tmp_path):
    other = bags()
    for parameter in other.parameters():
        parameter.data.mul_(3)
    model, made = quantize(other, DataType.INT8), spread(quantize(bags(), DataType.INT8), "mix")
    save(tmp_path / "whole", {"model": model})
    load(tmp_path / "whole", {"model": made})
    save(tmp_path / "spread", {"model": made})
    plain = quantize(bags(), DataType.INT8)
    load(tmp_path / "spread", {"model": plain})
    assert torch.equal(plain(batch()).values(), model(batch()).values())
    torch.testing.assert_close(made(batch()).values(), model(batch()).values())


def test_refusals():
    with pytest.raises(ValueError, match="devices"):
        ShardingEnv.from_local([])
    with pytest.raises(ValueError, match="'t0'"):
        spread(bags(), "tw")
    model = bags().requires_grad_(False)
    sharders = [md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1))]
    with pytest.raises(ValueError, match="'t0'"):
        DistributedModelParallel(model, env=ShardingEnv.from_local(["cpu"]), sharders=sharders)
    made = spread(quantize(bags(weighted=True)), "rw")
    features = batch(weighted=True)
    features.weights().requires_grad_()
    with pytest.raises(ValueError, match="gradient"):
        made(features)
    with pytest.raises(ValueError, match="move"):
        made.reshard(made.plan)
    with pytest.raises(ValueError, match=r"[Qq]uanti[sz]e"):
        quantize(spread(bags().requires_grad_(False), "rw"))
    bad = KeyedJaggedTensor(["ft0", "ft1", "ft2"], torch.tensor([99]), lengths=torch.tensor([1, 0, 0]))
    with pytest.raises(ValueError, match=r"id 99.*'ft0'"):
        spread(quantize(bags()), "tw")(bad)
