import logging
import os
import socket
import sys
from pathlib import Path

import pytest

from meshrec.comms import joining
from meshrec.comms.joining import STORE_VARIABLE, is_one_machine

# The second rank is a fork of the first: to import torch takes seconds.
RANKS = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from meshrec.comms.joining import form_group, store_host
from meshrec.comms.leaving import leave_process_group
from sockets import beyond_loopback, listening

child = os.fork()
rank = os.environ["RANK"] = "0" if child else "1"
form_group("gloo", timedelta(seconds=200))
tensor = torch.ones(1)
dist.all_reduce(tensor)
found = listening(os.getpid())
assert found and not beyond_loopback(found), found
with open(f"{sys.argv[1]}/told{rank}", "w") as file:
    print(int(tensor), store_host(), os.environ["GLOO_SOCKET_IFNAME"], end="", file=file)
dist.barrier()
leave_process_group()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def environment(monkeypatch):
    """``environment(NAME=value)``: only these of a launcher's variables are set."""
    names = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE_VARIABLE)

    def only(**values):
        for name in (*names, *joining._INTERFACE_VARIABLES):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return only


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({STORE_VARIABLE: "/tmp/x"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, False),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.9", "MASTER_PORT": "1"}, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}, False),
    ],
)
def test_one_machine_is_told_by_the_launcher(environment, values, expected):
    environment(**values)
    assert is_one_machine() is expected


def test_an_address_that_nobody_knows(environment):
    environment(WORLD_SIZE="2", MASTER_ADDR="no such host", MASTER_PORT="1")
    with pytest.raises(ValueError, match=r"MASTER_ADDR.*'no such host'"):
        is_one_machine()


def test_a_store_that_must_listen_everywhere_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        assert joining._listen("192.0.2.1", 0) is None  # kept for documentation: no machine has it
    assert "rank 0 cannot listen at MASTER_ADDR 192.0.2.1 alone (192.0.2.1: " in caplog.text


def test_the_user_is_told_when_there_is_no_loopback(environment, monkeypatch, caplog):
    environment()
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(2, "eth7")])
    with caplog.at_level(logging.WARNING):
        joining._listen_on_loopback()
    assert "this machine has no loopback interface" in caplog.text
    assert "eth7" in caplog.text
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def free_port():
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        return each.getsockname()[1]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("kind", ["started by hand", "our launcher"])
def test_ranks_of_one_machine_listen_on_loopback_only(run_code, tmp_path, kind):
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    if kind == "our launcher":
        where |= {STORE_VARIABLE: str(tmp_path), "MASTER_ADDR": "nowhere", "MASTER_PORT": "0"}
    run_code(RANKS, tmp_path, cwd=Path(__file__).parents[1] / "hostile", **where)
    host = "None" if kind == "our launcher" else "rank 0"
    assert [(tmp_path / f"told{rank}").read_text() for rank in range(2)] == [f"2 {host} lo"] * 2
