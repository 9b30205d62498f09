import numpy as np
import pytest

from meshrec.planner.elements import find_elements, on_grid
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.types import ParameterConstraints, Table, Topology


def elements_of(profile, kinds, **topology):
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32 * (1 + i % 2)) for i in range(4)]
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=8, hardware=profile, **topology)
    problem = build_problem(CostModel(tables, machine, batch_size=64), constraints)
    return problem, find_elements(problem, np.ones(len(problem.type_C), bool), 1.0)


def test_whole_tables_are_elements_on_a_grid(profile):
    problem, elements = elements_of(profile, ["table_wise"])
    phase = int(elements.unit_K.argmax())
    assert elements.is_grid
    assert len(elements.still_EK) == 2
    assert len(elements.varying_VK) == 0
    assert elements.unit_K[phase] == pytest.approx(problem.load_PK[:, phase].min())


def test_parts_are_what_stays_and_what_varies(profile):
    """An element for each piece, and all of them together are the piece's load."""
    problem, elements = elements_of(profile, ["table_wise", "row_wise"])
    total_PK = elements.count_P[:, None] * elements.still_EK[elements.element_P]
    split = elements.varying_P >= 0
    total_PK[split] += elements.varying_VK[elements.varying_P[split]]
    np.testing.assert_allclose(total_PK, elements.count_P[:, None] * problem.load_PK, atol=1e-15)
    assert elements.is_grid  # the outputs of a part of the rows are those of the whole table


def test_parts_summed_in_their_node_are_off_the_grid(profile):
    _, elements = elements_of(profile, ["table_wise", "table_row_wise"], local_world_size=4)
    assert not elements.is_grid
    assert np.nanmax(elements.steps_E) >= 1
    lower_K = np.full(len(elements.unit_K), 0.1)
    assert on_grid(elements, lower_K, 2 * lower_K)[0] is lower_K


def test_a_box_is_rounded_to_the_grid(profile):
    _, elements = elements_of(profile, ["table_wise"])
    phase = int(elements.unit_K.argmax())
    unit = elements.unit_K[phase]
    lower_K, upper_K = np.full(len(elements.unit_K), 1.5 * unit), np.full(len(elements.unit_K), 3.5 * unit)
    up_K, down_K = on_grid(elements, lower_K, upper_K)
    assert up_K[phase] == pytest.approx(2 * unit)
    assert down_K[phase] == pytest.approx(3 * unit)
    assert np.delete(up_K, phase) == pytest.approx(np.delete(lower_K, phase))
