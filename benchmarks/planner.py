"""The planner on task files and random tables: time, proven gap, and other plans under our cost model.

TorchRec's plans come from its own interpreter (``planner_torchrec.py``) and are left out if it is missing.
They use device memory only, as ours do.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, Effort, Result, table
from benchmarks.planner_inputs import NUM_FAMILIES, PlannerInput, draw, largest, random_input
from meshrec.plan.sharding_plan import ParameterSharding, ShardingPlan
from meshrec.planner.estimators import CostModel
from meshrec.planner.evaluate import evaluate_placements
from meshrec.planner.plan_file import load_task
from meshrec.planner.planners import plan_tables
from meshrec.planner.search import Effort as PlannerEffort
from meshrec.planner.types import Floats, Placements, Topology

TASKS = Path(os.environ.get("PLANNER_TASKS", Path(__file__).parent / "planner_tasks"))
TORCHREC_PYTHON = os.environ.get("TORCHREC_PYTHON", ".venv-peers/bin/python")
_TORCHREC_LIMIT = 600.0
"""Time limit of TorchRec's process in seconds. It enumerates options for minutes before its own limit
counts.
"""
_TORCHREC_SECONDS = {True: 300, False: 60}
"""Time limits of TorchRec for a named and for a drawn input: at least thirty times ours."""
TORCHREC, BY_TORCHREC = "torchrec", "by its model"
"""Cost of TorchRec's plan under our model, and of both plans under TorchRec's."""

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
_NAMED = "named"


def run(effort: Effort, *, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Plan every input, check that plans fit and cost what was claimed, and compare.

    ``only``: names of inputs such as ``medium:32``; all inputs if empty.
    """
    figures = [_run(case) for case in _inputs(tiny=tiny, only=only)]
    planned = [found for found in figures if found["gap"] is not None]
    gaps = [100 * found["gap"] for found in planned]
    bars = [
        Bar(name="plans found", figure=len(planned), asked=len(figures), unit=""),
        Bar(name="mean gap", figure=np.mean(gaps), asked=5, unit=" %", at_most=True),
        Bar(name="worst gap", figure=max(gaps), asked=8, unit=" %", at_most=True),
    ]
    rows = []
    for found in figures:
        name = f"{found['family']}, {found['name']}"
        bar = {"name": f"{name}: seconds", "figure": found["seconds"], "asked": found["limit"]}
        bars.append(Bar(**bar, unit=" s", at_most=True))
        if found["gap"] is None:
            rows.append([name, f"{found['seconds']:.1f}", "no plan", *["-"] * (len(BASELINES) + 3)])
            continue
        others = [found["others"].get(key) for key in (*BASELINES, TORCHREC, BY_TORCHREC)]
        if TORCHREC in found["others"]:
            bars.append(Bar(name=f"{name}: TorchRec's step", figure=found["others"][TORCHREC], asked=1.0))
        own = [f"{found['seconds']:.1f}", f"{1e3 * found['step']:.3f}", f"{100 * found['gap']:.2f}"]
        rows.append([name, *own, *("-" if o is None else f"{o:.2f}x" for o in others)])
    header = ["input", "s", "step ms", "gap %", *BASELINES, TORCHREC, BY_TORCHREC]
    print(table(header, rows) + "\n(others: their step over ours; inf: does not fit into memory)")
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
            yield PlannerInput(name, _NAMED, loaded.tables, topology, loaded.batch_size(num_ranks))
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
    limits = PlannerEffort(time_limit=_OF_LIMIT * limit, max_work=1e10, gap=_GAP)
    plan, others = None, {}
    started = time.perf_counter()
    with contextlib.suppress(ValueError):  # no plan fits
        plan = plan_tables(case.tables, case.topology, batch_size=case.batch_size, effort=limits)
    seconds = time.perf_counter() - started
    if plan is not None:
        estimate = plan.estimate()
        assert estimate.fits, "the plan does not fit into memory"
        assert abs(estimate.seconds / plan.seconds - 1) < 1e-9, "the plan does not cost what was claimed"
        model = CostModel(case.tables, case.topology, batch_size=case.batch_size)
        others = {name: _baseline(model, weigh) / plan.seconds for name, weigh in BASELINES.items()}
        others |= _torchrec(case, model, plan)
    return {
        "name": case.name,
        "family": case.family,
        "seconds": seconds,
        "limit": limit,
        "step": None if plan is None else plan.seconds,
        "gap": None if plan is None else plan.gap,
        "others": others,
    }


def _size(model: CostModel) -> Floats:
    return model.arrays.rows_T * model.arrays.columns_T.astype(float)


