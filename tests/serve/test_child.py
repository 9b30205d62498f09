"""The processes of a server, and what they start as."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.sockets import descendants
from tests.serve.conftest import Client, samples
from tests.serve.test_workers import program, until

ROOT = Path(__file__).parents[2]


def test_only_a_process_with_one_thread_forks():
    subprocess.run([sys.executable, "-W", "error", ROOT / "tests/serve/parent.py"], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_children_that_end_between_two_questions_are_replaced(packages):
    """No request is refused for them. A server with threads starts new interpreters."""
    large = [{**each, "user": [1] * 2000} for each in samples(20)]
    with program(f"clicks={packages[0]}") as (process, url, _):
        children = descendants(process.pid) - {process.pid}
        assert len(children) == 2
        for child in children:
            os.kill(child, signal.SIGKILL)
            until(lambda child=child: ") Z " in Path(f"/proc/{child}/stat").read_text())  # it has ended
        client = Client(url)
        assert client("POST", "/predict", large)[0] == 200
        assert client("POST", "/v2/repository/models/clicks/load", {})[0] == 200
        client.close()
        children = descendants(process.pid) - {process.pid}
        assert len(children) == 2
        for child in children:
            assert b"meshrec.serve.child" in Path(f"/proc/{child}/cmdline").read_bytes()
    assert not any(Path(f"/proc/{child}").exists() for child in children)
