import itertools

import numpy as np
import pytest

from meshrec.planner.class_program import Box
from meshrec.planner.elements import find_elements
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.problem import Scope
from meshrec.planner.rank_program import RankProgram
from meshrec.planner.types import ParameterConstraints, Table, Topology


def problem_of(tables, profile, kinds, num_ranks):
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=num_ranks, hardware=profile)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints)


def best_seconds(problem):
    """Of all ways to put whole tables on ranks, or everywhere."""
    best = np.inf
    whole = [layout.scope is Scope.RANKS for layout in problem.layouts_C]
    of_table = [np.flatnonzero(problem.type_C == kind) for kind in problem.type_T]
    places = [
        [(c, rank) for c in candidates for rank in (range(problem.num_ranks) if whole[c] else [0])]
        for candidates in of_table
    ]
    for plan in itertools.product(*places):
        load_RK = np.zeros((problem.num_ranks, problem.load_PK.shape[1]))
        for candidate, rank in plan:
            load_RK[rank] += problem.load_PK[problem.pieces(candidate)].sum(axis=0)
        common = sum(problem.common_C[candidate] for candidate, _ in plan)
        best = min(best, common + load_RK.max(axis=0).sum())
    return best


def is_impossible(problem, cutoff, scale):
    everything = np.ones(len(problem.type_C), bool)
    elements = find_elements(problem, everything, scale)
    limits = np.zeros(problem.load_PK.shape[1])
    box = Box(limits, limits + cutoff, cutoff)
    program = RankProgram(problem, elements, np.arange(len(problem.type_C)), box, scale=scale)
    result = program.is_impossible(60.0)
    assert program.work > 0
    return result


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_it_knows_the_best_plan_of_whole_tables(make_tables, profile, seed, num_ranks):
    tables = make_tables(4, seed)
    tables += [Table(**{**vars(table), "name": table.name + "twin"}) for table in tables[: seed % 2]]
    problem = problem_of(tables, profile, ["table_wise", "data_parallel"], num_ranks)
    best = best_seconds(problem)
    assert is_impossible(problem, 1 - 1e-4, best)
    assert not is_impossible(problem, 1 + 1e-4, best)


def test_a_rank_holds_one_part_of_a_table(profile):
    """A table in two parts is on two ranks, though its ids would rather be on one."""
    tables = [Table(name="t", num_embeddings=1000, embedding_dim=64, pooling_factors=(5.0,))]
    tables += [Table(name="u", num_embeddings=1000, embedding_dim=64, pooling_factors=(40.0,))]
    problem = problem_of(tables, profile, ["column_wise"], 2)
    both_K = problem.load_PK[problem.width_P == 32].sum(axis=0)
    scale = float(both_K.sum())
    assert is_impossible(problem, 1 - 1e-4, scale)
    assert not is_impossible(problem, 1 + 1e-4, scale)


def test_it_serves_few_tables_on_few_ranks(make_tables, profile):
    for num_tables, num_ranks, serves in ((6, 4, True), (30, 4, False), (6, 32, False)):
        problem = problem_of(make_tables(num_tables, 0), profile, ["table_wise"], num_ranks)
        assert RankProgram.serves(problem, np.ones(len(problem.type_C), bool)) == serves
