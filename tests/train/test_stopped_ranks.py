import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrec.train.stopped_ranks import StoppedRanks

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system has no /proc")


@pytest.fixture
def rank():
    """A process that waits."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_rank_that_stays_stopped_is_found(rank):
    watch, processes = StoppedRanks(0.01), {3: rank.pid, 1: os.getpid()}
    assert watch.poll(processes) == []
    stop(rank)
    assert watch.poll(processes) == []  # it is stopped only now
    time.sleep(0.05)
    assert watch.poll(processes) == [3]
    rank.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, rank.pid, os.WCONTINUED | os.WNOWAIT)
    assert watch.poll(processes) == []
    stop(rank)
    assert watch.poll(processes) == []  # the time begins anew


def test_time_for_which_the_launcher_was_stopped_itself_does_not_count(rank, monkeypatch):
    stop(rank)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = StoppedRanks(20.0)
    assert watch.poll({0: rank.pid}) == []
    now += 3600.0  # Ctrl-Z stopped all of them, and they go on together
    assert watch.poll({0: rank.pid}) == []
