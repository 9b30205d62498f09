import atexit
import fcntl
import gc
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from meshrec.comms.fork_server import start_fork_server
from meshrec.testing.rank_pool import PRELOADED, RankPool
from meshrec.train import Recipe
from tests.interpreters import Interpreters
from tests.train.small import small as small_recipe

if "XDG_STATE_HOME" not in os.environ:
    # The key that seals runs: not the developer's, and one for all workers, which read each other's runs.
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="meshrec-state-")
    atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Of several rooms: plans, and a program without Python.
pytest_plugins = ["tests.planner.cases", "tests.export.torchscript_program"]

# One thread each, for the workers of a session and for what they start, as together they have few cores:
# threads that wait for each other's turn burn more than they bring. Tests of several threads ask for them.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# What ranks, servers and other commands import; set here, as the first process that is started settles it for
# all. These imports would take most of their time. No modules in which tests replace something.
PRELOAD = [
    *("pytest", "hypothesis", "meshrec.model_parallel", "meshrec.runs.worker", "meshrec.pipeline"),
    *("meshrec.cli.__main__", "meshrec.cli.train", "meshrec.cli.screen", "meshrec.train.architectures"),
    *("networkx", "pandas", "pyarrow.dataset", "pyarrow.parquet", "redis", "uvicorn"),
    *("scipy.optimize", "scipy.sparse", "torch.utils.tensorboard"),
]
start_fork_server([*PRELOADED, *PRELOAD])

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Programs of packages: to optimise what calls their kernels takes longer than they run here.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")

# The same examples in every run: a red build means a change, not a draw. No deadline: machines are shared.
settings.register_profile("meshrec", derandomize=True, deadline=None)
settings.load_profile("meshrec")


gc.disable()  # until all tests are collected, which makes hardly any garbage


def pytest_collection_finish() -> None:
    """Leave torch and the thousands of collected tests out of all later garbage collections."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or nanobind reports what it has made for Triton as leaked
    gc.enable()


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


@pytest.fixture(scope="session")
def run_code() -> Iterator[Callable[..., "subprocess.CompletedProcess[str]"]]:
    """``run_code(code, argument, NAME="value")``: as ``python -c`` with that variable set, but forked."""
    interpreters = Interpreters()
    yield interpreters.run
    interpreters.close()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """``made_once(name, make)``: the folder that ``make(folder)`` fills, one for all workers of a session.

    The first that comes by makes it, and the others wait: to compile a model takes half a minute.
    """
    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent

    def once(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = common / name, common / f"{name}.made"
        with open(common / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                make(folder)
                done.touch()
        return folder

    return once
