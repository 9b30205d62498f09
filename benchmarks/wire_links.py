"""Ranks on two nodes with a link of a chosen speed between them, on one machine.

A node is a network namespace. A veth pair joins two of them, and ``tc ... tbf`` limits what each end sends.
Ranks of one node reach each other through their namespace's loopback and by shared memory, both unlimited.
Making namespaces needs root; ``why_not`` says what is missing.
"""

import importlib
import inspect
import os
import pickle
import runpy
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NODES = 2
_PREFIX = "10.231"


def why_not() -> str | None:
    """Return why namespaces cannot be made here; None if they can."""
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"the command {missing[0]!r} is missing"
    name = f"mr{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    try:
        link = subprocess.run(
            ["ip", "link", "add", f"{name}x", "type", "veth", "peer", "name", f"{name}y"],
            capture_output=True,
            text=True,
        )
        subprocess.run(["ip", "link", "del", f"{name}x"], capture_output=True)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return f"veth pairs cannot be made: {link.stderr.strip()}" if link.returncode else None


class Nodes:
    """Two namespaces and the link between them."""

    def __init__(self, tag: str) -> None:
        self._names = [f"{tag}{node}" for node in range(NODES)]
        self._net = f"{_PREFIX}.{secrets.randbelow(250) + 1}"

    def address(self, node: int) -> str:
        return f"{self._net}.{node + 1}"

    def interface(self, node: int) -> str:
        return f"{self._names[node]}v"

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs on a node."""
        return ["ip", "netns", "exec", self._names[node], *command]

    def make(self) -> None:
        """Make the namespaces and the link, with no limit yet."""
        for name in self._names:
            _run("ip", "netns", "add", name)
        pair = [self.interface(node) for node in range(NODES)]
        _run("ip", "link", "add", pair[0], "type", "veth", "peer", "name", pair[1])
        for node, name in enumerate(self._names):
            _run("ip", "link", "set", pair[node], "netns", name)
            for line in (
                ["ip", "addr", "add", f"{self.address(node)}/24", "dev", pair[node]],
                ["ip", "link", "set", pair[node], "up"],
                ["ip", "link", "set", "lo", "up"],
            ):
                _run(*self.command(node, line))

    def limit(self, gigabits: float) -> None:
        """Limit both directions of the link."""
        burst = max(1 << 17, int(gigabits * 1e9 / 8 / 1000))  # a millisecond's worth, above a segment
        for node in range(NODES):
            device = self.interface(node)
            subprocess.run(
                self.command(node, ["tc", "qdisc", "del", "dev", device, "root"]), capture_output=True
            )
            _run(
                *self.command(node, ["tc", "qdisc", "add", "dev", device, "root", "tbf"]),
                *["rate", f"{gigabits}gbit", "burst", str(burst), "latency", "50ms"],
            )

    def remove(self) -> None:
        """Remove the namespaces; the link goes with them."""
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Make two nodes, and remove them at the end."""
    nodes = Nodes(f"mr{secrets.token_hex(2)}n")
    try:
        nodes.make()
        yield nodes
    finally:
        nodes.remove()


def run_ranks(
    nodes: Nodes,
    work: Callable[..., Any],
    *arguments: Any,
    ranks_per_node: int = 2,
    seconds: float = 600.0,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``work(*arguments)`` on all ranks, in processes of their own; return what each rank returned.

    ``backend`` is that of the group of all ranks; ``slow_network.BACKEND`` delays its collectives.

    Raises:
        RuntimeError: a rank failed.
    """
    world = NODES * ranks_per_node
    with tempfile.TemporaryDirectory() as folder:
        task = Path(folder) / "task"
        task.write_bytes(pickle.dumps((work.__module__, inspect.getfile(work), work.__qualname__, arguments)))
        processes = []
        for rank in range(world):
            node = rank // ranks_per_node
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": nodes.address(0),
                "MASTER_PORT": "29400",  # of a namespace of our own
                "GLOO_SOCKET_IFNAME": nodes.interface(node),
                "MESHREC_HOST": f"node {node}",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, "-m", "benchmarks.wire_links", str(task), f"{folder}/{rank}", backend]
            processes.append(subprocess.Popen(nodes.command(node, command), env=environment))
        try:
            codes = [process.wait(seconds) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}; see their output above")
        return [pickle.loads(Path(f"{folder}/{rank}").read_bytes()) for rank in range(world)]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def _main(task: str, target: str, backend: str) -> None:
    """Run one rank of the measurement."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, file, name, arguments = pickle.loads(Path(task).read_bytes())
    try:
        work = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:  # a test's, which belongs to no package
        work = runpy.run_path(file)[name]
    if backend != "gloo":
        importlib.import_module("benchmarks.slow_network")  # registers it
    dist.init_process_group(backend)
    try:
        result = work(*arguments)
        Path(target).write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
