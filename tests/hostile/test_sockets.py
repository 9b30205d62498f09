"""On one machine, nothing that trains listens where another machine reaches it.

``tests/cli/test_train.py`` watches the sockets of two ranks, in its run that Ctrl-C ends.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ForkedProgram
from tests.hostile.sockets import beyond_loopback, listening, watched

ROOT = Path(__file__).parents[2]
SMALL = "tests/train/small.py:small"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


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


def test_tuning_listens_nowhere(tmp_path):
    words = ["tune", SMALL, "--trials", 1, "--runs", tmp_path]
    process = ForkedProgram("meshrec.cli.__main__:main", words, cwd=ROOT, stderr=subprocess.PIPE)
    try:
        assert watched(process) == set()
        assert process.wait() == 0, process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
