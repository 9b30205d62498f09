import multiprocessing
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from meshrec.testing.rank_pool import PRELOADED, RankPool
from meshrec.train import Recipe
from tests.train.small import small as small_recipe

pytest_plugins = ["tests.planner.cases"]  # plans of the calibration's and the reports' tests, too

# What functions for ranks import; set here, as the first process that is started settles it for all.
PRELOAD = ["pytest", "hypothesis", "meshrec.model_parallel", "meshrec.train.worker", "meshrec.pipeline"]
multiprocessing.set_forkserver_preload([*PRELOADED, *PRELOAD])

# The same examples in every run: a red build means a change, not a draw. No deadline: machines are shared.
settings.register_profile("meshrec", derandomize=True, deadline=None)
settings.load_profile("meshrec")


@pytest.fixture
def small() -> Callable[..., Recipe]:
    """``small(epochs=2)``: a recipe that trains in a second."""
    return small_recipe


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(2)``: a pool of 2 processes in a gloo group, started once per test worker."""
    pools: dict[int, RankPool] = {}

    def pool(world_size: int) -> RankPool:
        if world_size not in pools:
            # Long enough for a machine that does other things as well.
            pools[world_size] = RankPool(world_size, timeout_seconds=180.0, preload=PRELOAD)
        return pools[world_size]

    yield pool
    for each in pools.values():
        each.close()
