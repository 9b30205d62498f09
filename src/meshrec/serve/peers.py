"""Pipe between a worker and the parent process, which forwards model changes to all workers."""

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


class Peers:
    """A worker's view of the other workers, reached through the parent process.

    Args:
        pipe: pipe to the parent.
        loaded: shared memory [workers], bytes: 1 once the worker has loaded all models.
        index: index of this worker.

    Attributes:
        is_replacement: whether this worker replaces one which ended. It then accepts connections only after
            loading all models, because the other workers already answer.
    """

    def __init__(self, pipe: Connection, loaded: mmap.mmap, index: int) -> None:
        self._pipe, self._loaded, self._index = pipe, loaded, index
        self.is_replacement = bool(loaded[index])
        self._tickets = itertools.count()
        # Unanswered requests by ticket, from `change_all` until the parent's answer.
        self._pending: dict[int, asyncio.Future[list[Any] | None]] = {}
        # Changes in progress; the set keeps the tasks alive.
        self._tasks: set[asyncio.Task[None]] = set()

    def report_loaded(self) -> None:
        """Tell other workers that this worker has loaded all models."""
        self._loaded[self._index] = 1

    @property
    def all_loaded(self) -> bool:
        """Whether all workers have loaded their models: a request may reach any of them."""
        return all(self._loaded[:])

    async def change_all(self, action: str, model: str, delta: int | None = None) -> None:
        """Load or unload a model in every worker.

        Args:
            action: ``load`` or ``unload``.
            model: model name.
            delta: last delta to apply; None: all.

        Raises:
            RequestError: a worker failed; the error is the first one received.
        """
        ticket = next(self._tickets)
        answer = self._pending[ticket] = asyncio.get_running_loop().create_future()
        self._send({"ticket": ticket, "action": action, "model": model, "delta": delta})
        error = await answer
        if error is not None:
            raise RequestError(*error)

    def listen(self, loop: asyncio.AbstractEventLoop, change: Change) -> None:
        """Start applying changes forwarded by the parent, with ``change``."""

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
        """Apply a change in this worker and report the outcome to the parent."""
        error: Sequence[Any] | None = None
        try:
            await change(message["action"], message["model"], message["delta"])
        except RequestError as problem:
            error = problem.args  # message, status and headers
        self._send({"task": message["task"], "error": error})

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message to the parent as JSON."""
        self._pipe.send_bytes(json.dumps(message).encode())
