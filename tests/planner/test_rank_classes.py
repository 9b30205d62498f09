import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.highs import INFINITY, Optimum, Solver
from meshrec.planner.problem import Scope
from meshrec.planner.rank_classes import ClassRelaxation
from meshrec.planner.rank_program import RankProgram
from meshrec.planner.relaxation import MeanRelaxation
from meshrec.planner.state import Parts, State
from meshrec.planner.types import ParameterConstraints, Table, Topology


def problem_of(tables, profile, kinds, num_ranks, **topology):
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=num_ranks, hardware=profile, **topology)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints)


def both(problem, lower_K, upper_K, cutoff=1e3):
    everything = np.ones(len(problem.type_C), bool)
    assert ClassRelaxation.serves(problem)
    classes = ClassRelaxation(problem, everything, 1.0)
    mean = MeanRelaxation(problem, everything, 1.0, root=True)
    limits = (lower_K, upper_K, everything, cutoff)
    return classes.solve(*limits), mean.solve(*limits)


def test_heavy_tables_do_not_share_a_rank(profile):
    """Three tables on two ranks with room for one each."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=64) for i in range(3)]
    problem = problem_of(tables, profile, ["table_wise"], 2)
    largest = problem.load_PK[0]
    classes, _ = both(problem, 0 * largest, 1.8 * largest)
    assert classes is None


def test_a_rank_with_a_heavy_table_has_little_room(profile):
    """One heavy table and light ones: the ranks' loads are even only at the mean; in a narrow box of that,
    the relaxation knows where the room is."""
    tables = [Table(name="big", num_embeddings=10**6, embedding_dim=8, pooling_factors=(40.0,))]
    tables += [Table(name=f"t{i}", num_embeddings=100, embedding_dim=128) for i in range(3)]
    problem = problem_of(tables, profile, ["table_wise"], 4)
    by_table = problem.load_PK[problem.piece_start_C[:-1]]
    upper_K = by_table.max(axis=0) * 1.01
    classes, mean = both(problem, 0 * upper_K, upper_K)
    assert classes.bound >= mean.bound - 1e-12
    assert classes.share_C.sum() == pytest.approx(4)


def test_a_program_that_cannot_be_solved_leaves_the_mean(make_tables, profile, monkeypatch):
    problem = problem_of(make_tables(5, 0), profile, ["table_wise", "row_wise"], 4)
    upper_K = np.maximum(1.2 * problem.largest_load_CK().max(axis=0), 1e-9)
    failed = Optimum(-INFINITY, np.zeros(1), np.zeros(1))
    monkeypatch.setattr(ClassRelaxation, "_optimum", lambda *_: (failed, None))
    classes, _ = both(problem, np.zeros(len(upper_K)), upper_K)
    assert classes.bound > 0
    assert classes.share_C.sum() == pytest.approx(5)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_at_least_as_tight_as_the_mean(make_tables, profile, seed):
    tables = make_tables(5, seed)
    problem = problem_of(tables, profile, ["table_wise", "row_wise", "column_wise"], 4, local_world_size=2)
    upper_K = np.maximum(1.2 * problem.largest_load_CK().max(axis=0), 1e-9)
    classes, mean = both(problem, np.zeros(len(upper_K)), upper_K)
    assert classes.bound >= mean.bound * (1 - 1e-6)


def test_one_unit_decides_the_grid(profile):
    """Whole tables of 32 and 64 columns take one or two units of the output; a limit of 1.9 units is one."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32 * (1 + i % 2)) for i in range(4)]
    problem = problem_of(tables, profile, ["table_wise"], 8)
    scale = 10 * float(problem.load_PK.max())
    everything = np.ones(len(problem.type_C), bool)
    relaxation = ClassRelaxation(problem, everything, scale)
    phase = int(problem.load_PK.max(axis=0).argmax())
    unit = problem.load_PK[:, phase].min() / scale
    assert np.diff(relaxation.grid_K[phase][:5]) == pytest.approx(unit)
    upper_K = np.full(len(relaxation.grid_K), 1.0)
    upper_K[phase] = 2.9 * unit
    found = relaxation.solve(0 * upper_K, upper_K, everything, 10.0)
    assert found.upper_K[phase] == pytest.approx(2 * unit, rel=1e-5)
    upper_K[phase] = 1.9 * unit
    assert relaxation.solve(0 * upper_K, upper_K, everything, 10.0) is None


def test_parts_of_a_split_table_need_its_presence(profile):
    """A table in two parts puts its outputs on two ranks whole, so four ranks are not all as loaded as the
    mean says."""
    tables = [Table(name="t", num_embeddings=1000, embedding_dim=64, pooling_factors=(30.0,))]
    problem = problem_of(tables, profile, ["row_wise"], 4)
    upper_K = 1.01 * problem.largest_load_CK().max(axis=0)
    classes, mean = both(problem, 0 * upper_K, upper_K)
    assert classes.bound >= mean.bound


