import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrec.comms.joining import STORE_VARIABLE
from meshrec.train.stopped_ranks import StoppedRanks

pytestmark = pytest.mark.skipif(
    not list(Path("/proc/self/task").glob("*/children")), reason="the system does not list children"
)


@pytest.fixture
def child(monkeypatch):
    """``child(RANK="1")``: a process with these variables, and those that the launcher sets."""
    processes = []
    monkeypatch.setenv(STORE_VARIABLE, "/tmp/ours")

    def start(**variables):
        command = [sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(600)"]
        environment = {**os.environ, **variables}
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
        processes[-1].stdout.readline()
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_rank_that_stays_stopped_is_found(child):
    rank, other, stranger = child(RANK="3"), child(RANK="1", **{STORE_VARIABLE: "/tmp/theirs"}), child()
    watch = StoppedRanks(0.01)
    assert watch.poll() == []
    for each in (rank, other, stranger):
        stop(each)
    assert watch.poll() == []  # it is stopped only now
    time.sleep(0.05)
    assert watch.poll() == [(rank.pid, 3)]
    rank.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, rank.pid, os.WCONTINUED | os.WNOWAIT)
    assert watch.poll() == []
    stop(rank)
    assert watch.poll() == []  # the time begins anew


def test_time_for_which_the_launcher_was_stopped_itself_does_not_count(child, monkeypatch):
    rank = child(RANK="0")
    stop(rank)
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = StoppedRanks(20.0)
    assert watch.poll() == []
    now += 3600.0  # Ctrl-Z stopped all of them, and they go on together
    assert watch.poll() == []
