import numpy as np
import pytest

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.polish import polish
from meshrec.planner.state import Parts, State
from meshrec.planner.types import ParameterConstraints, Table, Topology


def state_of(tables, profile, types, ranks_T):
    constraints = {
        t.name: ParameterConstraints(sharding_types=[kind]) for t, kind in zip(tables, types, strict=True)
    }
    problem = build_problem(
        CostModel(tables, Topology(world_size=2, hardware=profile), batch_size=64), constraints
    )
    state = State(problem, np.ones(problem.load_PK.shape[1]))
    for table, ranks in enumerate(ranks_T):
        candidate = int(np.flatnonzero(problem.type_C == problem.type_T[table])[0])
        groups = [
            g for g in range(*problem.pieces(candidate).indices(999)) for _ in range(problem.count_P[g])
        ]
        state.add(table, Parts(candidate, np.array(groups), np.array(ranks), np.ones(len(ranks))))
    return state


@pytest.mark.parametrize(("kind", "columns"), [("row_wise", 32), ("column_wise", 256)])
def test_the_free_rank_takes_the_larger_part(profile, kind, columns):
    tables = [
        Table(name="whole", num_embeddings=1000, embedding_dim=32, pooling_factors=(20.0,)),
        Table(name="split", num_embeddings=10**5, embedding_dim=columns, pooling_factors=(50.0,)),
    ]
    state = state_of(tables, profile, ["table_wise", kind], [[0], [0, 1]])
    before = state.seconds
    assert polish(state)
    assert state.seconds < before
    small, large = state.parts_T[1].amount_N
    assert small < 1 < large
    assert small + large == pytest.approx(2)
    widths = state.parts_T[1].amount_N * state.problem.width_P[state.parts_T[1].group_N]
    assert kind == "row_wise" or (widths % 4 == 0).all()


def test_nothing_split_nothing_to_do(profile):
    tables = [Table(name="whole", num_embeddings=1000, embedding_dim=32)]
    state = state_of(tables, profile, ["table_wise"], [[0]])
    assert not polish(state)
    assert state.parts_T[0].rank_N.tolist() == [0]


def test_even_is_kept_where_even_is_best(profile):
    tables = [Table(name="split", num_embeddings=10**5, embedding_dim=64, pooling_factors=(50.0,))]
    state = state_of(tables, profile, ["row_wise"], [[0, 1]])
    assert not polish(state)
    np.testing.assert_array_equal(state.parts_T[0].amount_N, 1.0)


def test_rows_move_where_columns_cannot_for_their_multiples(profile):
    tables = [
        Table(name="whole", num_embeddings=1000, embedding_dim=32, pooling_factors=(0.3,)),
        Table(name="columns", num_embeddings=10**5, embedding_dim=128, pooling_factors=(50.0,)),
        Table(name="rows", num_embeddings=10**5, embedding_dim=32, pooling_factors=(20.0,)),
    ]
    state = state_of(tables, profile, ["table_wise", "column_wise", "row_wise"], [[0], [0, 1], [0, 1]])
    before = state.seconds
    assert not polish(state)
    assert polish(state, rows_only=True)
    assert state.seconds < 0.999 * before
    np.testing.assert_array_equal(state.parts_T[1].amount_N, 1.0)
    assert state.parts_T[2].amount_N[0] < 1.0
