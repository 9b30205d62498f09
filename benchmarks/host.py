"""Host time of a training step: plain loop, pipeline and trainer on 2 ranks, with nothing to compute.

Every rank trains on one sample per batch and 4 columns per table, so kernels only allocate their outputs, and
the rest is the host: Python, dispatch, autograd and collectives. CPU time of the calling thread is counted,
because a rank that sleeps until the other one answers does no work. The quietest tenth of the steps is
reported. The dense part alone, in one process, is the floor: sharding adds to it.

Kernel launches are counted on the simulated device of the tests, see `host_launches.py`.
"""

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import meshrec
from benchmarks.clicks_model import ClicksLoop, Shape, fill, make_batches
from benchmarks.dlrm_step import dense_step
from benchmarks.harness import Bar, Effort, Result, table
from meshrec.comms.mesh import default_env
from meshrec.testing import RankPool

SHAPE = Shape(num_tables=8, num_rows=64, dim=4, batch=1, bag=1, bottom=(8, 4), top=(8, 1))
DENSE, PLAIN, PIPELINE, TRAINER = "dense alone", "plain", "pipeline", "trainer"
_WARM_UP, _STEPS = 20, 200
_PACKAGE = str(Path(meshrec.__file__).parent)
# A rank polls in them for the other rank: how often depends on the machine's load.
_POLLING = ("/comms/failures.py", "/comms/host_link.py")
_DEVICE = Path(__file__).parents[1] / "tests" / "distributed"


class Host(NamedTuple):
    """Host work per step of one loop on one rank: microseconds, and calls of MeshRec's Python functions."""

    microseconds: float
    calls: int


def measure_loops(num_steps: int) -> tuple[dict[str, list[float]], dict[str, Host]]:
    """Return the losses of the first steps and the host work of this rank, by loop."""
    # First: batches that a pipeline has read ahead must not be under way when a run starts.
    losses, host = {}, {TRAINER: _of_trainer(num_steps)}
    env = default_env()
    batches = make_batches(SHAPE, env.world.rank, 4)
    for name in (PLAIN, PIPELINE):
        loop, endless = (
            ClicksLoop(SHAPE, env, pipelined=name == PIPELINE, init_fn=fill),
            itertools.cycle(batches),
        )
        losses[name] = [float(loop.step(endless)) for _ in range(_WARM_UP)]
        host[name] = _measured(lambda loop=loop, endless=endless: loop.step(endless), num_steps)  # type: ignore[misc]
    step = dense_step(SHAPE, bf16=False)
    host[DENSE] = _measured(lambda: step(batches[0]), num_steps)
    return losses, host


def _measured(step: Callable[[], Any], num_steps: int) -> Host:
    """Time some steps, and count the calls of one more."""
    ends = []
    for _ in range(_WARM_UP + num_steps + 1):
        step()
        ends.append(time.thread_time())
    with _counted() as calls:
        step()
    return Host(_quiet(ends[_WARM_UP:]), len(calls))


def _of_trainer(num_steps: int) -> Host:
    """Time the steps of a run, from the end of one to the end of the next."""
    from meshrec.train import DLRMConfig, Trainer, join
    from meshrec.train.observers import Stepped
    from meshrec.train.recipes import synthetic_clicks

    recipe, last = synthetic_clicks(), _WARM_UP + num_steps
    data = replace(
        recipe.data, num_samples=4 * last, num_validation=4, num_test=4, num_features=8, num_embeddings=64
    )
    training = replace(recipe.training, batch_size=2, max_steps=last + 2, log_every=last + 2)
    model = DLRMConfig(embedding_dim=4, bottom=(8,), top=(8,))
    ends, counted = [], _counted()
    calls: list[str] = []

    def observe(event: Any) -> None:
        nonlocal calls
        if not isinstance(event, Stepped):
            return
        ends.append(time.thread_time())
        if event.step == last:
            calls = counted.__enter__()
        elif event.step == last + 1:
            counted.__exit__(None, None, None)

    recipe = replace(recipe, data=data, model=model, training=training)
    Trainer(recipe, data.load(), join("cpu"), observer=observe).run()
    return Host(_quiet(ends[_WARM_UP:last]), len(calls))


def _quiet(ends: list[float]) -> float:
    """Return the 10th percentile of the times between ``ends``, in microseconds."""
    return 1e6 * statistics.quantiles((b - a for a, b in itertools.pairwise(ends)), n=10)[0]


@contextmanager
def _counted() -> Iterator[list[str]]:
    """Collect the files of MeshRec's Python functions that are called in a ``with`` block."""
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_PACKAGE) and not file.endswith(_POLLING):
            calls.append(file)

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def count_launches() -> dict[str, Any]:
    """Return the launches of a step of sharded tables, by kernel, and the number of reads of the device."""
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("host_launches.py"))],
        cwd=_DEVICE,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([root, str(_DEVICE)])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify, time and compare with the bars."""
    rounds: list[dict[str, Host]] = []
    with RankPool(2, timeout_seconds=300) as pool:
        for _ in range(effort.rounds):
            losses, host = pool.run(measure_loops, 10 if tiny else _STEPS)[0]
            if losses[PLAIN] != losses[PIPELINE]:
                raise AssertionError(f"the losses differ: {losses}")
            rounds.append(host)
    names = (DENSE, PLAIN, PIPELINE, TRAINER)
    least = {name: min(host[name].microseconds for host in rounds) for name in names}
    calls = {name: min(host[name].calls for host in rounds) for name in names}
    rows = [[name, f"{least[name]:.0f}", str(calls[name])] for name in names]
    print(table(["loop", "us per step", "Python calls"], rows), "\n")
    # Half of what they were before a step's Python calls were cut down from 373 and 494.
    bars = [
        Bar("pipelined step over the dense part alone", least[PIPELINE] / least[DENSE], 1.6, at_most=True),
        Bar("trainer's step over the dense part alone", least[TRAINER] / least[DENSE], 2.3, at_most=True),
        Bar("Python calls of a pipelined step", calls[PIPELINE], 350, unit="", at_most=True),
    ]
    figures: dict[str, Any] = {"us": least, "calls": calls}
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed: launches are not counted")
    else:
        figures["launches"] = launches = count_launches()
        number = sum(launches["forward"].values()) + sum(launches["backward"].values())
        bars.append(Bar("launches of a step of sharded tables", number, 24, unit="", at_most=True))
        bars.append(Bar("reads of the device in it", launches["reads"], 1, unit="", at_most=True))
    return Result(figures, bars)
