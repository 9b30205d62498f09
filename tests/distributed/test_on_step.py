"""Tables that are updated in the optimizer's step: what gradients at hand make possible, by real ranks."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import (
    SGD,
    Adam,
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
)
from meshrec.testing import RankError

TABLES = {"t0": (10, 6), "t1": (7, 5), "t2": (9, 4), "t3": (5, 4)}
PLANS = {
    # t1 in two pieces on the first rank.
    "mixed": {
        "t0": md.row_wise(),
        "t1": md.column_wise(ranks=[0, 1, 0]),
        "t2": md.data_parallel(),
        "t3": md.table_wise(rank=1),
    },
    "on one rank": {name: md.table_wise(rank=0) for name in TABLES},
}


class Model(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"]
                )
                for name, (rows, dim) in TABLES.items()
            ]
        )
        self.over = nn.Linear(sum(dim for _, dim in TABLES.values()), 1)

    def forward(self, features):
        return self.over(self.ebc(features).values()).tanh().sum()


def features(seed, rank):
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    lengths = torch.randint(0, 4, (3 * len(TABLES),), generator=generator)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor([f"f_{name}" for name in TABLES], ids, lengths=lengths)


@functools.cache
def environment(mesh):
    if mesh == "flat":
        return default_env()
    return md.ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def sharded(spec, *, plan="mixed", mesh="flat", dense="ddp"):
    env = environment(mesh)
    model = Model()
    module_plan = md.construct_module_sharding_plan(model.ebc, PLANS[plan], world_size=env.shard.size)
    sharder = md.EmbeddingBagCollectionSharder(spec, update="on_step")
    return DistributedModelParallel(
        model, env, plan=md.ShardingPlan({"ebc": module_plan}), sharders=[sharder], dense=dense
    )


def optimizer_of(model, fused, clip=None):
    """SGD for what has no fused optimizer; all of it clipped together."""
    names = set(fused.params)
    rest = {name: p for name, p in model.named_parameters() if name not in names}
    combined = CombinedOptimizer([fused, KeyedOptimizerWrapper(rest, lambda p: torch.optim.SGD(p, lr=0.1))])
    return combined if clip is None else GradientClippingOptimizer(combined, GradientClipping.NORM, *clip)


class Unsharded:
    """The unsharded model on the batches of all ranks."""

    def __init__(self, spec, clip=None):
        self.model = Model()
        fused = CombinedOptimizer([])
        if spec is not None:
            fuse(self.model.ebc, optimizer=spec, update="on_step")
            fused = CombinedOptimizer([("ebc", self.model.ebc.fused_optimizer)])
        self.optimizer = optimizer_of(self.model, fused, clip)

    def backward(self, seed, num_ranks):
        sum(self.model(features(seed, rank)) for rank in range(num_ranks)).div(num_ranks).backward()

    def assert_same(self, model):
        expected = dict(self.model.named_parameters())
        for name, table in model.module.ebc.embedding_bags.items():
            whole = expected[f"ebc.embedding_bags.{name}.weight"]
            for r, shard in zip(table.rectangles, table.shards(), strict=True):
                torch.testing.assert_close(shard.detach(), whole[r.r0 : r.r1, r.c0 : r.c1].detach())
        for name in ("over.weight", "over.bias"):
            found = dict(model.named_parameters())[name].detach()
            found = found.full_tensor() if hasattr(found, "full_tensor") else found
            torch.testing.assert_close(found, expected[name].detach())


def train(spec, clip, mesh="flat", dense="ddp", plan="mixed"):
    model = sharded(spec, plan=plan, mesh=mesh, dense=dense)
    optimizer, unsharded = optimizer_of(model, model.fused_optimizer, clip), Unsharded(spec, clip)
    env = environment(mesh)
    for step in range(4):
        optimizer.zero_grad()
        unsharded.optimizer.zero_grad()
        for seed in (2 * step, 2 * step + 1):  # gradients add up
            model(features(seed, env.world.rank)).backward()
            unsharded.backward(seed, env.world.size)
        optimizer.step()
        unsharded.optimizer.step()
        if clip is not None:
            total = unsharded.optimizer.last_total_grad_norm
            assert total > clip[0]
            torch.testing.assert_close(optimizer.last_total_grad_norm, total)
    unsharded.assert_same(model)


@pytest.mark.parametrize(
    "spec", [SGD(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1)], ids=lambda s: type(s).__name__
)
def test_gradients_accumulate(ranks, spec):
    ranks(2).run(train, spec, None)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, "inf"])
def test_the_norm_is_that_of_the_whole_model(ranks, norm_type):
    """Row and column parts add up over ranks; data-parallel tables and dense parameters count once."""
    ranks(2).run(train, RowWiseAdagrad(lr=0.1), (0.01, norm_type))


@pytest.mark.parametrize("dense", ["ddp", "fsdp2"])
def test_the_norm_with_replicas(ranks, dense):
    ranks(4).run(train, RowWiseAdagrad(lr=0.1), (0.01, 2.0), "replicated", dense)


@pytest.mark.parametrize("spec", [SGD(lr=0.1), None], ids=["fused", "ordinary gradients"])
def test_the_norm_where_a_rank_has_no_tables(ranks, spec):
    ranks(2).run(train, spec, (0.01, 2.0), "flat", "ddp", "on one rank")


def scale(plan):
    env = environment("flat")
    model, unsharded = sharded(Adam(lr=0.1), plan=plan), Unsharded(Adam(lr=0.1))
    optimizer = model.fused_optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(4):
        optimizer.zero_grad()
        unsharded.optimizer.zero_grad()
        # In the third step one rank overflows.
        factor = torch.inf if seed == 2 and env.world.rank == 1 else 1.0
        output = model.module.ebc(features(seed, env.world.rank)).values()
        scaler.scale(output.square().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        if seed != 2:
            outputs = [unsharded.model.ebc(features(seed, rank)).values() for rank in range(env.world.size)]
            sum(output.square().sum() for output in outputs).div(env.world.size).backward()
            unsharded.model.ebc.fused_optimizer.step()
    unsharded.assert_same(model)
    return scaler.get_scale(), sorted({slots["step"] for slots in optimizer.state.values()})


@pytest.mark.parametrize("plan", PLANS)
def test_a_grad_scaler_skips_the_step_on_all_ranks(ranks, plan):
    assert ranks(2).run(scale, plan) == [(2.0**9, [3])] * 2


def nothing_collected():
    model = sharded(Adam(lr=0.1))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.fused_optimizer.step()
    model(features(0, 0)).backward()
    same = all(map(torch.equal, before, model.module.ebc.parameters()))
    model.fused_optimizer.zero_grad()
    model.fused_optimizer.step()
    same &= all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return same, {slots["step"] for slots in model.fused_optimizer.state.values()}


def test_nothing_changes_before_the_step_or_without_gradients(ranks):
    assert ranks(2).run(nothing_collected) == [(True, {0})] * 2


def infinite_then_forgotten(reset):
    """``zero_grad`` of the module forgets an overflow as that of the optimizer does."""
    env = environment("flat")
    model = sharded(SGD(lr=0.1))
    optimizer = model.fused_optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (torch.inf, 1.0):
        (optimizer if reset == "optimizer" else model).zero_grad()
        scaler.scale(model(features(0, env.world.rank)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), [slots["step"] for slots in optimizer.state.values()]


@pytest.mark.parametrize("reset", ["optimizer", "module"])
def test_an_overflow_is_forgotten(ranks, reset):
    assert ranks(2).run(infinite_then_forgotten, reset) == [(1.0, [1] * 4)] * 2


def frozen_stays():
    model = sharded(SGD(lr=0.1))
    frozen = model.module.ebc.embedding_bags["t0"].weight.requires_grad_(False)
    before = frozen.detach().clone()
    model(features(0, 0)).backward()
    model.fused_optimizer.step()
    return torch.equal(before, frozen)


def test_frozen_tables_stay(ranks):
    assert ranks(2).run(frozen_stays) == [True, True]


def dense_gradient():
    model = sharded(SGD(lr=0.1))
    model(features(0, 0)).backward()
    weight = model.module.ebc.embedding_bags["t2"].weight
    weight.grad = torch.ones_like(weight)
    model.fused_optimizer.step()


def test_a_dense_gradient_is_refused(ranks):
    with pytest.raises(RankError, match="'t2'"):
        ranks(2).run(dense_gradient)


def bad_number():
    model = sharded(Adam(lr=0.1))
    model(features(0, 0)).backward()
    optimizer = model.fused_optimizer
    optimizer.param_groups[0]["lr"] = -1.0
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        optimizer.step()
    except ValueError as error:
        message = str(error)
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return same, {slots["step"] for slots in optimizer.state.values()}, "lr" in message


def test_a_failed_step_leaves_all_as_it_was(ranks):
    assert ranks(2).run(bad_number) == [(True, {0}, True)] * 2


def saved():
    model = sharded(Adam(lr=0.1))
    model(features(0, 0)).backward()
    model.fused_optimizer.step()
    state = model.fused_optimizer.state_dict()
    model.fused_optimizer.load_state_dict(state)
    return (
        sorted(state["param_groups"][0]["params"])
        == sorted(state["state"])
        == sorted(f"ebc.embedding_bags.{name}.weight" for name in TABLES)
    )


def test_state_dicts_know_nothing_of_the_signal(ranks):
    assert ranks(2).run(saved) == [True, True]
