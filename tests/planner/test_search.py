import numpy as np
import pytest

from meshrec.planner.bound import LowerBound
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.search import Effort, Search
from meshrec.planner.types import Topology


@pytest.fixture
def started(make_tables, profile):
    topology = Topology(world_size=4, hardware=profile)
    problem = build_problem(CostModel(make_tables(10, 4), topology, batch_size=64), {})
    everything = np.ones(len(problem.type_C), bool)
    search = Search(problem, everything, Effort(time_limit=60.0, max_work=1e8, gap=0.0))
    search.construct_from(LowerBound(problem, everything, 1.0).best_box, everything)
    return search


def test_disturbances_never_lose_the_best_plan(started):
    seconds = [started.seconds]
    for _ in range(60):
        started.disturb()
        seconds.append(started.seconds)
    assert (np.diff(seconds) <= 0).all()
    assert seconds[-1] < seconds[0]
    assert len(started.parts_T) == 10


def test_annealing_never_loses_the_best_plan(started):
    seconds = [started.seconds]
    for _ in range(4):
        started.refine()
        seconds.append(started.seconds)
    assert (np.diff(seconds) <= 0).all()
    assert seconds[-1] < seconds[0]


def test_plans_that_settle_take_less_work(started):
    """For two attempts than others for one; and lose nothing."""
    everything = np.ones(len(started.problem.type_C), bool)
    box = LowerBound(started.problem, everything, 1.0).best_box
    work, seconds = [started.work], [started.seconds]
    for short_attempts in (1, 0):
        started.start_from(box, everything, short_attempts=short_attempts)
        work.append(started.work)
        seconds.append(started.seconds)
    assert (np.diff(seconds) <= 0).all()
    assert 0 < work[1] - work[0] < work[2] - work[1]


def test_without_kernels_the_search_disturbs(started, monkeypatch):
    monkeypatch.setattr(started, "_annealer", None)
    before = started.seconds
    for _ in range(60):
        started.refine()
    assert started.seconds < before


def test_work_adds_up_until_it_is_spent(started):
    before = started.work
    started.disturb()
    assert started.work > before
    assert not started.is_spent
    started.work = int(1e8)
    assert started.is_spent
