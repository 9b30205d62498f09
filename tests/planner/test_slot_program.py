import itertools

import numpy as np
import pytest

from meshrec.planner import slot_program
from meshrec.planner.bound import LowerBound
from meshrec.planner.class_program import Box
from meshrec.planner.elements import find_elements
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.highs import Solver
from meshrec.planner.problem import Scope
from meshrec.planner.rank_classes import ClassRelaxation
from meshrec.planner.relaxation import MeanRelaxation
from meshrec.planner.search import Effort, Search
from meshrec.planner.slot_program import SlotProgram, by_split, heaviest_type
from meshrec.planner.state import State
from meshrec.planner.types import Table, Topology

OUTPUT = 2
EFFORT = Effort(time_limit=60.0, max_work=1e8, gap=0.0)


def problem_of(pooling_factors, num_ranks=32):
    tables = [
        Table(name=f"t{i}", num_embeddings=50_000 * (i + 1), embedding_dim=128, pooling_factors=(factor,))
        for i, factor in enumerate(pooling_factors)
    ]
    machine = Topology(world_size=num_ranks, hardware="h100", local_world_size=4)
    return build_problem(CostModel(tables, machine, batch_size=1024), {})


@pytest.fixture(scope="module")
def problem():
    return problem_of((1.0, 2.0, 3.0, 6.0, 10.0, 30.0))


@pytest.fixture(scope="module")
def plans(problem):
    """States of plans with pieces of all sizes, and with few."""
    everything = np.ones(len(problem.type_C), bool)
    coarse = LowerBound(problem, everything, 1.0, coarse=True)
    largest_C = problem.largest_load_CK()[:, OUTPUT]
    found = []
    for part in (1.0, 0.5, 0.3, 0.2):
        some_C = largest_C <= part * largest_C.max()
        for box in (coarse.best_box, coarse.one_size()):
            search = Search(problem, some_C, EFFORT)
            search.start_from(box, some_C)
            state = State(problem, np.ones(problem.load_PK.shape[1]))
            for table, parts in enumerate(search.parts_T):
                state.add(table, parts)
            found.append(state)
    return found


def program_of(problem, lower_K, upper_K, scale, cutoff=1e3):
    everything = np.ones(len(problem.type_C), bool)
    elements = find_elements(problem, everything, scale)
    fits_C = (problem.largest_load_CK() / scale <= upper_K * (1 + 1e-9)).all(axis=1)
    limits = Box(lower_K, upper_K, cutoff)
    return SlotProgram(problem, elements, np.flatnonzero(fits_C), limits, scale=scale)


@pytest.mark.parametrize(("below", "above"), [(0, 0), (0.02, 0.02), (0.1, 0), (0.3, 0.05), (0.01, 0.4)])
def test_every_plan_is_a_solution_of_the_boxes_around_it(problem, plans, below, above):
    served, with_main = 0, 0
    for state in plans:
        slowest_K = state.load_RK.max(axis=0) / state.seconds
        program = program_of(problem, (1 - below) * slowest_K, (1 + above) * slowest_K, state.seconds)
        if program.is_small:
            served += 1
            with_main += len(program._main_M) > 0
            optimum = Solver(program.build(), as_is=True).solve()
            assert optimum.objective <= 1 + 1e-6
            assert optimum.objective >= 1 - 1e-6 - below * slowest_K.sum()
    assert served > len(plans) / 2
    assert with_main


def test_main_pieces_that_are_alike_share_a_class(problem, plans, monkeypatch):
    """Which costs the bound little, and makes the program small."""
    slowest_K = plans[0].load_RK.max(axis=0) / plans[0].seconds
    found = []
    for alike in (-1.0, 0.01, 10.0):
        monkeypatch.setattr(slot_program, "_ALIKE", alike)
        program = program_of(problem, 0.9 * slowest_K, slowest_K, plans[0].seconds)
        linear = program.build()
        found.append((len(np.unique(program._class_M)), len(linear.cost), Solver(linear).solve().objective))
    classes, columns, bounds = zip(*found, strict=True)
    assert len(program._main_M) == classes[0] > classes[1] > classes[2] == 1
    assert columns[0] > columns[1] > columns[2]
    assert bounds[0] - 1e-3 <= bounds[1] <= bounds[0] + 1e-9
    assert bounds[2] <= bounds[1] + 1e-9


