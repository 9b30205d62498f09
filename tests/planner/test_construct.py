import numpy as np
import pytest

from meshrec.planner.bound import LowerBound
from meshrec.planner.construct import (
    assign_table,
    candidates_by_type,
    construct,
    fitting_plan,
    round_choice,
    squeezed_plan,
    table_order,
)
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.state import State
from meshrec.planner.types import Table, Topology


@pytest.fixture
def problem(profile):
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(5)]
    tables.append(Table(name="big", num_embeddings=10**6, embedding_dim=128, pooling_factors=(30.0,)))
    return build_problem(CostModel(tables, Topology(world_size=4, hardware=profile), batch_size=64), {})


def test_rounding_keeps_the_number_of_tables(problem):
    num_tables_C = np.zeros(len(problem.type_C))
    first = np.flatnonzero(problem.type_C == 0)
    num_tables_C[first[:3]] = [1.4, 1.4, 2.2]
    num_tables_C[np.flatnonzero(problem.type_C == 1)[2]] = 1.0
    choice_T = round_choice(problem, num_tables_C)
    assert np.bincount(choice_T, minlength=len(num_tables_C))[first[:3]].tolist() == [2, 1, 2]
    assert problem.type_C[choice_T].tolist() == problem.type_T.tolist()


def test_without_shares_every_table_still_has_a_choice(profile):
    """As where the relaxation could not be solved."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(40)]
    problem = build_problem(CostModel(tables, Topology(world_size=2, hardware=profile), batch_size=64), {})
    choice_T = round_choice(problem, np.zeros(len(problem.type_C)))
    assert problem.type_C[choice_T].tolist() == problem.type_T.tolist()


def test_the_largest_table_goes_first(problem):
    choice_T = np.array([np.flatnonzero(problem.type_C == kind)[1] for kind in problem.type_T])
    assert table_order(problem, choice_T)[0] == 5


def test_every_table_finds_a_place(problem):
    everything = np.ones(len(problem.type_C), bool)
    box = LowerBound(problem, everything).best_box
    state = construct(problem, box.num_tables_C, candidates_by_type(problem, everything))
    assert all(placement is not None for placement in state.placements_T)
    assert state.fits()


def test_types_without_an_allowed_candidate_keep_all(problem):
    none = np.zeros(len(problem.type_C), bool)
    assert [len(found) for found in candidates_by_type(problem, none)] == np.bincount(problem.type_C).tolist()


def test_memory_is_spread(problem):
    state = fitting_plan(problem)
    assert state.bytes_R.max() < 1.5 * state.bytes_R.mean()


def test_a_table_goes_where_it_costs_least(problem):
    state = State(problem, problem.load_PK.max(axis=0))
    whole = np.flatnonzero(problem.type_C == 0)[1:2]
    assert all(assign_table(state, table, whole) for table in range(4))
    assert sorted(int(placement.rank_N[0]) for placement in state.plan) == [0, 1, 2, 3]
    state.bytes_R[:] = problem.memory_cap
    assert not assign_table(state, 4, whole)
    assert len(state.plan) == 4


@pytest.fixture
def tight(profile):
    """Tables of very different sizes, which take most of the memory of all ranks."""
    random = np.random.default_rng(0)
    tables = [
        Table(
            name=f"t{number}",
            num_embeddings=int(np.exp(random.uniform(8, 14))),
            embedding_dim=int(random.choice([16, 64, 128])),
            pooling_factors=(float(random.uniform(1, 30)),),
        )
        for number in range(40)
    ]
    topology = Topology(world_size=16, local_world_size=4, hardware=profile)
    problem = build_problem(CostModel(tables, topology, batch_size=512), {})
    least_Y = np.full(40, np.inf)
    np.minimum.at(least_Y, problem.type_C, problem.mean_bytes_C())
    return problem._replace(memory_cap=1.1 * float(least_Y.sum()))


def test_tables_make_room_where_memory_is_tight(tight):
    allowed_C = tight.can_fit_C()
    box, candidates_Y = LowerBound(tight, allowed_C).best_box, candidates_by_type(tight, allowed_C)
    assert construct(tight, box.num_tables_C, candidates_Y) is None
    state, work = squeezed_plan(tight, box.num_tables_C, candidates_Y, 1e7, np.inf)
    assert state.fits()
    assert 0 < work < 1.1e7
    by_memory = State(tight)
    for table, placement in enumerate(fitting_plan(tight, allowed_C).plan):
        by_memory.add(table, placement)
    assert state.seconds < 0.8 * by_memory.seconds


def test_memory_that_does_not_suffice(tight):
    allowed_C = np.ones(len(tight.type_C), bool)
    box, candidates_Y = LowerBound(tight, allowed_C).best_box, candidates_by_type(tight, allowed_C)
    state, work = squeezed_plan(
        tight._replace(memory_cap=0.5 * tight.memory_cap), box.num_tables_C, candidates_Y, 1e6, np.inf
    )
    assert state is None
    assert work > 5e5
