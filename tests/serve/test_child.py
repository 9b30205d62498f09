"""The processes of a server, and what they start as."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.sockets import descendants
from tests.serve.conftest import Client, samples
from tests.serve.test_workers import program

ROOT = Path(__file__).parents[2]


def test_only_a_process_with_one_thread_forks():
    subprocess.run([sys.executable, "-W", "error", ROOT / "tests/serve/parent.py"], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_live_server_starts_new_interpreters(packages):
    large = [{**each, "user": [1] * 2000} for each in samples(20)]
    with program(f"clicks={packages[0]}") as (process, url, _):
        children = descendants(process.pid) - {process.pid}
        assert len(children) == 2
        for child in children:
            os.kill(child, signal.SIGKILL)
        client = Client(url)
        status, _, said = client("POST", "/predict", large)
        assert (status, "the process that reads large requests ended" in said["error"]) == (503, True)
        status, _, said = client("POST", "/v2/repository/models/clicks/load", {})
        assert (status, "the process that tries out" in said["error"]) == (400, True)
        assert client("POST", "/predict", large)[0] == 200
        assert client("POST", "/v2/repository/models/clicks/load", {})[0] == 200
        client.close()
        children = descendants(process.pid) - {process.pid}
        assert len(children) == 2
        for child in children:
            assert b"meshrec.serve.child" in Path(f"/proc/{child}/cmdline").read_bytes()
    assert not any(Path(f"/proc/{child}").exists() for child in children)
