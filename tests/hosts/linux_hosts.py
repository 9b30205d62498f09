"""Emulated hosts in Linux namespaces: separate networks, processes and files on a single machine.

A host is a process in a network namespace, and the first process in a PID namespace: killing it kills
everything on the host, like a power loss. A bridge connects the hosts, and link bandwidth can be limited. A
host's folder is private.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "setpriv")
_network_counter = itertools.count()  # differ between calls in this process


def why_not() -> str | None:
    """Return the reason this system cannot emulate hosts; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"namespaces need {', '.join(missing)}"
    # Some containers run as root without the capability, so try it.
    name = f"mrprobe{os.getpid()}"
    result = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if result.returncode != 0:
        return "this system allows no network namespaces"
    link = subprocess.run(
        ["ip", "-n", name, "link", "add", "br0", "type", "bridge"], capture_output=True, check=False
    )
    subprocess.run(["ip", "netns", "del", name], check=False)
    return "this system has no bridges between namespaces" if link.returncode else None


def ip(*words: object) -> None:
    """Run the ``ip`` command."""
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True)


class Host:
    """An emulated host. ``run`` starts a command on it; ``kill`` ends everything on it.

    Args:
        name: Host name.
        space: Network namespace.
        address: IPv4 address.
        private: The host's private folder, on the real file system.
        seen: Path at which the host sees its private folder.
    """

    def __init__(self, name: str, space: str, address: str, private: Path, seen: Path) -> None:
        self.name, self.address = name, address
        self._space, self._private, self._seen = space, private, seen
        self._names = private.with_name("names")  # mounted as /etc/hosts on every host
        self._root: subprocess.Popen[bytes] | None = None  # the first process, from boot() to kill()
        private.mkdir(parents=True, exist_ok=True)

    def boot(self) -> None:
        """Start the host's first process."""
        # PID 1 of the namespace: when it dies, the kernel kills all other processes in it.
        script = (
            f"mount --bind {self._names} /etc/hosts; mount --bind {self._private} {self._seen}; "
            "mount -t tmpfs tmpfs /dev/shm; hostname "
            f"{self.name}; "
            "echo up; while :; do sleep 1000; done"
        )
        # pdeathsig: the host dies with this process, even if `kill` is never called.
        self._root = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._space),
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--mount"),
                *("bash", "-c", script),
            ],
            stdout=subprocess.PIPE,
        )
        assert self._root.stdout is not None
        assert self._root.stdout.readline() == b"up\n"
        children = Path(f"/proc/{self._root.pid}/task/{self._root.pid}/children").read_text().split()
        self.pid = int(children[0])

    def popen(self, words: Sequence[object], **options: object) -> "subprocess.Popen[str]":
        """Start a command on the host."""
        options = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "cwd": os.getcwd(),
            **options,
        }
        inside = [
            "nsenter",
            "-t",
            str(self.pid),
            "--net",
            "--pid",
            "--mount",
            "--uts",
            f"--wd={options.pop('cwd')}",
        ]
        return subprocess.Popen([*inside, *map(str, words)], **options)  # type: ignore[call-overload,no-any-return]

    def run(self, words: Sequence[object], **options: object) -> str:
        """Run a command on the host, and return its output."""
        process = self.popen(words, **options)
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
        return out

    def kill(self) -> None:
        """Kill everything on the host at once."""
        if self._root is not None:
            with contextlib.suppress(ProcessLookupError):  # Ctrl-C reached the host first
                os.kill(self.pid, signal.SIGKILL)
            self._root.wait()
            assert self._root.stdout is not None
            self._root.stdout.close()
            self._root = None


def send(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Send a signal to a command started by `Host.popen`: to nsenter's child, as nsenter forwards none."""
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        os.kill(int(child), number)


@contextlib.contextmanager
def hosts(
    number: int, folder: Path, *, rate: str | None = None, seen: Path | None = None
) -> Iterator[list[Host]]:
    """Start hosts 10.77.N.1, 10.77.N.2, ... that can reach each other, and a switch; kill them at the end.

    Args:
        number: Number of hosts.
        folder: Parent of their private folders.
        rate: Bandwidth per link and direction, such as "1gbit"; None: unlimited.
        seen: Path at which every host sees its private folder; ``folder/own`` if None.
    """
    # Spread over 250 networks: parallel test processes must not share one.
    net = 1 + (os.getpid() * 7 + next(_network_counter) * 61) % 250
    prefix = f"mr{os.getpid()}x{net}"
    switch = f"{prefix}s"
    seen = seen or folder / "own"
    seen.mkdir(parents=True, exist_ok=True)
    spaces = [switch, *(f"{prefix}h{n}" for n in range(number))]
    running: list[Host] = []
    names = [(f"10.77.{net}.{n + 1}", f"host{n}") for n in range(number)] + [(f"10.77.{net}.254", "switch")]
    lines = [f"{address} {name}" for address, name in [("127.0.0.1", "localhost"), *names]]
    (folder / "names").write_text("\n".join(lines) + "\n")
    _remove_abandoned()
    try:
        for space in spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "addr", "add", f"10.77.{net}.254/24", "dev", "br0")
        ip("-n", switch, "link", "set", "br0", "up")
        for n, space in enumerate(spaces[1:]):
            ip("-n", switch, "link", "add", f"v{n}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", switch, "link", "set", f"v{n}", "master", "br0", "up")
            ip("-n", space, "addr", "add", f"10.77.{net}.{n + 1}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            if rate is not None:
                for where, device in ((space, "eth0"), (switch, f"v{n}")):
                    shape = ["qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", "64kb"]
                    subprocess.run(["tc", "-n", where, *shape, "latency", "50ms"], check=True)
            running.append(Host(f"host{n}", space, f"10.77.{net}.{n + 1}", folder / f"host{n}", seen))
            running[-1].boot()
        switch_host = Host("switch", switch, f"10.77.{net}.254", folder / "switch", seen)
        switch_host.boot()
        running.append(switch_host)
        yield running
    finally:
        for host in running:
            host.kill()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _remove_abandoned() -> None:
    """Remove network namespaces left behind by killed processes."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name, pid in re.findall(r"^(mr(\d+)x\w+)", listed, flags=re.MULTILINE):
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
