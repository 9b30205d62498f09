"""The connection of a worker to its parent, which passes changes of models on to all workers."""

import asyncio
import itertools
import json
import mmap
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

from meshrec.serve.requests import RequestError

Change = Callable[[str, str, int | None], Awaitable[None]]


class Peers:
    """The workers of a server, as one of them sees them.

    Args:
        pipe: the pipe to the parent.
        loaded: shared memory with a byte per worker: whether the worker has loaded its models once.
        index: the number of this worker.
    """

    def __init__(self, pipe: Connection, loaded: mmap.mmap, index: int) -> None:
        self._pipe, self._loaded, self._index = pipe, loaded, index
        self.is_late = bool(loaded[index])
        """Whether this worker replaces one that ended. It then listens only after loading its models."""
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[str | None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def say_loaded(self) -> None:
        """Tell the other workers that this one has loaded its models."""
        self._loaded[self._index] = 1

    @property
    def are_loaded(self) -> bool:
        """Whether every worker has loaded its models: a request may reach any of them."""
        return all(self._loaded[:])

    async def ask(self, action: str, model: str, delta: int | None = None) -> None:
        """Load or unload a model in every worker.

        Raises:
            RequestError: a worker failed; the message is the first such worker's.
        """
        ticket = next(self._tickets)
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self._send({"ticket": ticket, "action": action, "model": model, "delta": delta})
        error = await answer
        if error is not None:
            raise RequestError(error)

    def listen(self, loop: asyncio.AbstractEventLoop, change: Change) -> None:
        """Start to carry out the changes that the parent passes on, by ``change``."""

        def on_message() -> None:
            try:
                said = json.loads(self._pipe.recv_bytes())
            except (EOFError, OSError):  # the parent was killed; alone, workers would hold the port for ever
                loop.remove_reader(self._pipe.fileno())
                signal.raise_signal(signal.SIGTERM)
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
