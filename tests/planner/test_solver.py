import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.planner.construct import fitting_plan
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.problem import Problem, Scope
from meshrec.planner.search import Effort
from meshrec.planner.solver import CollectiveSet, _CollectiveSetSearch, solve
from meshrec.planner.types import ParameterConstraints, Table, Topology

EFFORT = Effort(time_limit=600.0, max_work=3e7, gap=0.0)
SHORT = EFFORT._replace(max_work=5e6)
THOROUGH = "MESHREC_THOROUGH" in os.environ
NUM_DRAWS = 15 if THOROUGH else 8


def options(problem: Problem, kind: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Every way to place a table of a type: (loads [R, K] with the common part in the first entry, bytes
    [R])."""
    found = []
    for candidate in np.flatnonzero(problem.type_C == kind):
        layout = problem.layouts_C[candidate]
        nodes = layout.scope is Scope.NODES
        places = problem.num_nodes if nodes else problem.num_ranks
        span = problem.node_size if nodes else 1
        groups = range(*problem.pieces(candidate).indices(len(problem.candidate_P)))
        pieces = [group for group in groups for _ in range(problem.count_P[group])]
        for chosen in set(itertools.permutations(range(places), len(pieces))):
            load_RK = np.zeros((problem.num_ranks, problem.load_PK.shape[1]))
            bytes_R = np.full(problem.num_ranks, problem.common_bytes_C[candidate])
            for group, place in zip(pieces, chosen, strict=True):
                ranks = slice(place * span, (place + 1) * span)
                load_RK[ranks] += problem.load_PK[group]
                bytes_R[ranks] += problem.bytes_P[group]
            found.append((np.concatenate(([problem.common_cost_C[candidate]], load_RK.ravel())), bytes_R))
    unique = {(load.tobytes(), size.tobytes()): (load, size) for load, size in found}
    return list(unique.values())


def brute_force(problem: Problem) -> float:
    """The least step time over all even splits and all places."""
    loads = np.zeros((1, 1 + problem.num_ranks * problem.load_PK.shape[1]))
    sizes = np.zeros((1, problem.num_ranks))
    for kind in problem.type_T:
        ways = options(problem, kind)
        loads = (loads[:, None] + np.stack([way[0] for way in ways])).reshape(-1, loads.shape[1])
        sizes = (sizes[:, None] + np.stack([way[1] for way in ways])).reshape(-1, sizes.shape[1])
        fits = sizes.max(axis=1) <= problem.memory_cap
        loads, sizes = loads[fits], sizes[fits]
        _both, index = np.unique(np.concatenate((loads, sizes), axis=1).round(15), axis=0, return_index=True)
        loads, sizes = loads[index], sizes[index]
    shape = (len(loads), problem.num_ranks, problem.load_PK.shape[1])
    slowest = loads[:, 1:].reshape(shape).max(axis=1).sum(axis=1)
    return float((loads[:, 0] + slowest).min())


def problem_of(tables, profile, num_ranks, constraints=None, **topology):
    machine = Topology(world_size=num_ranks, hardware=profile, **topology)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints or {})


def everyway(problem):
    return [CollectiveSet(np.ones(len(problem.type_C), bool), 0.0)]


@pytest.mark.parametrize("seed", range(4 if THOROUGH else 2))
def test_as_good_as_brute_force(make_tables, profile, seed):
    """All split types of three tables on three ranks. Uneven cuts may beat the best even plan."""
    problem = problem_of(make_tables(3, seed), profile, 3)
    best = brute_force(problem)
    solution = solve(problem, everyway(problem), EFFORT)
    assert solution.seconds <= best * 1.001
    assert solution.lower_bound <= min(best, solution.seconds) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(3 if THOROUGH else 1))
def test_six_tables_as_good_as_brute_force(make_tables, profile, seed):
    tables = make_tables(6, seed)
    kinds = ParameterConstraints(sharding_types=["table_wise", "data_parallel"])
    problem = problem_of(tables, profile, 3, {table.name: kinds for table in tables})
    best = brute_force(problem)
    solution = solve(problem, everyway(problem), EFFORT)
    assert solution.seconds == pytest.approx(best, rel=1e-9)
    assert solution.lower_bound <= best * (1 + 1e-6)


def test_nodes_as_good_as_brute_force(make_tables, profile):
    tables = make_tables(3, 5)
    kinds = ParameterConstraints(sharding_types=["table_wise", "table_row_wise", "data_parallel"])
    problem = problem_of(tables, profile, 4, {t.name: kinds for t in tables}, local_world_size=2)
    best = brute_force(problem)
    solution = solve(problem, everyway(problem), EFFORT)
    assert solution.seconds <= best * 1.001
    assert solution.lower_bound <= min(best, solution.seconds) * (1 + 1e-6)


table_strategy = st.builds(
    lambda rows, columns, pooling: (rows, columns, pooling),
    st.integers(1, 10**6),
    st.sampled_from([4, 8, 64, 100, 128]),
    st.floats(0.1, 50.0),
)


@settings(max_examples=NUM_DRAWS, deadline=None)
@given(st.lists(table_strategy, min_size=1, max_size=4), st.integers(1, 3))
def test_the_bound_never_exceeds_the_best_plan(profile, drawn, num_ranks):
    tables = [
        Table(name=f"t{i}", num_embeddings=rows, embedding_dim=columns, pooling_factors=(pooling,))
        for i, (rows, columns, pooling) in enumerate(drawn)
    ]
    kinds = ["table_wise", "column_wise", "row_wise", "data_parallel"]
    free = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    problem = problem_of(tables, profile, num_ranks, free)
    solution = solve(problem, everyway(problem), SHORT)
    assert solution.lower_bound <= solution.seconds * (1 + 1e-9)
    if len(tables) <= 3:
        assert solution.lower_bound <= brute_force(problem) * (1 + 1e-6)


def test_same_input_same_plan(make_tables, profile):
    problem = problem_of(make_tables(12), profile, 4)
    first, second = (solve(problem, everyway(problem), SHORT) for _ in range(2))
    assert (first.seconds, first.lower_bound, first.work) == (second.seconds, second.lower_bound, second.work)
    for one, other in zip(first.placements_T, second.placements_T, strict=True):
        np.testing.assert_array_equal(one.rank_N, other.rank_N)


def test_more_work_is_never_worse(make_tables, profile):
    problem = problem_of(make_tables(12, 3), profile, 4)
    results = [solve(problem, everyway(problem), EFFORT._replace(max_work=work)) for work in (1e5, 1e7)]
    assert results[1].seconds <= results[0].seconds * (1 + 1e-9)


def test_the_clock_stops_the_search(make_tables, profile):
    problem = problem_of(make_tables(12), profile, 4)
    solution = solve(problem, everyway(problem), Effort(time_limit=0.0, max_work=1e12, gap=0.0))
    assert solution.seconds >= solution.lower_bound > 0


def test_the_search_ends_where_only_a_way_without_starts_could_be_faster(make_tables, profile, monkeypatch):
    """The slow way has one candidate, so that its bound is its plan; the fast way finds no start."""
    problem = problem_of(make_tables(1), profile, 2)
    only = np.arange(len(problem.type_C)) == np.flatnonzero(problem.can_fit_C())[0]
    fast, slow = CollectiveSet(np.ones(len(only), bool), 0.0), CollectiveSet(only, 1.0)

    def without_starts(method, nothing):
        return lambda entrant, *args: method(entrant, *args) if entrant.fixed_seconds else nothing

    for name, nothing in (("start", None), ("memory_balanced_start", None), ("new_attempts", [])):
        monkeypatch.setattr(
            _CollectiveSetSearch, name, without_starts(getattr(_CollectiveSetSearch, name), nothing)
        )
    solution = solve(problem, [fast, slow], EFFORT)
    assert solution.seconds > 1.0 > solution.lower_bound


def test_no_memory_no_plan(make_tables, profile):
    problem = problem_of(make_tables(4), profile, 2, hbm_cap=1 << 12)
    solution = solve(problem, everyway(problem), EFFORT)
    assert solution.placements_T == []
    assert solution.lower_bound == np.inf
    assert fitting_plan(problem) is None


def test_memory_alone_can_be_spread(make_tables, profile):
    """Whole tables of equal size fill the ranks exactly: only a balanced plan fits."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=8) for i in range(6)]
    kinds = ParameterConstraints(sharding_types=["table_wise"])
    problem = problem_of(tables, profile, 3, {table.name: kinds for table in tables})
    tight = problem._replace(memory_cap=float(2 * problem.bytes_P[0] + 6 * problem.common_bytes_C[0]) + 1)
    state = fitting_plan(tight)
    assert state is not None
    assert np.bincount([placement.rank_N[0] for placement in state.placements_T]).tolist() == [2, 2, 2]


@pytest.mark.parametrize("seed", range(4 if THOROUGH else 2))
def test_where_a_plan_fits_one_is_found(make_tables, profile, seed):
    """With as little memory as any plan of even pieces can do with."""
    problem = problem_of(make_tables(3, seed), profile, 3)
    in_bytes = problem._replace(
        common_cost_C=problem.common_bytes_C, load_PK=problem.bytes_P[:, None], memory_cap=np.inf
    )
    least = brute_force(in_bytes)
    solution = solve(problem._replace(memory_cap=least * (1 + 1e-9)), everyway(problem), EFFORT)
    assert solution.placements_T


def test_little_memory_makes_plans_slower_but_not_fewer(make_tables, profile):
    problem = problem_of(make_tables(12, 1), profile, 4)
    free = solve(problem, everyway(problem), SHORT)
    least = problem.mean_bytes_C()
    least = sum(least[problem.type_C == kind].min() for kind in problem.type_T)
    tight = solve(problem._replace(memory_cap=least / 0.95), everyway(problem), SHORT)
    assert tight.placements_T
    assert tight.seconds >= free.lower_bound
