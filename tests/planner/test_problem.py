import numpy as np
import pytest

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.problem import Scope
from meshrec.planner.types import Table, Topology


@pytest.fixture
def problem(profile):
    tables = [Table(name="t", num_embeddings=1000, embedding_dim=96, pooling_factors=(5.0,))]
    topology = Topology(world_size=8, local_world_size=2, hardware=profile)
    return build_problem(CostModel(tables, topology, batch_size=100), {})


def test_means_count_every_rank_that_takes_a_piece(problem):
    for candidate, layout in enumerate(problem.layouts_C):
        pieces = problem.pieces(candidate)
        per_piece = problem.node_size if layout.scope is Scope.NODES else 1
        expected = (problem.load_PK[pieces] * problem.count_P[pieces, None]).sum(axis=0) * per_piece / 8
        np.testing.assert_allclose(problem.mean_load_CK()[candidate], expected, atol=1e-18)
    assert problem.num_nodes == 4


def test_largest_is_the_largest_piece_of_each_candidate(problem):
    largest_CK = problem.largest_load_CK()
    for candidate in range(len(problem.layouts_C)):
        loads = problem.load_PK[problem.pieces(candidate)]
        expected = loads.max(axis=0) if len(loads) else 0
        np.testing.assert_array_equal(largest_CK[candidate], expected)


def test_memory_of_a_copy_counts_on_every_rank(problem):
    copies = [layout.scope is Scope.EVERYWHERE for layout in problem.layouts_C]
    mean_C = problem.mean_bytes_C()
    assert (mean_C[copies] > mean_C[1]).all()
