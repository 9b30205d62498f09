"""Start a process group: decide how ranks find each other, and on which network interface they listen.

[Note: who can reach the ranks of a run]
Ranks find each other through a store, and then connect through gloo or NCCL sockets. Neither authenticates
peers, and torch unpickles objects received through them: whoever can connect can execute code in a rank.

- Our launcher gives ranks a file in a folder only the user may enter (`STORE_VARIABLE`). It opens no port,
  and no rank hosts it, so peers can still query it when a rank is stopped.
- Another launcher, such as torchrun, gives an address. If rank 0 hosts the store, it listens on that address
  only; torch alone would listen on all interfaces.
- If all ranks are on the same machine, sockets listen on the loopback interface.
- Across machines, gloo would listen on the host name's interface, often loopback. Unless
  GLOO_SOCKET_IFNAME names an interface, ranks use the interface which routes to MASTER_ADDR.
"""

import contextlib
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore

from meshrec.durable import join_scratch

_logger = logging.getLogger("meshrec")
STORE_VARIABLE = "MESHREC_STORE"
"""Environment variable with the store's private folder, set by our launcher."""
RESTARTS_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of times that the launcher has started all ranks again."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_SIOCGIFADDR = 0x8915  # netdevice(7)
# Linux; macOS and BSD.
_LOOPBACK_NAMES = ("lo", "lo0")


def form_group(backend: str, timeout: timedelta) -> None:
    """Create the default process group from the environment variables which the launcher has set.

    Args:
        timeout: maximum wait for other ranks, in this call and in collectives.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if is_one_machine():
        _listen_on_loopback()
    # The user's choice takes precedence.
    elif _INTERFACE_VARIABLES[0] not in os.environ:
        name = interface_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if name is not None:
            _logger.info("this rank listens on %s, which leads to %s", name, os.environ["MASTER_ADDR"])
            os.environ[_INTERFACE_VARIABLES[0]] = name
    store = _store(rank, size, timeout)
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def is_one_machine() -> bool:
    """Return whether, according to the launcher's environment variables, all ranks are on this machine."""
    # Set by MeshRec's launcher, whose ranks are all on this machine.
    if STORE_VARIABLE in os.environ:
        return True
    if "LOCAL_WORLD_SIZE" in os.environ:
        return os.environ["LOCAL_WORLD_SIZE"] == os.environ.get("WORLD_SIZE")
    addresses = _addresses(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return all(ipaddress.ip_address(address[0]).is_loopback for _, address in addresses)


def store_host() -> str | None:
    """Return a description of the process hosting the default group's store; None if the store is a file."""
    store: Any = dist.distributed_c10d._get_default_store()
    # torch wraps the store for every process group.
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    return "the launcher of the first machine" if os.environ.get(_AGENT_VARIABLE) == "True" else "rank 0"


def _store(rank: int, size: int, timeout: timedelta) -> Any:
    """Create the store through which the ranks find each other.

    Returns:
        The store, or None if torch must create it, for example to connect to the launcher's store.
    """
    folder = os.environ.get(STORE_VARIABLE)
    if folder is not None:
        # A new file per start: restarted ranks must not find the addresses of dead ranks.
        join_scratch(Path(folder))  # the launcher may be killed before the ranks end
        path = Path(folder) / f"start-{os.environ.get(RESTARTS_VARIABLE, '0')}"
        return FileStore(str(path), size)
    if os.environ.get(_AGENT_VARIABLE) == "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = _listen(host, port) if rank == 0 else None
    if listener is None and rank == 0:
        return None
    # The store takes over the socket, so the descriptor must stay open.
    # Ranks other than 0 connect, and pass no socket.
    descriptor = None if listener is None else listener.detach()
    return TCPStore(host, port, size, rank == 0, timeout, master_listen_fd=descriptor)


def host_store(host: str, port: int) -> TCPStore:
    """Host a store which listens on a single address of this machine, for elastic launchers.

    Args:
        port: port; 0 for a free port.

    Raises:
        ValueError: the address is not local, or the port is taken.
    """
    listener = _listen(host, port)
    if listener is None:
        raise ValueError(
            f"this machine cannot listen at {host}:{port}. Give one of its addresses, and a free port."
        )
    # The port which the system has chosen, if 0 was given.
    port = listener.getsockname()[1]
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def _listen(host: str, port: int) -> socket.socket | None:
    """Return a socket which listens only on the address of ``host``.

    If this machine cannot listen on that address, log a warning and return None.
    """
    refusals = []
    for family, address in _addresses(host, port):
        listener = socket.socket(family, socket.SOCK_STREAM)
        # A restarted run must be able to listen while old connections time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            listener.close()
            refusals.append(f"{address[0]}: {error.strerror}")
        else:
            return listener
    _logger.warning(
        "the store of the ranks listens on every interface, since rank 0 cannot listen at MASTER_ADDR %s "
        "alone (%s): see to it that only your machines reach port %d",
        host,
        ", ".join(refusals),
        port,
    )
    return None


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    try:
        results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR is {host!r}, which this rank cannot find ({error.strerror}). Name a host or an "
            "address of the machine of rank 0."
        ) from error
    return [(family, address) for family, _, _, _, address in results]


def interface_towards(host: str, port: int) -> str | None:
    """Return the name of the network interface through which this machine reaches a host; None if unknown.

    If the address belongs to this machine, return the interface with that address. Sends no packet.
    """
    for family, address in _addresses(host, port):
        # Connecting a UDP socket only selects a route; no packet is sent.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                continue
            # The address from which packets to the host would be sent.
            local_address = probe.getsockname()[0]
        if (
            not ipaddress.ip_address(local_address).is_loopback
            and (name := interfaces().get(local_address)) is not None
        ):
            return name
    return None


def interfaces() -> dict[str, str]:
    """Return this machine's network interface names, by IPv4 address. Empty outside Linux."""
    names = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                # The structure ifreq: 16 bytes of name, then the address, which starts at byte 20.
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                names[socket.inet_ntoa(answer[20:24])] = name
    return names


def _listen_on_loopback() -> None:
    """Set environment variables which make gloo and NCCL listen on the loopback interface only."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _LOOPBACK_NAMES if name in names), None)
    if loopback is None:
        _logger.warning(
            "this machine has no loopback interface, so that ranks listen on one that others may reach; it "
            "has %s",
            ", ".join(sorted(names)) or "none",
        )
        return
    for variable in _INTERFACE_VARIABLES:
        previous = os.environ.get(variable)
        if previous not in (None, loopback):
            _logger.info("%s was %s; all ranks are on one machine and use %s", variable, previous, loopback)
        os.environ[variable] = loopback
