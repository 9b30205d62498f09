"""The planner on task files and random tables: time, and the proven gap between each plan and its bound."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, Result, table
from benchmarks.planner_inputs import NUM_FAMILIES, PlannerInput, draw, largest, random_input
from meshrec.planner.plan_file import load_task
from meshrec.planner.planners import plan_tables
from meshrec.planner.search import Effort
from meshrec.planner.types import Topology

TASKS = Path(os.environ.get("PLANNER_TASKS", Path(__file__).parent / "planner_tasks"))
NAMED = (
    ("dlrm_dcnv2", 8),
    ("dlrm_dcnv2", 64),
    ("tiny", 8),
    ("small", 16),
    ("medium", 8),
    ("medium", 32),
    ("medium", 64),
    ("random_1000", 128),
    ("random_2000", 1024),
)
"""Names of the task files, with their numbers of ranks."""
_FIRST_SEED = 20
"""First even seed of the report. The even seeds below were once used for development."""
_GAP = 0.005
"""Gap at which the search stops: ten times smaller than the average that the bar asks for."""
_OF_LIMIT = 0.93
"""Share of the allowed time that the search may use. Work before and after it takes the rest."""


def run(*, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Plan every input, check that plans fit and cost what was claimed, and compare.

    ``only``: names of inputs such as ``medium:32``; all inputs if empty.
    """
    figures = [_run(case) for case in _inputs(tiny=tiny, only=only)]
    gaps = [100 * found["gap"] for found in figures if found["gap"] is not None]
    bars = [
        Bar("plans found", len(gaps), len(figures), unit=""),
        Bar("mean gap", float(np.mean(gaps)), 5, unit=" %", at_most=True),
        Bar("worst gap", max(gaps), 8, unit=" %", at_most=True),
    ]
    rows = []
    for found in figures:
        name, seconds, step, gap = (found[key] for key in ("name", "seconds", "step", "gap"))
        bars.append(Bar(f"{name}: seconds", seconds, found["limit"], unit=" s", at_most=True))
        plan = ["no plan", "-"] if gap is None else [f"{1e3 * step:.3f}", f"{100 * gap:.2f}"]
        rows.append([name, f"{seconds:.1f}", *plan])
    print(table(["input", "s", "step ms", "gap %"], rows))
    return Result(figures, bars)


def _inputs(*, tiny: bool, only: Sequence[str]) -> Iterator[PlannerInput]:
    for task, num_ranks in NAMED[2:3] if tiny else NAMED:
        if only and f"{task}:{num_ranks}" not in only:
            continue
        if task.startswith("random_"):
            yield random_input(int(task.removeprefix("random_")), num_ranks)
        elif (TASKS / f"{task}.json").is_file():
            loaded = load_task(TASKS / f"{task}.json")
            topology = Topology(world_size=num_ranks, hardware="h100")
            name = f"{task} on {num_ranks}"
            yield PlannerInput(name, "named", loaded.tables, topology, loaded.batch_size(num_ranks))
        else:
            print(f"{task}: no task file in {TASKS}; set PLANNER_TASKS")
    if not only:
        # A quick look is no report, and leaves the even seeds alone.
        seeds = [1] if tiny else range(_FIRST_SEED, _FIRST_SEED + 2 * NUM_FAMILIES, 2)
        yield from map(draw, seeds)
        if not tiny:
            yield largest(_FIRST_SEED)


def _run(case: PlannerInput) -> dict[str, Any]:
    """Plan an input in the time that its number of tables allows."""
    limit = 2.0 if len(case.tables) <= 100 else 10.0 if len(case.tables) <= 1000 else 30.0
    limits = Effort(time_limit=_OF_LIMIT * limit, max_work=1e10, gap=_GAP)
    step = gap = None
    started = time.perf_counter()
    with contextlib.suppress(ValueError):  # no plan fits
        plan = plan_tables(case.tables, case.topology, batch_size=case.batch_size, effort=limits)
        step, gap = plan.seconds, plan.gap
    seconds = time.perf_counter() - started
    if step is not None:
        estimate = plan.estimate()
        assert estimate.fits, "the plan does not fit into memory"
        assert abs(estimate.seconds / step - 1) < 1e-9, "the plan does not cost what was claimed"
    name = f"{case.family}, {case.name}"
    return {"name": name, "seconds": seconds, "limit": limit, "step": step, "gap": gap}
