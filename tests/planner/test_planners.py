import ast
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import meshrec
from meshrec.plan.checks import verify_plan
from meshrec.plan.sharding_plan import ShardingType, TableSize
from meshrec.planner.planners import EmbeddingShardingPlanner, plan_tables
from meshrec.planner.types import ParameterConstraints, Table, Topology


class Bags(nn.Module):
    def __init__(self, rows=100):
        super().__init__()
        self.rows = rows

    def embedding_bag_configs(self):
        return [
            SimpleNamespace(
                name=name, num_embeddings=self.rows, embedding_dim=64, feature_names=[f"f_{name}"]
            )
            for name in ("a", "b", "c")
        ]


def planner(**arguments):
    topology = arguments.pop("topology", Topology(world_size=2, compute_device="cpu"))
    return EmbeddingShardingPlanner(topology, batch_size=16, max_work=1e6, **arguments)


def test_a_model_gets_a_verified_plan_with_a_bound():
    plan = planner().plan(nn.ModuleDict({"tables": Bags()}))
    sizes = {"tables": {name: TableSize(100, 64) for name in "abc"}}
    verify_plan(plan, sizes, world_size=2)
    assert 0 < plan.lower_bound <= plan.seconds
    assert 0 <= plan.gap < 1


def test_a_model_on_meta_is_planned_without_its_memory():
    config = meshrec.EmbeddingBagConfig(
        name="items", num_embeddings=20_000_000_000, embedding_dim=128, feature_names=["item"]
    )
    module = meshrec.EmbeddingBagCollection(tables=[config], device="meta")
    roomy = Topology(world_size=8, compute_device="cpu", ddr_cap=2 << 40)
    plan = planner(topology=roomy).plan(nn.ModuleDict({"tables": module}))
    verify_plan(plan, {"tables": {"items": TableSize(20_000_000_000, 128)}}, world_size=8)
    assert set(plan.plan["tables"]["items"].ranks) == set(range(8))


CHANGES = {
    "sharding_types": ["column_wise"],
    "min_partition": 8,
    "pooling_factors": [30.0],
    "num_poolings": [4.0],
    "batch_sizes": [640],
    "ranks": [3],
    "effective_rows": 20.0,
    "all_ranks": True,
}


def test_the_list_of_changes_has_every_constraint():
    assert set(CHANGES) == {field.name for field in fields(ParameterConstraints)}


@pytest.mark.parametrize("field", CHANGES)
def test_every_constraint_changes_the_plan_or_its_estimate(field):
    """Beside what makes the field matter: columns where it is about columns, few ranks where about ranks."""
    beside = {
        "min_partition": {"sharding_types": ["column_wise"]},
        "all_ranks": {"sharding_types": ["row_wise"]},
    }
    before = ParameterConstraints(**beside.get(field, {}))
    machine = Topology(world_size=4, compute_device="cuda")

    def planned(constraint):
        found = planner(topology=machine, constraints={"a": constraint}).plan(Bags(rows=100_000))
        return found.plan[""]["a"], found.seconds

    assert planned(replace(before, **{field: CHANGES[field]})) != planned(before)


def test_row_wise_tables_may_ask_for_all_ranks():
    for world_size, local in ((4, 4), (8, 8), (16, 8), (4, 2)):
        machine = Topology(world_size=world_size, compute_device="cuda", local_world_size=local)
        constraint = ParameterConstraints(sharding_types=["row_wise"], all_ranks=True)
        found = planner(topology=machine, constraints=dict.fromkeys("abc", constraint)).plan(Bags(rows=1000))
        assert {placed.ranks for placed in found.plan[""].values()} == {tuple(range(world_size))}
        assert "ParameterConstraints(all_ranks=True)" not in str(found)
    few = planner(topology=machine, constraints={"a": constraint}).plan(Bags(rows=3))
    assert len(few.plan[""]["a"].ranks) == 3


def test_a_plan_prints_its_step_its_gap_and_that_rows_are_on_few_ranks():
    machine = Topology(world_size=4, compute_device="cuda")
    constraint = ParameterConstraints(sharding_types=["row_wise"])
    found = planner(topology=machine, constraints=dict.fromkeys("abc", constraint)).plan(Bags(rows=1000))
    text = str(found)
    assert f"predicted step without the dense part: {found.seconds * 1e3:.3f} ms" in text
    assert f"(gap {found.gap:.2%})" in text
    assert "table 'a': its rows are on 2 of 4 ranks" in text


