"""The sockets on which a process and its descendants listen, by Linux's /proc."""

import contextlib
import ipaddress
import os
import subprocess
import time
from pathlib import Path

_LISTEN = "0A"


def descendants(pid: int) -> set[int]:
    """A process and all that it has started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pid: int) -> set[str]:
    """The addresses, with ports, on which a process or a descendant listens for TCP."""
    inodes = set()
    for each in descendants(pid):
        for link in Path(f"/proc/{each}/fd").glob("*"):
            with contextlib.suppress(OSError):
                target = os.readlink(link)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = set()
    for name in ("tcp", "tcp6"):
        path = Path("/proc/net") / name
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            words = line.split()
            if words[3] == _LISTEN and words[9] in inodes:
                address, _, port = words[1].partition(":")
                found.add(f"{_address(address)} {int(port, 16)}")
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as /proc/net writes it: words of 4 bytes, each in the order of the machine."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def beyond_loopback(found: set[str]) -> set[str]:
    """Those that others than this machine reach."""
    return {each for each in found if not ipaddress.ip_address(each.split()[0]).is_loopback}


def watched(process: subprocess.Popen, until=lambda: False, seconds: float = 240.0) -> set[str]:
    """All addresses on which a process and its descendants listened, until it ended or ``until()``."""
    found, deadline = set(), time.monotonic() + seconds
    while process.poll() is None and not until() and time.monotonic() < deadline:
        found |= listening(process.pid)
        time.sleep(0.02)
    return found
