from dataclasses import replace

import pytest

from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner import EmbeddingShardingPlanner, save_plan
from meshrec.planner.optimize import DEFAULT_EFFORT
from meshrec.train import Placement
from meshrec.train.planning import constraints_of, make_plan, topology_of


def planned(recipe, effort=None, **machine):
    dataset = recipe.data.load()
    topology = topology_of(recipe, **{"world_size": 2, "local_size": 2, "device": "cpu", **machine})
    return make_plan(recipe, recipe.model.build(dataset), dataset, topology, effort=effort)


def test_the_plan_holds_what_the_recipe_says(tmp_path, small):
    plan = planned(small(placement=Placement(sharding_types=("row_wise",), memory_gib=1.0)))
    inputs = plan.required_inputs()
    assert {sharding.sharding_type.value for _, _, sharding in plan.tables()} == {"row_wise"}
    assert inputs.batch_size == 50
    assert inputs.topology.profile.memory == 2**30
    save_plan(plan, tmp_path / "plan.json")
    again = planned(small(placement=Placement(plan=tmp_path / "plan.json")))
    assert again.digest() == plan.digest()


def test_tables_are_measured_on_the_first_batches(small):
    recipe = small()
    dataset = recipe.data.load()
    found = constraints_of(recipe, recipe.model.build(dataset), dataset, world_size=2)
    assert set(found) == {"f0", "f1", "f2"}
    assert list(found["f0"].pooling_factors) == [1.0]
    assert found["f0"].effective_rows < 50  # Zipf
    few = replace(recipe.data, num_samples=1).load()  # the first rank has no row
    assert set(constraints_of(recipe, recipe.model.build(few), few, world_size=2)) == set(found)


def test_no_plan_is_one_clear_error(tmp_path, small):
    with pytest.raises(ValueError, match="`meshrec plan`"):
        planned(small(placement=Placement(plan=tmp_path / "none.json")))
    with pytest.raises(ValueError, match=r"memory"):
        planned(small(placement=Placement(memory_gib=1e-6)))


def test_a_run_searches_as_long_as_its_tables_need(small, monkeypatch):
    found = []

    class Planner(EmbeddingShardingPlanner):
        def __init__(self, **options):
            found.append(options["max_work"])
            super().__init__(**options)

    monkeypatch.setattr("meshrec.train.planning.EmbeddingShardingPlanner", Planner)
    brief = planned(small())
    long = planned(small(), effort=DEFAULT_EFFORT._replace(max_work=1e8))
    assert found == [3 * 2e6, 1e8]
    assert brief.seconds == long.seconds


def test_large_tables_are_not_copied(small):
    table = 50 * 8 * 4 / 2**20
    for limit, may_be_copied in ((table, True), (0.9 * table, False)):
        recipe = small(placement=Placement(replicate_mib=limit))
        dataset = recipe.data.load()
        found = constraints_of(recipe, recipe.model.build(dataset), dataset, world_size=2)
        for each in found.values():
            assert (ShardingType.DATA_PARALLEL in each.allowed_types) == may_be_copied
    assert "data_parallel" not in {
        sharding.sharding_type.value for _, _, sharding in planned(recipe).tables()
    }
