import numpy as np

from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.one_size import sets_of_one_size
from meshrec.planner.types import ParameterConstraints, Table, Topology


def problem_of(tables, profile, kinds):
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=8, hardware=profile, local_world_size=4)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints)


def test_pieces_of_a_set_are_alike_and_all_types_have_some(profile):
    """Those that go to ranks, and those that go to nodes."""
    tables = [Table(name=f"t{i}", num_embeddings=1000 * (i + 1), embedding_dim=64) for i in range(4)]
    kinds = ["table_wise", "column_wise", "table_row_wise", "data_parallel"]
    problem = problem_of(tables, profile, kinds)
    everything = np.ones(len(problem.type_C), bool)
    largest_CK = problem.largest_load_CK()
    by_node_C = problem.ranks_per_piece_C() > 1
    assert by_node_C.any()
    for phase, most in enumerate(largest_CK.max(axis=0)):
        seen = []
        for some_C in sets_of_one_size(problem, everything, phase, most):
            for where_C in (by_node_C, ~by_node_C):
                sizes = largest_CK[some_C & where_C & (largest_CK[:, phase] > 0.02 * most), phase]
                assert not len(sizes) or sizes.max() <= 1.05 * sizes.min() * (1 + 1e-12)
            assert set(problem.type_C[some_C]) == set(problem.type_C)
            assert not any((some_C == other).all() for other in seen)
            seen.append(some_C)
        assert seen


def test_no_piece_is_larger_than_asked(profile):
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=64) for i in range(2)]
    problem = problem_of(tables, profile, ["table_wise", "column_wise"])
    everything = np.ones(len(problem.type_C), bool)
    largest_C = problem.largest_load_CK()[:, 0]
    for most in np.unique(largest_C):
        for some_C in sets_of_one_size(problem, everything, 0, most):
            assert largest_C[some_C].max() <= most


def test_there_is_no_set_where_a_type_has_nothing_alike(profile):
    tables = [Table(name="narrow", num_embeddings=1000, embedding_dim=16)]
    tables += [Table(name="wide", num_embeddings=1000, embedding_dim=64)]
    problem = problem_of(tables, profile, ["table_wise"])
    everything = np.ones(len(problem.type_C), bool)
    output = int(problem.load_PK.sum(axis=0).argmax())
    most = problem.largest_load_CK()[:, output].max()
    assert not list(sets_of_one_size(problem, everything, output, most))


def test_only_what_is_allowed_is_in_a_set(profile):
    tables = [Table(name="t", num_embeddings=1000, embedding_dim=64)]
    problem = problem_of(tables, profile, ["table_wise", "column_wise", "data_parallel"])
    for banned in range(len(problem.type_C)):
        allowed_C = np.arange(len(problem.type_C)) != banned
        for some_C in sets_of_one_size(problem, allowed_C, 0, problem.largest_load_CK()[:, 0].max()):
            assert not some_C[banned]
