import numpy as np
import pytest

from meshrec.planner.bound import LowerBound
from meshrec.planner.construct import (
    candidates_by_type,
    construct,
    exchange,
    fitting_plan,
    reinsert,
    round_choice,
    table_order,
)
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.state import Parts, State
from meshrec.planner.types import ParameterConstraints, Table, Topology


@pytest.fixture
def problem(profile):
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(5)]
    tables.append(Table(name="big", num_embeddings=10**6, embedding_dim=128, pooling_factors=(30.0,)))
    return build_problem(CostModel(tables, Topology(world_size=4, hardware=profile), batch_size=64), {})


def test_rounding_keeps_the_number_of_tables(problem):
    share_C = np.zeros(len(problem.type_C))
    first = np.flatnonzero(problem.type_C == 0)
    share_C[first[:3]] = [1.4, 1.4, 2.2]
    share_C[np.flatnonzero(problem.type_C == 1)[2]] = 1.0
    choice_T = round_choice(problem, share_C)
    assert np.bincount(choice_T, minlength=len(share_C))[first[:3]].tolist() == [2, 1, 2]
    assert problem.type_C[choice_T].tolist() == problem.type_T.tolist()


def test_without_shares_every_table_still_has_a_choice(profile):
    """As where the relaxation could not be solved."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(40)]
    problem = build_problem(CostModel(tables, Topology(world_size=2, hardware=profile), batch_size=64), {})
    choice_T = round_choice(problem, np.zeros(len(problem.type_C)))
    assert problem.type_C[choice_T].tolist() == problem.type_T.tolist()


def test_the_largest_table_goes_first(problem):
    choice_T = np.array([np.flatnonzero(problem.type_C == kind)[1] for kind in problem.type_T])
    assert table_order(problem, choice_T)[0] == 5


def test_every_table_finds_a_place(problem):
    everything = np.ones(len(problem.type_C), bool)
    box = LowerBound(problem, everything, 1.0).best_box
    state = construct(problem, box.share_C, candidates_by_type(problem, everything))
    assert all(parts is not None for parts in state.parts_T)
    assert state.seconds >= box.bound * (1 - 1e-6)


def test_types_without_an_allowed_candidate_keep_all(problem):
    none = np.zeros(len(problem.type_C), bool)
    assert [len(found) for found in candidates_by_type(problem, none)] == np.bincount(problem.type_C).tolist()


def test_memory_is_spread(problem):
    state = fitting_plan(problem)
    assert state.bytes_R.max() < 1.5 * state.bytes_R.mean()


@pytest.fixture
def piled(profile):
    """Eight whole tables, all on rank 0 of four."""
    tables = [
        Table(name=f"t{i}", num_embeddings=1000 * (i + 1), embedding_dim=32, pooling_factors=(1.0 + i,))
        for i in range(8)
    ]
    whole = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
    model = CostModel(tables, Topology(world_size=4, hardware=profile), batch_size=64)
    problem = build_problem(model, whole)
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    for table in range(8):
        group = problem.pieces(table)
        state.add(table, Parts(table, np.array([group.start]), np.array([0]), np.ones(1)))
    state.set_exponent(16)
    return state


def is_consistent(state):
    load_RK = np.zeros_like(state.load_RK)
    for parts in state.parts_T:
        load_RK[parts.rank_N] += state.loads(parts)
    np.testing.assert_allclose(state.load_RK, load_RK, atol=1e-15)


def test_exchange_levels_the_ranks(piled):
    before = piled.seconds
    exchange(piled, 10**8)
    is_consistent(piled)
    assert piled.seconds < 0.35 * before
    assert np.bincount([parts.rank_N[0] for parts in piled.parts_T], minlength=4).min() >= 1


def test_exchange_stops_when_the_work_is_done(piled):
    exchange(piled, 1)
    assert sum(parts.rank_N[0] != 0 for parts in piled.parts_T) == 1


def test_exchange_keeps_to_memory(piled):
    cap = piled.bytes_R.max() + piled.common_bytes
    piled.bytes_R[1:] = cap - piled.common_bytes  # the other ranks are full
    exchange(piled, 10**8)
    assert all(parts.rank_N[0] == 0 for parts in piled.parts_T) or piled.fits()


def test_reinsert_moves_only_for_the_better(piled):
    before = piled.smooth
    assert reinsert(piled, 7, np.array([7]))
    assert piled.smooth < before
    assert not reinsert(piled, 7, np.array([7]))
    is_consistent(piled)
