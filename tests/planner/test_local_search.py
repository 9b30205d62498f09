import numpy as np
import pytest

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.local_search import exchange, reinsert
from meshrec.planner.state import Parts, State
from meshrec.planner.types import ParameterConstraints, Table, Topology


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
