import numpy as np
import pytest

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.rank_classes import ClassRelaxation
from meshrec.planner.relaxation import MeanRelaxation
from meshrec.planner.types import ParameterConstraints, Table, Topology


def problem_of(tables, profile, kinds, num_ranks, **topology):
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=num_ranks, hardware=profile, **topology)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints)


def both(problem, lower_K, upper_K, cutoff=1e3):
    everything = np.ones(len(problem.type_C), bool)
    assert ClassRelaxation.serves(problem, everything)
    classes, mean = ClassRelaxation(problem, everything, 1.0), MeanRelaxation(problem, everything, 1.0)
    return classes.solve(lower_K, upper_K, cutoff), mean.solve(lower_K, upper_K, cutoff)


def test_heavy_tables_do_not_share_a_rank(profile):
    """Three tables on two ranks with room for one each: the mean fits, whole tables do not."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=64) for i in range(3)]
    problem = problem_of(tables, profile, ["table_wise"], 2)
    largest = problem.load_PK[0]
    classes, mean = both(problem, 0 * largest, 1.8 * largest)
    assert mean is not None
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
    relaxation = ClassRelaxation(problem, np.ones(len(problem.type_C), bool), 1.0)
    phase = int(relaxation.unit_K.argmax())
    unit = problem.load_PK[:, phase].min()
    assert relaxation.unit_K[phase] == pytest.approx(unit)
    upper_K = np.full(len(relaxation.unit_K), 1e3)
    upper_K[phase] = 2.9 * unit
    found = relaxation.solve(0 * upper_K, upper_K, 1e4)
    assert found.slowest_K[phase] >= 0
    upper_K[phase] = 1.9 * unit
    assert relaxation.solve(0 * upper_K, upper_K, 1e4) is None


def test_parts_of_a_split_table_need_its_presence(profile):
    """A table in two parts puts its outputs on two ranks whole, so four ranks are not all as loaded as the
    mean says."""
    tables = [Table(name="t", num_embeddings=1000, embedding_dim=64, pooling_factors=(30.0,))]
    problem = problem_of(tables, profile, ["row_wise"], 4)
    upper_K = 1.01 * problem.largest_load_CK().max(axis=0)
    classes, mean = both(problem, 0 * upper_K, upper_K)
    assert classes.bound >= mean.bound
