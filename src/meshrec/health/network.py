"""Checks of the network that a rank makes before it joins the others."""

import os
import socket
import time
from collections.abc import Iterator

from meshrec.comms.joining import interface_towards, interfaces, is_one_machine
from meshrec.health.findings import Finding

_CONNECT_SECONDS = 20.0


def network_checks() -> Iterator[Finding]:
    """Check the launcher's address and the interface, before the ranks join."""
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
    """Check that the store of the ranks answers at the address of rank 0."""
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
    if os.environ.get("RANK") == "0":  # this rank is about to listen there itself
        return Finding("address of rank 0", "ok", f"{host}:{port}")
    return Finding(
        "address of rank 0",
        "fail",
        f"{host}:{port} does not answer ({refusal})",
        f"Start rank 0, open port {port} and the ephemeral ports between the hosts, or name "
        "another --master-addr.",
    )


def interface(one_machine: bool, towards: str | None) -> Finding:
    """Check the interface on which gloo listens."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    there = {name for _, name in socket.if_nameindex()}
    addresses = {name: address for address, name in interfaces().items()}
    known = ", ".join(f"{name} ({addresses[name]})" for name in sorted(addresses)) or "none"
    if chosen is None or one_machine:
        name = "lo" if one_machine else towards
        found = f"{name or 'by the name of this host'}"
        return Finding("interface", "ok", found + (f" ({addresses[name]})" if name in addresses else ""))
    where = f"Set GLOO_SOCKET_IFNAME={towards}, which leads to rank 0"
    if towards is None:
        where = "Set GLOO_SOCKET_IFNAME to the one that leads to the other hosts"
    advice = f"{where}, or unset it; there are {known}."
    if chosen not in there:
        return Finding("interface", "fail", f"GLOO_SOCKET_IFNAME is {chosen}, which is not there", advice)
    if chosen not in addresses:
        return Finding("interface", "fail", f"GLOO_SOCKET_IFNAME is {chosen}, which has no address", advice)
    if addresses[chosen].startswith("127."):
        found = f"GLOO_SOCKET_IFNAME is {chosen}, which other hosts cannot reach"
        return Finding("interface", "fail", found, advice)
    if towards is not None and chosen != towards:
        found = f"GLOO_SOCKET_IFNAME is {chosen} ({addresses[chosen]}); {towards} leads to rank 0"
        return Finding("interface", "warn", found, advice)
    return Finding("interface", "ok", f"{chosen} ({addresses[chosen]})")