def any_parts(problem, kind, generator):
    """A table of a type, split and placed at random, rows or columns cut unevenly."""
    candidate = int(generator.choice(np.flatnonzero(problem.type_C == kind)))
    layout = problem.layouts_C[candidate]
    span = problem.node_size if layout.scope is Scope.NODES else 1
    groups = range(*problem.pieces(candidate).indices(len(problem.candidate_P)))
    group_N = np.array([group for group in groups for _ in range(problem.count_P[group])], np.int64)
    places = generator.permutation(problem.num_ranks // span)[: len(group_N)]
    rank_N = (places[:, None] * span + np.arange(span)).ravel().astype(np.int64)
    amount_N = np.ones(len(rank_N))
    length = layout.row_parts * span
    if length > 1:
        amount_N = generator.uniform(0.1, 1.0, len(rank_N)).reshape(-1, length)
        amount_N = (amount_N / amount_N.mean(axis=1, keepdims=True)).ravel()
    elif len(layout.widths) > 1:
        width_N = problem.width_P[group_N]
        least = problem.min_partition_Y[kind]
        more_N = generator.dirichlet(np.ones(len(width_N))) * (width_N.sum() - least * len(width_N))
        amount_N = (least + more_N) / width_N
    return Parts(candidate, np.repeat(group_N, span), rank_N, amount_N)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from([(4, 4), (4, 2), (6, 3)]), st.booleans())
@example(4552, 2, (4, 4), False)
def test_no_plan_of_the_box_is_left_out(make_tables, profile, seed, num_tables, ranks, twins):
    """Any plan, uneven cuts and all, costs the bound at least, and stays in the narrowed box."""
    generator = np.random.default_rng(seed)
    tables = make_tables(num_tables, seed % 997)
    if twins:
        tables += [Table(**{**vars(table), "name": table.name + "twin"}) for table in tables]
    kinds = ["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"]
    kinds = list(generator.permutation(kinds))[: int(generator.integers(2, 6))]
    kinds = kinds if {"table_wise", "row_wise", "data_parallel"} & set(kinds) else [*kinds, "table_wise"]
    problem = problem_of(tables, profile, kinds, ranks[0], local_world_size=ranks[1])
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    for table, kind in enumerate(problem.type_T):
        state.add(table, any_parts(problem, kind, generator))
    scale = state.seconds
    slowest_K = state.load_RK.max(axis=0) / scale
    lower_K = slowest_K * generator.uniform(0.5, 1.0)
    upper_K = slowest_K + generator.uniform(0, 0.3)
    everything = np.ones(len(problem.type_C), bool)
    for relaxation in (
        ClassRelaxation(problem, everything, scale),
        MeanRelaxation(problem, everything, scale),
    ):
        found = relaxation.solve(lower_K, upper_K, everything, 1 + 1e-6)
        assert found is not None
        assert found.bound <= 1 + 1e-6
        assert (found.lower_K <= slowest_K + 1e-6).all()
        assert (slowest_K <= found.upper_K + 1e-6).all()
        assert found.admitted_C[[parts.candidate for parts in state.parts_T]].all()
        for serves in (RankProgram.serves, lambda *_: False):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RankProgram, "serves", serves)
                closer = relaxation.solve_closely(found, 1 + 1e-6, 10.0)
            assert closer is not None
            assert closer.bound <= 1 + 1e-6
        # What a box's program left over makes its parts neither better nor worse.
        middle_K = (found.lower_K + found.upper_K) / 2
        for limits in ((found.lower_K, middle_K), (middle_K, found.upper_K)):
            parts = [
                relaxation.solve(*limits, found.admitted_C, 1 + 1e-6, start) for start in (None, found.start)
            ]
            assert (parts[0] is None) == (parts[1] is None)
            if parts[0] is not None:
                assert parts[0].bound == pytest.approx(parts[1].bound, rel=1e-5)


def test_whole_numbers_know_that_five_tables_need_two_ranks(profile):
    """Five equal tables on four ranks, box [1, 2] tables: the mean says 1.25, whole numbers say two."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(5)]
    problem = problem_of(tables, profile, ["table_wise"], 4)
    one_K = problem.load_PK[0]
    scale = 2 * one_K.sum()
    everything = np.ones(len(problem.type_C), bool)
    relaxation = ClassRelaxation(problem, everything, scale)
    lower_K, upper_K = one_K / scale, 1.99 * one_K / scale
    assert relaxation.solve(lower_K, upper_K, everything, 1.0) is None
    assert relaxation.solve(lower_K, 2 * one_K / scale, everything, 1.0 + 1e-6).bound <= 1.0 + 1e-6
    assert relaxation.work > 0


def test_a_closer_look_has_its_time(make_tables, profile, monkeypatch):
    """The classes' program may not take longer; the first look at a box takes what it takes."""
    problem = problem_of(make_tables(6, 1), profile, ["table_wise", "row_wise"], 4)
    everything, upper_K = np.ones(len(problem.type_C), bool), np.ones(problem.load_PK.shape[1])
    scale, limits = float(problem.load_PK.sum()), []
    set_time = Solver.set_time
    monkeypatch.setattr(
        Solver, "set_time", lambda self, seconds: limits.append(seconds) or set_time(self, seconds)
    )
    monkeypatch.setattr(RankProgram, "serves", lambda *_: False)
    relaxation = ClassRelaxation(problem, everything, scale)
    found = relaxation.solve(0 * upper_K, upper_K, everything, 10.0)
    relaxation.solve_closely(found, 10.0, 7.5)
    assert limits == [INFINITY, 7.5]
