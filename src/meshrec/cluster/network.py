"""Network checks which a rank runs before it joins the process group."""

import os
import socket
import time
from collections.abc import Iterator

from meshrec.cluster.findings import Finding
from meshrec.comms.joining import interface_towards, interfaces, is_one_machine

# How long to wait for rank 0, which may start later than this rank.
_CONNECT_SECONDS = 20.0


def network_checks() -> Iterator[Finding]:
    """Check that this rank reaches rank 0 at MASTER_ADDR:MASTER_PORT, and check the network interface."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        one_machine = is_one_machine()
        towards = interface_towards(host, port)
    except ValueError as error:
        yield Finding(
            "address of rank 0", "fail", str(error).partition(". ")[0], str(error).partition(". ")[2]
        )
        return
    yield reachable(host, port)
    yield interface(one_machine, towards)


def reachable(host: str, port: int) -> Finding:
    """Check that rank 0's store, at which the ranks meet, accepts a TCP connection within 20 s."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            return Finding("address of rank 0", "ok", f"{host}:{port} answers")
        except OSError as error:
            refusal = error.strerror or str(error)
        if time.monotonic() > deadline or os.environ.get("RANK") == "0":
            break
        time.sleep(0.2)
    if os.environ.get("RANK") == "0":  # this rank will listen there itself
        return Finding("address of rank 0", "ok", f"{host}:{port}")
    return Finding(
        "address of rank 0",
        "fail",
        f"{host}:{port} does not answer ({refusal})",
        f"Start rank 0, open port {port} and the ephemeral ports between the hosts, or name "
        "another --master-addr.",
    )


def interface(one_machine: bool, towards: str | None) -> Finding:
    """Check the network interface on which gloo will listen, which GLOO_SOCKET_IFNAME may set.

    Args:
        one_machine: whether all ranks are on this host, so that gloo uses the loopback interface.
        towards: interface through which this host reaches rank 0; None if unknown.
    """
    selected = os.environ.get("GLOO_SOCKET_IFNAME")
    there = {name for _, name in socket.if_nameindex()}
    # IPv4 address of every interface.
    addresses = {name: address for address, name in interfaces().items()}
    available = ", ".join(f"{name} ({addresses[name]})" for name in sorted(addresses)) or "none"
    if selected is None or one_machine:
        name = "lo" if one_machine else towards
        observation = f"{name or 'by the name of this host'}"
        return Finding(
            "interface", "ok", observation + (f" ({addresses[name]})" if name in addresses else "")
        )
    where = f"Set GLOO_SOCKET_IFNAME={towards}, which leads to rank 0"
    if towards is None:
        where = "Set GLOO_SOCKET_IFNAME to the one that leads to the other hosts"
    advice = f"{where}, or unset it; interfaces: {available}."
    if selected not in there:
        return Finding("interface", "fail", f"GLOO_SOCKET_IFNAME is {selected}, which does not exist", advice)
    if selected not in addresses:
        return Finding("interface", "fail", f"GLOO_SOCKET_IFNAME is {selected}, which has no address", advice)
    if addresses[selected].startswith("127."):
        observation = f"GLOO_SOCKET_IFNAME is {selected}, which other hosts cannot reach"
        return Finding("interface", "fail", observation, advice)
    if towards is not None and selected != towards:
        observation = f"GLOO_SOCKET_IFNAME is {selected} ({addresses[selected]}); {towards} leads to rank 0"
        return Finding("interface", "warn", observation, advice)
    return Finding("interface", "ok", f"{selected} ({addresses[selected]})")
