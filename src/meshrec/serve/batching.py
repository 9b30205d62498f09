"""Dynamic batching: while the model computes a batch, arriving requests queue up and form the next batch."""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshrec.serve.requests import Floats, Request, RequestError, RequestSplitter, concat_requests

# Maximum duration of a batch with several requests, in seconds. A compiled program holds the GIL, so the
# server neither reads, answers nor refuses requests meanwhile.
_MAX_BATCH_SECONDS = 5e-3
# Target duration, in seconds, of a piece of a request too large for a batch.
_PIECE_SECONDS = 1e-3
# Safety factor on estimated waits before comparison with deadlines.
_WAIT_MARGIN = 1.5


class VersionedScores(NamedTuple):
    """Scores [B] or vectors [B, V], and the model version that computed them."""

    scores: Floats
    version: str


Score = Callable[[Request], VersionedScores]
"""Function which computes the scores of a request, or of several concatenated requests."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the batches and the request queue of a model."""

    max_batch: int = 512
    """Maximum samples per batch. Larger requests are computed in pieces, interleaved with other requests."""
    max_wait_ms: float = 0.0
    """Milliseconds that a request may wait for other requests while the model is idle. With 0, a batch has
    the requests which arrived during the previous batch.
    """
    max_queue: int = 1024
    """Maximum number of waiting requests; further requests get status 503."""

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.max_wait_ms < 60_000:
            raise ValueError(f"max_wait_ms must lie in [0, 60000), got {self.max_wait_ms}.")


class BatchMetrics(NamedTuple):
    """Measurements of a scored batch.

    Attributes:
        num_samples: number of samples in the batch, over all requests.
        waits: for every request in the batch, the seconds it waited in the queue.
    """

    num_samples: int
    waits: list[float]


class _QueuedRequest(NamedTuple):
    """Request, or piece of a large request, in the queue.

    Attributes:
        request: samples to score.
        deadline: ``time.monotonic`` time after which the request is dropped.
        since: ``time.monotonic`` time when the request entered the queue.
        answer: future which gets the scores or an exception. It is cancelled if the client disconnects.
    """

    request: Request
    deadline: float
    since: float
    answer: "asyncio.Future[VersionedScores]"


