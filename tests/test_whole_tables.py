"""Whole tables and their state, by public names only, as docs/guides/whole-tables.md shows them."""

import functools
import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import meshrec
from meshrec import distributed as md
from meshrec.distributed import ShardingEnv
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad

ROWS, DIM, DENSE = 941, 6, 3
PLANS = {
    "table": md.table_wise(rank=1),
    "rows": md.row_wise(),
    "columns": md.column_wise(ranks=[0, 1, 0]),
    "grid": md.grid_shard(),
    "copies": md.data_parallel(),
}
TABLE, SUM = "ebc.embedding_bags.t.weight", "sum"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        config = meshrec.EmbeddingBagConfig(
            name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
        )
        self.ebc = meshrec.EmbeddingBagCollection([config])
        self.over = torch.nn.Linear(DIM, DENSE)

    def forward(self, features):
        return self.over(self.ebc(features).values())


@functools.cache
def env_of(mesh):
    if mesh == "flat":
        return ShardingEnv.from_process_group(dist.group.WORLD)
    return ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def make(plan, mesh, dense="ddp", update="in_backward"):
    env = env_of(mesh)
    model = Model()
    module_plan = md.construct_module_sharding_plan(model.ebc, {"t": PLANS[plan]}, world_size=env.shard.size)
    sharders = [md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1), update=update)]
    return DistributedModelParallel(
        model, env, plan=md.ShardingPlan({"ebc": module_plan}), sharders=sharders, dense=dense
    )


def truth():
    """Weights by name, and the table's state."""
    table = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    return {
        TABLE: table,
        "over.weight": torch.arange(DENSE * DIM, dtype=torch.float32).view(DENSE, DIM),
        "over.bias": torch.ones(DENSE),
    }, table[:, 0] + 0.5


def filled(plan, mesh, dense="ddp"):
    model = make(plan, mesh, dense)
    weights, state = truth()
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, weights, options=whole)
    optimizer = get_optimizer_state_dict(model, model.fused_optimizer, options=whole)
    optimizer["state"][TABLE] = {"step": 5, SUM: state}
    set_optimizer_state_dict(model, model.fused_optimizer, optimizer, options=whole)
    return model


def check(weights, optimizer):
    expected, state = truth()
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        assert type(weights[name]) is torch.Tensor
        assert torch.equal(weights[name], value), name
    assert torch.equal(optimizer["state"][TABLE][SUM], state)
    assert optimizer["state"][TABLE]["step"] == 5
    assert optimizer["param_groups"][0]["params"] == [TABLE]


def in_memory(plan, mesh, dense):
    model = filled(plan, mesh, dense)
    optimizer = model.fused_optimizer
    value = model.state_dict()[TABLE]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    assert torch.equal(value, truth()[0][TABLE])
    whole = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(model, options=whole)
    state = get_optimizer_state_dict(model, optimizer, options=whole)
    check(weights, state)
    torch.save({"weights": weights, "state": state}, io.BytesIO())
    # What only the first rank keeps, and hands to all others.
    first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    kept = get_model_state_dict(model, options=first)
    kept_state = get_optimizer_state_dict(model, optimizer, options=first)
    assert (dist.get_rank() == 0) == bool(kept) == bool(kept_state)
    if kept:
        check(kept, kept_state)
    other = make(plan, mesh, dense)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, kept, options=from_first)
    set_optimizer_state_dict(other, other.fused_optimizer, kept_state, options=from_first)
    check(
        get_model_state_dict(other, options=whole),
        get_optimizer_state_dict(other, other.fused_optimizer, options=whole),
    )
    # Each rank its own part, from one model to another.
    for options in (None, StateDictOptions(cpu_offload=True)):
        third = make(plan, mesh, dense)
        set_model_state_dict(third, get_model_state_dict(model, options=options))
        parts = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(third, third.fused_optimizer, parts)
        check(
            get_model_state_dict(third, options=whole),
            get_optimizer_state_dict(third, third.fused_optimizer, options=whole),
        )


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("mesh", ["flat", "replicated"])
def test_whole_tables_are_right_on_every_rank(ranks, plan, mesh):
    dense = "fsdp2" if plan == "grid" else "ddp"
    ranks(2 if mesh == "flat" else 4).run(in_memory, plan, mesh, dense)


def on_step():
    whole = StateDictOptions(full_state_dict=True)
    source = filled("columns", "flat")
    model = make("grid", "flat", update="on_step")
    set_model_state_dict(model, get_model_state_dict(source, options=whole), options=whole)
    model.fused_optimizer.load_state_dict(
        get_optimizer_state_dict(source, source.fused_optimizer, options=whole)
    )
    check(
        get_model_state_dict(model, options=whole),
        get_optimizer_state_dict(model, model.fused_optimizer, options=whole),
    )


def test_tables_updated_by_step_load_whole_state(ranks):
    ranks(2).run(on_step)


def saved(plan, mesh, folder):
    model = filled(plan, mesh)
    dcp.save(
        {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, model.fused_optimizer),
        },
        checkpoint_id=folder,
    )


def loaded(plan, mesh, folder):
    model = make(plan, mesh)
    optimizer = model.fused_optimizer
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    whole = StateDictOptions(full_state_dict=True)
    check(
        get_model_state_dict(model, options=whole),
        get_optimizer_state_dict(model, optimizer, options=whole),
    )


def test_users_drive_torchs_checkpoints(ranks, tmp_path):
    places = [("flat", plan) for plan in PLANS] + [("replicated", "columns"), ("replicated", "rows")]
    for number, (mesh, plan) in enumerate(places):
        folder = str(tmp_path / f"{mesh}-{plan}")
        ranks(2 if mesh == "flat" else 4).run(saved, plan, mesh, folder)
        mesh, plan = places[(number + 1) % len(places)]
        ranks(2 if mesh == "flat" else 4).run(loaded, plan, mesh, folder)
