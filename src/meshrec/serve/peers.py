"""A worker's line to its parent, which passes wishes on to all workers."""

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from meshrec.serve.requests import RequestError

Change = Callable[[str, str, int | None], Awaitable[None]]


class Peers:
    """Asks all workers, this one among them, to load or unload a model.

    Args:
        pipe: to the parent.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[str | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, action: str, model: str, delta: int | None = None) -> None:
        """``load`` or ``unload`` of a model, everywhere.

        Raises:
            RequestError: what one of them says that went wrong.
        """
        ticket = next(self._tickets)
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._send({"ticket": ticket, "action": action, "model": model, "delta": delta})
        error = await answer
        if error is not None:
            raise RequestError(error)

    def listen(self, loop: asyncio.AbstractEventLoop, change: Change) -> None:
        """From now on does what the parent says, by ``change``."""

        def on_message() -> None:
            try:
                said = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):  # the parent is gone, and with it the others
                loop.remove_reader(self._pipe.fileno())
                return
            if "ticket" in said:
                self._asked.pop(said["ticket"]).set_result(said["error"])
                return
            task = loop.create_task(self._do(change, said))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        loop.add_reader(self._pipe.fileno(), on_message)

    async def _do(self, change: Change, said: dict[str, Any]) -> None:
        error = None
        try:
            await change(said["action"], said["model"], said["delta"])
        except RequestError as problem:
            error = str(problem)
        self._send({"task": said["task"], "error": error})

    def _send(self, what: dict[str, Any]) -> None:
        self._pipe.send_bytes(json.dumps(what).encode())
