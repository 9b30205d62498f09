"""A training step on 1 to 8 hosts with links of 1 Gb/s, beside the calibrated model's prediction, up to
1,024 ranks.

Hosts are network namespaces of this machine, with a rank each. Weak scaling: every rank has the same batch.
The machine is calibrated with as many ranks as are measured, as `meshrec calibrate` asks. Predictions beyond
are those of the profile of two ranks, for the planner's best plan. The loss of the first step is compared
with that of a single rank before anything is believed.

The time of the tables is that of a step in which nothing overlaps, without its dense part, as the model
predicts it, and the mean of the ranks. Phases are those of the slowest rank, which may be another one in
each of them. Needs root, and no other load: 8 ranks share the machine's cores.

    sudo python -m benchmarks.scaling
    sudo python -m benchmarks.scaling --folder F --ranks 1 2  # some sizes now, others and the tables later
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.dlrm_contenders import Shape, build, make_inputs
from benchmarks.dlrm_phases import measure_phases, planned
from benchmarks.harness import table
from meshrec.calibration.calibrate import Sizes, calibrate
from meshrec.comms.joining import form_group
from meshrec.comms.leaving import leave_process_group
from meshrec.planner import HardwareProfile, plan_tables
from meshrec.reports.measured import DENSE, compare
from meshrec.testing.namespaces import hosts

# Larger than the caches, as the cost model assumes, and with some work in the dense part.
SHAPE = Shape(num_tables=16, num_rows=200_000, dim=64, batch=1024, bottom=(128, 64), top=(128, 1))
KIND = "table_wise"  # which the planner chooses for these numbers of ranks
SIZES = (1, 2, 4, 8)
BEYOND = (16, 64, 256, 1024)
RATE = "1gbit"
_WINDOWS, _ROUNDS, _STEPS = 3, 3, 6
_PROFILE = ".profile.json"


def worker(out: Path) -> None:
    """Measure as one rank, or calibrate if ``out`` is a profile. Rank 0 writes the result to ``out``."""
    torch.set_num_threads(1)
    form_group("gloo", timedelta(minutes=5))
    if out.name.endswith(_PROFILE):
        profile = calibrate(dist.group.WORLD, sizes=Sizes(batch_size=512))
        found = profile.to_json()
    else:
        found = _measure(HardwareProfile.load(out.with_name(out.stem + _PROFILE)))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    leave_process_group()


def _measure(profile: HardwareProfile) -> dict[str, Any]:
    """Return predicted and measured phases, and whole steps. Collective."""
    size = dist.get_world_size()
    # In windows some time apart, so that a slow moment of the machine does not decide.
    own = [
        time._replace(step=1000 * window + time.step)
        for window in range(_WINDOWS)
        for time in measure_phases(KIND, SHAPE)
    ]
    every: list[Any] = [None] * size
    dist.all_gather_object(every, own)
    alone = [_first_loss(other) for other in range(max(SIZES))] if size == 1 else []
    step = build("meshrec", KIND, SHAPE).step
    batches = [make_inputs(SHAPE, number) for number in range(4)]
    losses = [float(step(batch).detach()) for batch in batches]
    taken = []
    for _ in range(_ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        for number in range(_STEPS):
            step(batches[number % 4])
        taken.append((time.perf_counter() - began) / _STEPS)
    total = torch.tensor(losses)
    dist.all_reduce(total)
    plan = planned(KIND, SHAPE, profile, size, local_ranks=1)
    phases = compare(plan, list(itertools.chain(*every)))
    return {
        "ranks": size,
        "phases": {each.phase: (each.predicted, each.measured) for each in phases},
        "dense": statistics.median(t.seconds for of_rank in every for t in of_rank if t.phase == DENSE),
        "whole": statistics.median(taken),
        "losses": (total / size).tolist(),
        "alone": alone,
        "profile": profile.to_json(),
    }


def _first_loss(rank: int) -> float:
    """Return the loss of a rank's first batch under the first weights, computed by a single rank."""
    return float(build("meshrec", KIND, SHAPE).step(make_inputs(SHAPE, 0, rank)).detach())


def measured(size: int, folder: Path) -> dict[str, Any]:
    """Calibrate and measure on ``size`` hosts with a rank each, unless the folder has the results."""
    for out in (folder / f"{size}{_PROFILE}", folder / f"{size}.json"):
        if not out.exists():
            _on_hosts(size, folder, out)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _on_hosts(size: int, folder: Path, out: Path) -> None:
    """Run a rank on each of ``size`` hosts."""
    with hosts(size, folder / str(size), rate=RATE) as (*found, _):
        ranks = []
        for rank, host in enumerate(found):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
            environment |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": found[0].address, "MASTER_PORT": "29500"}
            environment |= {"OMP_NUM_THREADS": "1", "MESHREC_HOST_LINK": "0"}
            words = [sys.executable, "-m", "benchmarks.scaling", "--worker", str(out)]
            ranks.append(host.popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=None))
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}. Look at their errors above.")


def run(folder: Path) -> str:
    """Measure, predict, and return the tables as text."""
    results = {size: measured(size, folder) for size in SIZES}
    for size in results:
        expected, found = statistics.mean(results[1]["alone"][:size]), results[size]["losses"][0]
        if abs(found - expected) > 1e-4 * expected:
            raise RuntimeError(f"{size} ranks have a loss of {found} instead of {expected}. Find out why.")
    header = ["ranks", "tables [ms]", "predicted", "error", "by 2 ranks", "dense [ms]", "step [ms]"]
    profile, dense = HardwareProfile.from_json(results[2]["profile"]), results[2]["dense"]
    rows = []
    for size in (*SIZES, *BEYOND):
        inputs = planned(KIND, SHAPE, profile, size, local_ranks=1).required_inputs()
        best = plan_tables(inputs.tables, inputs.topology, batch_size=inputs.batch_size)
        by_two = 1e3 * sum(best.estimate().phases.values())
        if size in results:
            each = results[size]
            predicted, real = each["phases"]["step"]
            cells = [f"{1e3 * real:.1f}", f"{1e3 * predicted:.1f}", f"{100 * (predicted / real - 1):+.0f} %"]
            rest = [f"{1e3 * each['dense']:.1f}", f"{1e3 * each['whole']:.1f}"]
        else:
            cells, rest = [""] * 3, [f"{1e3 * dense:.1f}", f"{by_two + 1e3 * dense:.1f}"]
        rows.append([str(size), *cells, f"{by_two:.1f}" if size > 1 else "", *rest])
    phases = [
        [name, *(_cell(results[size]["phases"].get(name)) for size in SIZES)] for name in results[8]["phases"]
    ]
    names = ["phase, predicted / measured [ms]", *(f"{size} ranks" for size in SIZES)]
    return f"{table(header, rows)}\n\n{table(names, phases)}"


def _cell(values: list[float] | None) -> str:
    return "" if values is None else f"{1e3 * values[0]:.1f} / {1e3 * values[1]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", type=Path)
    parser.add_argument("--folder", type=Path, help="keeps the results of each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="measure only these; print no table")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        worker(arguments.worker)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for size in arguments.ranks:
            measured(size, folder)
        if not arguments.ranks:
            print(run(folder))


if __name__ == "__main__":
    main()
