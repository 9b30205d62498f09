import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.planner.cuts import Rounding
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.problem import Scope
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


def placed(problem, candidate, generator):
    """Loads [R, K] of a table on random places, its rows or columns cut unevenly."""
    load_RK = np.zeros((problem.num_ranks, problem.load_PK.shape[1]))
    layout = problem.layouts_C[candidate]
    span = problem.node_size if layout.scope is Scope.NODES else 1
    pieces = problem.pieces(candidate)
    groups = np.repeat(np.arange(pieces.start, pieces.stop), problem.count_P[pieces])
    places = generator.permutation(problem.num_ranks // span)[: len(groups)]
    rank_N = (places[:, None] * span + np.arange(span)).ravel()
    group_N = np.repeat(groups, span)
    amount_N = np.ones(len(rank_N))
    if layout.row_parts * span > 1:
        amount_N = generator.dirichlet(np.ones(len(rank_N))) * len(rank_N)
        amount_N = amount_N.reshape(len(layout.widths), -1)
        amount_N = (amount_N / amount_N.mean(axis=1, keepdims=True)).ravel()
        order = np.argsort(np.repeat(np.arange(len(layout.widths)), layout.row_parts * span), kind="stable")
        amount_N = amount_N[order]
    elif len(layout.widths) > 1:
        width_N = problem.width_P[group_N].astype(float)
        least = problem.min_partition_Y[problem.type_C[candidate]]
        spare = width_N.sum() - least * len(width_N)
        amount_N = (least + generator.dirichlet(np.ones(len(width_N))) * spare) / width_N
    fixed_NK = problem.fixed_PK[group_N]
    np.add.at(load_RK, rank_N, fixed_NK + amount_N[:, None] * (problem.load_PK[group_N] - fixed_NK))
    return load_RK


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([(4, 4), (4, 2), (6, 3)]))
def test_no_plan_violates_a_cut_of_its_box(make_tables, profile, seed, num_tables, ranks):
    """Cuts that some other choice of candidates violates hold for any plan, uneven cuts and all."""
    generator = np.random.default_rng(seed)
    problem = problem_of(
        make_tables(num_tables, seed % 997), profile, None, ranks[0], local_world_size=ranks[1]
    )
    candidate_T = [generator.choice(np.flatnonzero(problem.type_C == kind)) for kind in problem.type_T]
    load_RK = sum(placed(problem, candidate, generator) for candidate in candidate_T)
    scale = load_RK.max(axis=0).sum() + 1e-9
    upper_K = load_RK.max(axis=0) / scale * generator.uniform(1.0, 1.1)
    share_C = np.bincount(candidate_T, minlength=len(problem.type_C)).astype(float)
    other_C = generator.uniform(0, 3, len(share_C))
    for cut in Rounding(problem, scale).violated(other_C, upper_K, np.ones(len(share_C), bool)):
        assert cut.value_N @ share_C[cut.candidate_N] <= cut.limit * (1 + 1e-6)


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
