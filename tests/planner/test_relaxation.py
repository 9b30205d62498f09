import numpy as np
import pytest

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.relaxation import MeanRelaxation, representatives, restricted
from meshrec.planner.types import Topology


@pytest.fixture
def problem(make_tables, profile):
    return build_problem(
        CostModel(make_tables(6), Topology(world_size=4, hardware=profile), batch_size=64), {}
    )


@pytest.fixture
def relaxation(problem):
    return MeanRelaxation(problem, np.ones(len(problem.type_C), bool), 1.0, root=True)


def limits(problem, upper=1e3):
    num_phases = problem.load_PK.shape[1]
    return np.zeros(num_phases), np.full(num_phases, upper), np.ones(len(problem.type_C), bool)


def test_all_tables_cost_more_than_the_cheapest_candidates(problem, relaxation):
    found = relaxation.solve(*limits(problem), np.inf)
    total_C = problem.common_C + problem.mean_load_CK().sum(axis=1)
    cheapest = sum(total_C[problem.type_C == kind].min() for kind in problem.type_T)
    assert found.bound >= cheapest * (1 - 1e-9)
    assert (found.share_C @ problem.mean_load_CK() <= found.slowest_K + 1e-9).all()
    assert (found.cut_at_K >= found.slowest_K - 1e-12).all()


def test_large_pieces_are_out_of_small_boxes(problem, relaxation):
    whole = relaxation.solve(*limits(problem), np.inf)
    lower_K, upper_K, everything = limits(problem)
    phase = int(problem.load_PK.sum(axis=0).argmax())
    upper_K[phase] = 0.7 * problem.largest_load_CK()[whole.share_C > 1e-7, phase].max()
    cut = relaxation.solve(lower_K, upper_K, everything, np.inf)
    used = cut.share_C > 1e-7
    assert (problem.largest_load_CK()[used, phase] <= upper_K[phase] * (1 + 1e-9)).all()
    assert cut.bound >= whole.bound
    upper_K[phase] = 0.95 * whole.slowest_K[phase]
    below = relaxation.solve(lower_K, upper_K, everything, np.inf)
    assert below is None or below.bound > whole.bound


def test_nothing_is_cheaper_than_the_cutoff(problem, relaxation):
    found = relaxation.solve(*limits(problem), np.inf)
    assert relaxation.solve(*limits(problem), 0.9 * found.bound) is None
    assert relaxation.work > 0


@pytest.mark.parametrize("seed", range(3))
def test_the_box_is_narrowed_to_where_cheap_plans_can_be(make_tables, profile, seed):
    machine = Topology(world_size=4, hardware=profile)
    problem = build_problem(CostModel(make_tables(6, seed), machine, batch_size=64), {})
    everything, lower_K = np.ones(len(problem.type_C), bool), np.zeros(problem.load_PK.shape[1])
    scale = float(problem.load_PK.sum())
    limits = (lower_K, lower_K + 1, everything)
    mean = MeanRelaxation(problem, everything, scale, root=True).solve(*limits, 1.0)
    relaxation = MeanRelaxation(problem, everything, scale)
    tight = relaxation.solve(*limits, 1.2 * mean.bound + 0.01)
    assert tight.bound >= mean.bound * (1 - 1e-9)
    assert (tight.lower_K <= tight.slowest_K + 1e-6).all()
    assert (tight.slowest_K <= tight.upper_K + 1e-6).all()
    assert tight.upper_K.sum() < len(lower_K)


def test_after_the_deadline_boxes_stay_as_they_are(make_tables, profile):
    machine = Topology(world_size=4, hardware=profile)
    problem = build_problem(CostModel(make_tables(6, 0), machine, batch_size=64), {})
    everything, scale = np.ones(len(problem.type_C), bool), float(problem.load_PK.sum())
    lower_K, upper_K, _ = limits(problem, 1.0)
    late, other = (
        MeanRelaxation(problem, everything, scale, deadline=deadline).solve(lower_K, upper_K, everything, 1.0)
        for deadline in (0.0, np.inf)
    )
    np.testing.assert_array_equal(late.upper_K, upper_K)
    assert 0 < late.bound <= other.bound
    assert other.upper_K.sum() < upper_K.sum()


