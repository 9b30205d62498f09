"""Faults of a server: what happens to its processes, files, disk and connections while it answers."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.hostile.second.joints import broken
from tests.hostile.second.programs import PATIENCE, Program, Steady
from tests.hostile.sockets import descendants

MODEL = "/v2/repository/models/clicks"
SMALL_DISK = 'mount -t tmpfs -o size=24m none "$0" && export TMPDIR="$0" && exec "$@"'
"""Run a command whose folder of temporary files is a disk of its own, of 24 MiB."""


class Place(NamedTuple):
    """A server under test.

    Attributes:
        program: its processes.
        steady: a client that keeps asking.
        link: the link to the package that it serves.
        packages: sound packages. Their scores are what ``steady`` expects.
        folder: a folder for damaged copies.
        disk: its folder of temporary files, as seen by this process.
        large: a valid body that another process reads.
    """

    program: Program
    steady: Steady
    link: Path
    packages: list[Path]
    folder: Path
    disk: Path
    large: bytes

    def turn(self, package: Path) -> None:
        """Turn the link to another package."""
        new = self.link.with_name("new")
        new.symlink_to(package)
        new.replace(self.link)

    def copy(self, draw: random.Random) -> Path:
        """A copy of a sound package, to be damaged."""
        return Path(shutil.copytree(draw.choice(self.packages), self.folder / f"copy{time.monotonic_ns()}"))

    def load(self, sign: str) -> tuple[int, str]:
        """Load or unload the model in all workers; give the status and what is said."""
        try:
            status, body = self.program.ask("POST", f"{MODEL}/{sign}")
        except OSError as error:  # the worker that was asked is gone
            return 0, repr(error)
        return status, body.decode()

    def load_sound(self) -> None:
        """Load the package that the link leads to. Raises AssertionError if it is not loaded."""
        status, said = self.load("load")
        assert status == 200, (status, said)

    def mend(self) -> None:
        """After a fault that was not held: serve a sound package again."""
        self.turn(self.packages[0])
        self.load("load")
        self.steady.recover()


def workers(program: Program) -> list[int]:
    """The processes that answer."""
    return _children(program.process.pid)


def readers(program: Program) -> list[int]:
    """The processes that read large bodies: the children of workers that take less of the processor."""
    return [pid for pid in _of_workers(program) if _nice(pid) > _nice(program.process.pid)]


def trials(program: Program) -> list[int]:
    """The processes that load packages first."""
    return [pid for pid in _of_workers(program) if _nice(pid) == _nice(program.process.pid)]


def _of_workers(program: Program) -> list[int]:
    return [child for worker in workers(program) for child in _children(worker)]


def _children(pid: int) -> list[int]:
    found = []
    for each in descendants(pid) - {pid}:
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(each)
    return sorted(found)


def _nice(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[16])
    except OSError:
        return 0


def _kill(pids: list[int], draw: random.Random, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(draw.choice(pids), number)


@contextlib.contextmanager
def _stopped(pid: int):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def worker_killed(place: Place, draw: random.Random) -> None:
    _kill(workers(place.program), draw, draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM]))


def worker_stopped(place: Place, draw: random.Random) -> None:
    with _stopped(draw.choice(workers(place.program))):
        time.sleep(draw.uniform(0.1, 1.5))


def all_stopped(place: Place, draw: random.Random) -> None:
    """As on a machine that is suspended."""
    with contextlib.ExitStack() as stack:
        for pid in sorted(descendants(place.program.process.pid)):
            stack.enter_context(_stopped(pid))
        time.sleep(draw.uniform(0.1, 1.5))


def reader_killed(place: Place, draw: random.Random) -> None:
    """While it reads: its request is answered with scores, or with 503."""
    ask = _in_thread(lambda: place.program.ask("POST", "/predict/clicks", place.large))
    time.sleep(draw.uniform(0, 0.1))
    for pid in readers(place.program):
        _kill([pid], draw)
    status, body = ask()
    assert status == 200 or (status == 503 and b"ended" in body), (status, body[:300])


def reader_stopped(place: Place, draw: random.Random) -> None:
    """Small requests are answered meanwhile, and the large one afterwards."""
    with contextlib.ExitStack() as stack:
        for pid in readers(place.program):
            with contextlib.suppress(ProcessLookupError):  # of a reader that ends, the request tells
                stack.enter_context(_stopped(pid))
        ask = _in_thread(lambda: place.program.ask("POST", "/predict/clicks", place.large))
        for _ in range(20):
            seen = place.steady.once()
            assert seen.status == 200, seen
    assert ask()[0] == 200


def trial_killed(place: Place, draw: random.Random) -> None:
    """While a package is loaded: it is loaded, or not and the old one stays."""
    place.turn(draw.choice(place.packages))
    ask = _in_thread(lambda: place.load("load"))
    time.sleep(draw.uniform(0, 0.3))
    for pid in trials(place.program):
        _kill([pid], draw)
    status, said = ask()
    assert status == 200 or (status == 400 and "ended" in said), (status, said)
    place.load_sound()


def weights_cut(place: Place, draw: random.Random) -> None:
    _served_copy_is_damaged(place, draw, lambda path, size: os.truncate(path, draw.randrange(size)))


def weights_written(place: Place, draw: random.Random) -> None:
    def write(path: Path, size: int) -> None:
        with path.open("r+b") as file:
            file.seek(draw.randrange(size - 8))
            file.write(struct.pack("<f", 1e30))

    _served_copy_is_damaged(place, draw, write)


def _served_copy_is_damaged(place: Place, draw: random.Random, damage: Callable[[Path, int], None]) -> None:
    """The model is taken away with a reason, until a sound package is loaded."""
    copy = place.copy(draw)
    place.turn(copy)
    place.load_sound()
    with place.steady.paused():  # between the write and the next look, scores are of the damaged file
        weights = copy / "weights.bin"
        damage(weights, weights.stat().st_size)
        place.program.wait_until(lambda: place.steady.once().status == 503, "the end of a damaged model")
        # Each worker looks for itself, and any of them may answer.
        place.program.wait_until(
            lambda: b"weights.bin" in place.program.ask("POST", "/v2/repository/index")[1], "the reason"
        )
        place.turn(draw.choice(place.packages))
        place.load_sound()


def bad_package(place: Place, draw: random.Random) -> None:
    """A package that is broken at a joint is refused, and the old one stays."""
    copy = place.copy(draw)
    path = draw.choice([each for each in sorted(copy.iterdir()) if each.is_file()])
    its = place.packages[0] / path.name
    path.write_bytes(broken(path.read_bytes(), its.read_bytes(), draw)[1])
    place.turn(copy)
    status, said = place.load("load")
    assert status == 400, (status, said)
    assert path.name in said or "package" in said, said
    place.turn(draw.choice(place.packages))


def package_vanishes(place: Place, draw: random.Random) -> None:
    """While it is loaded: it is loaded, or not and the old one stays."""
    copy = place.copy(draw)
    place.turn(copy)
    ask = _in_thread(lambda: place.load("load"))
    time.sleep(draw.uniform(0, 0.5))
    shutil.rmtree(copy)
    status, said = ask()
    assert status in (200, 400), (status, said)
    place.turn(draw.choice(place.packages))
    place.load_sound()


def disk_full(place: Place, draw: random.Random) -> None:
    """The model that answers goes on; a new one is loaded, or refused with words until there is room."""
    filler = place.disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << draw.choice([12, 16])))
    try:
        place.turn(draw.choice(place.packages))
        status, said = place.load("load")
        assert status in (200, 400), (status, said)
        for _ in range(10):
            seen = place.steady.once()
            assert seen.status == 200, seen
    finally:
        filler.unlink()
    place.load_sound()


def no_descriptors(place: Place, draw: random.Random) -> None:
    """Connections beyond the limit of open files wait or are closed, and afterwards all is as before."""
    pid = draw.choice(workers(place.program))
    held = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + draw.randrange(1, 9), before[1]))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(_connected(place.program))
            time.sleep(draw.uniform(0.1, 1.0))
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def no_memory(place: Place, draw: random.Random) -> None:
    """A reader without memory refuses a large body, and the server goes on."""
    for pid in readers(place.program):
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
        resource.prlimit(pid, resource.RLIMIT_AS, (size + (1 << 20), resource.RLIM_INFINITY))
    for _ in range(4):
        status, body = place.program.ask("POST", "/predict/clicks", place.large)
        assert status in (200, 413, 503), (status, body[:300])
    for pid in readers(place.program):
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def sockets_cut(place: Place, draw: random.Random) -> None:
    """Many clients are cut off in the midst of their requests and answers."""
    head = b"POST /predict/clicks HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(place.large)
    for _ in range(100):
        with _connected(place.program) as bad, contextlib.suppress(OSError):
            bad.sendall((head + place.large)[: draw.randrange(len(head) + 1, len(head) + len(place.large))])
            bad.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def many_reloads(place: Place, draw: random.Random) -> None:
    """Signals to load anew, while the link turns and clients load as well."""
    for _ in range(draw.randrange(3, 8)):
        place.turn(draw.choice(place.packages))
        os.kill(place.program.process.pid, signal.SIGHUP)
        time.sleep(draw.uniform(0, 0.2))
    place.load_sound()


def worker_killed_while_loading(place: Place, draw: random.Random) -> None:
    place.turn(draw.choice(place.packages))
    ask = _in_thread(lambda: place.load("load"))
    time.sleep(draw.uniform(0, 0.3))
    _kill(workers(place.program), draw)
    status, said = ask()
    assert status in (0, 200) or (status in (400, 503) and "ended" in said), (status, said)


def unloaded(place: Place, draw: random.Random) -> None:
    """By a client, and loaded again."""
    with place.steady.paused():
        assert place.load("unload")[0] == 200
        assert place.steady.once().status == 404
        place.load_sound()


FAULTS: list[Callable[[Place, random.Random], None]] = [
    *(worker_killed, worker_stopped, all_stopped, reader_killed, reader_stopped, trial_killed, weights_cut),
    *(weights_written, bad_package, package_vanishes, disk_full, no_descriptors, no_memory, sockets_cut),
    *(many_reloads, worker_killed_while_loading, unloaded),
]
MAY_BREAK = {worker_killed, worker_killed_while_loading, no_descriptors}
"""Faults during which connections may be cut."""
MAY_LOG = {no_descriptors, no_memory, package_vanishes}
"""Faults of which asyncio or torch write a traceback to the log."""
MAY_REFUSE = {*MAY_BREAK, package_vanishes}
"""Faults during which requests may be refused, with a reason."""


def _in_thread(call: Callable[[], tuple]) -> Callable[[], tuple]:
    """Start a call in a thread; give what waits for its result."""
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return lambda: future.result(PATIENCE)


def _connected(program: Program) -> socket.socket:
    return socket.create_connection(("127.0.0.1", program.port), timeout=30)


def can_mount() -> bool:
    """Whether this user may have a disk of his own."""
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def said_of(seen: list) -> str:
    """The answers that were no scores, in short."""
    return json.dumps([(each.status, each.body[:200].decode(errors="replace")) for each in seen[:5]])
