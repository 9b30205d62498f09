import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.largest import LargestPieces
from meshrec.planner.types import ParameterConstraints, Table, Topology


def value(cut, share_C, slowest_K):
    return cut.value_N @ share_C[cut.candidate_N] + cut.slope * slowest_K[cut.phase]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12))
def test_no_choice_violates_a_row(make_tables, profile, seed, num_tables):
    """Rows that a mixture of candidates violates hold for whole tables and their largest piece."""
    generator = np.random.default_rng(seed)
    machine = Topology(world_size=4, local_world_size=2, hardware=profile)
    tables = make_tables(num_tables, seed % 997)
    tables += [tables[0].__class__(**{**vars(tables[0]), "name": "twin"})]
    problem = build_problem(CostModel(tables, machine, batch_size=64), {})
    chosen_T = [generator.choice(np.flatnonzero(problem.type_C == kind)) for kind in problem.type_T]
    share_C = np.bincount(chosen_T, minlength=len(problem.type_C)).astype(float)
    slowest_K = problem.largest_load_CK()[chosen_T].max(axis=0)
    lower_K = slowest_K * generator.uniform(0, 1, len(slowest_K))
    mixed_C = generator.dirichlet(np.full(len(share_C), 0.3)) * len(tables)
    everything = np.ones(len(share_C), bool)
    found = LargestPieces(problem, 1.0).violated(mixed_C, lower_K * 1.01, lower_K, everything)
    for cut in found:
        assert value(cut, mixed_C, lower_K * 1.01) > cut.limit
        assert value(cut, share_C, slowest_K) <= cut.limit + 1e-12 + 1e-9 * slowest_K.sum()
        assert cut.holds(lower_K, lower_K + 1)
        assert not cut.holds(lower_K - 1, lower_K)


def test_half_of_a_large_piece_is_more_than_half_of_it(profile):
    """Of a table that is half whole and half in two, T is the mean of the largest pieces; where T is known to
    be more than the smaller one, that takes its place."""
    tables = [Table(name="t", num_embeddings=1000, embedding_dim=64)]
    constraints = {"t": ParameterConstraints(sharding_types=["table_wise", "row_wise"])}
    machine = Topology(world_size=2, hardware=profile)
    problem = build_problem(CostModel(tables, machine, batch_size=64), constraints)
    small_K, large_K = np.sort(problem.largest_load_CK(), axis=0)
    differs = np.flatnonzero(large_K > 1.5 * small_K)
    pieces, share_C, everything = LargestPieces(problem, 1.0), np.array([0.5, 0.5]), np.ones(2, bool)
    for lower_K in (0 * small_K, (small_K + large_K) / 2):
        expected_K = (np.maximum(small_K, lower_K) + large_K) / 2
        found = pieces.violated(share_C, 0.97 * expected_K, lower_K, everything)
        assert set(differs) <= {cut.phase for cut in found}
        assert not pieces.violated(share_C, 1.001 * expected_K, lower_K, everything)