def test_what_varies_little_may_be_on_any_rank(problem, plans, monkeypatch):
    """All of it is somewhere: the bound is as good as the mean's."""
    best = min(plans, key=lambda state: state.seconds)
    slowest_K = best.load_RK.max(axis=0) / best.seconds
    found = []
    for little in (0.0, 0.05, 10.0):
        monkeypatch.setattr(slot_program, "_LITTLE", little)
        program = program_of(problem, 0.9 * slowest_K, slowest_K, best.seconds)
        linear = program.build()
        found.append((len(program._split), len(linear.cost), Solver(linear).solve().objective))
    splits, columns, bounds = zip(*found, strict=True)
    assert splits[0] > splits[1] > splits[2] == 0
    assert columns[0] > columns[1] > columns[2]
    assert bounds[0] - 1e-3 <= bounds[1] <= bounds[0] + 1e-9
    everything = np.ones(len(problem.type_C), bool)
    mean = MeanRelaxation(problem, everything, best.seconds)
    assert mean.solve(0.9 * slowest_K, slowest_K, everything, 1e3).bound <= bounds[2] <= bounds[1] + 1e-9


def test_it_knows_more_than_the_mean(problem, plans):
    best = min(plans, key=lambda state: state.seconds)
    slowest_K = best.load_RK.max(axis=0) / best.seconds
    lower_K, upper_K = 0.8 * slowest_K, 1.01 * slowest_K
    everything = np.ones(len(problem.type_C), bool)
    mean = MeanRelaxation(problem, everything, best.seconds).solve(lower_K, upper_K, everything, 1e3)
    optimum = Solver(program_of(problem, lower_K, upper_K, best.seconds).build(), as_is=True).solve()
    assert optimum.objective > mean.bound + 0.005


def test_cuts_of_the_mean_hold_as_well(problem, plans):
    best = min(plans, key=lambda state: state.seconds)
    slowest_K = best.load_RK.max(axis=0) / best.seconds
    lower_K, upper_K = 0.9 * slowest_K, 1.01 * slowest_K
    everything = np.ones(len(problem.type_C), bool)
    mean = MeanRelaxation(problem, everything, best.seconds)
    mean.solve(lower_K, upper_K, everything, 1e3)
    cuts = mean.cuts(lower_K, upper_K)
    assert cuts
    program = program_of(problem, lower_K, upper_K, best.seconds)
    without, with_cuts = (Solver(program.build(some), as_is=True).solve() for some in ([], cuts))
    assert without.objective - 1e-9 <= with_cuts.objective <= 1 + 1e-6


def test_the_error_is_that_of_products(problem, plans):
    """Where T is known, room is ranks times T."""
    slowest_K = plans[0].load_RK.max(axis=0) / plans[0].seconds
    for below in (0.0, 0.4):
        program = program_of(problem, (1 - below) * slowest_K, slowest_K, plans[0].seconds)
        error_K = program.error(Solver(program.build(), as_is=True).solve().x)
        assert (error_K >= 0).all()
        assert (error_K.max() > 1e-3) == (below > 0)


def test_ranks_of_the_heaviest_table_hold_what_is_beside_it_as_well(problem, plans, monkeypatch):
    gains = []
    for state in plans:
        slowest_K = state.load_RK.max(axis=0) / state.seconds
        lower_K = 0.8 * slowest_K
        lower_K[OUTPUT] = slowest_K[OUTPUT]
        program = program_of(problem, lower_K, slowest_K, state.seconds)
        if program.is_small:
            found = Solver(program.build(), as_is=True).solve()
            with monkeypatch.context() as without:
                without.setattr(SlotProgram, "_beside_heaviest", lambda self: None)
                gains.append(found.objective - Solver(program.build(), as_is=True).solve().objective)
    assert min(gains) > -1e-7
    assert max(gains) > 1e-4


