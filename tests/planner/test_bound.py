import numpy as np
import pytest

from meshrec.planner.bound import LowerBound, sets_of_one_size
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.types import ParameterConstraints, Table, Topology


def problem_of(tables, profile, kinds, num_ranks=4):
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=num_ranks, hardware=profile)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints)


def bound_of(problem, seconds=1.0):
    return LowerBound(problem, np.ones(len(problem.type_C), bool), seconds)


def test_one_whole_table_takes_its_own_time(profile):
    """The mean over ranks says a quarter; the largest piece says all of it."""
    problem = problem_of([Table(name="t", num_embeddings=1000, embedding_dim=32)], profile, ["table_wise"])
    exact = problem.load_PK[0].sum()
    everything = np.ones(len(problem.type_C), bool)
    assert LowerBound(problem, everything, 1.0, coarse=True).value == pytest.approx(exact)
    bound = bound_of(problem, 2 * exact)
    while bound.branch():
        pass
    assert bound.value == pytest.approx(exact, rel=5e-3)
    assert bound.value <= exact * (1 + 1e-6)


def test_five_equal_tables_on_four_ranks_take_two(profile):
    """The mean says 1.25 tables per rank; whole tables say two."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(5)]
    problem = problem_of(tables, profile, ["table_wise"])
    exact = 2 * problem.load_PK[0].sum()
    bound = bound_of(problem, 1.5 * exact)
    while bound.branch():
        pass
    assert bound.value == pytest.approx(exact, rel=2e-2)
    assert bound.value <= exact * (1 + 1e-6)


def test_a_low_goal_is_proven_at_once(make_tables, profile):
    """Nothing is faster than what is proven to be the least: then no box is left, and none can be split."""
    problem = problem_of(make_tables(8), profile, ["table_wise", "row_wise"])
    everything = np.ones(len(problem.type_C), bool)
    least = LowerBound(problem, everything, 1.0, coarse=True).value
    bound = LowerBound(problem, everything, 1.0, goal=least / 2)
    assert bound.is_proven
    assert bound.value == pytest.approx(least / 2)
    assert not bound.branch()
    assert bound.best_box is None


def test_a_goal_above_the_best_plan_is_never_proven(profile):
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(5)]
    problem = problem_of(tables, profile, ["table_wise"])
    exact = 2 * problem.load_PK[0].sum()
    bound = LowerBound(problem, np.ones(len(problem.type_C), bool), exact, goal=1.05 * exact)
    while bound.branch():
        pass
    assert not bound.is_proven
    assert bound.value <= exact * (1 + 1e-6)


def test_branching_only_raises_the_bound(make_tables, profile):
    problem = problem_of(make_tables(8), profile, ["table_wise", "row_wise", "column_wise"][:2])
    bound = bound_of(problem)
    values = [bound.value]
    while bound.branch() and len(values) < 50:
        values.append(bound.value)
    assert (np.diff(values) >= -1e-12).all()
    assert values[-1] > values[0]


def test_too_little_memory_is_proven(profile):
    problem = problem_of([Table(name="t", num_embeddings=1000, embedding_dim=32)], profile, ["table_wise"])
    full, everything = problem._replace(memory_cap=10.0), np.ones(len(problem.type_C), bool)
    assert LowerBound(full, everything, 1.0, coarse=True).value == np.inf
    assert bound_of(full).is_proven


@pytest.mark.parametrize("factor", [1.1, 1.5])
def test_squeezed_plans_have_no_pieces_far_above_t(make_tables, profile, factor):
    """A table that has no others keeps its smallest."""
    problem = problem_of(make_tables(12, 3), profile, ["table_wise", "column_wise", "row_wise"])
    seconds = float(problem.mean_load_CK().sum())
    coarse = LowerBound(problem, np.ones(len(problem.type_C), bool), seconds, coarse=True)
    root, box = coarse.best_box, coarse.squeezed(factor)
    excess_C = (problem.largest_load_CK() / np.maximum(root.slowest_K, 1e-4 * seconds)).max(axis=1)
    small_C = excess_C <= factor * (1 + 1e-9)
    for kind in problem.type_T:
        mine = problem.type_C == kind
        allowed = small_C[mine] if small_C[mine].any() else excess_C[mine] <= excess_C[mine].min()
        np.testing.assert_array_equal(box.admitted_C[mine], allowed)
    assert not box.share_C[~box.admitted_C].any()
    np.testing.assert_allclose(np.bincount(problem.type_C, box.share_C), np.bincount(problem.type_T))
    assert not box.admitted_C.all()
    assert box.bound >= coarse.value * (1 - 1e-9)


def test_squeezed_by_nothing_is_the_relaxation_itself(make_tables, profile):
    problem = problem_of(make_tables(12, 3), profile, ["table_wise", "row_wise"])
    coarse = LowerBound(problem, np.ones(len(problem.type_C), bool), 1.0, coarse=True)
    assert coarse.squeezed(np.inf).bound == pytest.approx(coarse.best_box.bound)


def test_nothing_is_squeezed_where_no_plan_fits(make_tables, profile):
    problem = problem_of(make_tables(4), profile, ["table_wise"])._replace(memory_cap=1.0)
    assert LowerBound(problem, np.ones(len(problem.type_C), bool), 1.0, coarse=True).squeezed(1.1) is None


def on_two_nodes(tables, profile, kinds):
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=8, hardware=profile, local_world_size=4)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints)


def test_pieces_of_a_set_are_alike_and_all_types_have_some(profile):
    """Those that go to ranks, and those that go to nodes."""
    tables = [Table(name=f"t{i}", num_embeddings=1000 * (i + 1), embedding_dim=64) for i in range(4)]
    kinds = ["table_wise", "column_wise", "table_row_wise", "data_parallel"]
    problem = on_two_nodes(tables, profile, kinds)
    everything = np.ones(len(problem.type_C), bool)
    largest_CK = problem.largest_load_CK()
    by_node_C = problem.ranks_per_piece_C() > 1
    assert by_node_C.any()
    for phase, most in enumerate(largest_CK.max(axis=0)):
        seen = []
        for some_C in sets_of_one_size(problem, everything, phase, most):
            for where_C in (by_node_C, ~by_node_C):
                sizes = largest_CK[some_C & where_C & (largest_CK[:, phase] > 0.02 * most), phase]
                assert not len(sizes) or sizes.max() <= 1.05 * sizes.min() * (1 + 1e-12)
            assert set(problem.type_C[some_C]) == set(problem.type_C)
            assert not any((some_C == other).all() for other in seen)
            seen.append(some_C)
        assert seen


def test_no_piece_is_larger_than_asked(profile):
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=64) for i in range(2)]
    problem = on_two_nodes(tables, profile, ["table_wise", "column_wise"])
    everything = np.ones(len(problem.type_C), bool)
    largest_C = problem.largest_load_CK()[:, 0]
    for most in np.unique(largest_C):
        for some_C in sets_of_one_size(problem, everything, 0, most):
            assert largest_C[some_C].max() <= most


def test_there_is_no_set_where_a_type_has_nothing_alike(profile):
    tables = [Table(name="narrow", num_embeddings=1000, embedding_dim=16)]
    tables += [Table(name="wide", num_embeddings=1000, embedding_dim=64)]
    problem = on_two_nodes(tables, profile, ["table_wise"])
    everything = np.ones(len(problem.type_C), bool)
    output = int(problem.load_PK.sum(axis=0).argmax())
    most = problem.largest_load_CK()[:, output].max()
    assert not list(sets_of_one_size(problem, everything, output, most))


def test_only_what_is_allowed_is_in_a_set(profile):
    tables = [Table(name="t", num_embeddings=1000, embedding_dim=64)]
    problem = on_two_nodes(tables, profile, ["table_wise", "column_wise", "data_parallel"])
    for banned in range(len(problem.type_C)):
        allowed_C = np.arange(len(problem.type_C)) != banned
        for some_C in sets_of_one_size(problem, allowed_C, 0, problem.largest_load_CK()[:, 0].max()):
            assert not some_C[banned]
