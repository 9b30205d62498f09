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
    scale = 2 * float(problem.load_PK.max())
    return problem, scale, find_elements(problem, np.ones(len(problem.type_C), bool), scale)


def test_whole_tables_are_elements_on_a_grid(profile):
    problem, scale, elements = elements_of(profile, ["table_wise"])
    phase = int(problem.load_PK.max(axis=0).argmax())
    unit = problem.load_PK[:, phase].min() / scale
    assert len(elements.still_EK) == 2
    assert len(elements.varying_VK) == 0
    np.testing.assert_allclose(np.diff(elements.grid_K[phase][:5]), unit)


def test_parts_are_what_stays_and_what_varies(profile):
    """An element for each piece, and all of them together are the piece's load."""
    problem, scale, elements = elements_of(profile, ["table_wise", "row_wise"])
    total_PK = elements.count_P[:, None] * elements.still_EK[elements.element_P]
    split = elements.varying_P >= 0
    total_PK[split] += elements.uses_P[split, None] * elements.varying_VK[elements.varying_P[split]]
    np.testing.assert_allclose(scale * total_PK, elements.count_P[:, None] * problem.load_PK, atol=1e-15)
    # The outputs of a part of the rows are those of the whole table; its ids are not.
    assert any(len(grid) > 0 for grid in elements.grid_K)
    assert any(len(grid) == 0 for grid in elements.grid_K)


def test_parts_of_columns_have_their_fewest(profile):
    """64 columns in two parts of 32 at least cannot be cut otherwise; with 16 at least, half of it can."""
    for least, part in ((32, 1.0), (16, 0.5)):
        table = Table(name="t", num_embeddings=1000, embedding_dim=64)
        kinds = ParameterConstraints(sharding_types=["column_wise"], min_partition=least)
        machine = Topology(world_size=2, hardware=profile)
        problem = build_problem(CostModel([table], machine, batch_size=64), {"t": kinds})
        allowed_C = np.array([len(layout.widths) == 2 for layout in problem.layouts_C])
        elements = find_elements(problem, allowed_C, 1.0)
        piece = int(np.flatnonzero(allowed_C[problem.candidate_P])[0])
        still_K = elements.still_EK[elements.element_P[piece]]
        load_K, fixed_K = problem.load_PK[piece], problem.fixed_PK[piece]
        np.testing.assert_allclose(still_K, fixed_K + part * (load_K - fixed_K))
        assert (elements.varying_P[piece] >= 0) == (part < 1)


def test_parts_summed_in_their_node_are_on_a_finer_grid(profile):
    """Sums of two sizes, whole tables' and their parts'."""
    problem, _, whole = elements_of(profile, ["table_wise"], local_world_size=4)
    both = elements_of(profile, ["table_wise", "table_row_wise"], local_world_size=4)[2]
    phase = int(problem.load_PK.max(axis=0).argmax())
    assert len(both.grid_K[phase]) > len(whole.grid_K[phase]) > 0


def test_a_node_holds_what_varies_of_its_part(profile):
    """The ranks of a node share a table's rows, or those of a part of its columns."""
    kinds = ["table_row_wise", "grid_shard", "row_wise"]
    problem, scale, elements = elements_of(profile, kinds, local_world_size=4)
    in_node_P = elements.in_node_E[elements.element_P]
    one_node_C = np.array([layout.by_nodes and layout.row_parts == 1 for layout in problem.layouts_C])
    np.testing.assert_array_equal(in_node_P, one_node_C[problem.candidate_P])
    assert 0 < in_node_P.sum() < len(in_node_P)
    np.testing.assert_array_equal(elements.uses_P[in_node_P], problem.count_P[in_node_P])
    for piece in np.flatnonzero(in_node_P):
        varies_K = problem.load_PK[piece] / scale - elements.still_EK[elements.element_P[piece]]
        np.testing.assert_allclose(elements.varying_VK[elements.varying_P[piece]], 4 * varies_K)


def test_a_box_is_rounded_to_the_grid(profile):
    problem, scale, elements = elements_of(profile, ["table_wise"])
    phase = int(problem.load_PK.max(axis=0).argmax())
    unit = problem.load_PK[:, phase].min() / scale
    lower_K, upper_K = np.full(len(elements.grid_K), 1.5 * unit), np.full(len(elements.grid_K), 3.5 * unit)
    up_K, down_K = on_grid(elements, lower_K, upper_K)
    assert up_K[phase] == pytest.approx(2 * unit, rel=1e-5)
    assert down_K[phase] == pytest.approx(3 * unit, rel=1e-5)
    far_K = np.full(len(upper_K), 1e3)
    np.testing.assert_array_equal(on_grid(elements, lower_K, far_K)[1], far_K)
