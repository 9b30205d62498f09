"""A package that would end the process that loads it never ends a server."""

import os
import signal
import time

import pytest

from tests.serve.conftest import Client, link, running, samples
from tests.serve.toys import Toy, check_toy, make_toy, open_with

ENDS = {
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "code 127": lambda: os._exit(127),
    "code 0": lambda: os._exit(0),
    "not done": lambda: time.sleep(60),
    "MemoryError": lambda: bytearray(1 << 62),
}


class Deadly(Toy):
    """A package whose scores end the process, if its version says so."""

    home, how = 0, ""

    def run(self, *given):
        if self.version == "v666":
            assert os.getpid() != self.home, "the server itself runs a package that was not tried out"
            ENDS[self.how]()
        return super().run(*given)


@pytest.mark.parametrize("how", ENDS)
def test_a_package_that_ends_its_process_is_refused_with_words(packages, tmp_path, monkeypatch, how):
    monkeypatch.setattr("meshrec.serve.trial._SECONDS", 1.0 if how == "not done" else 60.0)
    monkeypatch.setattr(Deadly, "home", os.getpid())
    monkeypatch.setattr(Deadly, "how", how)
    open_with(monkeypatch, Deadly, check_toy)
    bad, place = make_toy(tmp_path / "bad", 666), tmp_path / "clicks"
    link(packages[0], place)
    with running({"clicks": place}, tries=True) as server:
        client = Client(server.url)
        before = client("POST", "/predict", samples(3))[2]
        link(bad, place)
        for _ in range(2):
            status, _, said = client("POST", "/v2/repository/models/clicks/load", {})
            assert status == 400
            assert how in said["error"]
            assert client("POST", "/predict", samples(3))[2] == before
            assert how in client("POST", "/v2/repository/index")[2][0]["reason"]
        link(packages[1], place)
        assert client("POST", "/v2/repository/models/clicks/load", {})[0] == 200
        assert client("POST", "/predict", samples(3))[2]["version"] == "v2"
        client.close()


def test_the_process_for_trials_is_started_again(packages):
    with running({"clicks": packages[0]}, tries=True) as server:
        client = Client(server.url)
        os.kill(server._trial._child._pid, signal.SIGKILL)
        status, _, said = client("POST", "/v2/repository/models/clicks/load", {})
        assert (status, "the process that tries out" in said["error"]) == (400, True)
        assert client("POST", "/v2/repository/models/clicks/load", {})[0] == 200
        client.close()


def test_it_ends_with_the_server(packages):
    with running({"clicks": packages[0]}, tries=True) as server:
        pid = server._trial._child._pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
