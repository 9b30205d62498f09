"""Ranks are killed at random moments, started anew, and end with the bits of a run that was never killed."""

import json
import multiprocessing
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import pytest

from meshrec.checkpoint import CheckpointManager, verify_data
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.reading import read_manifest

WORLD_SIZE = 2
NUM_KILLS = int(os.environ.get("MESHREC_KILLS", "3"))
"""Few by default, for the time it takes; `make kills` makes it 20."""
NUM_STEPS = 20 + 10 * NUM_KILLS
PATIENCE = 240.0


def start(folder, store, phases):
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(
            target=runpy.run_path,
            args=(str(Path(__file__).parent / "life.py"),),
            kwargs={
                "run_name": "__life__",
                "init_globals": {
                    "RANK": rank,
                    "FOLDER": folder,
                    "STORE": store,
                    "PHASES": phases,
                    "NUM_STEPS": NUM_STEPS,
                },
            },
            daemon=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    for process in processes:
        process.start()
    return processes


def join(processes):
    deadline = time.monotonic() + PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        assert process.exitcode is not None, "a rank did not notice that the other is gone"
    return [process.exitcode for process in processes]


def children(pids):
    """Processes that descend from ``pids`` now."""
    found = set(pids)
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    for _ in range(3):
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found


def run_to_the_end(folder, tmp_path, kills):
    """Kills while there are kills left; gives how often each phase was hit."""
    rng = random.Random(0)
    hit = {b"l": 0, b"t": 0, b"s": 0}
    wanted = [phase for _ in range(kills) for phase in (b"t", b"s", b"l")][:kills]
    lives = 0
    while True:
        lives += 1
        assert lives < 3 * kills + 3, "the run does not come to its end"
        phases = multiprocessing.get_context("forkserver").Array("c", WORLD_SIZE)
        processes = start(folder, tmp_path / f"store{lives}", phases)
        victim = rng.randrange(WORLD_SIZE)
        if wanted:
            target, skip = wanted.pop(), rng.randrange(4)
            deadline = time.monotonic() + PATIENCE
            while processes[victim].is_alive() and time.monotonic() < deadline:
                if phases[victim] == target:
                    skip -= 1
                    if target == b"l":
                        break
                    time.sleep(rng.random() * 0.02)
                    if skip < 0 and phases[victim] == target:
                        break
                time.sleep(0.0005)
            family = children([process.pid for process in processes])
            if processes[victim].is_alive():
                hit[phases[victim]] = hit.get(phases[victim], 0) + 1
                os.kill(processes[victim].pid, signal.SIGKILL)
        else:
            family = children([process.pid for process in processes])
        before = complete(folder)
        codes = join(processes)
        assert before <= complete(folder) | removed(folder, before), "a checkpoint was lost"
        assert not [pid for pid in family if alive(pid)], "a process was left behind"
        if codes == [0, 0]:
            return hit, lives


def complete(folder):
    return {path.parent.name for path in folder.glob(f"step-*/{MANIFEST}")}


def removed(folder, before):
    """Those that retention may have removed: older than the two newest."""
    kept = sorted(complete(folder) | before)[-2:]
    return {name for name in before if name not in kept}


def alive(pid):
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_killed_runs_end_with_the_same_bits(tmp_path):
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _, lives = run_to_the_end(undisturbed, tmp_path / "a", 0)
    assert lives == 1
    hit, lives = run_to_the_end(disturbed, tmp_path / "b", NUM_KILLS)
    print(json.dumps({"lives": lives, **{phase.decode(): count for phase, count in hit.items()}}))
    first, second = (
        read_manifest(CheckpointManager(each).path(NUM_STEPS)) for each in (undisturbed, disturbed)
    )
    verify_data(CheckpointManager(disturbed).path(NUM_STEPS), second)
    assert {n: [p.checksums for p in r.pieces] for n, r in first.tensors.items()} == {
        n: [p.checksums for p in r.pieces] for n, r in second.tensors.items()
    }
    assert first.values == second.values
