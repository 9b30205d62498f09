"""Small planning cases that several tests share."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from meshrec.planner.hardware import HardwareProfile, Link
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.planners import plan_tables
from meshrec.planner.search import Effort
from meshrec.planner.types import Table, Topology

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
