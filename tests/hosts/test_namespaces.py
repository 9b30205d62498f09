"""Hosts made of namespaces end with the process that made them, however it ends."""

import subprocess
import sys
from pathlib import Path

from tests.hosts.namespaces import hosts, needs_hosts, until
from tests.hosts.runs import ENVIRONMENT

pytestmark = needs_hosts
MAKES = """
import os, sys
from pathlib import Path
from tests.hosts.linux_hosts import hosts

with hosts(1, Path(sys.argv[1])) as (host, _):
    host.popen(["sleep", "1000"])
    print(os.getpid(), host.pid, flush=True)
    sys.stdin.read()
"""


def namespaces(pid):
    """The network namespaces that a process has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if name.startswith(f"mr{pid}x")]


def test_hosts_end_with_their_maker(tmp_path):
    words = [sys.executable, "-c", MAKES, str(tmp_path)]
    with subprocess.Popen(
        words, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as maker:
        pid, host = maker.stdout.readline().split()
        assert len(namespaces(pid)) == 2
        maker.kill()
    until(lambda: not Path(f"/proc/{host}").exists(), what="the host's first process is still there")
    with hosts(1, tmp_path):
        assert namespaces(pid) == []
