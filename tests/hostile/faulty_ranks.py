"""Draws faults of ranks, and runs training with them: stopped, killed, and cut off from the network."""

import contextlib
import ctypes
import functools
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from meshrec.cli.__main__ import main as meshrec
from tests.forked import ForkedProgram

ROOT = Path(__file__).parents[2]
MESHREC = "meshrec.cli.__main__:main"
SMALL = "tests/train/small.py:small"
RANK_TIMEOUT = 3
PATIENCE = 240.0
"""Seconds after which a run hangs; a machine may be busy."""

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
# The network of rank 1, on the other end of the cable.
_FAR_END = """
ip link set lo up; touch "$FOLDER/apart"
until ip link show v1 > /dev/null 2>&1; do sleep 0.05; done
ip address add 10.9.0.2/24 dev v1; ip link set v1 up
"""
_NEAR_END = """
until [ -e "$FOLDER/apart" ]; do sleep 0.05; done
ip link add v0 type veth peer name v1 netns "$0"
ip address add 10.9.0.1/24 dev v0; ip link set v0 up
"""
_CUT_CABLE = """
until [ -e "$FOLDER/cut" ] || [ -e "$FOLDER/code0" ]; do sleep 0.05; done
ip link set v0 down
"""
_CUT_LOOPBACK = 'until [ -e "$FOLDER/cut" ]; do sleep 0.05; done; ip link set lo down'


class Fault(NamedTuple):
    """What happens to which rank of how many, when, and how long after that moment has come."""

    kind: str
    rank: int
    size: int
    moment: str
    seconds: float


class Outcome(NamedTuple):
    """How a run with a fault ended: in time or not, and what it told."""

    seconds: float
    code: int | None
    told: str


MOMENTS = ("starting", "training", "saving")


def draw(number: int, seed: int) -> Iterator[Fault]:
    """Faults of our launcher's ranks; with seed 0 the first ones are one of each kind and rank."""
    source = random.Random(seed)
    first = [("killed", 0, 2, "saving"), ("stopped", 0, 2, "starting"), ("stopped", 0, 2, "training")]
    first += [("stopped", 1, 3, "training"), ("stopped", 1, 2, "saving"), ("killed", 1, 3, "starting")]
    for at in range(number):
        size = source.choice((2, 2, 2, 3))
        kind, rank, moment = (
            source.choice(("stopped", "killed")),
            source.randrange(size),
            source.choice(MOMENTS),
        )
        if seed == 0 and at < len(first):
            kind, rank, size, moment = first[at]
        yield Fault(kind, rank, size, moment, source.uniform(0.0, 1.0))


def environment(**values: str) -> dict[str, str]:
    """The environment of commands: the sources of this checkout, and nothing of another launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src", **values}


def arguments(folder: Path, *options: object) -> list[str]:
    """``meshrec``'s arguments for an endless training with checkpoints."""
    given = ("--runs", folder, "--name", "mine", "--quiet", "--rank-timeout", RANK_TIMEOUT, *options)
    endless = ("--training.epochs", 100_000, "--training.checkpoint-every", 10, "--training.batch-size", 102)
    return ["train", SMALL, *map(str, (*given, *endless))]


def run(fault: Fault, folder: Path) -> Outcome:
    """Train on this machine, and have the fault happen."""
    errors = folder / "errors"
    with errors.open("w") as file:
        process = ForkedProgram(
            MESHREC,
            arguments(folder, "--nproc", fault.size),
            cwd=ROOT,
            environment=environment(),
            stderr=file,
        )
    try:
        victim = wait_for(process, fault, folder / "mine")
        time.sleep(fault.seconds)
        began = time.monotonic()
        os.kill(victim, signal.SIGSTOP if fault.kind == "stopped" else signal.SIGKILL)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return Outcome(time.monotonic() - began, None, "it hangs")
        return Outcome(time.monotonic() - began, process.returncode, errors.read_text())
    finally:
        end(process)


def wait_for(process: ForkedProgram, fault: Fault, run_folder: Path) -> int:
    """Wait for the moment of the fault; the process of its rank."""
    patterns = {"training": "metrics.jsonl", "saving": "checkpoints/*/manifest.json"}
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        victim = ranks_of(process.pid).get(fault.rank)
        if victim and (fault.moment == "starting" or list(run_folder.glob(patterns[fault.moment]))):
            return victim
        time.sleep(0.02)
    raise AssertionError(f"{fault} never came: {process.poll()}")


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process, of the ranks that a launcher has started through its fork server."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            name = path.read_text().strip()
            if name.startswith("meshrec rank ") and parent(parent(path.parent.name)) == str(launcher):
                found[int(name.split()[-1])] = int(path.parent.name)
    return found


