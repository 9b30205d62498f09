import numpy as np
import pytest
import torch

from meshrec.ops import operators
from meshrec.ops.planning import AnnealProblem, Assignment, anneal, can_anneal

pytestmark = pytest.mark.skipif(not can_anneal, reason="no compiled kernels")

NONE = np.zeros(0, np.int64)


def whole_tables(loads_TK, **changes):
    """Each table has one candidate: the whole of it, one byte per second of its first phase."""
    loads = np.asarray(loads_TK, float)
    count = len(loads)
    problem = AnnealProblem(
        type_T=np.arange(count),
        choice_start_Y=np.arange(count + 1),
        choices=np.arange(count),
        scope_C=np.zeros(count, np.int64),
        uneven_C=np.zeros(count, np.int64),
        piece_start_C=np.arange(count + 1),
        count_P=np.ones(count, np.int64),
        load_PK=loads,
        fixed_PK=loads,
        bytes_P=loads[:, 0],
        fixed_bytes_P=loads[:, 0],
        common_cost_C=np.zeros(count),
        common_bytes_C=np.zeros(count),
        min_amount_P=np.full(count, 1e-3),
        allowed_YR=NONE,
        shape_C=np.zeros(count, np.int64),
        columns_Y=np.ones(count, np.int64),
    )
    return problem._replace(**changes)


def all_on(rank, count):
    index = np.arange(count)
    return Assignment(index, np.arange(count + 1), index, np.full(count, rank), np.ones(count))


def run(
    problem,
    assignment,
    num_ranks,
    *,
    node_size=1,
    memory_cap=1e9,
    max_work=200_000,
    seed=0,
    placement_share=1.0,
    exponent=4,
):
    return anneal(
        problem,
        assignment,
        num_ranks=num_ranks,
        node_size=node_size,
        memory_cap=memory_cap,
        max_work=max_work,
        seconds=60.0,
        placement_share=placement_share,
        exponent=exponent,
        seed=seed,
    )


def test_whole_tables_are_balanced_in_two_phases():
    """The sums of both phases come out even only if unlike tables are put together."""
    loads = [(3, 1), (1, 3)] * 4
    found = run(whole_tables(loads), all_on(0, 8), 4)
    load_RK = np.zeros((4, 2))
    np.add.at(load_RK, found.assignment.rank_N, np.array(loads, float))
    np.testing.assert_allclose(load_RK, 4.0)
    assert found.seconds == pytest.approx(8.0)


def test_rows_move_until_the_ranks_are_even():
    """One table of 4 in two parts next to one of 2: parts of 3 and 1."""
    problem = whole_tables([(2,), (2,)], count_P=np.array([1, 2]), fixed_PK=np.zeros((2, 1)))
    problem = problem._replace(uneven_C=np.array([0, 1]))
    start = Assignment(
        np.array([0, 1]), np.array([0, 1, 3]), np.array([0, 1, 1]), np.array([0, 0, 1]), np.ones(3)
    )
    found = run(problem, start, 2)
    assert found.seconds == pytest.approx(3.0, rel=1e-2)
    assert found.assignment.amount_N[1:].sum() == pytest.approx(2.0)


def test_a_better_split_is_found():
    """Type 0 may be whole (candidate 0) or in four parts (1)."""
    problem = whole_tables([(4,), (1,)])._replace(
        type_T=np.array([0]),
        choice_start_Y=np.array([0, 2]),
        choices=np.array([0, 1]),
        count_P=np.array([1, 4]),
        shape_C=np.array([0, 1]),
    )
    start = Assignment(np.array([0]), np.array([0, 1]), np.array([0]), np.array([0]), np.ones(1))
    found = run(problem, start, 4)
    assert found.assignment.candidate_T.tolist() == [1]
    assert sorted(found.assignment.rank_N.tolist()) == [0, 1, 2, 3]
    assert found.seconds == pytest.approx(1.0)
    still_whole = run(problem, start, 4, placement_share=0.0)
    assert still_whole.assignment.candidate_T.tolist() == [0]
    assert still_whole.work > 0


def test_tables_take_each_others_shape_and_places():
    """A table of 4 is whole and one of 1 is in halves; the other way round is better."""
    problem = whole_tables([(4,), (2,), (1,), (0.5,)])._replace(
        type_T=np.array([0, 1]),
        choice_start_Y=np.array([0, 2, 4]),
        count_P=np.array([1, 2, 1, 2]),
        shape_C=np.array([0, 1, 0, 1]),
        columns_Y=np.ones(2, np.int64),
    )
    start = Assignment(
        np.array([0, 3]), np.array([0, 1, 3]), np.array([0, 3, 3]), np.array([0, 1, 2]), np.ones(3)
    )
    found = run(problem, start, 3, placement_share=0.0)
    assert found.assignment.candidate_T.tolist() == [1, 2]
    assert sorted(found.assignment.rank_N.tolist()) == [0, 1, 2]
    assert found.seconds == pytest.approx(2.0)
    kept = run(problem._replace(columns_Y=np.array([1, 2])), start, 3, placement_share=0.0)
    assert kept.assignment.candidate_T.tolist() == [0, 3]