class Batcher:
    """Request queue of a model, with a thread which scores one batch at a time. Used by a single event loop.

    A handler takes a queue position before it parses the body: ``with batcher: scores = await
    batcher(request)``. If scoring a batch fails, the requests are scored individually.

    Args:
        score: function which scores a request; called in the thread.
        observe: function to call with measurements after every batch.
    """

    def __init__(self, score: Score, limits: Limits, observe: Callable[[BatchMetrics], None]) -> None:
        self._score, self._limits, self._observe = score, limits, observe
        # The only thread that runs the model, until `drain`.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="score")
        # Requests from `_enqueue` until `_take`, oldest first.
        self._waiting: deque[_QueuedRequest] = deque()
        # Samples in `_waiting`, and in the batch being scored (0: no batch is running).
        self._num_waiting = 0
        self._num_running = 0
        # Requests between `__enter__` and `__exit__`, including those whose body is still being parsed.
        self._num_admitted = 0
        # Moving average of samples per request; stands for a request whose body was not read yet.
        self._usual_samples = 0.0
        # Next call of `_on_timer`; None: none is scheduled.
        self._timer: asyncio.Handle | None = None
        # Moving averages of wall time under load (estimates waits) and of scoring time alone (sizes batches).
        self._seconds_per_sample = 0.0
        self._computing_per_sample = 0.0
        # ``time.monotonic`` end of the last batch.
        self._finished = 0.0
        # Set while no request is admitted; `drain` waits for it.
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> "Batcher":
        """Take a queue position for a request whose body has arrived; ``with`` releases it after the answer.

        Raises:
            RequestError: the queue is full (status 503).
        """
        if self.is_full:
            raise self._queue_error(f"{self._num_admitted} requests are already waiting")
        # Counted before the body is parsed, so that a burst of large bodies cannot exceed the queue.
        self._num_admitted += 1
        self._idle.clear()
        return self

    @property
    def is_full(self) -> bool:
        return self._num_admitted >= self._limits.max_queue

    def __exit__(self, *_: object) -> None:
        self._num_admitted -= 1
        if not self._num_admitted:
            self._idle.set()

    async def __call__(self, request: Request, deadline: float = math.inf) -> VersionedScores:
        """Put an admitted request into the queue, and wait for the scores.

        Args:
            request: request from `check_request`.
            deadline: ``time.monotonic`` time after which the request is dropped.

        Returns:
            Scores and model version. If deltas are applied between the pieces of a large request, the version
            is that of the first piece.

        Raises:
            RequestError: the queue is too long for the deadline (status 503), the deadline has passed (504),
                or the model rejects the request (400).
        """
        # Checked again, now with the actual sample count, and after the time for reading the body.
        self.check(deadline, request.num_samples)
        # With weight 0.1, the average follows about the last ten requests.
        self._usual_samples += 0.1 * (min(request.num_samples, self._limits.max_batch) - self._usual_samples)
        if request.num_samples <= self._limits.max_batch:
            return await self._enqueue(request, deadline)
        # Pieces would otherwise delay all other requests by the whole duration.
        piece, start = RequestSplitter(request), 0
        # One piece after the other, so that requests of other clients are scored in between.
        scored: list[VersionedScores] = []
        while start < request.num_samples:
            stop = start + self._piece_size()
            scored.append(await self._enqueue(piece(start, stop), deadline))
            start = stop
        # Deltas may be applied between pieces; every piece has at least the first piece's version.
        return VersionedScores(np.concatenate([part.scores for part in scored]), scored[0].version)

    async def _enqueue(self, request: Request, deadline: float) -> VersionedScores:
        """Put a request of at most ``max_batch`` samples into the queue, and wait for the scores."""
        work = _QueuedRequest(request, deadline, time.monotonic(), asyncio.get_running_loop().create_future())
        self._waiting.append(work)
        self._num_waiting += request.num_samples
        if self._timer is None and not self._num_running:
            # On the next loop iteration: requests read in this iteration join the batch.
            self._timer = asyncio.get_running_loop().call_soon(self._on_timer)
        return await work.answer

    def _piece_size(self) -> int:
        """Return the number of samples which take about `_PIECE_SECONDS`; 32 before the first measurement."""
        if not self._computing_per_sample:
            return min(32, self._limits.max_batch)
        return max(1, min(int(_PIECE_SECONDS / self._computing_per_sample), self._limits.max_batch))

    def check(self, deadline: float, num_samples: int | None = None) -> None:
        """Check that a request arriving now would be scored before the deadline, at the current pace.

        Args:
            num_samples: samples in the request. None if the body was not read yet: the usual number is
                assumed, and the queue must have room. So the server can refuse a request without reading the
                body.

        Raises:
            RequestError: the queue is full or too long for the deadline (status 503), or the deadline has
                passed (504).
        """
        now = time.monotonic()
        if num_samples is None and self.is_full:
            raise self._queue_error(f"{self._num_admitted} requests are already waiting")
        # Cheaper than computing an answer that nobody reads.
        if deadline <= now:
            raise deadline_error()
        if num_samples is None:
            num_samples = round(self._usual_samples)
        wait = (self._num_waiting + self._num_running + num_samples) * self._seconds_per_sample
        if now + _WAIT_MARGIN * wait > deadline and self._num_waiting + self._num_running:
            raise self._queue_error(
                f"an answer would take about {1e3 * wait:.0f} ms, past the request's deadline"
            )

    async def drain(self) -> None:
        """Wait until all admitted requests are answered, then end the scoring thread."""
        # New requests go to the version that replaces this model, so the queue empties.
        await self._idle.wait()
        self._pool.shutdown(wait=False)

    async def run_in_thread(self, call: Callable[[], None]) -> None:
        """Run a function in the scoring thread, between batches."""
        await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def _queue_error(self, reason: str) -> RequestError:
        """Return a 503 error which tells the client when the queue will be empty."""
        seconds = math.ceil(self._num_waiting * self._seconds_per_sample) or 1
        return RequestError(f"{reason}. Try again later.", 503, {"Retry-After": str(seconds)})

    def _start(self) -> None:
        """Start to score the next batch, unless a batch is running or the queue is empty.

        A batch that is not full waits for further requests as long as its oldest request may wait. A timer
        then calls this method again.
        """
        if self._num_running or not self._waiting:
            return
        now = time.monotonic()
        # The oldest request determines how long the batch may wait.
        left = self._waiting[0].since + self._limits.max_wait_ms / 1e3 - now
        if left > 0 and self._num_waiting < self._limits.max_batch:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(left, self._on_timer)
            return
        batch = self._take(now)
        if not batch:
            return
        # At least 1, because 0 means idle: a batch of empty requests has no samples.
        self._num_running = sum(work.request.num_samples for work in batch) or 1
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._scores, batch)
        running.add_done_callback(lambda future: self._finish(batch, now, future))

    def _on_timer(self) -> None:
        """Call `_start` again, after the time for which requests may wait for a batch."""
        self._timer = None
        self._start()

    def _take(self, now: float) -> list[_QueuedRequest]:
        """Remove the requests of the next batch from the queue, and return them.

        Expired requests get an error instead; requests with disconnected clients are dropped.
        """
        batch: list[_QueuedRequest] = []
        num_samples = 0
        while self._waiting:
            # Only looked at, because it may not fit into this batch.
            work = self._waiting[0]
            is_live = work.deadline > now and not work.answer.done()
            together = num_samples + work.request.num_samples
            if is_live and batch and together > self._limits.max_batch:
                break
            # Computing time alone: queueing does not hold the GIL.
            if is_live and batch and together * self._computing_per_sample > _MAX_BATCH_SECONDS:
                break
            self._waiting.popleft()
            self._num_waiting -= work.request.num_samples
            if is_live:
                batch.append(work)
                num_samples += work.request.num_samples
            elif not work.answer.done():
                work.answer.set_exception(deadline_error())
        return batch

    def _scores(self, batch: Sequence[_QueuedRequest]) -> list[VersionedScores | Exception]:
        """Score a batch, and return scores or an error for every request. Runs in the scoring thread."""
        requests = [work.request for work in batch]
        results: list[VersionedScores | Exception] = []
        try:
            scores, version = self._score(concat_requests(requests))
            start = 0
            for request in requests:
                results.append(VersionedScores(scores[start : start + request.num_samples], version))
                start += request.num_samples
        except Exception as error:
            if len(batch) == 1:
                return [error]
            # One bad request must not fail the others in its batch.
            return [result for work in batch for result in self._scores([work])]
        return results

    def _finish(
        self,
        batch: Sequence[_QueuedRequest],
        start_time: float,
        future: "asyncio.Future[list[VersionedScores | Exception]]",
    ) -> None:
        """Update the averages of seconds per sample, start the next batch, and answer the requests.

        Runs in the event loop.
        """
        now = time.monotonic()
        # Wall time since the last batch: under load, reading and answering requests also takes time.
        since = max(self._finished, min(work.since for work in batch))
        self._finished = now
        # Seconds per sample, including the time for parsing and answering.
        # With weight 0.2, both averages follow about the last five batches.
        pace = (now - since) / self._num_running
        self._seconds_per_sample += 0.2 * (pace - self._seconds_per_sample)
        # Scoring alone, without queueing: sizes batches and pieces.
        computing = (now - start_time) / self._num_running
        if self._computing_per_sample:
            computing = min(computing, 2 * self._computing_per_sample)  # damp outliers
        self._computing_per_sample += 0.2 * (computing - self._computing_per_sample)
        num_samples, self._num_running = self._num_running, 0
        self._start()  # before the answers, so that the thread computes while they are serialized
        for work, result in zip(batch, future.result(), strict=True):
            if work.answer.done():
                continue  # the client disconnected
            if isinstance(result, Exception):
                work.answer.set_exception(result)
            else:
                work.answer.set_result(result)
        self._observe(BatchMetrics(num_samples, [start_time - work.since for work in batch]))


def deadline_error() -> RequestError:
    """Return the error (status 504) for a request past the deadline."""
    return RequestError("the deadline passed before the request was computed. Allow more time.", 504)
