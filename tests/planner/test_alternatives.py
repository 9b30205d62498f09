from meshrec.planner.alternatives import alternatives


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
