import itertools

import numpy as np
import pytest

from meshrec.planner.elements import find_elements
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.slot_sizes import steps_of_sizes, sums_of_sizes
from meshrec.planner.types import Table, Topology

OUTPUT = 2


@pytest.fixture(scope="module")
def problem():
    tables = [Table(name=f"t{i}", num_embeddings=50_000, embedding_dim=128) for i in range(3)]
    machine = Topology(world_size=32, hardware="h100", local_world_size=4)
    return build_problem(CostModel(tables, machine, batch_size=1024), {})


def test_sums_are_what_fits_beside_main_pieces(problem):
    everything = np.ones(len(problem.type_C), bool)
    scale = problem.largest_load_CK()[:, OUTPUT].max()
    elements = find_elements(problem, everything, scale)
    limit = 0.6
    sums = sums_of_sizes(problem, elements, everything, OUTPUT, limit)
    still_P = elements.still_EK[elements.element_P, OUTPUT]
    least_C = [still_P[problem.pieces(index)].min(initial=np.inf) for index in range(len(problem.type_C))]
    main = {least for least in least_C if limit < 2 * least <= 2 * limit}
    small = {
        float(still_P[index])
        for index in range(len(still_P))
        if 2 * least_C[problem.candidate_P[index]] <= limit and still_P[index] > 1e-6
    }
    most = int(limit / min(small))
    sets = itertools.chain(
        *(itertools.combinations_with_replacement(sorted(small), n + 1) for n in range(most))
    )
    expected = {round(a + sum(some), 4) for some in sets for a in main if a + sum(some) <= limit}
    assert main
    assert {round(float(each), 4) for each in sums} == expected
    assert (np.diff(sums) > 0).all()
    # A box that ends there has no room for what the sum is of.
    assert all((np.abs(each - sums) > 1e-6).all() for each in expected)


def test_without_small_pieces_or_main_ones_there_are_none(problem):
    everything = np.ones(len(problem.type_C), bool)
    scale = problem.largest_load_CK()[:, OUTPUT].max()
    elements = find_elements(problem, everything, scale)
    large_C = (problem.largest_load_CK()[:, OUTPUT] > 0.2 * scale) & (problem.ranks_per_piece_C() == 1)
    for some_C in (large_C & problem.sharded_C, ~large_C, ~everything):
        assert not len(sums_of_sizes(problem, elements, some_C, OUTPUT, 0.4))


def test_steps_follow_plateaus_or_make_room_for_two_main_pieces(problem):
    everything = np.ones(len(problem.type_C), bool)
    scale = problem.largest_load_CK()[:, OUTPUT].max()
    elements = find_elements(problem, everything, scale)
    limit = 0.6
    sums = sums_of_sizes(problem, elements, everything, OUTPUT, limit)
    steps = steps_of_sizes(problem, elements, everything, OUTPUT, limit)
    after = {round(b, 5) for a, b in itertools.pairwise(sums) if b > 1.04 * a}
    on_ranks_P = (problem.ranks_per_piece_C() == 1)[problem.candidate_P]
    still_P = elements.still_EK[elements.element_P, OUTPUT]
    twice = {round(2 * still - 3e-6, 5) for still in still_P[on_ranks_P] if 2 * still <= limit}
    assert after
    assert twice
    assert {round(step, 5) for step in steps} == after | twice
