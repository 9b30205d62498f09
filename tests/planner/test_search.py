import numpy as np
import pytest

from meshrec.planner.anneal import Annealer
from meshrec.planner.bound import LowerBound
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.search import ANNEALING_SETTINGS, Search
from meshrec.planner.types import Topology


@pytest.fixture
def problem(make_tables, profile):
    topology = Topology(world_size=4, hardware=profile)
    return build_problem(CostModel(make_tables(10, 4), topology, batch_size=64), {})


@pytest.fixture
def everything(problem):
    return np.ones(len(problem.type_C), bool)


@pytest.fixture
def box(problem, everything):
    return LowerBound(problem, everything).best_box


@pytest.fixture
def started(problem, everything, box):
    search = Search(problem, everything, np.inf)
    return search, search.add_start(box, everything)


@pytest.mark.parametrize("manner", ANNEALING_SETTINGS)
def test_attempts_never_lose_the_best_plan(started, manner):
    search, start = started
    seconds, work = [search.seconds], search.work
    for _ in range(4):
        reached = search.attempt(start, manner, 1e6)
        seconds.append(search.seconds)
        assert search.seconds <= reached
    assert (np.diff(seconds) <= 0).all()
    assert len(search.placements_T) == 10
    assert search.work > work


def test_without_kernels_there_are_plans_all_the_same(problem, everything, box, monkeypatch, started):
    as_it_comes, _ = started
    monkeypatch.setattr(Annealer, "supports", lambda problem: False)
    alone = Search(problem, everything, np.inf)
    assert alone.add_start(box, everything) is None
    assert alone.seconds == as_it_comes.seconds
    assert len(alone.placements_T) == 10


def test_what_does_not_fit_is_no_start(problem, everything, box):
    full = Search(problem._replace(memory_cap=1000.0), everything, np.inf)
    assert full.add_start(box, everything) is None
    assert not full.placements_T