def _lookup(model: CostModel) -> Floats:
    return model.arrays.columns_T * model.arrays.ids_T


def _size_lookup(model: CostModel) -> Floats:
    return _size(model) * _lookup(model)


def _time(model: CostModel) -> Floats:
    index = np.arange(len(model.tables))
    none = np.zeros(len(index), bool)
    return model.rectangle_loads(index, model.arrays.rows_T, model.arrays.columns_T, none).sum(axis=1)


BASELINES: dict[str, Callable[[CostModel], Floats]] = {
    "size": _size,
    "lookup": _lookup,
    "size x lookup": _size_lookup,
    "LPT": _time,
}
"""Weights for the LPT rule: whole tables, heaviest first, each to the least loaded rank with room."""


def _baseline(model: CostModel, weigh: Callable[[CostModel], Floats]) -> float:
    weights = weigh(model)
    index = np.arange(len(model.tables))
    sizes = model.rectangle_bytes(index, model.arrays.rows_T, model.arrays.columns_T)
    load, room = np.zeros(model.num_ranks), np.full(model.num_ranks, model.memory_cap)
    rank_T = np.zeros(len(index), np.int64)
    for table_index in np.argsort(-weights, kind="stable"):
        allowed = np.where(room >= sizes[table_index], load, np.inf)
        rank = int(allowed.argmin())
        if not np.isfinite(allowed[rank]):
            return float("inf")
        rank_T[table_index] = rank
        load[rank] += weights[table_index]
        room[rank] -= sizes[table_index]
    zero = np.zeros_like(index)
    placements = Placements(
        index, zero, model.arrays.rows_T, zero, model.arrays.columns_T, rank_T, np.zeros(len(index), bool)
    )
    return evaluate_placements(placements, model).seconds


def _torchrec(case: PlannerInput, model: CostModel, plan: ShardingPlan) -> dict[str, float]:
    """Return how much longer a step of TorchRec's plan takes than one of ours, under our model and under
    theirs.

    Empty if TorchRec has no plan, or none in time.
    """
    python, topology = shutil.which(TORCHREC_PYTHON), case.topology
    if python is None:
        return {}
    question = {
        "tables": [
            {
                "name": one.name,
                "num_embeddings": one.num_embeddings,
                "embedding_dim": one.embedding_dim,
                "pooling_factors": one.pooling_factors,
            }
            for one in case.tables
        ],
        "world_size": topology.world_size,
        "local_world_size": topology.local_size,
        "batch_size": case.batch_size,
        "memory": int(topology.profile.memory),
        "reserve": topology.reserve,
        "seconds": _TORCHREC_SECONDS[case.family == _NAMED],
        "other": {name: _shards(one) for tables in plan.plan.values() for name, one in tables.items()},
    }
    script = Path(__file__).with_name("planner_torchrec.py")
    try:
        answer = subprocess.run(
            [python, str(script)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=_TORCHREC_LIMIT,
            check=True,
        ).stdout
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return {}
    theirs = json.loads(answer)
    found: list[tuple[int, ...]] = []
    replicated = []
    for index, one in enumerate(model.tables):
        entry = theirs["plan"][one.name]
        replicated.append(entry["sharding_type"] == "data_parallel")
        if not replicated[-1]:
            found += [(index, r, r + rows, c, c + cols, rank) for r, c, rows, cols, rank in entry["shards"]]
    placements = Placements(*np.array(found, np.int64).reshape(-1, 6).T, np.array(replicated, bool))
    estimate = evaluate_placements(placements, model)
    ratios = {TORCHREC: estimate.seconds / plan.seconds if estimate.fits else float("inf")}
    if theirs["other"] is not None:
        ratios[BY_TORCHREC] = theirs["own"] / theirs["other"]
    return ratios


def _shards(sharding: ParameterSharding) -> dict[str, Any]:
    """Convert a table of our plan to the form of the TorchRec script."""
    shards = [[*shard.shard_offsets, *shard.shard_sizes, shard.placement.rank] for shard in sharding.shards]
    return {"sharding_type": sharding.sharding_type.value, "shards": shards}


def main(arguments: Sequence[str] = ()) -> int:
    """Run this benchmark alone (``--case medium:32 ...``: only these inputs); return 1 if a bar is missed."""
    only = arguments[arguments.index("--case") + 1 :] if "--case" in arguments else ()
    result = run(Effort(), tiny="--tiny" in arguments, only=only)
    for bar in result.bars:
        print(
            f"{'PASS' if bar.met else 'MISS'}  {bar.name}: {bar.figure:.2f}{bar.unit} (asked {bar.asked:g})"
        )
    return int(not all(bar.met for bar in result.bars))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
