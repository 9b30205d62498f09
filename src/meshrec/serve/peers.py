"""Messages between a worker and the parent process, which forwards model changes to all workers.

A worker which gets a request to load or unload a model sends it to the parent with a ticket. The parent sends
the change to all workers as a task, waits for their outcomes, and answers the ticket. See ``workers.py``.
"""

import asyncio
import itertools
import json
import mmap
import signal
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from meshrec.serve.requests import RequestError

Change = Callable[[str, str, int | None], Awaitable[None]]
"""Function which applies a change in this process, given the action, the model name and the last delta."""


class ParentLink:
    """Connection of a worker to the other workers, through the parent process.

    Args:
        loaded: memory shared by all workers, with a byte per worker. The byte is 1 once the worker has loaded
            all models.

    Attributes:
        is_replacement: whether this worker replaces a worker which ended. It then accepts connections only
            after it has loaded all models, because the other workers already answer requests.
    """

    def __init__(self, pipe: Connection, loaded: mmap.mmap, index: int) -> None:
        self._pipe, self._loaded, self._index = pipe, loaded, index
        # The byte was set by the worker before.
        self.is_replacement = bool(loaded[index])
        # Numbers for this worker's requests; other workers have their own.
        self._tickets = itertools.count()
        # Changes that this worker has requested, by ticket, from `change_all` until the parent's answer. The
        # result is None, or the arguments of a `RequestError`.
        self._pending: dict[int, asyncio.Future[list[Any] | None]] = {}
        # Changes in progress; the set keeps the tasks alive.
        self._tasks: set[asyncio.Task[None]] = set()

    def report_loaded(self) -> None:
        """Tell the other workers that this worker has loaded all models."""
        self._loaded[self._index] = 1

    @property
    def all_loaded(self) -> bool:
        """Whether all workers have loaded their models.

        Only then is the server ready: the workers share the listening socket, so the kernel may pass a
        connection to any of them.
        """
        return all(self._loaded[:])

    async def change_all(self, action: str, model: str, delta: int | None = None) -> None:
        """Load or unload a model in every worker.

        Args:
            delta: number of the last delta to apply when loading; None: all.

        Raises:
            RequestError: a worker failed. The error is the first one received.
        """
        ticket = next(self._tickets)
        answer = self._pending[ticket] = asyncio.get_running_loop().create_future()
        self._send({"ticket": ticket, "action": action, "model": model, "delta": delta})
        # The answer arrives in `on_message`, after all workers have reported.
        error = await answer
        if error is not None:
            raise RequestError(*error)

    def listen(self, loop: asyncio.AbstractEventLoop, change: Change) -> None:
        """Start to handle messages from the parent: changes to apply, and answers to `change_all`."""

        def on_message() -> None:
            try:
                message = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):  # the parent was killed: exit too, to free the port
                loop.remove_reader(self._pipe.fileno())
                signal.raise_signal(signal.SIGTERM)
                return
            if "ticket" in message:
                self._pending.pop(message["ticket"]).set_result(message["error"])
                return
            task = loop.create_task(self._apply_change(change, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop.add_reader(self._pipe.fileno(), on_message)

    async def _apply_change(self, change: Change, message: dict[str, Any]) -> None:
        """Apply a change in this worker, and report success or the error to the parent."""
        error: Sequence[Any] | None = None
        try:
            await change(message["action"], message["model"], message["delta"])
        except RequestError as problem:
            error = problem.args  # message, status and headers
        self._send({"task": message["task"], "error": error})

    def _send(self, message: dict[str, Any]) -> None:
        self._pipe.send_bytes(json.dumps(message).encode())
