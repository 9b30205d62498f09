"""Processes that a server forks at its start, and that do for it what it must not do itself.

They are forked before the server has threads or models. Reading a large body would keep the event loop from
all other clients (`reading`); loading a damaged package could end the process (`trial`).
"""

import contextlib
import os
import pickle
import signal
import socket
import struct
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

_SIZE = struct.Struct("<Q")
Work = Callable[[socket.socket], None]


class Child:
    """A process that answers questions one after another, until its parent is gone.

    Args:
        work: what the process does with its end of the connection. It raises EOFError once the parent's end
            is closed.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._socket: socket.socket | None = None
        self._pid = 0
        self.start()

    @property
    def is_running(self) -> bool:
        """Whether it was started, and no question has failed since."""
        return self._socket is not None

    def start(self) -> None:
        """Fork the process."""
        here, there = socket.socketpair()
        with warnings.catch_warnings():
            # Python warns of threads that hold locks. A server forks before it has threads.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            _live(there, self._work)
        there.close()
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
        """End the process."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


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
    """Send objects; their arrays and bytes go as they are in memory, while other threads run."""
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
