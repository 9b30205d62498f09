"""Small planning cases that several tests share."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from meshrec.planner.hardware import HardwareProfile, Link
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.planners import plan_tables
from meshrec.planner.problem import Problem, Scope
from meshrec.planner.search import Effort
from meshrec.planner.types import Floats, Table, Topology

QUICK = Effort(time_limit=60.0, max_work=3e7, gap=0.0)


@pytest.fixture(scope="session")
def quick() -> Effort:
    return QUICK


@pytest.fixture(scope="session")
def profile() -> HardwareProfile:
    """Round numbers, so that a test can do the sums by hand."""
    link = Link(latency=1e-5, all_to_all=1e9, reduce_scatter=2e9, all_reduce=4e9)
    return HardwareProfile(
        name="round",
        device="cuda",
        read_row_seconds=1e-8,
        read_bandwidth=1e10,
        update_row_seconds=2e-8,
        update_bandwidth=5e9,
        update_id_seconds=1e-9,
        route_id_seconds=1e-9,
        stream_bandwidth=2e10,
        kernel_seconds=1e-5,
        intra=link,
        inter=Link(latency=2e-5, all_to_all=2.5e8, reduce_scatter=5e8, all_reduce=1e9),
        memory=1 << 34,
    )


@pytest.fixture(scope="session")
def cpu_profile(profile: HardwareProfile) -> HardwareProfile:
    """One that differs from the other in everything that is the CPU's."""
    costs = {
        "split_id_seconds": 2e-9,
        "scan_id_seconds": 1e-9,
        "scan_bag_seconds": 1e-8,
        "statistics_seconds": 1e-5,
    }
    return replace(profile, device="cpu", full_duplex=False, sorts_once=True, **costs)


@pytest.fixture(scope="session")
def make_tables() -> Callable[..., list[Table]]:
    def make(num_tables: int, seed: int = 0, **attributes: object) -> list[Table]:
        generator = np.random.default_rng(seed)
        return [
            Table(
                name=f"t{index}",
                num_embeddings=int(10 ** generator.uniform(1, 6)),
                embedding_dim=int(generator.choice([8, 32, 64, 96, 128])),
                pooling_factors=tuple(generator.uniform(1, 40, int(generator.integers(1, 3)))),
                **attributes,
            )
            for index in range(num_tables)
        ]

    return make


@pytest.fixture(scope="session")
def small_plan(make_tables: Callable[..., list[Table]]) -> PlannedShardingPlan:
    topology = Topology(world_size=4, hardware="a100", local_world_size=2)
    return plan_tables(make_tables(6), topology, batch_size=256, effort=QUICK)


@pytest.fixture(scope="session")
def placed_unevenly() -> Callable[[Problem, int, np.random.Generator], Floats]:
    def placed(problem: Problem, candidate: int, generator: np.random.Generator) -> Floats:
        """Loads [R, K] of a table on random places, its rows or columns cut unevenly."""
        load_RK = np.zeros((problem.num_ranks, problem.load_PK.shape[1]))
        layout = problem.layouts_C[candidate]
        span = problem.node_size if layout.scope is Scope.NODES else 1
        pieces = problem.pieces(candidate)
        groups = np.repeat(np.arange(pieces.start, pieces.stop), problem.count_P[pieces])
        places = generator.permutation(problem.num_ranks // span)[: len(groups)]
        rank_N = (places[:, None] * span + np.arange(span)).ravel()
        group_N = np.repeat(groups, span)
        amount_N = np.ones(len(rank_N))
        if layout.row_parts * span > 1:
            amount_N = generator.dirichlet(np.ones(len(rank_N))) * len(rank_N)
            amount_N = amount_N.reshape(len(layout.widths), -1)
            amount_N = (amount_N / amount_N.mean(axis=1, keepdims=True)).ravel()
            part_N = np.repeat(np.arange(len(layout.widths)), layout.row_parts * span)
            amount_N = amount_N[np.argsort(part_N, kind="stable")]
        elif len(layout.widths) > 1:
            width_N = problem.width_P[group_N].astype(float)
            least = problem.min_partition_Y[problem.type_C[candidate]]
            spare = width_N.sum() - least * len(width_N)
            amount_N = (least + generator.dirichlet(np.ones(len(width_N))) * spare) / width_N
        fixed_NK = problem.fixed_PK[group_N]
        np.add.at(load_RK, rank_N, fixed_NK + amount_N[:, None] * (problem.load_PK[group_N] - fixed_NK))
        return load_RK

    return placed
