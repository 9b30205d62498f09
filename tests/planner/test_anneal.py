import numpy as np
import pytest

from meshrec.planner.anneal import Annealer
from meshrec.planner.construct import candidates_by_type, fitting_plan
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.state import State
from meshrec.planner.types import ParameterConstraints, Topology


@pytest.fixture
def problem(make_tables, profile):
    tables = make_tables(12, 2)
    topology = Topology(world_size=8, local_world_size=4, hardware=profile)
    return build_problem(
        CostModel(tables, topology, batch_size=64), {"t0": ParameterConstraints(ranks=[1, 2])}
    )


def placed(problem, placements_T):
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    for table, placement in enumerate(placements_T):
        state.add(table, placement)
    return state


def test_plans_come_back_better_and_whole(problem):
    if not Annealer.supports(problem):
        pytest.skip("no compiled kernels")
    before = fitting_plan(problem)
    choices = candidates_by_type(problem, np.ones(len(problem.type_C), bool))
    placements_T, work = Annealer(problem, choices).improve(
        before.plan, max_work=300_000, seconds=60.0, start_temperature=0.1, seed=0
    )
    assert 0 < work < 400_000
    after = placed(problem, placements_T)
    assert after.seconds < placed(problem, before.plan).seconds
    assert after.fits()
    for table, placement in enumerate(placements_T):
        assert problem.type_C[placement.candidate] == problem.type_T[table]
        assert len(set(placement.rank_N.tolist())) == len(placement.rank_N)
        groups = range(*problem.pieces(placement.candidate).indices(len(problem.candidate_P)))
        assert set(placement.group_N.tolist()) == set(groups)
    assert set(placements_T[0].rank_N.tolist()) <= {1, 2}
