"""Dynamic batching: requests that arrive while a batch is computed form the next batch."""

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
"""Longest time, in seconds, that a batch of several requests should take. A compiled program holds Python's
lock, so nothing is read, answered or refused while it runs."""
_PIECE = 1e-3
"""Time, in seconds, that a piece of a request should take that is too large for one batch."""
_MARGIN = 1.5
"""Factor by which an estimated wait is raised before it is compared with a deadline."""


class VersionedScores(NamedTuple):
    """Scores [B] and the version of the model that computed them."""

    scores: Floats
    version: str


Score = Callable[[Request], VersionedScores]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of batches and of the queue."""

    max_batch: int = 512
    """Largest number of samples in a batch. A larger request is computed in pieces, others between them."""
    max_wait_ms: float = 0.0
    """Milliseconds that a request may wait for others while the model is idle. With 0, a batch consists of
    the requests that arrived while the previous one was computed."""
    max_queue: int = 1024
    """Largest number of requests that wait for scores; further ones are answered with 503."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.max_wait_ms < 60_000:
            raise ValueError(f"max_wait_ms must lie in [0, 60000), got {self.max_wait_ms}.")


class Batched(NamedTuple):
    """Metrics of a batch: its number of samples, and the seconds that its requests had waited."""

    num_samples: int
    waits: list[float]


class _Work(NamedTuple):
    request: Request
    deadline: float
    since: float
    answer: "asyncio.Future[VersionedScores]"


class Batcher:
    """The queue of a model. It scores requests in a thread, one batch at a time, for one event loop.

    If a request cannot be scored, the others of its batch still are.

    Args:
        score: computes the scores of samples; called in the thread.
        limits: limits of batches and of the queue.
        observe: called after every batch.
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
        """Admit a request whose body has arrived. Unfinished requests take no place in the queue.

        Raises:
            RequestError: the queue is full (status 503).
        """
        if self.is_full:
            raise self._busy(f"{self._num_admitted} requests are waiting already")
        self._num_admitted += 1
        self._idle.clear()
        return self

    @property
    def is_full(self) -> bool:
        """Whether the queue is full."""
        return self._num_admitted >= self._limits.max_queue

    def __exit__(self, *_: object) -> None:
        self._num_admitted -= 1
        if not self._num_admitted:
            self._idle.set()

    async def __call__(self, request: Request, deadline: float = math.inf) -> VersionedScores:
        """Return the scores [B] of an admitted request.

        Args:
            request: a checked request.
            deadline: a time of ``time.monotonic``; the request is not scored after it.

        Raises:
            RequestError: the queue is too long for the deadline (status 503), the deadline has passed (504),
                or the model rejects the request (400).
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
        """Check that a request that arrives now would get its scores before its deadline.

        Args:
            deadline: a time of ``time.monotonic``.
            num_samples: the number of samples; None before the body is read, which assumes as many as usual
                and also checks that the queue has room, so that a refusal costs little.

        Raises:
            RequestError: the queue is full or too long for the deadline (status 503), or the deadline has
                passed (504).
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
        """Wait until every admitted request has its answer, then end the thread."""
        await self._idle.wait()
        self._pool.shutdown(wait=False)

    async def in_thread(self, call: Callable[[], None]) -> None:
        """Run a function in the thread that computes batches, between two of them."""
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
        """Take the next batch from the queue: as many requests as it may contain, without expired ones."""
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
        """Return the scores of each request, or the error that it causes. Called in the thread."""
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
        # Under load, reading and answering requests takes a share of the time as well.
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
    """Return the error of a request whose deadline has passed."""
    return RequestError("the deadline has passed, nothing was computed. Give more time.", 504)
