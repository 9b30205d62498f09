"""The start of a process group: how its ranks find each other, and where they listen.

[Note: who can reach the ranks of a run]
Ranks find each other through a store, and then gloo or NCCL connects them by sockets. Neither asks who is
there, and torch unpickles objects that come through them: whoever reaches them can run code in a rank.

- Our launcher gives the ranks a file in a folder that only its user may enter (`STORE_VARIABLE`). Nobody
  listens for that, and no rank hosts it, so that the others can still ask when one of them is stopped.
- Another launcher, such as torchrun, names an address. If rank 0 is to host the store, the store listens at
  that address only; torch alone would listen on every interface.
- If all ranks are on one machine, their sockets listen on its loopback interface.
- On several machines, gloo would listen where the machine's name leads, which is often its loopback
  interface. Unless GLOO_SOCKET_IFNAME names an interface, ranks take the one that leads to MASTER_ADDR.
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

_logger = logging.getLogger("meshrec")
STORE_VARIABLE = "MESHREC_STORE"
"""Names the private folder in which the ranks that our launcher starts keep their store."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_AGENT_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
_SIOCGIFADDR = 0x8915  # netdevice(7)
_LOOPBACK_NAMES = ("lo", "lo0")


def form_group(backend: str, timeout: timedelta) -> None:
    """Make the default process group that the launcher's environment describes.

    Args:
        backend: ``gloo`` or ``nccl``.
        timeout: how long collectives, and this call, wait for a rank.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if is_one_machine():
        _listen_on_loopback()
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
    """Whether all ranks are known to be on this machine, by the launcher's environment."""
    if STORE_VARIABLE in os.environ:
        return True
    if "LOCAL_WORLD_SIZE" in os.environ:
        return os.environ["LOCAL_WORLD_SIZE"] == os.environ.get("WORLD_SIZE")
    addresses = _addresses(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    return all(ipaddress.ip_address(address[0]).is_loopback for _, address in addresses)


def store_host() -> str | None:
    """Return which process hosts the store of the default group, for a message; None for a file."""
    store: Any = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    return "the launcher of the first machine" if os.environ.get(_AGENT_VARIABLE) == "True" else "rank 0"


def _store(rank: int, size: int, timeout: timedelta) -> Any:
    """Make the store of the default group; None if torch connects to that of the launcher by itself."""
    folder = os.environ.get(STORE_VARIABLE)
    if folder is not None:
        # One file for each start: in a shared one, ranks that start anew may find the addresses of dead ones.
        path = Path(folder) / f"start-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return FileStore(str(path), size)
    if os.environ.get(_AGENT_VARIABLE) == "True":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listening = _listening(host, port) if rank == 0 else None
    if listening is None and rank == 0:
        return None
    descriptor = None if listening is None else listening.detach()
    return TCPStore(host, port, size, rank == 0, timeout, master_listen_fd=descriptor)


def host_store(host: str, port: int) -> TCPStore:
    """Host a store at an address of this machine alone, for the launchers of an elastic run.

    Raises:
        ValueError: this machine does not have the address, or the port is taken.
    """
    listening = _listening(host, port)
    if listening is None:
        raise ValueError(
            f"this machine cannot listen at {host}:{port}. Give one of its addresses, and a free port."
        )
    port = listening.getsockname()[1]
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listening.detach())


def _listening(host: str, port: int) -> socket.socket | None:
    """Listen at the address of ``host`` alone; warn and return None if this machine does not have it."""
    refusals = []
    for family, address in _addresses(host, port):
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            listening.listen(socket.SOMAXCONN)
        except OSError as error:
            listening.close()
            refusals.append(f"{address[0]}: {error.strerror}")
        else:
            return listening
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
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR is {host!r}, which this rank cannot find ({error.strerror}). Name a host or an "
            "address of the machine of rank 0."
        ) from error
    return [(family, address) for family, _, _, _, address in found]


def interface_towards(host: str, port: int) -> str | None:
    """Return the network interface from which this machine reaches a host; None if that cannot be told.

    Nothing is sent. For an address of this machine, it is the interface that has the address.
    """
    for family, address in _addresses(host, port):
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            try:
                asking.connect(address)
            except OSError:
                continue
            own = asking.getsockname()[0]
        if not ipaddress.ip_address(own).is_loopback and (name := interfaces().get(own)) is not None:
            return name
    return None


def interfaces() -> dict[str, str]:
    """Return the network interfaces of this machine by their IPv4 addresses; on Linux only."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[socket.inet_ntoa(answer[20:24])] = name
    return found


def _listen_on_loopback() -> None:
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
        chosen = os.environ.get(variable)
        if chosen not in (None, loopback):
            _logger.info("%s was %s; all ranks are on one machine and use %s", variable, chosen, loopback)
        os.environ[variable] = loopback
