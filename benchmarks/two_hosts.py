"""Backward pass of a DLRM on two hosts joined at 400 Mb/s: dense gradients averaged by MeshRec's hook, beside
torch's ``allreduce_hook``.

The hosts are network namespaces of this machine, so the benchmark needs Linux and root. Both hooks train the
same model in the same processes, and take turns step by step. Their gradients are compared before anything is
timed.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from benchmarks.clicks_model import ClicksLoop, Shape, fill, make_batches
from benchmarks.harness import Bar, Effort, Result, selected, table
from meshrec.comms.joining import form_group
from meshrec.comms.mesh import default_env
from tests.hosts.linux_hosts import Host, hosts, why_not

OURS, THEIRS = "meshrec", "allreduce_hook"
RATE = "400mbit"
BUCKETS_MIB = {"one bucket": 25.0, "1 MiB buckets": 1.0, "0.25 MiB buckets": 0.25}
FULL = Shape(batch=256, num_rows=10_000, top=(672, 512, 256, 1))
TINY = Shape(num_tables=4, num_rows=100, dim=8, batch=16, bottom=(16, 8), top=(16, 1))
_PORT = "29512"
_STEPS_PER_CALL = 2


class _Loop(ClicksLoop):
    """A plain training loop whose dense gradients are averaged by one of the hooks."""

    def __init__(self, name: str, shape: Shape, bucket_mib: float) -> None:
        options = {"bucket_cap_mb": bucket_mib}
        super().__init__(shape, default_env(), pipelined=False, dense_options=options, init_fn=fill)
        if name == THEIRS:
            self.model.register_comm_hook(None, allreduce_hook)
        self._batches = itertools.cycle(make_batches(shape, dist.get_rank(), 4))

    def backward(self) -> float:
        """Run a forward and a backward pass. Return the backward pass's seconds on the slowest rank."""
        self.optimizer.zero_grad()
        loss, _ = self.model(next(self._batches))
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    def gradients(self) -> list[torch.Tensor]:
        """Return the averaged dense gradients."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def _measure(bucket_mib: float, num_steps: int, shape: Shape) -> tuple[dict[str, list[float]], int, int]:
    """Compare the hooks' gradients on a rank, then time backward passes in turns.

    Returns:
        Milliseconds by hook, bytes of dense gradients, and number of buckets.
    """
    loops = {name: _Loop(name, shape, bucket_mib) for name in (OURS, THEIRS)}
    # gloo does not add in rank order, so only two ranks get equal bits.
    tolerance = {"rtol": 0.0, "atol": 0.0} if dist.get_world_size() == 2 else {"rtol": 1e-4, "atol": 1e-7}
    # Without optimizer steps, so that the weights stay equal. DDP forms its buckets in the first pass.
    for _ in range(3):
        for loop in loops.values():
            loop.backward()
        torch.testing.assert_close(loops[OURS].gradients(), loops[THEIRS].gradients(), **tolerance)
    milliseconds: dict[str, list[float]] = {name: [] for name in loops}
    for step in range(num_steps):
        for name in list(loops)[:: 1 if step % 2 else -1]:
            milliseconds[name].append(1e3 * loops[name].backward())
            loops[name].optimizer.step()
    wrapped: Any = loops[OURS].model._dmp_wrapped_module
    sizes = wrapped._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
    return milliseconds, sum(gradient.nbytes for gradient in loops[OURS].gradients()), len(sizes)


def rank_main(buckets: Sequence[str], num_steps: int, shape: Shape) -> None:
    """Measure with all these bucket sizes on a rank. Rank 0 prints the figures as JSON."""
    torch.set_num_threads(1)
    form_group("gloo", timedelta(minutes=2))
    figures = {text: _measure(BUCKETS_MIB[text], num_steps, shape) for text in buckets}
    if dist.get_rank() == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _run_ranks(cluster: Sequence[Host], num_ranks: int, *arguments: str) -> Any:
    """Run ranks on the hosts, in equal numbers. Return what rank 0 prints."""
    local = num_ranks // len(cluster)
    variables = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(local), "OMP_NUM_THREADS": "1"}
    variables |= {"MASTER_ADDR": cluster[0].address, "MASTER_PORT": _PORT, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks: list[subprocess.Popen[str]] = []
    for rank in range(num_ranks):
        host = cluster[rank // local]
        # Both hosts have the same boot ID, so they need names.
        variables |= {"MESHREC_HOST": host.name, "RANK": str(rank), "LOCAL_RANK": str(rank % local)}
        words = [sys.executable, "-m", "benchmarks.two_hosts", *arguments]
        ranks.append(host.popen(words, env={**os.environ, **variables}, stderr=None))
    outputs = [process.communicate(timeout=600)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"ranks ended with {[process.returncode for process in ranks]}; see above.")
    return json.loads(outputs[0])


def run(effort: Effort, *, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Verify, time and compare with the bars. ``only``: words of the bucket sizes."""
    if (reason := why_not()) is not None:
        print(f"not measured: {reason}\n")
        return Result({"not_measured": reason}, [])
    figures, rows, bars = {}, [], []
    num_steps = effort.rounds * effort.calls * _STEPS_PER_CALL
    buckets = selected(list(BUCKETS_MIB), only)
    with tempfile.TemporaryDirectory() as folder, hosts(2, Path(folder), rate=RATE) as (*cluster, _):
        for num_ranks in (2, 4):
            measured = _run_ranks(cluster, num_ranks, str(num_steps), "tiny" if tiny else "full", *buckets)
            for text, (milliseconds, num_bytes, num_buckets) in measured.items():
                name = f"{num_ranks} ranks, {text}"
                ours, theirs = (statistics.median(milliseconds[hook]) for hook in (OURS, THEIRS))
                rows.append(
                    [name, f"{num_bytes / 1e6:.2f}", str(num_buckets), f"{ours:.1f}", f"{theirs:.1f}"]
                )
                figures[name] = {"ms": milliseconds, "bytes": num_bytes, "buckets": num_buckets}
                bars.append(Bar(name, ours / theirs, 1.05, at_most=True))
    print(table(["backward pass", "dense MB", "buckets", f"{OURS} ms", f"{THEIRS} ms"], rows), "\n")
    return Result(figures, bars)


if __name__ == "__main__":
    rank_main(sys.argv[3:], int(sys.argv[1]), TINY if sys.argv[2] == "tiny" else FULL)
