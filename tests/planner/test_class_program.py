import numpy as np
import pytest

from meshrec.planner.class_program import Box, Classes, ClassProgram
from meshrec.planner.elements import find_elements
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.highs import Solver
from meshrec.planner.types import ParameterConstraints, Table, Topology


@pytest.fixture
def solver_of(profile):
    """Three equal tables, whole, on three ranks; ranks with and without a table are told apart."""

    def build(box):
        tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(3)]
        constraints = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
        machine = Topology(world_size=3, hardware=profile)
        problem = build_problem(CostModel(tables, machine, batch_size=64), constraints)
        scale = float(problem.load_PK[0].sum())
        elements = find_elements(problem, np.ones(1, bool), scale)
        one_K = elements.still_EK[0]
        heavy_HG = np.array([[0], [1], [2]])
        classes = Classes(np.array([0]), heavy_HG, heavy_HG * one_K, np.array([3.0, 3.0, 1.0]))
        lower, upper, cutoff = box
        limits = Box(lower * one_K, upper * one_K, cutoff)
        program = ClassProgram(problem, elements, np.array([0]), classes, limits, scale=scale)
        return program, Solver(program.build())

    return build


def test_a_rank_each_takes_one_table(solver_of):
    program, solver = solver_of((1.0, 2.0, 5.0))
    found = solver.solve()
    assert found.objective == pytest.approx(1.0)
    np.testing.assert_allclose(found.x[program.first_class : program.first_light], [0, 3, 0], atol=1e-6)


def test_whole_numbers_are_ranks_and_tables(solver_of):
    program, solver = solver_of((1.5, 3.0, 5.0))
    assert program.integer()[: program.first_light].all()
    assert not program.integer()[program.first_load :].any()
    assert solver.solve_whole(program.integer(), 10.0) == pytest.approx(1.5)
    assert len(program.integer()) == program.num_columns


def test_nothing_is_cheaper_than_the_cutoff(solver_of):
    assert solver_of((1.5, 2.0, 1.4))[1].solve() is None


def test_cuts_leave_no_parts_of_tables(profile):
    """Three equal tables on two ranks with room for 1.6 each: the program cuts one in two, a cut says one
    each."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(3)]
    constraints = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
    machine = Topology(world_size=2, hardware=profile)
    problem = build_problem(CostModel(tables, machine, batch_size=64), constraints)
    scale = float(problem.load_PK[0].sum())
    elements = find_elements(problem, np.ones(1, bool), scale)
    one_K = elements.still_EK[0]
    classes = Classes(np.zeros(0, int), np.zeros((1, 0), int), 0 * one_K[None], np.array([2.0]))
    for room, is_cut in ((1.6, True), (2.0, False)):
        box = Box(0 * one_K, room * one_K, 5.0)
        program = ClassProgram(problem, elements, np.array([0]), classes, box, scale=scale)
        solver = Solver(program.build())
        rows = program.cuts(solver.solve().x, 10)
        assert (rows is not None) == is_cut
        if rows is not None:
            solver.add_rows(rows)
            assert solver.solve() is None