def test_rows_over_a_node_are_shared_out_by_what_its_ranks_have():
    """Two tables by nodes; one of them is where a rank has 3 already: about 0.5 of its 4 there."""
    problem = whole_tables([(2,), (2,), (3,)])._replace(
        scope_C=np.array([1, 1, 0]), uneven_C=np.array([1, 1, 0]), fixed_PK=np.zeros((3, 1))
    )
    start = Assignment(
        np.arange(3), np.array([0, 2, 4, 5]), np.array([0, 0, 1, 1, 2]), np.array([0, 1, 2, 3, 0]), np.ones(5)
    )
    found = run(problem, start, 4, node_size=2, placement_share=0.0)
    assert found.seconds == pytest.approx(3.5, rel=0.05)
    np.testing.assert_allclose(found.assignment.amount_N[:4].reshape(2, 2).sum(axis=1), 2.0)


def test_parts_of_whole_nodes_stay_whole():
    """Two tables, each over a node of two ranks: one node each."""
    problem = whole_tables([(1,), (1,)], scope_C=np.ones(2, np.int64))
    start = Assignment(
        np.array([0, 1]), np.array([0, 2, 4]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.ones(4)
    )
    found = run(problem, start, 4, node_size=2)
    first, second = np.sort(found.assignment.rank_N.reshape(2, 2))
    assert sorted([first.tolist(), second.tolist()]) == [[0, 1], [2, 3]]
    assert found.seconds == pytest.approx(1.0)


def test_memory_and_allowed_ranks_hold():
    """Two tables may not leave ranks 0 and 1, and no rank has room for two."""
    problem = whole_tables([(5,), (5,), (1,), (1,)])
    allowed = np.ones((4, 4), np.int64)
    allowed[0, 2:] = allowed[1, 2:] = 0
    start = all_on(0, 4)._replace(rank_N=np.arange(4))
    found = run(problem._replace(allowed_YR=allowed.ravel()), start, 4, memory_cap=5.5)
    ranks = found.assignment.rank_N
    assert set(ranks[:2]) == {0, 1}
    assert np.bincount(ranks, weights=[5, 5, 1, 1], minlength=4).max() <= 5.5


def test_the_same_seed_gives_the_same_plan():
    loads = np.random.default_rng(0).uniform(1, 10, (40, 4))
    problem, start = whole_tables(loads), all_on(0, 40)
    first, second, other = (run(problem, start, 8, max_work=10**6, seed=seed) for seed in (1, 1, 2))
    assert first.assignment.rank_N.tolist() == second.assignment.rank_N.tolist()
    assert first.assignment.rank_N.tolist() != other.assignment.rank_N.tolist()
    assert first.seconds == pytest.approx(loads.sum(axis=0).sum() / 8, rel=0.06)


def test_no_work_changes_nothing():
    start = all_on(1, 6)
    found = run(whole_tables(np.ones((6, 2))), start, 3, max_work=0)
    assert found.assignment.rank_N.tolist() == [1] * 6
    assert found.work == 0


def test_too_many_phases_are_refused():
    with pytest.raises(ValueError, match=r"plan_anneal.*9 phases.*8"):
        run(whole_tables(np.ones((2, 9))), all_on(0, 2), 2)


def test_wrong_dtypes_are_refused():
    problem = whole_tables(np.ones((2, 2)))
    with pytest.raises(ValueError, match="plan_anneal"):
        run(problem._replace(count_P=np.ones(2)), all_on(0, 2), 2)


def test_a_problem_has_seventeen_arrays():
    tensors = [torch.zeros(1)] * 3
    with pytest.raises(ValueError, match=r"plan_anneal.*17 tensors.*3"):
        operators.plan_anneal(
            tensors, *tensors, tensors[0], tensors[0], 1, 1, 1.0, 1, 1.0, 0.1, 0.01, 1.0, 4, 0
        )


def test_the_first_exponent_is_a_power_of_two():
    start = all_on(0, 6)
    for exponent in (0, 3, 128):
        with pytest.raises(ValueError, match=f"64.*{exponent}"):
            run(whole_tables(np.ones((6, 2))), start, 3, exponent=exponent)
    found = run(whole_tables(np.ones((6, 2))), start, 3, exponent=32, max_work=10**5)
    assert np.bincount(found.assignment.rank_N).tolist() == [2, 2, 2]
