"""On one machine, nothing that trains listens where another machine reaches it."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.sockets import beyond_loopback, listening, watched

ROOT = Path(__file__).parents[2]
SMALL = "tests/train/small.py:small"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


def meshrec(*arguments, launcher=("-m", "meshrec"), **environment):
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_listens_is_seen():
    for family, address in (
        (socket.AF_INET, "0.0.0.0"),
        (socket.AF_INET6, "::"),
        (socket.AF_INET, "127.0.0.1"),
    ):
        with socket.socket(family) as each:
            each.bind((address, 0))
            each.listen()
            found = {one for one in listening(os.getpid()) if one.endswith(f" {each.getsockname()[1]}")}
            assert found == {f"{address} {each.getsockname()[1]}"}
            assert bool(beyond_loopback(found)) is (address != "127.0.0.1")


def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path):
    options = ("--nproc", 2, "--runs", tmp_path, "--name", "mine", "--quiet", "--training.epochs", 100_000)
    # A user's own choice of an interface is for several machines.
    process = meshrec("train", SMALL, *options, GLOO_SOCKET_IFNAME="eth0")
    try:
        metrics = tmp_path / "mine" / "metrics.jsonl"
        found = watched(process, until=metrics.exists)
        assert metrics.exists(), process.stderr.read()
        process.send_signal(signal.SIGTERM)
        found |= watched(process)
        assert json.loads((tmp_path / "mine" / "summary.json").read_text())["state"] == "stopped"
        assert found  # gloo's sockets
        assert beyond_loopback(found) == set()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_tuning_listens_nowhere(tmp_path):
    process = meshrec("tune", SMALL, "--trials", 1, "--runs", tmp_path)
    try:
        assert watched(process) == set()
        assert process.wait() == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
