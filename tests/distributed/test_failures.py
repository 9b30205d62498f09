"""A rank that goes away in the middle of a step, in processes of their own."""

import json
import multiprocessing
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import SGD

rank, store, when = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=timedelta(seconds=60)
)
module = torch.nn.ModuleDict(
    {"ebc": EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t0", num_embeddings=12, embedding_dim=4, feature_names=["a"])]
    )}
)
plan = md.construct_module_sharding_plan(module["ebc"], {"t0": md.row_wise()}, world_size=3)
model = DistributedModelParallel(
    module, plan=md.ShardingPlan({"ebc": plan}), sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))]
)
ebc = model.module["ebc"]
features = KeyedJaggedTensor(["a"], torch.tensor([1, 5, 9]), lengths=torch.tensor([2, 1]))


def wait_for_all(point):
    # Ranks of one host read from each other's memory: what a rank has sent goes with it.
    Path(f"{store}.{point}.{rank}").touch()
    while not all(Path(f"{store}.{point}.{other}").exists() for other in range(3)):
        time.sleep(0.01)


ebc(features).values().sum().backward()  # a whole step works
wait_for_all("a whole step")
for step in range(3):
    if rank == 1 and when == "forward":
        os._exit(7)
    output = ebc(features)
    if when == "reading":
        wait_for_all("sent")
        if rank == 1:
            os._exit(7)
        time.sleep(1.0)
    output = output.values()
    if rank == 1 and when == "backward":
        os._exit(7)
    output.sum().backward()
"""


# A program per rank that ends as any other does, but need not import everything.
PROGRAMS = """
import json, os, runpy, sys
import torch._dynamo
import meshrec.model_parallel

script, arguments, errors = json.loads(sys.argv[1])
children = []
for each, path in zip(arguments, errors):
    children.append(os.fork())
    if children[-1] == 0:
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [script, *each]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
print(*[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""


def as_programs(script: Path, arguments: list[list[str]]) -> list[tuple[int | None, str]]:
    errors = [script.with_name(f"errors{rank}") for rank in range(len(arguments))]
    request = json.dumps([str(script), arguments, list(map(str, errors))])
    command = [sys.executable, "-c", PROGRAMS, request]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    # torch 2.10 prints lines of its own before.
    codes = map(int, done.stdout.splitlines()[-1].split())
    return [(code, path.read_text()) for code, path in zip(codes, errors, strict=True)]


# What the script begins with where a process has not been started for it alone.
FORKED = """
import os, sys
sys.argv = ARGUMENTS
os.dup2(os.open(ERRORS, os.O_WRONLY | os.O_CREAT), 2)
"""


def as_forks(script: Path, arguments: list[list[str]]) -> list[tuple[int | None, str]]:
    """In processes that have torch loaded already."""
    script.write_text(FORKED + script.read_text())
    errors = [script.with_name(f"errors{rank}") for rank in range(len(arguments))]
    context = multiprocessing.get_context("forkserver")
    processes = []
    for each, path in zip(arguments, errors, strict=True):
        given = {"ARGUMENTS": [str(script), *each], "ERRORS": str(path)}
        processes.append(context.Process(target=runpy.run_path, args=(str(script), given, "__main__")))
        processes[-1].start()
    for process in processes:
        process.join(240)
    return [(process.exitcode, path.read_text()) for process, path in zip(processes, errors, strict=True)]


@pytest.mark.parametrize(
    ("when", "run", "collectives"),
    [
        ("forward", as_forks, ("sizes of ids", "ids", "embeddings")),
        ("reading", as_forks, ("embeddings",)),
        # What the dead rank has sent the others may not have read.
        ("backward", as_programs, ("embeddings", "gradients of embeddings", "sizes of ids")),
    ],
)
def test_the_others_name_the_dead_rank_and_the_collective_and_exit(tmp_path: Path, when, run, collectives):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = run(script, [[str(rank), str(tmp_path / "store"), when] for rank in range(3)])
    assert ended[1][0] == 7
    for rank in (0, 2):
        code, errors = ended[rank]
        assert code not in (0, None), errors
        line = next(line for line in errors.splitlines() if "CollectiveError: rank" in line)
        assert f"CollectiveError: rank {rank}: the collective" in line
        assert any(f"'{name}' over ranks [0, 1, 2] failed" in line for name in collectives)
        assert "no answer from rank 1." in line
        assert "restart all ranks from the last checkpoint" in line
