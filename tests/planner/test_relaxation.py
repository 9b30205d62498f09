import numpy as np
import pytest

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.relaxation import Relaxation
from meshrec.planner.types import Topology


@pytest.fixture
def problem(make_tables, profile):
    return build_problem(
        CostModel(make_tables(6), Topology(world_size=4, hardware=profile), batch_size=64), {}
    )


def solved(problem, relaxation, upper=1e3, *, cutoff=np.inf, rounds=8):
    num_phases = problem.load_PK.shape[1]
    everything = np.ones(len(problem.type_C), bool)
    return relaxation.solve(np.zeros(num_phases), np.full(num_phases, upper), everything, cutoff, rounds)


def test_all_tables_cost_more_than_the_cheapest_candidates(problem):
    found = solved(problem, Relaxation(problem, 1.0))
    total_C = problem.common_cost_C + problem.mean_load_CK().sum(axis=1)
    cheapest = sum(total_C[problem.type_C == kind].min() for kind in problem.type_T)
    assert found.bound >= cheapest * (1 - 1e-9)
    assert (found.num_tables_C @ problem.mean_load_CK() <= found.slowest_K + 1e-9).all()
    assert (found.cut_at_K >= found.slowest_K - 1e-12).all()


def test_large_pieces_are_out_of_small_boxes(problem):
    relaxation = Relaxation(problem, 1.0)
    whole = solved(problem, relaxation)
    phase = int(problem.load_PK.sum(axis=0).argmax())
    upper_K, everything = np.full(problem.load_PK.shape[1], 1e3), np.ones(len(problem.type_C), bool)
    upper_K[phase] = 0.7 * problem.largest_load_CK()[whole.num_tables_C > 1e-7, phase].max()
    cut = relaxation.solve(0 * upper_K, upper_K, everything, np.inf, 8)
    used = cut.num_tables_C > 1e-7
    assert (problem.largest_load_CK()[used, phase] <= upper_K[phase] * (1 + 1e-9)).all()
    assert cut.bound >= whole.bound
    upper_K[phase] = 0.95 * whole.slowest_K[phase]
    below = relaxation.solve(0 * upper_K, upper_K, everything, np.inf, 8)
    assert below is None or below.bound > whole.bound


def test_nothing_is_cheaper_than_the_cutoff(problem):
    relaxation = Relaxation(problem, float(problem.load_PK.sum()))
    found = solved(problem, relaxation, 1.0)
    assert solved(problem, relaxation, 1.0, cutoff=0.9 * found.bound) is None
    assert relaxation.work > 0


def test_cuts_only_raise_the_bound_and_end_at_the_deadline(problem):
    plain, cut, late = (
        solved(problem, Relaxation(problem, 1.0, deadline), rounds=rounds).bound
        for rounds, deadline in ((0, np.inf), (8, np.inf), (8, 0.0))
    )
    assert cut > plain
    assert late == pytest.approx(plain)


def test_many_cuts_are_begun_anew(problem, monkeypatch):
    relaxation = Relaxation(problem, 1.0)
    first = solved(problem, relaxation)
    work = relaxation.work
    monkeypatch.setattr("meshrec.planner.relaxation._MOST_CUTS", 0)
    assert solved(problem, relaxation).bound == pytest.approx(first.bound, rel=1e-3)
    assert relaxation.work > work


@pytest.mark.parametrize("seed", range(3))
def test_candidates_that_cost_too_much_are_out(make_tables, profile, seed):
    """With one of them, nothing is as cheap as the cutoff."""
    machine = Topology(world_size=4, hardware=profile)
    problem = build_problem(CostModel(make_tables(4, seed), machine, batch_size=64), {})
    relaxation = Relaxation(problem, float(problem.load_PK.sum()))
    cutoff = 1.1 * solved(problem, relaxation, 1.0, cutoff=1.0).bound
    found = solved(problem, relaxation, 1.0, cutoff=cutoff)
    out = np.flatnonzero(~found.admitted_C)
    assert len(out)
    nothing_K = np.zeros(problem.load_PK.shape[1])
    for candidate in out:
        is_it = np.arange(len(problem.type_C)) == candidate
        only_C = (problem.type_C != problem.type_C[candidate]) | is_it
        alone = relaxation.solve(nothing_K, nothing_K + 1, only_C, 1.0, 8)
        assert alone is None or alone.bound >= cutoff - 1e-5


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_left_out_of_its_box(make_tables, profile, placed_unevenly, seed):
    generator = np.random.default_rng(seed)
    machine = Topology(world_size=8, hardware=profile, local_world_size=4)
    problem = build_problem(CostModel(make_tables(7, seed), machine, batch_size=64), {})
    for _ in range(4):
        candidate_T = [generator.choice(np.flatnonzero(problem.type_C == kind)) for kind in problem.type_T]
        slowest_K = sum(placed_unevenly(problem, index, generator) for index in candidate_T).max(axis=0)
        scale = float(problem.common_cost_C[candidate_T].sum() + slowest_K.sum())
        relaxation = Relaxation(problem, scale)
        slowest_K = slowest_K / scale
        lower_K, upper_K = 0.9 * slowest_K, np.ones(len(slowest_K))
        admitted_C = np.ones(len(problem.type_C), bool)
        for _ in range(3):
            found = relaxation.solve(lower_K, upper_K, admitted_C, 1.0001, 8)
            assert found.bound <= 1 + 1e-6
            assert found.admitted_C[candidate_T].all()
            lower_K = np.maximum(lower_K, generator.uniform(0.9, 1.0, len(slowest_K)) * slowest_K)
            upper_K = np.minimum(upper_K, generator.uniform(1.0, 1.2, len(slowest_K)) * slowest_K)
            admitted_C = found.admitted_C
