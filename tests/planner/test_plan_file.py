import json
from dataclasses import replace

import pytest

from meshrec.plan.sharding_plan import ShardingPlan, ShardingType
from meshrec.planner.plan_file import PlannedShardingPlan, PlannerInputs, load_plan, save_plan
from meshrec.planner.types import ParameterConstraints


def test_a_plan_survives_its_file(small_plan, tmp_path):
    save_plan(small_plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == small_plan
    assert loaded.gap == small_plan.gap
    assert loaded.estimate().seconds == small_plan.seconds
    assert ShardingPlan.load(tmp_path / "plan.json").plan == small_plan.plan


def test_inputs_survive_json_with_constraints(small_plan):
    constraints = {"t1": ParameterConstraints(sharding_types=(ShardingType.ROW_WISE,), ranks=(0, 1))}
    inputs = replace(small_plan.required_inputs(), constraints=constraints)
    again = PlannerInputs.from_json(json.loads(json.dumps(inputs.to_json())))
    assert again.constraints["t1"].allowed_types == {ShardingType.ROW_WISE}
    assert again.constraints["t1"].ranks == [0, 1]
    assert (again.tables, again.topology) == (inputs.tables, inputs.topology)


def test_plans_of_before_profiles_named_their_device_are_read(small_plan):
    inputs = small_plan.required_inputs()
    values = inputs.to_json()
    del values["topology"]["hardware"]["device"]
    assert PlannerInputs.from_json(values).topology == inputs.topology


def test_plans_without_inputs_say_so(small_plan, tmp_path):
    bare = PlannedShardingPlan(small_plan.plan)
    assert bare.gap == 0
    with pytest.raises(ValueError, match="this plan does not say what it was made from"):
        bare.estimate()
    ShardingPlan(small_plan.plan).save(tmp_path / "plan.json")
    with pytest.raises(
        ValueError, match=r"holds a plan but not what it was made from; read it with ShardingPlan"
    ):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"plan\.json is no sharding plan; name a file .* Expecting property name"),
        ('{"version": 1, "plan": 3}', r"plan\.json is no sharding plan; name .* 'int' object"),
        ('{"version": 1, "plan": {}, "planner": {}}', r"what the plan was made from: 'seconds'. Plan again"),
    ],
)
def test_files_that_are_no_plans_are_named(tmp_path, content, message):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_plan(tmp_path / "plan.json")
