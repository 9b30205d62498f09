"""Dynamic batching: requests that wait while another batch is computed are computed together."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshrec.serve.requests import Floats, Pieces, Request, RequestError, joined

_LONGEST = 5e-3
"""Seconds that a batch of several requests should take: Python stands still while a compiled program runs,
and no request is read, answered or refused."""
_PIECE = 1e-3
"""Seconds that a piece of a request should take too large for one batch. Others are computed between."""
_MARGIN = 1.5
"""Of a wait, against deadlines: what comes later may take longer, and answers have a way to go."""


class VersionedScores(NamedTuple):
    """Scores [B], and the version of the model that gave them."""

    scores: Floats
    version: str


Score = Callable[[Request], VersionedScores]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How requests are put together, and how many may wait."""

    max_batch: int = 512
    """Most samples in a batch; a request of more is computed in pieces, and other requests between them."""
    max_wait_ms: float = 0.0
    """How long a request may wait for others while nothing is computed. With 0, batches are of those that
    came while the last one was computed."""
    max_queue: int = 1024
    """Most requests that wait for their scores; others are told to come back (503)."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.max_wait_ms < 60_000:
            raise ValueError(f"max_wait_ms must lie in [0, 60000), got {self.max_wait_ms}.")


class Batched(NamedTuple):
    """For metrics: a batch that was computed, and how long its requests had waited, in seconds."""

    num_samples: int
    waits: list[float]


class _Work(NamedTuple):
    request: Request
    deadline: float
    since: float
    answer: "asyncio.Future[VersionedScores]"


class Batcher:
    """Scores requests in a thread, one batch at a time. Lives in one event loop.

    A request that cannot be scored fails alone: the others of its batch are scored.

    Args:
        score: gives the scores of samples; called in the thread.
        limits: of batches and of the queue.
        observe: is told of every batch.
    """

    def __init__(self, score: Score, limits: Limits, observe: Callable[[Batched], None]) -> None:
        self._score, self._limits, self._observe = score, limits, observe
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="score")
        self._waiting: deque[_Work] = deque()
        self._num_waiting = 0
        self._num_running = 0
        self._num_admitted = 0
        self._usual_samples = 0.0
        self._timer: asyncio.Handle | None = None
        self._seconds_per_sample = 0.0
        self._computing_per_sample = 0.0
        self._finished = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> "Batcher":
        """Admit a request whose body has arrived: what others have not sent yet must not stand in its way.

        Raises:
            RequestError: with status 503, where too many are there already.
        """
        if self.is_full:
            raise self._busy(f"{self._num_admitted} requests are waiting already")
        self._num_admitted += 1
        self._idle.clear()
        return self

    @property
    def is_full(self) -> bool:
        """Whether as many requests wait as may."""
        return self._num_admitted >= self._limits.max_queue

    def __exit__(self, *_: object) -> None:
        self._num_admitted -= 1
        if not self._num_admitted:
            self._idle.set()

    async def __call__(self, request: Request, deadline: float = math.inf) -> VersionedScores:
        """The scores [B] of an admitted request.

        Args:
            request: checked.
            deadline: of ``time.monotonic``; what cannot be scored before it is not scored at all.

        Raises:
            RequestError: 503 where the queue is too long for the deadline, 504 where it has passed, and 400
                for what the model does not take.
        """
        self.check(deadline, request.num_samples)
        self._usual_samples += 0.1 * (min(request.num_samples, self._limits.max_batch) - self._usual_samples)
        if request.num_samples <= self._limits.max_batch:
            return await self._queued(request, deadline)
        piece, start = Pieces(request), 0
        found: list[VersionedScores] = []
        while start < request.num_samples:
            stop = start + self._samples_of_a_piece()
            found.append(await self._queued(piece(start, stop), deadline))
            start = stop
        # Deltas may arrive meanwhile; all of the scores have at least those of the first piece.
        return VersionedScores(np.concatenate([each.scores for each in found]), found[0].version)

    async def _queued(self, request: Request, deadline: float) -> VersionedScores:
        work = _Work(request, deadline, time.monotonic(), asyncio.get_running_loop().create_future())
        self._waiting.append(work)
        self._num_waiting += request.num_samples
        if self._timer is None and not self._num_running:
            # Not at once: requests that were read with this one join its batch.
            self._timer = asyncio.get_running_loop().call_soon(self._on_timer)
        return await work.answer

    def _samples_of_a_piece(self) -> int:
        if not self._computing_per_sample:
            return min(32, self._limits.max_batch)
        return max(1, min(int(_PIECE / self._computing_per_sample), self._limits.max_batch))

    def check(self, deadline: float, num_samples: int | None = None) -> None:
        """Check that samples (as many as usual) that come now have scores before their deadline.

        Without ``num_samples``, as before a body is read, check that the queue has room, too: what is refused
        should cost little.

        Raises:
            RequestError: 503 where the queue is full or too long for the deadline, 504 where it has passed.
        """
        now = time.monotonic()
        if num_samples is None and self.is_full:
            raise self._busy(f"{self._num_admitted} requests are waiting already")
        if deadline <= now:
            raise expired()
        if num_samples is None:
            num_samples = round(self._usual_samples)
        wait = (self._num_waiting + self._num_running + num_samples) * self._seconds_per_sample
        if now + _MARGIN * wait > deadline and self._num_waiting + self._num_running:
            raise self._busy(f"an answer would take about {1e3 * wait:.0f} ms, past the request's deadline")

    async def drain(self) -> None:
        """Waits until every admitted request has its answer, and ends the thread."""
        await self._idle.wait()
        self._pool.shutdown(wait=False)

    async def in_thread(self, call: Callable[[], None]) -> None:
        """Runs something where batches are computed, between two of them."""
        await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _busy(self, reason: str) -> RequestError:
        seconds = math.ceil(self._num_waiting * self._seconds_per_sample) or 1
        return RequestError(f"{reason}. Try again later.", 503, {"Retry-After": str(seconds)})

    def _start(self) -> None:
        if self._num_running or not self._waiting:
            return
        now = time.monotonic()
        left = self._waiting[0].since + self._limits.max_wait_ms / 1e3 - now
        if left > 0 and self._num_waiting < self._limits.max_batch:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(left, self._on_timer)
            return
        batch = self._take(now)
        if not batch:
            return
        self._num_running = sum(work.request.num_samples for work in batch) or 1
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._scores, batch)
        running.add_done_callback(lambda done: self._finish(batch, now, done))

    def _on_timer(self) -> None:
        self._timer = None
        self._start()

    def _take(self, now: float) -> list[_Work]:
        """The next batch: requests in their order that are still wanted, as many as it holds."""
        batch: list[_Work] = []
        num_samples = 0
        while self._waiting:
            work = self._waiting[0]
            wanted = work.deadline > now and not work.answer.done()
            together = num_samples + work.request.num_samples
            if wanted and batch and together > self._limits.max_batch:
                break
            if wanted and batch and together * self._computing_per_sample > _LONGEST:
                break
            self._waiting.popleft()
            self._num_waiting -= work.request.num_samples
            if wanted:
                batch.append(work)
                num_samples += work.request.num_samples
            elif not work.answer.done():
                work.answer.set_exception(expired())
        return batch

    def _scores(self, batch: Sequence[_Work]) -> list[VersionedScores | Exception]:
        """In the thread: for each request its scores, or what is wrong with it."""
        requests = [work.request for work in batch]
        found: list[VersionedScores | Exception] = []
        try:
            scores, version = self._score(joined(requests))
            start = 0
            for request in requests:
                found.append(VersionedScores(scores[start : start + request.num_samples], version))
                start += request.num_samples
        except Exception as error:
            if len(batch) == 1:
                return [error]
            return [each for work in batch for each in self._scores([work])]
        return found

    def _finish(
        self, batch: Sequence[_Work], began: float, done: "asyncio.Future[list[VersionedScores | Exception]]"
    ) -> None:
        now = time.monotonic()
        # Where requests wait all the time, reading and answering them takes its share as well.
        since = max(self._finished, min(work.since for work in batch))
        self._finished = now
        pace = (now - since) / self._num_running
        self._seconds_per_sample += 0.2 * (pace - self._seconds_per_sample)
        computing = (now - began) / self._num_running
        if self._computing_per_sample:
            computing = min(computing, 2 * self._computing_per_sample)  # one hiccup says little
        self._computing_per_sample += 0.2 * (computing - self._computing_per_sample)
        num_samples, self._num_running = self._num_running, 0
        self._start()
        for work, found in zip(batch, done.result(), strict=True):
            if work.answer.done():
                continue  # the client went away
            if isinstance(found, Exception):
                work.answer.set_exception(found)
            else:
                work.answer.set_result(found)
        self._observe(Batched(num_samples, [began - work.since for work in batch]))


def expired() -> RequestError:
    """The deadline of a request has passed."""
    return RequestError("the deadline has passed, nothing was computed. Give more time.", 504)
