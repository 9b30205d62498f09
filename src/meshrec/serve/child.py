"""Child processes for work that a server must not do itself.

Reading a large body would keep the event loop from all other clients (`reading`). Loading a damaged package
could end the process (`trial`).

A fork copies one thread, and the locks that other threads hold, which nobody releases in the copy. So only a
process with a single thread forks. Any other process starts a new interpreter, which takes seconds.
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

_SIZE = struct.Struct("<Q")
_SOCKET = 3
"""File descriptor of the connection in a new interpreter."""
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from meshrec.serve.child import begin; begin()"
Work = Callable[[socket.socket], None]


class Child:
    """A process that answers questions one after another, until its parent is gone.

    A process with a single thread forks it at once. Otherwise call `start` before the first question.

    Args:
        work: a function of a module that is called in the child process with its end of the connection. It
            raises EOFError once the parent's end is closed.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._socket: socket.socket | None = None
        self._pid = 0
        if not _has_other_threads():
            self.start()

    @property
    def is_running(self) -> bool:
        """Whether the child was started and can answer. One that ended between two questions cannot."""
        if self._socket is not None and os.waitpid(self._pid, os.WNOHANG)[0]:
            self._socket.close()  # not `stop`: by now another process may have this ID
            self._socket = None
        return self._socket is not None

    def start(self) -> None:
        """Start the child: by a fork if this process has a single thread, else as a new interpreter."""
        here, there = socket.socketpair()
        with there:
            if _has_other_threads():
                self._pid = _start_interpreter(there)
                send(here, self._work)
            else:
                self._pid = os.fork()
                if not self._pid:
                    _live(there, self._work)
        self._socket = here

    def ask(self, *what: Any) -> Any:
        """Send a question, and return the answer.

        Raises:
            EOFError: the process ended. `start` starts another one.
        """
        assert self._socket is not None
        try:
            send(self._socket, *what)
            return receive(self._socket)
        except (OSError, EOFError) as error:
            self.stop()
            raise EOFError("the child process ended") from error

    def stop(self) -> None:
        """Stop the child process."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def begin() -> None:
    """Run the function that the parent sends first. A new interpreter begins here."""
    parent = socket.socket(fileno=_SOCKET)
    work: Work = receive(parent)
    _live(parent, work)


def _has_other_threads() -> bool:
    """Return whether a fork would leave threads behind."""
    tasks = Path("/proc/self/task")
    if threading.active_count() > 1 or not tasks.is_dir():
        return True
    # NumPy's OpenBLAS has threads from the start, but ends them before a fork.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of other threads; this child only exits
        pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(list(tasks.iterdir())) > 1


def _start_interpreter(parent: socket.socket) -> int:
    """Start an interpreter that runs `begin`, and return its process ID.

    It inherits the standard streams and the socket, and no other file descriptor.
    """
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", _PROGRAM, *sys.path],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, parent.fileno(), _SOCKET)],
    )


def _live(parent: socket.socket, work: Work) -> NoReturn:
    try:
        # The socket that clients connect to is among those that were inherited, and must end with the server.
        os.closerange(3, parent.fileno())
        os.closerange(parent.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work(parent)
    finally:
        os._exit(0)


def send(to: socket.socket, *what: Any) -> None:
    """Send objects. Arrays and bytes are sent from their own memory, and other threads run meanwhile."""
    buffers: list[pickle.PickleBuffer] = []
    plain = [pickle.PickleBuffer(each) if isinstance(each, bytes) else each for each in what]
    head = pickle.dumps(plain if len(what) > 1 else what[0], 5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = [len(head), *(view.nbytes for view in views)]
    to.sendall(_SIZE.pack(len(sizes)) + b"".join(map(_SIZE.pack, sizes)))
    to.sendall(head)
    for view in views:
        to.sendall(view)


def receive(source: socket.socket) -> Any:
    """Return what `send` sent: the object, or the list of several.

    Raises:
        EOFError: the other process is gone.
    """
    (num,) = _SIZE.unpack(_exactly(source, _SIZE.size))
    sizes = [size for (size,) in _SIZE.iter_unpack(_exactly(source, num * _SIZE.size))]
    head, *buffers = [_exactly(source, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)


def _exactly(source: socket.socket, size: int) -> memoryview:
    found = np.empty(size, np.uint8).data  # not filled with zeros first
    at = 0
    while at < size:
        num = source.recv_into(found[at:])
        if not num:
            raise EOFError("the other process is gone")
        at += num
    return found