@pytest.mark.parametrize("seed", range(3))
def test_candidates_that_cost_too_much_are_out(make_tables, profile, seed):
    """With one of them, nothing is as cheap as the cutoff."""
    machine = Topology(world_size=4, hardware=profile)
    problem = build_problem(CostModel(make_tables(4, seed), machine, batch_size=64), {})
    scale = float(problem.load_PK.sum())
    relaxation = MeanRelaxation(problem, np.ones(len(problem.type_C), bool), scale)
    lower_K, upper_K, everything = limits(problem, 1.0)
    cutoff = 1.1 * relaxation.solve(lower_K, upper_K, everything, 1.0).bound
    found = relaxation.solve(lower_K, upper_K, everything, cutoff)
    out = np.flatnonzero(~found.admitted_C)
    assert len(out)
    for candidate in out:
        only_C = (problem.type_C != problem.type_C[candidate]) | (np.arange(len(everything)) == candidate)
        alone = relaxation.solve(lower_K, upper_K, only_C, 1.0)
        assert alone is None or alone.bound >= cutoff - 1e-5


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_left_out_of_its_box(make_tables, profile, placed_unevenly, monkeypatch, seed, drops):
    """Also where dominated candidates are dropped, and those of the first box for the boxes within."""
    if drops:
        monkeypatch.setattr("meshrec.planner.relaxation._DROPPED", 1.0)
    generator = np.random.default_rng(seed)
    machine = Topology(world_size=8, hardware=profile, local_world_size=4)
    problem = build_problem(CostModel(make_tables(7, seed), machine, batch_size=64), {})
    for _ in range(4):
        candidate_T = [generator.choice(np.flatnonzero(problem.type_C == kind)) for kind in problem.type_T]
        slowest_K = sum(placed_unevenly(problem, index, generator) for index in candidate_T).max(axis=0)
        common = float(problem.common_C[candidate_T].sum())
        scale = common + float(slowest_K.sum())
        everything = np.ones(len(problem.type_C), bool)
        relaxation = MeanRelaxation(problem, everything, scale, deadline=generator.choice([np.inf, 0.0]))
        slowest_K = slowest_K / scale
        lower_K, upper_K = 0.9 * slowest_K, np.ones(len(slowest_K))
        admitted_C = everything
        for _ in range(3):
            found = relaxation.solve(lower_K, upper_K, admitted_C, 1.0001)
            assert found.bound <= 1 + 1e-6
            assert (found.lower_K <= slowest_K + 1e-6).all()
            assert (slowest_K <= found.upper_K + 1e-6).all()
            lower_K = np.maximum(found.lower_K, generator.uniform(0.9, 1.0, len(slowest_K)) * slowest_K)
            upper_K = np.minimum(found.upper_K, generator.uniform(1.0, 1.2, len(slowest_K)) * slowest_K)
            admitted_C = found.admitted_C


@pytest.fixture
def wide(make_tables, profile):
    machine = Topology(world_size=8, hardware=profile, local_world_size=4)
    return build_problem(CostModel(make_tables(6), machine, batch_size=64), {})


def prices(wide, floor_K):
    above_CK = np.maximum(wide.largest_load_CK() - floor_K, 0.0)
    rest = (wide.common_C, wide.mean_bytes_C())
    return np.column_stack((wide.mean_load_CK(), above_CK, *rest))


@pytest.mark.parametrize("part", [0.0, 0.3, 2.0])
def test_who_stands_for_a_candidate_is_no_worse(wide, part):
    floor_K = part * wide.largest_load_CK().max(axis=0)
    admitted_C = np.arange(len(wide.type_C)) % 5 != 3
    stands_C = representatives(wide, floor_K, admitted_C)
    assert ((stands_C >= 0) == admitted_C).all()
    mine = np.flatnonzero(admitted_C)
    assert (wide.type_C[stands_C[mine]] == wide.type_C[mine]).all()
    price_CN = prices(wide, floor_K)
    assert (price_CN[stands_C[mine]] <= price_CN[mine]).all()
    assert (stands_C[stands_C[mine]] == stands_C[mine]).all()


def test_fewer_are_left_where_small_pieces_are_alike(wide):
    everything = np.ones(len(wide.type_C), bool)
    largest_K = wide.largest_load_CK().max(axis=0)
    left = [len(np.unique(representatives(wide, part * largest_K, everything))) for part in (0, 0.3, 2)]
    assert left[0] > left[1] > left[2] >= len(np.unique(wide.type_C))


def test_a_restricted_problem_keeps_what_its_candidates_cost(wide):
    keep_C = np.arange(len(wide.type_C)) % 3 != 1
    small = restricted(wide, keep_C)
    assert small.layouts_C == [wide.layouts_C[index] for index in np.flatnonzero(keep_C)]
    for get in ("mean_load_CK", "largest_load_CK", "mean_bytes_C", "ranks_per_piece_C"):
        np.testing.assert_array_equal(getattr(small, get)(), getattr(wide, get)()[keep_C])
    np.testing.assert_array_equal(small.least_load_PK(), wide.least_load_PK()[keep_C[wide.candidate_P]])
    for candidate, old in enumerate(np.flatnonzero(keep_C)):
        assert (small.load_PK[small.pieces(candidate)] == wide.load_PK[wide.pieces(old)]).all()
