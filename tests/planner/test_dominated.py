import numpy as np
import pytest

from meshrec.planner.dominated import representatives, restricted
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.types import Topology


@pytest.fixture
def problem(make_tables, profile):
    machine = Topology(world_size=8, hardware=profile, local_world_size=4)
    return build_problem(CostModel(make_tables(6), machine, batch_size=64), {})


def prices(problem, floor_K):
    above_CK = np.maximum(problem.largest_load_CK() - floor_K, 0.0)
    rest = (problem.common_C, problem.mean_bytes_C())
    return np.column_stack((problem.mean_load_CK(), above_CK, *rest))


@pytest.mark.parametrize("part", [0.0, 0.3, 2.0])
def test_who_stands_for_a_candidate_is_no_worse(problem, part):
    floor_K = part * problem.largest_load_CK().max(axis=0)
    admitted_C = np.arange(len(problem.type_C)) % 5 != 3
    stands_C = representatives(problem, floor_K, admitted_C)
    assert ((stands_C >= 0) == admitted_C).all()
    mine = np.flatnonzero(admitted_C)
    assert (problem.type_C[stands_C[mine]] == problem.type_C[mine]).all()
    price_CN = prices(problem, floor_K)
    assert (price_CN[stands_C[mine]] <= price_CN[mine]).all()
    assert (stands_C[stands_C[mine]] == stands_C[mine]).all()


def test_fewer_are_left_where_small_pieces_are_alike(problem):
    everything = np.ones(len(problem.type_C), bool)
    largest_K = problem.largest_load_CK().max(axis=0)
    left = [len(np.unique(representatives(problem, part * largest_K, everything))) for part in (0, 0.3, 2)]
    assert left[0] > left[1] > left[2] >= len(np.unique(problem.type_C))


def test_a_restricted_problem_keeps_what_its_candidates_cost(problem):
    keep_C = np.arange(len(problem.type_C)) % 3 != 1
    small = restricted(problem, keep_C)
    assert small.layouts_C == [problem.layouts_C[index] for index in np.flatnonzero(keep_C)]
    for get in ("mean_load_CK", "largest_load_CK", "mean_bytes_C", "ranks_per_piece_C"):
        np.testing.assert_array_equal(getattr(small, get)(), getattr(problem, get)()[keep_C])
    np.testing.assert_array_equal(small.least_load_PK(), problem.least_load_PK()[keep_C[problem.candidate_P]])
    for candidate, old in enumerate(np.flatnonzero(keep_C)):
        assert (small.load_PK[small.pieces(candidate)] == problem.load_PK[problem.pieces(old)]).all()
