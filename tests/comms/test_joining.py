import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from meshrec.comms import joining
from meshrec.comms.joining import STORE_VARIABLE, is_one_machine

ROOT = Path(__file__).parents[2]
RANK = """
import os
from datetime import timedelta
import torch
import torch.distributed as dist
from meshrec.comms.joining import form_group, store_host
from meshrec.comms.leaving import leave_process_group
from sockets import beyond_loopback, listening

form_group("gloo", timedelta(seconds=200))
tensor = torch.ones(1)
dist.all_reduce(tensor)
found = listening(os.getpid())
assert found and not beyond_loopback(found), found
print(int(tensor), store_host(), os.environ["GLOO_SOCKET_IFNAME"])
dist.barrier()
leave_process_group()
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
def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path, kind):
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    if kind == "our launcher":
        where = {STORE_VARIABLE: str(tmp_path), "MASTER_ADDR": "nowhere", "MASTER_PORT": "0"}
    cleared = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={
                **cleared,
                **where,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "PYTHONPATH": f"{ROOT}/tests/hostile:{ROOT}/src",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [each.communicate(timeout=240) for each in ranks]
    host = "None" if kind == "our launcher" else "rank 0"
    # Gloo itself speaks on stdout with torch 2.10.
    assert [output.splitlines()[-1:] for output, _ in outputs] == [[f"2 {host} lo"]] * 2, outputs
