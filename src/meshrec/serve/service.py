"""Scoring of requests, independent of the transport: model selection, limits, batches, recommendations.

An endpoint (HTTP here, gRPC elsewhere) converts a request to a `ScoreRequest` and an `InferRequest`, calls
`ScoringService`, and serializes the resulting `ScoreResult`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np

from meshrec.export.next_items import Recommended
from meshrec.serve.metrics import Metrics
from meshrec.serve.models import Repository, ServedModel
from meshrec.serve.reading import size_of
from meshrec.serve.recommending import ItemOptions
from meshrec.serve.requests import SCORES, Floats, InferRequest, RequestError, Signature

_OUTCOMES = {  # metric label by HTTP status of the refusal
    401: "unauthorized",
    404: "unknown",
    413: "too_large",
    503: "overloaded",
    504: "expired",
}
# First part of the URL path by kind of outputs.
_ASK_FOR = {SCORES: "predict", "vectors": "embed"}


class ScoreRequest(NamedTuple):
    """Model, version and outputs which a client asks for, without the samples.

    Attributes:
        model: model name; None: the server's only model.
        version: version that the client requires; None: any.
        outputs: ``scores`` or ``vectors``; None: the outputs of the model, in the Open Inference Protocol.
        recommends: whether to return recommended items instead of vectors.
        items: options for recommended items.
    """

    model: str | None
    version: str | None
    outputs: str | None
    recommends: bool = False
    items: ItemOptions = ItemOptions()


class ScoreResult(NamedTuple):
    """Scores of a request, and the model which computed them.

    Attributes:
        infer: parsed request.
        model: model name.
        version: version of the model.
        outputs: ``scores`` or ``vectors``.
        scores: scores [B] or vectors [B, V], float32.
        best: recommended items; None if the client did not ask for items.
    """

    infer: InferRequest
    model: str
    version: str
    outputs: str
    scores: Floats
    best: Recommended | None


class RequestMemory(Protocol):
    """Memory limit for requests which wait for an answer. `Connections` implements it."""

    def reserve(self, num_bytes: int, /) -> str | None:
        """Reserve memory for a request. Return None, or the reason for refusing the request."""

    def release(self, num_bytes: int, /) -> None:
        """Release reserved memory."""


class ScoringService:
    """Service that scores requests from any transport.

    A request which cannot be answered in time is refused before the body is read.
    """

    def __init__(self, repository: Repository, metrics: Metrics, waiting: RequestMemory) -> None:
        self._repository, self._metrics, self._waiting = repository, metrics, waiting

    @contextmanager
    def count_outcome(self, requested: ScoreRequest) -> Iterator[float]:
        """Count a request in the metrics, by model and outcome, when the context ends.

        Yields:
            ``time.monotonic`` time when the request arrived.

        Raises:
            RequestError: the model is unknown or not ready.
        """
        # "error" stays if an exception other than a refusal ends the request.
        start_time, name, outcome = time.monotonic(), "", "error"
        try:
            name = self._served(requested).name
            yield start_time
            outcome = "ok"
        except RequestError as error:
            outcome = _OUTCOMES.get(error.status, "bad_request")
            raise
        finally:
            self._metrics.record_request(name, outcome, time.monotonic() - start_time)

    def check(self, requested: ScoreRequest, deadline: float) -> ServedModel:
        """Check, before the body is read, that a request can be answered, and return the model.

        Args:
            deadline: ``time.monotonic`` time after which the answer is useless.

        Raises:
            RequestError: the model has other outputs, or cannot answer in time.
        """
        served = self._served(requested)
        if requested.outputs not in (None, served.signature.outputs):
            raise RequestError(
                f"model {served.name!r} returns {served.signature.outputs}, not {requested.outputs}. "
                f"Ask /{_ASK_FOR[served.signature.outputs]}/{served.name}."
            )
        if requested.recommends and not served.recommends:
            raise RequestError(
                f"model {served.name!r} has no item list. Export a next-item run trained from a log."
            )
        served.batcher.check(deadline)
        return served

    async def score(
        self,
        requested: ScoreRequest,
        read: Callable[[Signature], Awaitable[InferRequest]],
        num_bytes: int,
        *,
        start_time: float,
        deadline: float,
    ) -> ScoreResult:
        """Score a request whose body has arrived.

        Args:
            num_bytes: bytes of the body, for which the transport has already reserved memory.
            deadline: ``time.monotonic`` time after which the answer is useless.

        Raises:
            RequestError: the request is invalid, or cannot be answered in time.
        """
        # Look up again: versions are not pinned while a client sends its body.
        served = self.check(requested, deadline)
        with served.batcher:
            # The position in the queue is held while the body is parsed.
            infer = await read(served.signature)
            repeated = max(
                0, size_of(infer.request) - num_bytes
            )  # repeated shared values take more than the body
            if (refused := self._waiting.reserve(repeated)) is not None:
                raise RequestError(refused, 503, {"Retry-After": "1"})
            try:
                scored = await served.batcher(infer.request, min(deadline, start_time + infer.timeout))
            finally:
                self._waiting.release(repeated)
        scores = _check_finite(scored.scores)
        best = None
        if requested.recommends:
            # Ranking all items takes long, so it must not block the event loop.
            best = await asyncio.to_thread(served.recommend, scores, infer.request, requested.items)
        return ScoreResult(infer, served.name, scored.version, served.signature.outputs, scores, best)

    def _served(self, requested: ScoreRequest) -> ServedModel:
        """Return the model which a request names, or the only model if it names none."""
        if requested.model is None:
            return self._repository.get_only()
        return self._repository.get(requested.model, requested.version)


def _check_finite(scores: Floats) -> Floats:
    """Return the scores. Raises RequestError (422) for an infinite or NaN score, which JSON lacks."""
    finite = np.isfinite(scores)
    if not finite.all():
        sample = int(finite.reshape(len(scores), -1).all(1).argmin())
        raise RequestError(f"the score of sample {sample} is not finite. Check for huge dense values.", 422)
    return scores
