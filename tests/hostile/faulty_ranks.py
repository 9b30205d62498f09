"""Draws faults of ranks, and runs training with them: stopped, killed, and cut off from the network."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SMALL = "tests/train/small.py:small"
RANK_TIMEOUT = 6
PATIENCE = 240.0
"""Seconds after which a run hangs; a machine may be busy."""

# Two ranks, each in a network of its own, with one cable between them, which is cut once a file says so.
TWO_MACHINES = """
ip link set lo up
unshare -n sh -c '
    ip link set lo up; touch "$FOLDER/apart"
    until ip link show v1 > /dev/null 2>&1; do sleep 0.05; done
    ip address add 10.9.0.2/24 dev v1; ip link set v1 up
    export RANK=1 GLOO_SOCKET_IFNAME=v1
    "$@" 2> "$FOLDER/errors1"; echo $? > "$FOLDER/code1"' rank "$@" &
until [ -e "$FOLDER/apart" ]; do sleep 0.05; done
ip link add v0 type veth peer name v1 netns $!
ip address add 10.9.0.1/24 dev v0; ip link set v0 up
(export RANK=0 GLOO_SOCKET_IFNAME=v0; "$@" 2> "$FOLDER/errors0"; echo $? > "$FOLDER/code0") &
until [ -e "$FOLDER/cut" ] || [ -e "$FOLDER/code0" ]; do sleep 0.05; done
ip link set v0 down
wait
"""
# Our launcher and its ranks on a machine whose loopback interface goes away.
NO_LOOPBACK = """
ip link set lo up
(until [ -e "$FOLDER/cut" ]; do sleep 0.05; done; ip link set lo down) &
exec "$@"
"""


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
    first = [("stopped", 0, "starting"), ("killed", 0, "saving"), ("stopped", 0, "training")]
    first += [("stopped", 1, "training"), ("stopped", 1, "saving"), ("killed", 1, "starting")]
    for at in range(number):
        size = source.choice((2, 2, 2, 3))
        kind, rank, moment = (
            source.choice(("stopped", "killed")),
            source.randrange(size),
            source.choice(MOMENTS),
        )
        if seed == 0 and at < len(first):
            kind, rank, moment = first[at]
        yield Fault(kind, rank, size, moment, source.uniform(0.0, 1.0))


def environment(**values: str) -> dict[str, str]:
    """The environment of commands: the sources of this checkout, and nothing of another launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src", **values}


def command(folder: Path, *options: object) -> list[str]:
    """An endless training with checkpoints."""
    given = ("--runs", folder, "--name", "mine", "--quiet", "--rank-timeout", RANK_TIMEOUT, *options)
    endless = ("--training.epochs", 100_000, "--training.checkpoint-every", 10, "--training.batch-size", 102)
    return [sys.executable, "-m", "meshrec", "train", SMALL, *map(str, (*given, *endless))]


def run(fault: Fault, folder: Path) -> Outcome:
    """Train on this machine, and have the fault happen."""
    process = subprocess.Popen(
        command(folder, "--nproc", fault.size),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        victim = wait_for(process, fault, folder / "mine")
        time.sleep(fault.seconds)
        began = time.monotonic()
        os.kill(victim, signal.SIGSTOP if fault.kind == "stopped" else signal.SIGKILL)
        try:
            told = process.communicate(timeout=PATIENCE)[1]
        except subprocess.TimeoutExpired:
            return Outcome(time.monotonic() - began, None, "it hangs")
        return Outcome(time.monotonic() - began, process.returncode, told)
    finally:
        end(process)


def wait_for(process: subprocess.Popen, fault: Fault, run_folder: Path) -> int:
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
    """Rank -> process, of the ranks that a launcher has started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[1]) == launcher:
                variables = (path.parent / "environ").read_bytes().split(b"\0")
                ranks = [int(each[5:]) for each in variables if each.startswith(b"RANK=")]
                found |= dict.fromkeys(ranks, int(path.parent.name))
    return found


def end(process: subprocess.Popen) -> None:
    """End a launcher and its ranks, whatever they do."""
    for each in (*ranks_of(process.pid).values(), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    process.wait()
    if process.stderr is not None:
        process.stderr.close()


def run_by_hand(folder: Path, stopped: int, *, port: int) -> Outcome:
    """Train with two ranks that no launcher looks after, and stop one; what the other tells."""
    ranks = [
        subprocess.Popen(
            command(folder),
            cwd=ROOT,
            env=environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
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


def cut(script: str, folder: Path, *options: object, **variables: str) -> Outcome:
    """Train inside a network of its own by ``script``, and cut its cable once training is under way."""
    errors = folder / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            ["unshare", "-rn", "sh", "-c", script, "sh", *command(folder, *options)],
            cwd=ROOT,
            env=environment(FOLDER=str(folder), **variables),
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
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
        process.wait()
