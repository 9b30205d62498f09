import pytest

from meshrec.planner.optimize import optimize
from meshrec.planner.types import Table, Topology


def test_the_replicate_axis_is_chosen_by_cost(quick, profile):
    """Two big tables with few lookups fit anywhere; whether to replicate is a matter of time alone."""
    tables = [
        Table(name=f"t{i}", num_embeddings=10**5, embedding_dim=64, pooling_factors=(20.0,)) for i in range(4)
    ]
    machine = {"world_size": 8, "local_world_size": 4, "hardware": profile}
    single = [
        optimize(tables, Topology(**machine, replicate=(size,)), batch_size=256, effort=quick)
        for size in (1, 2)
    ]
    both = optimize(tables, Topology(**machine, replicate=(1, 2)), batch_size=256, effort=quick)
    assert both.estimate.seconds == pytest.approx(min(found.estimate.seconds for found in single), rel=0.02)
    assert both.lower_bound <= min(found.lower_bound for found in single) * (1 + 1e-9)
    assert both.replicas in (1, 2)


def test_identical_runs_are_identical(quick, make_tables, profile):
    tables, topology = make_tables(8, 2), Topology(world_size=4, hardware=profile)
    first, second = (optimize(tables, topology, batch_size=64, effort=quick) for _ in range(2))
    assert first.estimate.seconds == second.estimate.seconds
    assert (first.placements.rank_N == second.placements.rank_N).all()
    assert 0 <= first.gap < 1


def test_one_rank_needs_no_search(quick, make_tables, profile):
    found = optimize(make_tables(3), Topology(world_size=1, hardware=profile), batch_size=64, effort=quick)
    assert found.gap < 1e-6


def test_no_tables_no_plan(profile):
    with pytest.raises(ValueError, match="tables"):
        optimize([], Topology(world_size=2, hardware=profile), batch_size=64)


def test_too_little_memory_gives_none(quick, make_tables, profile):
    tiny = Topology(world_size=2, hardware=profile, hbm_cap=1 << 12)
    assert optimize(make_tables(3), tiny, batch_size=64, effort=quick) is None
