from meshrec import distributed as md
from meshrec.comms.agreement import _difference


def test_same_plan_needs_no_group_with_one_process():
    md.verify_same_plan(md.ShardingPlan({}), None)


def test_difference_names_the_table_and_the_ranks():
    with_t1 = {("ebc", "t0"): "a", ("ebc", "t1"): "b"}
    assert "table 't1' of module 'ebc': it is missing on rank 1" in _difference(
        [with_t1, {("ebc", "t0"): "a"}]
    )
    moved = {("ebc", "t0"): "c", ("ebc", "t1"): "b"}
    assert "table 't0' of module 'ebc': ranks 0 and 2 place it differently" in _difference(
        [with_t1, with_t1, moved]
    )
