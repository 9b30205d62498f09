import json
from dataclasses import replace

import pytest

from meshrec.plan.builders import WorldShape, row_wise, table_wise
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan, TableSize
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.plan_report import diff, make_report, what_if


def test_the_report_adds_up(small_plan):
    report = make_report(small_plan)
    assert sum(report.phases.values()) == pytest.approx(report.seconds)
    assert len(report.ranks) == 4
    assert {table.name for table in report.tables} == {f"t{i}" for i in range(6)}
    for table in report.tables:
        area = sum(rows * columns for _, _, rows, columns, _ in table.rectangles)
        assert area == (0 if table.name in report.replicated else table.num_embeddings * table.embedding_dim)
        owners = {rectangle[4] for rectangle in table.rectangles}
        assert owners == {rank.rank for rank in report.ranks if table.name in rank.tables}
    assert json.loads(json.dumps(report.to_json()))["gap"] == report.gap


def test_warnings_name_what_is_wrong(small_plan):
    inputs = small_plan.required_inputs()
    fullest = small_plan.estimate().bytes_R.max()
    tight = replace(inputs.topology, hbm_cap=int(1.02 * fullest / 0.85))
    ones = tuple(replace(table, pooling_factors=(1.0,)) for table in inputs.tables)
    worse = replace(
        small_plan, lower_bound=small_plan.seconds / 2, inputs=replace(inputs, topology=tight, tables=ones)
    )
    text = "\n".join(make_report(worse).warnings)
    assert "a plan up to 50.0% faster could exist" in text
    assert "every pooling factor is 1" in text


def by_hand(small_plan, generator):
    table = small_plan.required_inputs().tables[0]
    size = TableSize(table.num_embeddings, table.embedding_dim)
    inputs = replace(small_plan.required_inputs(), tables=(table,))
    plan = {"": EmbeddingModuleShardingPlan({table.name: generator(table.name, size, WorldShape(4, 2))})}
    return PlannedShardingPlan(plan, inputs=inputs), table


def test_diff_counts_what_is_new_on_a_rank(small_plan):
    assert diff(small_plan, small_plan) == []
    whole, table = by_hand(small_plan, table_wise(rank=1))
    other, _ = by_hand(small_plan, table_wise(rank=2))
    split, _ = by_hand(small_plan, row_wise(ranks=[1, 2]))
    (move,) = diff(whole, other)
    assert (move.old_type, move.new_type, move.num_bytes) == ("table_wise", "table_wise", table.num_bytes)
    (move,) = diff(whole, split)
    assert move.num_bytes == pytest.approx(table.num_bytes / 2, rel=0.05)
    (new,) = diff(ShardingPlan(), whole)
    assert (new.old_type, new.num_bytes) == (None, table.num_bytes)
    gone = diff(ShardingPlan({"": EmbeddingModuleShardingPlan(x=whole.plan[""][table.name])}), whole)
    assert ("x", "table_wise", None, 0) in gone


def test_what_if_keeps_the_global_batch(small_plan, quick):
    found = dict(what_if(small_plan, [2, 8, 3], quick._replace(max_work=1e6)))
    assert found[8].required_inputs().batch_size == 128
    assert found[2].required_inputs().batch_size == 512
    assert "not a multiple" in found[3]
