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


def test_the_error_is_that_of_products(solver_of):
    """Where T is known, room is ranks times T."""
    for lower, upper in ((1.5, 1.5), (1.5, 3.0)):
        program, solver = solver_of((lower, upper, 5.0))
        x = solver.solve().x
        error_K = program.error(x)
        assert (error_K >= 0).all()
        if lower == upper:
            np.testing.assert_allclose(error_K, 0, atol=1e-6)
        x[program.first_load] += 1.0
        assert program.error(x)[0] == pytest.approx(error_K[0] + 1.0, abs=1e-6) or upper > lower


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
        cuts = program.cuts(solver.solve().x, 10)
        assert bool(cuts) == is_cut
        if cuts:
            rows, found = program.rows([*cuts, cuts[0]._replace(name=1)])
            assert found == cuts
            solver.add_rows(rows)
            assert solver.solve() is None


def test_variables_and_rows_have_their_own_keys(solver_of):
    program, solver = solver_of((1.5, 2.0, 5.0))
    key_N = program.keys([])
    assert len(np.unique(key_N)) == len(key_N)
    solver.solve()
    assert len(key_N) == len(solver.basis())


def test_a_node_takes_the_whole_of_its_tables(profile):
    """Two tables by nodes, on two nodes: what varies is each node's own, however unlike their ranks are."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(2)]
    constraints = {table.name: ParameterConstraints(sharding_types=["table_row_wise"]) for table in tables}
    machine = Topology(world_size=4, local_world_size=2, hardware=profile)
    problem = build_problem(CostModel(tables, machine, batch_size=64), constraints)
    scale = 2 * float(problem.load_PK[0].sum())
    elements = find_elements(problem, np.ones(1, bool), scale)
    heavy_HG = np.array([[0], [1], [2]])
    still_K = elements.still_EK[0]
    classes = Classes(np.array([0]), heavy_HG, heavy_HG * still_K, np.array([4.0, 4.0, 2.0]))
    box = Box(np.zeros(len(still_K)), np.ones(len(still_K)), 5.0)
    program = ClassProgram(problem, elements, np.array([0]), classes, box, scale=scale)
    x = Solver(program.build()).solve().x
    ranks_H, nodes_S = np.split(x[program.first_class : program.first_light], [3])
    np.testing.assert_allclose(ranks_H, 2 * nodes_S, atol=1e-6)
    share_H = x[program.first_light : program.first_load]
    np.testing.assert_allclose(share_H, nodes_S * [0, 1, 2], atol=1e-6)


def test_a_rank_takes_as_much_of_a_table_as_it_has_room_for(profile):
    """A table in two parts of its rows needs room for half of it on either rank."""
    constraints = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    table = Table(name="t", num_embeddings=1000, embedding_dim=32, pooling_factors=(100.0,))
    machine = Topology(world_size=2, hardware=profile)
    problem = build_problem(CostModel([table], machine, batch_size=64), constraints)
    scale = float(problem.load_PK[0].sum())
    elements = find_elements(problem, np.ones(1, bool), scale)
    none = Classes(np.zeros(0, int), np.zeros((1, 0), int), 0 * elements.still_EK[:1], np.array([2.0]))
    for room, fits in ((1.0, True), (0.99, False)):
        upper_K = room * problem.load_PK[0] / scale
        program = ClassProgram(
            problem, elements, np.array([0]), none, Box(0 * upper_K, upper_K, 5.0), scale=scale
        )
        assert (Solver(program.build()).solve() is not None) == fits