def test_main_pieces_exclude_each_other_and_may_be_of_nodes(problem, plans):
    ranks_C = np.zeros(len(problem.type_C))
    each_P = problem.ranks_per_piece_C()[problem.candidate_P]
    np.add.at(ranks_C, problem.candidate_P, problem.count_P * each_P)
    scopes = set()
    for state in plans:
        slowest_K = state.load_RK.max(axis=0) / state.seconds
        program = program_of(problem, slowest_K, slowest_K, state.seconds)
        main = program.candidates[program._main_M]
        assert (2 * program._least_MK[:, OUTPUT] > slowest_K[OUTPUT]).all()
        assert (program._num_ranks_M == ranks_C[main]).all()
        scopes |= {problem.layouts_C[index].scope for index in main}
    assert {Scope.RANKS, Scope.NODES} <= scopes


def test_patterns_are_all_largest_sets_of_sizes(problem, plans):
    for state in plans[:3]:
        slowest_K = state.load_RK.max(axis=0) / state.seconds
        program = program_of(problem, slowest_K, slowest_K, state.seconds)
        limit, size_S = slowest_K[OUTPUT] + 1e-7, program._size_S
        counts = itertools.product(*(range(int(limit / size) + 2) for size in size_S))
        fitting = {count for count in counts if np.dot(count, size_S) <= limit}
        unit_S = np.eye(len(size_S), dtype=int)
        largest = {count for count in fitting if not any(tuple(count + unit) in fitting for unit in unit_S)}
        assert {tuple(pattern) for pattern in program._patterns_BS} == largest


def test_it_suits_few_tables_of_their_own_kinds(problem):
    assert SlotProgram.suits(problem)
    assert not SlotProgram.suits(problem_of((1.0, 2.0), num_ranks=16))
    assert not SlotProgram.suits(problem_of((1.0,) * 40))
    assert not SlotProgram.suits(problem._replace(type_T=np.array([0, 0, 1, 2, 3, 4])))


def test_boxes_are_cut_in_the_largest_phase_first(problem):
    """Until little freedom is left in it; the closer look is with slots then."""
    everything = np.ones(len(problem.type_C), bool)
    scale = LowerBound(problem, everything, 1.0, coarse=True).value * 1.5
    relaxation = ClassRelaxation(problem, everything, scale)
    zeros = np.zeros(problem.load_PK.shape[1])
    wide = relaxation.solve(zeros, zeros + 1.0, everything, 1.0)
    assert not relaxation.is_settled_closely(wide)
    assert (wide.cut_at_K != wide.slowest_K).nonzero()[0].tolist() == [OUTPUT]
    assert wide.lower_K[OUTPUT] < wide.cut_at_K[OUTPUT] < wide.upper_K[OUTPUT]
    lower_K, upper_K = wide.lower_K.copy(), wide.upper_K.copy()
    lower_K[OUTPUT] = upper_K[OUTPUT] = wide.slowest_K[OUTPUT]
    narrow = relaxation.solve(lower_K, upper_K, wide.admitted_C, 1.0)
    assert relaxation.is_settled_closely(narrow)
    assert not narrow.error_K.any()
    closer = relaxation.solve_closely(narrow, 1.0, 60.0)
    assert closer is None or closer.bound >= narrow.bound


def test_boxes_are_divided_by_how_the_heaviest_table_is_split(problem):
    everything = np.ones(len(problem.type_C), bool)
    heaviest = heaviest_type(problem, everything)
    assert heaviest == 5
    parts = by_split(problem, heaviest, everything)
    mine_C = problem.type_C == heaviest
    assert all(part_C[~mine_C].all() for part_C in parts)
    assert (sum(part_C.astype(int) for part_C in parts)[mine_C] == 1).all()
    for part_C in parts:
        layouts = [problem.layouts_C[index] for index in np.flatnonzero(part_C & mine_C)]
        assert len({(layout.scope, len(layout.widths)) for layout in layouts}) == 1
    assert len(by_split(problem, heaviest, parts[0])) == 1


def test_the_bound_stays_below_the_best_plan(problem, plans):
    """And what is proven of all parts together is proven."""
    best = min(state.seconds for state in plans)
    everything = np.ones(len(problem.type_C), bool)
    for part, is_proven in ((0.8, True), (1.0001, False)):
        bound = LowerBound(problem, everything, best, part * best)
        while bound.num_solves < 200 and bound.branch():
            pass
        assert bound.is_proven == is_proven
        assert bound.value <= best * (1 + 1e-5)
