import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.planner.cuts import LargestPieces, Rounding
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.types import ParameterConstraints, Table, Topology


def problem_of(tables, profile, kinds, num_ranks, **topology):
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=num_ranks, hardware=profile, **topology)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints)


def test_half_a_unit_of_room_is_none(profile):
    """Five equal tables on two ranks with room for 2.6 each: 5.2 in all, but each rank holds two."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(5)]
    problem = problem_of(tables, profile, ["table_wise"], 2)
    one_K, everything = problem.load_PK[0], np.ones(1, bool)
    rounding = Rounding(problem, 1e-3)
    found = rounding.violated(np.array([5.0]), 2.6 * one_K / 1e-3, everything)
    assert {cut.phase for cut in found} == set(np.flatnonzero(one_K))
    assert all(5.0 * cut.value_N[0] > cut.limit for cut in found)
    assert all(4.0 * cut.value_N[0] <= cut.limit + 1e-9 for cut in found)
    assert not rounding.violated(np.array([4.0]), 2.6 * one_K / 1e-3, everything)
    assert not rounding.violated(np.array([5.0]), 3.0 * one_K / 1e-3, everything)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([(4, 4), (4, 2), (6, 3)]))
def test_no_plan_violates_a_cut_of_its_box(make_tables, profile, placed_unevenly, seed, num_tables, ranks):
    """Cuts that some other choice of candidates violates hold for any plan, uneven cuts and all."""
    generator = np.random.default_rng(seed)
    problem = problem_of(
        make_tables(num_tables, seed % 997), profile, None, ranks[0], local_world_size=ranks[1]
    )
    candidate_T = [generator.choice(np.flatnonzero(problem.type_C == kind)) for kind in problem.type_T]
    load_RK = sum(placed_unevenly(problem, candidate, generator) for candidate in candidate_T)
    scale = load_RK.max(axis=0).sum() + 1e-9
    upper_K = load_RK.max(axis=0) / scale * generator.uniform(1.0, 1.1)
    num_tables_C = np.bincount(candidate_T, minlength=len(problem.type_C)).astype(float)
    other_C = generator.uniform(0, 3, len(num_tables_C))
    rounding = Rounding(problem, scale)
    for cut in rounding.violated(other_C, upper_K, np.ones(len(num_tables_C), bool)):
        assert cut.value_N @ num_tables_C[cut.candidate_N] <= cut.limit * (1 + 1e-6)


def test_least_loads_keep_the_least_columns(profile):
    """Two parts of 64 columns may shrink to 32 each, four parts not at all, and rows to nothing."""
    tables = [Table(name="t", num_embeddings=1000, embedding_dim=128)]
    problem = problem_of(tables, profile, ["column_wise", "row_wise", "table_wise"], 4)
    shares = {}
    for piece, candidate in enumerate(problem.candidate_P):
        layout = problem.layouts_C[candidate]
        varying_K = problem.load_PK[piece] - problem.fixed_PK[piece]
        least_K = problem.least_load_PK()[piece] - problem.fixed_PK[piece]
        shares[(len(layout.widths), layout.row_parts)] = least_K.sum() / max(varying_K.sum(), 1e-30)
    assert shares[(2, 1)] == pytest.approx(0.5)
    assert shares[(4, 1)] == pytest.approx(1.0)
    assert shares[(1, 2)] == pytest.approx(0.0)


def value(cut, num_tables_C, slowest_K):
    return cut.value_N @ num_tables_C[cut.candidate_N] + cut.slope * slowest_K[cut.phase]


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
    num_tables_C = np.bincount(chosen_T, minlength=len(problem.type_C)).astype(float)
    slowest_K = problem.largest_load_CK()[chosen_T].max(axis=0)
    lower_K = slowest_K * generator.uniform(0, 1, len(slowest_K))
    mixed_C = generator.dirichlet(np.full(len(num_tables_C), 0.3)) * len(tables)
    everything = np.ones(len(num_tables_C), bool)
    found = LargestPieces(problem, 1.0).violated(mixed_C, lower_K * 1.01, lower_K, everything)
    for cut in found:
        assert value(cut, mixed_C, lower_K * 1.01) > cut.limit
        assert value(cut, num_tables_C, slowest_K) <= cut.limit + 1e-12 + 1e-9 * slowest_K.sum()
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
    pieces, num_tables_C, everything = LargestPieces(problem, 1.0), np.array([0.5, 0.5]), np.ones(2, bool)
    for lower_K in (0 * small_K, (small_K + large_K) / 2):
        expected_K = (np.maximum(small_K, lower_K) + large_K) / 2
        found = pieces.violated(num_tables_C, 0.97 * expected_K, lower_K, everything)
        assert set(differs) <= {cut.phase for cut in found}
        assert not pieces.violated(num_tables_C, 1.001 * expected_K, lower_K, everything)
