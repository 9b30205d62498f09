"""Whole programs: signals, and several processes."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from meshrec.serve import ServerOptions, serve, workers
from tests.forked import ForkedProgram
from tests.hostile.sockets import listening
from tests.serve import toys
from tests.serve.conftest import Client, free_port, link, samples, scores_of


@contextlib.contextmanager
def program(*arguments, code=0, main="tests.serve.toys:main", forks=True):
    """``meshrec serve``, ready; and a way to ask it. It ends with ``code``, and so do all its processes.

    It is a fork of a process which has imported torch, or an interpreter of its own.
    """
    port = free_port()
    arguments = [*map(str, arguments), "--port", str(port)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if forks:
        process = ForkedProgram(main, arguments, environment=environment, stderr=subprocess.PIPE)
    else:
        command = [sys.executable, "-W", "ignore", toys.__file__, *arguments]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    log = []
    reader = threading.Thread(target=lambda: log.extend(process.stderr))
    reader.start()
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: process.poll() is not None or answers(url, 200), log)
        assert process.poll() is None, log
        yield process, url, log
    finally:
        process.terminate()
        process.wait(60)
        reader.join(60)  # at the end once no process holds the other end
        left = reader.is_alive()
        for pid in re.findall(r"\(process (\d+)\)", "".join(log)) if left else ():
            os.kill(int(pid), signal.SIGKILL)
        reader.join()
        process.stderr.close()
    assert not left, log
    assert process.returncode == code, log


def answers(url, status):
    client = Client(url)
    try:
        return client("GET", "/v2/health/ready")[0] == status
    except OSError:
        return False
    finally:
        client.close()


def until(condition, log=()):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(f"waited for a minute; the log: {log}")


def ask(url, given):
    """On a connection of its own, so that any worker may answer."""
    client = Client(url)
    try:
        return client("POST", "/predict", given)
    finally:
        client.close()


def test_workers_do_everything_together(packages, predictors, tmp_path):
    place = tmp_path / "clicks"
    link(packages[0], place)
    given = samples(3)
    with program(place, "--workers", "2") as (process, url, log):
        status, _, said = ask(url, given)
        assert status == 200
        np.testing.assert_allclose(said["scores"], scores_of(predictors[0], given), rtol=1e-5)
        until(lambda: sum("is ready" in line for line in log) == 2, log)

        link(packages[1], place)
        client = Client(url)
        assert client("POST", "/v2/repository/models/clicks/load")[0] == 200
        assert {ask(url, given)[2]["version"] for _ in range(8)} == {predictors[1].version}
        status, _, said = client("POST", "/v2/repository/models/x/load")
        assert (status, "no model 'x'" in said["error"]) == (404, True)

        link(packages[0], place)
        process.send_signal(signal.SIGHUP)
        until(lambda: {ask(url, given)[2]["version"] for _ in range(8)} == {predictors[0].version}, log)

        text = client("GET", "/metrics")[2].decode()  # of both
        answered = float(re.search(r'meshrec_requests_total{model="clicks",outcome="ok"} (\S+)', text)[1])
        assert answered >= 17
        client.close()

        # A worker that ends is replaced by one that listens once it is ready.
        first, second = (int(process) for process in re.findall(r"process (\d+)", "".join(log)))
        ready = sum("is ready" in line for line in log)
        os.kill(first, signal.SIGKILL)
        until(lambda: any("exit code" in line for line in log), log)
        statuses = set()
        until(
            lambda: statuses.add(ask(url, given)[0]) or sum("is ready" in line for line in log) > ready, log
        )
        assert statuses | {ask(url, given)[0] for _ in range(8)} == {200}

        # It has the models that the others have.
        client = Client(url)
        assert client("POST", "/v2/repository/models/clicks/unload")[0] == 200
        client.close()
        os.kill(second, signal.SIGKILL)
        until(lambda: sum("exit code" in line for line in log) == 2, log)
        until(lambda: sum("serving clicks" in line for line in log) == 4, log)
        until(lambda: {ask(url, given)[0] for _ in range(8)} == {404}, log)


def test_workers_end_when_their_parent_is_killed_and_leave_no_files(packages, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with program(packages[0], "--workers", 3, code=-signal.SIGKILL) as (process, url, log):
        until(lambda: sum("serving v0" in line for line in log) == 3, log)
        assert [path.name[:14] for path in tmp_path.iterdir()] == ["meshrec-serve-"]
        process.kill()
        until(lambda: not answers(url, 200), log)
        until(lambda: not list(tmp_path.iterdir()), log)


def test_a_signal_ends_it_after_the_last_answer(packages):
    given = samples(8)
    with program(packages[0], forks=False) as (process, url, _):
        wrong, counts = [], []

        def load():
            client, count = Client(url), 0
            while True:
                try:
                    status, headers, _ = client("POST", "/predict", given)
                except ConnectionRefusedError:
                    break
                count += 1
                if status != 200:
                    wrong.append(status)
                if headers.get("connection") == "close":
                    client.close()
            counts.append(count)

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert wrong == []
        assert len(counts) == 3
        assert min(counts) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_listen_on_loopback_only(packages):
    with program(packages[0], "--workers", "2") as (process, url, _):
        assert listening(process.pid) == {f"127.0.0.1 {url.rsplit(':', 1)[1]}"}


def test_the_number_of_workers_is_checked(packages):
    with pytest.raises(ValueError, match=r"workers.*1.*0"):
        serve({"clicks": packages[0]}, ServerOptions(port=0), workers=0)


class Pipe:
    """The parent's end of a worker's pipe, which keeps what is sent."""

    def __init__(self):
        self.sent = []

    def send_bytes(self, content):
        self.sent.append(json.loads(content))

    def close(self):
        pass


def test_a_reload_does_not_end_a_worker_that_starts(packages):
    with program(f"clicks={packages[0]}", "--workers", 2) as (process, _, log):

        def started():
            return re.findall(r"\(process (\d+)\)", "".join(log))

        until(lambda: len(started()) == 2, log)
        os.kill(int(started()[0]), signal.SIGKILL)
        until(lambda: "exit code" in "".join(log), log)
        until(lambda: process.send_signal(signal.SIGHUP) or len(started()) == 3, log)
        time.sleep(0.2)
        assert "".join(log).count("ended with exit code") == 1, log


def test_a_new_worker_tries_again_before_it_listens(packages, tmp_path):
    """Its share of the requests would get 503 otherwise, until somebody loads the model."""
    place = tmp_path / "clicks"
    link(packages[0], place)
    with program(place, "--workers", 2) as (_, url, log):
        until(lambda: "".join(log).count("is ready") == 2, log)
        place.unlink()
        os.kill(int(re.findall(r"\(process (\d+)\)", "".join(log))[0]), signal.SIGKILL)
        until(lambda: "loading 'clicks' again in 0.5 s" in "".join(log), log)
        assert {ask(url, samples(3))[0] for _ in range(16)} == {200}
        link(packages[0], place)
        until(lambda: "".join(log).count("is ready") == 3, log)
        assert {ask(url, samples(3))[0] for _ in range(16)} == {200}


def test_a_new_worker_hears_nothing_of_what_its_predecessor_asked(packages, monkeypatch, tmp_path):
    """Tickets begin anew in each worker: the answer would be taken for that of another request."""
    ended = SimpleNamespace(join=lambda: None, exitcode=-9, is_alive=lambda: True, pid=12)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for name in ("gauge_livesum_12.db", "counter_12.db"):
        (tmp_path / name).touch()

    def start(self, index):
        self._workers[index] = workers._Worker(ended, Pipe(), time.monotonic() - 60)

    monkeypatch.setattr(workers._Supervisor, "_start_worker", start)
    with socket.socket() as bound:
        supervisor = workers._Supervisor({"clicks": packages[0]}, ServerOptions(), bound, 2)
        for index in range(2):
            start(supervisor, index)
        wish = {"action": "load", "model": "clicks", "delta": None}
        supervisor._tasks[1] = workers._Task(wish, {0, 1}, [], 0, 0)
        supervisor._on_worker_exit(0)
        supervisor._finish_change(1, 1, None)
        assert supervisor._tasks == {}
        assert supervisor._workers[0].pipe.sent == []
        assert [path.name for path in tmp_path.iterdir()] == ["counter_12.db"]
        supervisor._tasks[2] = workers._Task(wish, {0}, [], 1, 5)
        supervisor._finish_change(2, 0, None)
        assert supervisor._workers[1].pipe.sent == [{"ticket": 5, "error": None}]
