import json
from dataclasses import replace

import pytest

from meshrec.plan.sharding_plan import ShardingPlan, ShardingType
from meshrec.planner.plan_file import (
    PlannedShardingPlan,
    PlannerInputs,
    load_plan,
    load_task,
    save_plan,
)
from meshrec.planner.types import OptimizerKind, ParameterConstraints


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
    with pytest.raises(ValueError, match="contain"):
        bare.estimate()
    ShardingPlan(small_plan.plan).save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="ShardingPlan"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"plan\.json"),
        ('{"version": 1, "plan": 3}', r"plan\.json.*'int'"),
        (
            '{"version": 1, "plan": {}, "planner": {}}',
            "'seconds'",
        ),
    ],
)
def test_files_that_are_no_plans_are_named(tmp_path, content, message):
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_plan(tmp_path / "plan.json")


def test_a_task_file(tmp_path):
    table = {"name": "t", "num_embeddings": 10, "embedding_dim": 4, "pooling_factors": [1, 2]}
    task = {"task": "mine", "global_batch_size": 64, "dtype": "fp16", "world_sizes": [2], "tables": [table]}
    (tmp_path / "task.json").write_text(json.dumps(task))
    found = load_task(tmp_path / "task.json")
    assert (found.name, found.batch_size(16), found.world_sizes) == ("mine", 4, (2,))
    assert (found.tables[0].weight_bytes, found.tables[0].optimizer) == (2, OptimizerKind.ROW_WISE_ADAGRAD)
    (tmp_path / "task.json").write_text(json.dumps({**task, "dtype": "fp5"}))
    with pytest.raises(ValueError, match=r"'fp5'.*global_batch_size"):
        load_task(tmp_path / "task.json")
