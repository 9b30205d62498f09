import socket

import pytest

from meshrec.cluster import network


@pytest.fixture
def address(monkeypatch):
    """A store that listens on this machine, as another launcher than ours names it."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        for name in ("LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "MESHREC_STORE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(listening.getsockname()[1]))
        monkeypatch.setenv("RANK", "1")
        yield monkeypatch


def test_a_store_that_listens(address):
    assert [each.level for each in network.network_checks()] == ["ok", "ok"]


def test_a_store_that_does_not_answer(address):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address.setattr(network, "_CONNECT_SECONDS", 0.1)
    told = network.reachable("127.0.0.1", port)
    assert told.level == "fail"
    assert f"open port {port}" in told.remedy
    address.setenv("RANK", "0")  # which is about to listen there
    assert network.reachable("127.0.0.1", port).level == "ok"


def test_an_unknown_name(address):
    address.setenv("MASTER_ADDR", "nowhere.invalid")
    (told,) = network.network_checks()
    assert told.level == "fail"
    assert told.remedy.startswith("Name a host")


@pytest.mark.parametrize(
    ("chosen", "level", "words"),
    [
        ("eth7x", "fail", "not exist"),
        ("lo", "fail", "other hosts cannot reach"),
        ("a", "ok", "a (10.0.0.1)"),
        ("b", "warn", "a leads to rank 0"),
        ("c", "fail", "no address"),
        (None, "ok", "a (10.0.0.1)"),
    ],
)
def test_interfaces(monkeypatch, chosen, level, words):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if chosen is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(["lo", "a", "b", "c"])))
    addresses = {"127.0.0.1": "lo", "10.0.0.1": "a", "10.0.1.1": "b"}
    monkeypatch.setattr(network, "interfaces", lambda: addresses)
    told = network.interface(False, "a")
    assert told.level == level
    assert words in told.observation
    assert level == "ok" or "GLOO_SOCKET_IFNAME=a" in told.remedy
