"""Child processes for tasks that must not run in the server process.

Parsing a large body would block the event loop (``reading.py``). Loading a damaged package could end the
process (``trial.py``).

A fork copies only the calling thread. Locks held by other threads are never released in the copy. So only a
single-threaded process forks its child. Otherwise a new interpreter is started, which takes seconds.
"""

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from meshrec.interpreter import interpreter_arguments

# Format of a buffer size in the message header.
_SIZE = struct.Struct("<Q")
# File descriptor of the connection in a new interpreter.
_SOCKET = 3
# Program of a new interpreter, for parents with several threads, in which a fork is not safe.
_PROGRAM = "from meshrec.serve.child import run_child; run_child()"
Work = Callable[[socket.socket], None]
"""Function which a child runs: it answers requests from the socket until the socket is closed."""


class Child:
    """Child process which answers requests one by one, until the parent exits.

    In a single-threaded process, the constructor forks the child. In other processes the caller must call
    `start` before the first `ask`.

    Args:
        work: module-level function, called in the child with the child's end of a socket. It must loop:
            `receive` a request, compute, `send` the answer. `receive` raises EOFError once the parent's end
            is closed, which ends the loop.
    """

    def __init__(self, work: Work) -> None:
        # Sent to a new interpreter, or called in the fork.
        self._work = work
        # This process's end of a socket pair; None before `start`, and after the child has ended.
        self._socket: socket.socket | None = None
        # Process ID of the running child.
        self._pid = 0
        if not _has_other_threads():
            self.start()

    @property
    def is_running(self) -> bool:
        """Whether the child runs. Also detects a child which ended since the last `ask`."""
        if self._socket is not None and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._socket.close()  # not `stop`: the reaped process ID may already be reused
            self._socket = None
        return self._socket is not None

    def start(self) -> None:
        """Start the child: fork if this process is single-threaded, otherwise start a new interpreter."""
        here, there = socket.socketpair()
        # The parent's copy of the child's end is closed, so that `receive` notices when the child ends.
        with there:
            if _has_other_threads():
                self._pid = _start_interpreter(there)
                send(here, self._work)
            else:
                self._pid = os.fork()
                if not self._pid:
                    _run_and_exit(there, self._work)
        self._socket = here

    def ask(self, *question: Any) -> Any:
        """Send objects to the child, and wait for the object which it sends back.

        Raises:
            EOFError: the child ended. Call `start` to replace it.
        """
        assert self._socket is not None
        try:
            send(self._socket, *question)
            return receive(self._socket)
        except (OSError, EOFError) as error:
            # Stopped, so that the next question starts a new child.
            self.stop()
            raise EOFError("the child process ended") from error

    def stop(self) -> None:
        """Kill the child."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            # Not SIGTERM: the child may be busy for minutes, and has nothing to save.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            # Reap the child, which would otherwise stay a zombie until this process ends.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def run_child() -> None:
    """Entry point of a new interpreter: receive the work function and run it."""
    parent = socket.socket(fileno=_SOCKET)
    work: Work = receive(parent)
    _run_and_exit(parent, work)


def _has_other_threads() -> bool:
    """Return whether this process has threads which would be missing in a fork."""
    tasks = Path("/proc/self/task")
    if threading.active_count() > 1 or not tasks.is_dir():
        return True
    # OpenBLAS starts threads on import, and ends them before a fork: fork once, then count.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this child only exits
        pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(list(tasks.iterdir())) > 1


def _start_interpreter(parent: socket.socket) -> int:
    """Start a Python interpreter that runs `run_child`, and return the process ID.

    The interpreter inherits the standard streams and the socket, but no other file descriptors.
    """
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *interpreter_arguments(_PROGRAM, sys.path)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, parent.fileno(), _SOCKET)],
    )


def _run_and_exit(parent: socket.socket, work: Work) -> NoReturn:
    """Run the child's work function, then exit without the parent's cleanup handlers."""
    try:
        # Close the inherited listening socket: it must end with the server.
        os.closerange(3, parent.fileno())
        os.closerange(parent.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        # A terminal sends these to the whole process group, but the child must end only with its parent.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work(parent)
    finally:
        os._exit(0)


def send(to: socket.socket, *objects: Any) -> None:
    """Send pickled objects to the other process.

    Arrays and bytes are sent without copying them, and the GIL is released meanwhile.
    """
    buffers: list[pickle.PickleBuffer] = []
    plain = [pickle.PickleBuffer(item) if isinstance(item, bytes) else item for item in objects]
    head = pickle.dumps(plain if len(objects) > 1 else objects[0], 5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    # Format: number of buffers, size of each, then the buffers; the first is the pickle.
    sizes = [len(head), *(view.nbytes for view in views)]
    to.sendall(_SIZE.pack(len(sizes)) + b"".join(map(_SIZE.pack, sizes)))
    to.sendall(head)
    for view in views:
        to.sendall(view)


def receive(source: socket.socket) -> Any:
    """Wait for a `send` in the other process, and return the object, or a list if several were sent.

    Only for a socket to a process of this server, because unpickling executes code.

    Raises:
        EOFError: the other process ended.
    """
    (num,) = _SIZE.unpack(_receive_exactly(source, _SIZE.size))
    sizes = [size for (size,) in _SIZE.iter_unpack(_receive_exactly(source, num * _SIZE.size))]
    head, *buffers = [_receive_exactly(source, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)


def _receive_exactly(source: socket.socket, size: int) -> memoryview:
    """Receive ``size`` bytes; raise EOFError if the connection ends before."""
    buffer = np.empty(size, np.uint8).data  # unlike bytearray, not zeroed
    at = 0
    while at < size:
        num = source.recv_into(buffer[at:])
        if not num:
            raise EOFError("the other process ended")
        at += num
    return buffer
