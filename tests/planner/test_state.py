import numpy as np
import pytest

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.problem import Scope
from meshrec.planner.state import State, TablePlacement
from meshrec.planner.types import ParameterConstraints, Topology


@pytest.fixture
def problem(make_tables, profile):
    topology = Topology(world_size=4, local_world_size=2, hardware=profile)
    return build_problem(CostModel(make_tables(5), topology, batch_size=64), {})


def fresh(problem):
    return State(problem, problem.load_PK.max(axis=0))


def place_all(state):
    for table, kind in enumerate(state.problem.type_T):
        weight_K = state.weights()
        found = [
            state.cheapest_placement(table, c, weight_K) for c in np.flatnonzero(state.problem.type_C == kind)
        ]
        state.add(table, min((p for p in found if p), key=lambda placed: placed.objective).placement)


def test_ranks_have_what_was_placed_on_them(problem):
    state = fresh(problem)
    place_all(state)
    assert len(state.plan) == len(problem.type_T)
    mean_K = sum(problem.mean_load_CK()[placement.candidate] for placement in state.plan)
    np.testing.assert_allclose(state.load_RK.mean(axis=0), mean_K)
    assert state.seconds == pytest.approx(state.common + state.load_RK.max(axis=0).sum())
    assert state.fits()


def test_a_place_is_worth_what_it_promises(problem):
    """The smooth objective is about the largest load, and tends to it."""
    for candidate in np.flatnonzero(problem.type_C == problem.type_T[0]):
        state = fresh(problem)
        placed = state.cheapest_placement(0, candidate, state.weights())
        state.add(0, placed.placement)
        assert placed.objective <= state.seconds * (1 + 1e-9)
        assert placed.objective >= state.seconds / problem.num_ranks ** (1 / 8) * (1 - 1e-9)


def test_pieces_go_where_their_scope_says(problem):
    state = fresh(problem)
    for candidate, layout in enumerate(problem.layouts_C):
        table = int(np.flatnonzero(problem.type_T == problem.type_C[candidate])[0])
        ranks = state.cheapest_placement(table, candidate, state.weights()).placement.rank_N
        assert len(set(ranks.tolist())) == len(ranks)
        if layout.scope is Scope.NODES:
            assert (np.bincount(ranks // 2, minlength=2) % 2 == 0).all()


def test_columns_of_one_node_stay_there(make_tables, profile):
    tables = [table for table in make_tables(12) if table.embedding_dim >= 64][:2]
    kinds = {table.name: ParameterConstraints(sharding_types=["table_column_wise"]) for table in tables}
    topology = Topology(world_size=4, local_world_size=2, hardware=profile)
    problem = build_problem(CostModel(tables, topology, batch_size=64), kinds)
    state = fresh(problem)
    place_all(state)
    nodes = [set((placement.rank_N // 2).tolist()) for placement in state.placements_T]
    assert [len(node) for node in nodes] == [1, 1]
    assert nodes[0] != nodes[1]


def test_full_and_forbidden_ranks_are_left_out(make_tables, profile):
    tables = make_tables(2)
    only = {"t0": ParameterConstraints(ranks=[2], sharding_types=["table_wise"])}
    problem = build_problem(CostModel(tables, Topology(world_size=4, hardware=profile), batch_size=64), only)
    state = fresh(problem)
    placed = state.cheapest_placement(
        0, int(np.flatnonzero(problem.type_C == problem.type_T[0])[0]), state.weights()
    )
    assert placed.placement.rank_N.tolist() == [2]
    state.bytes_R[2] = problem.memory_cap
    assert state.cheapest_placement(0, placed.placement.candidate, state.weights()) is None


def test_sizes_scale_only_what_varies(problem):
    state = fresh(problem)
    candidate = next(c for c, layout in enumerate(problem.layouts_C) if layout.row_parts == 2)
    group = problem.pieces(candidate).start
    halves = TablePlacement(candidate, np.array([group, group]), np.array([0, 1]), np.array([0.5, 1.5]))
    loads_NK = state.loads(halves)
    np.testing.assert_allclose(loads_NK.sum(axis=0), 2 * problem.load_PK[group])
    assert (loads_NK[0] >= problem.fixed_PK[group]).all()
    assert state.sizes(halves).sum() == pytest.approx(2 * problem.bytes_P[group])