def test_constraints_hold():
    kinds = {name: ParameterConstraints(sharding_types=["row_wise"]) for name in "abc"}
    plan = planner(constraints=kinds).plan(Bags())
    assert {sharding.sharding_type for sharding in plan.plan[""].values()} == {ShardingType.ROW_WISE}
    only = {"a": ParameterConstraints(sharding_types=["table_wise"], ranks=[1])}
    assert planner(constraints=only).plan(Bags()).plan[""]["a"].ranks == (1,)


def test_a_static_plan_is_reused():
    plan = planner().plan(Bags())
    assert planner(static_plan=plan).plan(Bags()) is plan
    with pytest.raises(ValueError, match=r"'.'.*100 x 64.*7 x 64"):
        planner(static_plan=planner(constraints={
            name: ParameterConstraints(sharding_types=["table_wise"]) for name in "abc"
        }).plan(Bags())).plan(Bags(rows=7))  # fmt: skip
    with pytest.raises(ValueError, match=r"'a'.*'x'"):
        planner(static_plan=plan).plan(nn.ModuleDict({"x": Bags()}))


def test_what_does_not_fit_is_diagnosed():
    small = Topology(world_size=2, ddr_cap=1 << 14, compute_device="cpu")
    with pytest.raises(ValueError, match="memory"):
        planner(topology=small).plan(Bags())
    with pytest.raises(ValueError, match="memory"):
        plan_tables(
            [Table(name="t", num_embeddings=10, embedding_dim=8)],
            Topology(world_size=2, dense_bytes=1 << 60),
            batch_size=8,
        )


def test_a_hashed_table_that_no_rank_holds_is_named():
    """Its memory is that of ``max_rows`` rows, before there is a row."""
    config = meshrec.EmbeddingBagConfig(
        name="ids", embedding_dim=64, feature_names=["id"], keys=meshrec.Hashed(max_rows=1 << 30)
    )
    module = nn.ModuleDict({"tables": meshrec.EmbeddingBagCollection([config])})
    room = Topology(world_size=2, ddr_cap=1 << 36, compute_device="cpu")
    with pytest.raises(ValueError, match=r"no plan fits into memory[\s\S]*needs 1\d\d\.\d\d GiB[\s\S]*ids"):
        planner(topology=room).plan(module)
    assert planner(topology=replace(room, ddr_cap=1 << 40)).plan(module)


def test_one_process_needs_no_group():
    plan = EmbeddingShardingPlanner(batch_size=16, max_work=1e5).collective_plan(Bags())
    assert all(set(sharding.ranks or (0,)) == {0} for sharding in plan.plan[""].values())


def plan_on_each_rank():
    torch.manual_seed(dist.get_rank())
    plan = planner().collective_plan(Bags(), None, dist.group.WORLD)
    with pytest.raises(ValueError, match="'z'") as caught:
        planner(constraints={"z": ParameterConstraints()}).collective_plan(Bags())
    return plan.digest(), str(caught.value)


def test_all_ranks_get_rank_0s_plan_and_its_error(ranks):
    first, second = ranks(2).run(plan_on_each_rank)
    assert first == second


def test_the_planner_loads_nothing_of_the_run_time(run_code):
    """It also plans on machines that train nothing."""
    code = "import sys; from meshrec.planner import *; print([m for m in sys.modules if 'meshrec.' in m])"
    loaded = run_code(code).stdout
    assert "meshrec.planner.solver" in loaded
    # Formats of what travels it prices; they know tensors only.
    comms = {name for name in ast.literal_eval(loaded) if name.startswith("meshrec.comms")}
    assert comms == {"meshrec.comms", "meshrec.comms.leaving", "meshrec.comms.wire"}
    assert "meshrec.distributed" not in loaded


def test_a_topology_of_other_ranks_than_the_group_is_refused():
    with pytest.raises(ValueError, match=r"topology has 2 ranks, but the group has 1"):
        planner(topology=Topology(world_size=2, compute_device="cpu")).collective_plan(Bags())
