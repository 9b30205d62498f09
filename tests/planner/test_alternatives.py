import pytest

from meshrec.plan.builders import WorldShape, column_wise, table_wise
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, TableSize
from meshrec.planner.alternatives import alternatives
from meshrec.planner.evaluate import evaluate
from meshrec.planner.plan_file import PlannedShardingPlan, PlannerInputs
from meshrec.planner.types import Table, Topology


def test_the_chosen_type_costs_nothing_and_others_hardly_ever_gain(small_plan):
    found = alternatives(small_plan)
    assert set(found) == {table.name for table in small_plan.required_inputs().tables}
    for name, choices in found.items():
        chosen = small_plan.plan[""][name].sharding_type.value
        by_type = {choice.sharding_type: choice.change for choice in choices}
        assert by_type[chosen] <= 0
        assert min(by_type.values()) > -0.05 * small_plan.seconds
        assert [choice.change for choice in choices] == sorted(choice.change for choice in choices)


def test_only_the_largest_when_there_are_many(small_plan):
    largest = max(small_plan.required_inputs().tables, key=lambda table: table.num_bytes)
    assert list(alternatives(small_plan, most_tables=1)) == [largest.name]


def test_change_is_the_difference_of_two_estimates_with_all_latencies(profile):
    topology = Topology(world_size=2, local_world_size=2, hardware=profile)
    # Of one name, in two modules. Column shards of either all-reduce row statistics.
    tables = tuple(
        Table(name=f"{path}.t", num_embeddings=1000, embedding_dim=64, module_path=path) for path in "ab"
    )
    inputs = PlannerInputs(tables=tables, topology=topology, batch_size=100, constraints={})
    whole, split = table_wise(rank=0), column_wise(ranks=[0, 1])

    def planned(*generators):
        shardings = [generator("t", TableSize(1000, 64), WorldShape(2, 2)) for generator in generators]
        plan = {
            path: EmbeddingModuleShardingPlan(t=sharding)
            for path, sharding in zip("ab", shardings, strict=True)
        }
        return PlannedShardingPlan(plan, inputs=inputs)

    def seconds(*generators):
        return evaluate(planned(*generators), tables, topology, batch_size=100).seconds

    for second in (whole, split):
        found = alternatives(planned(whole, second))
        change = {choice.sharding_type: choice.change for choice in found["a.t"]}["column_wise"]
        assert change == pytest.approx(seconds(split, second) - seconds(whole, second))