def parent(process: str) -> str:
    """Its parent, from /proc."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]


def end(process: ForkedProgram) -> None:
    """End a launcher and its ranks, whatever they do."""
    for each in (*ranks_of(process.pid).values(), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    process.wait()


def run_by_hand(folder: Path, stopped: int, *, port: int) -> Outcome:
    """Train with two ranks that no launcher looks after, and stop one; what the other tells."""
    ranks = [
        ForkedProgram(
            MESHREC,
            arguments(folder),
            cwd=ROOT,
            environment=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            ),
        )
        for rank in range(2)
    ]
    other = ranks[1 - stopped]
    try:
        deadline = time.monotonic() + PATIENCE
        while not (folder / "mine" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            assert other.poll() is None, other.returncode
            time.sleep(0.05)
        began = time.monotonic()
        ranks[stopped].send_signal(signal.SIGSTOP)
        try:
            code = other.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return Outcome(time.monotonic() - began, None, "it hangs")
        told = (folder / "mine" / f"error_rank{1 - stopped}.txt").read_text()
        return Outcome(time.monotonic() - began, code, told)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@functools.cache
def can_cut() -> bool:
    """Whether this user may make networks of his own, in which cables can be cut."""
    try:
        done = subprocess.run(
            ["unshare", "-rn", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"],
            capture_output=True,
        )
    except OSError:
        return False
    return done.returncode == 0


def two_machines() -> int:
    """Train on two ranks, each in a network of its own; the cable between them is cut once a file says so.

    Called in a process of its own, as `no_loopback` is. Each rank writes its exit code to a file.
    """
    _leave_network()
    far = os.fork()
    if not far:
        _unshare(_CLONE_NEWNET)
        _shell(_FAR_END)
        _be_rank(1, "v1")
    _shell(_NEAR_END, far)
    near = os.fork()
    if not near:
        _be_rank(0, "v0")
    _shell(_CUT_CABLE)
    for rank in (near, far):
        os.waitpid(rank, 0)
    return 0


def no_loopback() -> int:
    """Train by our launcher on a machine whose loopback interface goes away once a file says so."""
    _leave_network()
    with subprocess.Popen(["sh", "-c", _CUT_LOOPBACK]) as cutter:
        try:
            return meshrec()
        finally:
            cutter.terminate()


def _leave_network() -> None:
    """Enter a network of this process's own, as its administrator, and a session which can be killed."""
    os.setsid()
    user, group = os.getuid(), os.getgid()
    _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(content)
    _shell("ip link set lo up")


def _unshare(flags: int) -> None:
    """Call unshare(2), which Python has from 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), "unshare")


def _shell(script: str, *words: object) -> None:
    subprocess.run(["sh", "-c", script, *map(str, words)], check=True)


def _be_rank(rank: int, interface: str) -> NoReturn:
    """Run the command as a rank, and write its exit code to a file."""
    folder, code = Path(os.environ["FOLDER"]), 1
    try:
        os.environ |= {"RANK": str(rank), "GLOO_SOCKET_IFNAME": interface}
        with (folder / f"errors{rank}").open("w") as errors:
            os.dup2(errors.fileno(), 2)
        code = meshrec()
    finally:
        (folder / f"code{rank}").write_text(f"{code}\n")
        os._exit(0)


def cut(main: str, folder: Path, *options: object, **variables: str) -> Outcome:
    """Train by a function of this file inside a network of its own, and cut it once training is under way."""
    errors = folder / "errors"
    with errors.open("w") as file:
        process = ForkedProgram(
            f"{__name__}:{main}",
            arguments(folder, *options),
            cwd=ROOT,
            environment=environment(FOLDER=str(folder), **variables),
            stderr=file,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        metrics = folder / "mine" / "metrics.jsonl"
        while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert metrics.exists(), [path.read_text() for path in folder.glob("errors*")]
        began = time.monotonic()
        (folder / "cut").touch()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return Outcome(time.monotonic() - began, None, "it hangs")
        return Outcome(time.monotonic() - began, process.returncode, errors.read_text())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
