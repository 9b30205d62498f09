"""Scoring without HTTP, as another transport would call it."""

import asyncio
import contextlib
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from meshrec.serve.batching import VersionedScores
from meshrec.serve.requests import SCORES, InferRequest, RequestError
from meshrec.serve.service import ScoreRequest, ScoringService

REQUEST = InferRequest(
    SimpleNamespace(values=[], lengths=[], dense=np.zeros((2, 3), np.float32)), None, math.inf, True
)


WANTED = ScoreRequest("clicks", None, SCORES)


class Batcher(contextlib.nullcontext):
    def __init__(self, scores):
        super().__init__()
        self.scores = np.array(scores, np.float32)

    def check(self, deadline):
        if time.monotonic() > deadline:
            raise RequestError("too late", 504)

    async def __call__(self, request, deadline):
        return VersionedScores(self.scores, "v1")


def service(scores=(0.25, 0.5), finished=None, refused=None):
    served = SimpleNamespace(
        name="clicks", signature=SimpleNamespace(outputs=SCORES), recommends=False, batcher=Batcher(scores)
    )
    repository = SimpleNamespace(get_only=lambda: served, get=lambda name, version: served)
    finished = [] if finished is None else finished
    metrics = SimpleNamespace(record_request=lambda name, outcome, _: finished.append((name, outcome)))
    waiting = SimpleNamespace(reserve=lambda _: refused, release=lambda _: None)
    return ScoringService(repository, metrics, waiting)


def score(service, wanted=WANTED, deadline=math.inf):
    async def read(signature):
        return REQUEST

    with service.count_outcome(wanted) as start_time:
        return asyncio.run(service.score(wanted, read, 0, start_time=start_time, deadline=deadline))


def test_a_transport_gets_scores_and_their_version():
    finished = []
    scored = score(service(finished=finished))
    assert (scored.model, scored.version, scored.outputs, scored.best) == ("clicks", "v1", SCORES, None)
    assert scored.scores.tolist() == [0.25, 0.5]
    assert finished == [("clicks", "ok")]


@pytest.mark.parametrize(
    ("options", "request_options", "status", "outcome"),
    [
        ({}, {"deadline": 0.0}, 504, "expired"),
        ({"refused": "full"}, {}, 503, "overloaded"),
        ({"scores": (0.5, math.nan)}, {}, 422, "bad_request"),
        ({}, {"wanted": ScoreRequest("clicks", None, "vectors")}, 400, "bad_request"),
    ],
)
def test_a_request_without_an_answer_is_counted_by_its_outcome(options, request_options, status, outcome):
    finished = []
    with pytest.raises(RequestError) as error:
        score(service(finished=finished, **options), **request_options)
    assert error.value.status == status
    assert finished == [("clicks", outcome)]
