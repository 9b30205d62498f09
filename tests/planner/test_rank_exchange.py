import numpy as np
import pytest

from meshrec.planner.bound import LowerBound
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.polish import polish
from meshrec.planner.rank_exchange import exchange_pieces
from meshrec.planner.search import Effort, Search
from meshrec.planner.state import State
from meshrec.planner.types import Table, Topology


def problem_of(num_ranks):
    factors = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 40.0, 50.0, 60.0)
    tables = [
        Table(name=f"t{i}", num_embeddings=3_000_000 * (i + 1), embedding_dim=128, pooling_factors=(factor,))
        for i, factor in enumerate(factors)
    ]
    machine = Topology(world_size=num_ranks, hardware="h100", local_world_size=8)
    return build_problem(CostModel(tables, machine, batch_size=1024), {})


def state_of(problem, parts_T):
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    for table, parts in enumerate(parts_T):
        state.add(table, parts)
    return state


def by_node_beside_pieces(problem, seed):
    """A polished plan with the three largest tables by node, one on each, and columns of the others spread
    at random over their ranks."""
    random = np.random.default_rng(seed)
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    state.set_exponent(8)
    for table in range(9, -1, -1):
        mine = np.flatnonzero(problem.type_C == problem.type_T[table])
        for candidate in mine:
            layout = problem.layouts_C[candidate]
            by_node = layout.by_nodes and layout.row_parts == len(layout.widths) == 1
            wanted = layout.row_parts == 1 and not layout.by_nodes and len(layout.widths) == 3
            if by_node if table > 6 else wanted:
                placed = state.best_place(table, int(candidate), np.ones(problem.load_PK.shape[1]))
                parts = placed.parts
                if table <= 6:
                    free = np.setdiff1d(np.arange(24), [r for p in state.parts_T[:7] if p for r in p.rank_N])
                    parts = parts._replace(rank_N=random.permutation(free)[: len(parts.rank_N)])
                state.add(table, parts)
                break
    assert all(parts is not None for parts in state.parts_T)
    polish(state)
    return state


@pytest.fixture(scope="module")
def problem():
    return problem_of(24)


def test_plans_become_faster_and_stay_plans(problem):
    gains = []
    for seed in range(6):
        state = by_node_beside_pieces(problem, seed)
        before, parts_T = state.seconds, list(state.parts_T)
        is_better = exchange_pieces(state)
        assert is_better == (state.seconds < before)
        gains.append(before - state.seconds)
        for old, new in zip(parts_T, state.parts_T, strict=True):
            assert new.candidate == old.candidate
            assert len(set(new.rank_N.tolist())) == len(new.rank_N)
            columns = [(parts.amount_N * problem.width_P[parts.group_N]).sum() for parts in (old, new)]
            assert columns[0] == pytest.approx(columns[1])
        again = state_of(problem, state.parts_T)
        assert again.seconds == pytest.approx(state.seconds)
        assert again.load_RK == pytest.approx(state.load_RK, abs=1e-12)
        assert again.fits()
    assert min(gains) >= 0
    assert max(gains) > 0.005 * before


def test_the_ranks_of_a_table_stay_apart(problem):
    """Even where a rank holds several pieces."""
    everything = np.ones(len(problem.type_C), bool)
    search = Search(problem, everything, Effort(time_limit=60.0, max_work=1e8, gap=0.0))
    search.start_from(LowerBound(problem, everything, 1.0, coarse=True).best_box, everything)
    state = state_of(problem, search.parts_T)
    before = state.seconds
    exchange_pieces(state)
    assert state.seconds <= before
    assert all(len(set(parts.rank_N.tolist())) == len(parts.rank_N) for parts in state.parts_T)


def test_a_plan_without_shares_of_rows_stays(problem):
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    state.set_exponent(8)
    for table in range(10):
        mine = np.flatnonzero(problem.type_C == problem.type_T[table])
        candidate = next(c for c in mine if problem.layouts_C[c].row_parts == 1 and problem.sharded_C[c])
        state.add(table, state.best_place(table, int(candidate), np.ones(5)[: state.num_phases]).parts)
    before = list(state.parts_T)
    assert not exchange_pieces(state)
    assert all(a is b for a, b in zip(before, state.parts_T, strict=True))
