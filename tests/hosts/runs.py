"""Runs of ``meshrec train`` on hosts, and what is left of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from meshrec.checkpoint import CheckpointManager, find_checkpoint, read_manifest
from tests.hosts.namespaces import ROOT, Host

RECIPE = "tests/train/small.py:small"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("GLOO", "TORCHELASTIC"))},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{ROOT}:{ROOT}/src",
    "PYTHONUNBUFFERED": "1",
}


def torchrun(
    host: Host, number: int, first: Host, *options: str, nodes: str = "2", ranks: int = 2
) -> list[str]:
    """The words of torchrun on one of several hosts with the static rendezvous."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(ranks)),
        *("--node-rank", str(number), "--master-addr", first.address, "--master-port", "29511", *options),
    ]


def train(*options: object, recipe: str = RECIPE) -> list[str]:
    return ["-m", "meshrec", "train", recipe, "--quiet", *map(str, options)]


def on_all(found: list[Host], *options: object, ranks: int = 2, **more: object) -> list[tuple[int, str]]:
    """Train on all hosts; the exit code and what was printed, by host."""
    processes = [
        host.popen(
            [*torchrun(host, n, found[0], nodes=str(len(found)), ranks=ranks), *train(*options, **more)],
            env=ENVIRONMENT,
        )
        for n, host in enumerate(found)
    ]
    printed = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


def by_hand(found: list[Host], *options: object, ranks: int = 1) -> list[tuple[int, str]]:
    """As ``on_all`` with one rank on each host, without torchrun: its variables are set."""
    assert ranks == 1
    variables = {"WORLD_SIZE": str(len(found)), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    variables |= {"MASTER_ADDR": found[0].address, "MASTER_PORT": "29511"}
    processes = [
        host.popen(
            [sys.executable, *train(*options)],
            env={**ENVIRONMENT, **variables, "RANK": str(rank), "GROUP_RANK": str(rank)},
        )
        for rank, host in enumerate(found)
    ]
    printed = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, printed, strict=True)]


def bits(run: Path, step: int | None = None) -> dict[str, object]:
    """The checksums of everything in a run's last checkpoint but random numbers, of which each rank has its
    own.
    """
    path = (
        find_checkpoint(run, last=True) if step is None else CheckpointManager(run / "checkpoints").path(step)
    )
    manifest = read_manifest(path)
    return {
        name: sorted((piece.offset, piece.checksums) for piece in record.pieces)
        for name, record in manifest.tensors.items()
        if record.entry != "random"
    }


def metrics(run: Path) -> list[dict[str, object]]:
    """The lines of metrics without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = (
        "seconds",
        "samples_per_second",
        "peak_memory_mib",
        "cpu_seconds",
        "straggler",
        "straggler_share",
    )
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


def alone(folder: Path, ranks: int, *options: object) -> Path:
    """Train on this host alone, undisturbed; the run's folder."""
    words = [sys.executable, *train(*options), "--nproc", str(ranks), "--out", str(folder), "--name", "alone"]
    subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
    return folder / "alone"
