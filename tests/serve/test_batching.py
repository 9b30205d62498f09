import asyncio
import math
import threading
import time

import numpy as np
import pytest

from meshrec.serve import batching
from meshrec.serve.batching import Batcher, Limits, VersionedScores
from meshrec.serve.requests import RequestError
from tests.serve.conftest import request_of, samples


class Scorer:
    """Sums of the dense values; the first batch waits for `go`."""

    def __init__(self):
        self.batches = []
        self.go, self.began = threading.Event(), threading.Event()

    def __call__(self, request):
        self.batches.append(request.num_samples)
        self.began.set()
        assert self.go.wait(60)
        if (request.dense == 99).any():
            raise ValueError("a sample cannot be")
        return VersionedScores(request.dense.sum(1), "v")


def in_loop(test, longest=math.inf):
    """Batches are as long as they like, as a machine with other work may take long for any."""

    async def run():
        scorer, batched = Scorer(), []
        batcher = Batcher(scorer, Limits(max_batch=4, max_queue=6), batched.append)
        result = await test(batcher, scorer)
        await asyncio.wait_for(batcher.drain(), 60)
        return result, batched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "_MAX_BATCH_SECONDS", longest)
        return asyncio.run(run())


async def ask(batcher, given, deadline=float("inf")):
    with batcher:
        return (await batcher(request_of(given), deadline)).scores


async def behind_one(batcher, scorer, *works):
    """Runs what is to wait until a first batch is done."""
    first = asyncio.create_task(ask(batcher, samples(1)))
    await asyncio.to_thread(scorer.began.wait)
    tasks = [asyncio.create_task(work) for work in works]
    await asyncio.sleep(0)
    scorer.go.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_requests_that_wait_are_computed_together_and_get_their_own_scores():
    given = [samples(n, n) for n in (1, 2, 3, 1)]

    async def test(batcher, scorer):
        return await behind_one(batcher, scorer, *(ask(batcher, each) for each in given)), scorer.batches

    (found, batches), batched = in_loop(test)
    for each, scores in zip(given, found, strict=True):
        assert np.array_equal(scores, request_of(each).dense.sum(1))
    assert batches == [1, 3, 4]  # at most 4 samples, in their order
    assert [each.num_samples for each in batched] == [1, 3, 4]
    assert len(batched[1].waits) == 2


def test_a_request_of_more_samples_than_a_batch_is_computed_in_pieces():
    async def test(batcher, scorer):
        return await behind_one(batcher, scorer, ask(batcher, samples(9)), ask(batcher, samples(1))), scorer

    (found, scorer), _ = in_loop(test)
    assert [len(each) for each in found] == [9, 1]
    assert sum(scorer.batches) == 11
    assert max(scorer.batches) <= 4


def test_a_request_that_fails_leaves_the_others_of_its_batch_unharmed():
    bad = samples(1)
    bad[0]["dense"] = [99.0, 0.0, 0.0]

    async def test(batcher, scorer):
        return await behind_one(batcher, scorer, ask(batcher, samples(2)), ask(batcher, bad))

    (found, error), _ = in_loop(test)
    assert np.array_equal(found, request_of(samples(2)).dense.sum(1))
    assert isinstance(error, ValueError)


def test_what_is_past_its_deadline_is_not_computed():
    async def test(batcher, scorer):
        soon = time.monotonic() + 0.01
        late = [ask(batcher, samples(2), soon), asyncio.sleep(0.02)]
        first = asyncio.create_task(ask(batcher, samples(1)))
        await asyncio.to_thread(scorer.began.wait)
        waiting = asyncio.gather(*late, return_exceptions=True)
        await asyncio.sleep(0.02)
        scorer.go.set()
        await first
        with pytest.raises(RequestError, match="deadline"):
            await ask(batcher, samples(1), time.monotonic())
        return (await waiting)[0], scorer.batches

    (error, batches), _ = in_loop(test)
    assert error.status == 504
    assert batches == [1]


def test_no_batch_of_several_requests_takes_long():
    async def test(batcher, scorer):
        first = asyncio.create_task(ask(batcher, samples(1)))
        await asyncio.to_thread(scorer.began.wait)
        batcher._computing_per_sample = 1.0
        waiting = [asyncio.create_task(ask(batcher, samples(2))) for _ in range(4)]
        await asyncio.sleep(0)
        scorer.go.set()
        await asyncio.gather(first, *waiting)
        return scorer.batches

    batches, _ = in_loop(test, longest=0.1)
    assert batches == [1, 2, 2, 2, 2]  # 4 samples would take more than a second


def test_too_many_requests_and_those_that_would_be_late_are_told_to_come_back():
    async def test(batcher, scorer):
        scorer.go.set()
        await ask(batcher, samples(1))  # now it knows its pace
        batcher._seconds_per_sample = 1.0
        scorer.go.clear()
        scorer.began.clear()
        first = asyncio.create_task(ask(batcher, samples(2)))
        await asyncio.to_thread(scorer.began.wait)
        with pytest.raises(RequestError, match="about 3000") as late:
            await ask(batcher, samples(1), time.monotonic() + 1)
        with pytest.raises(RequestError, match="about 2000"):
            batcher.check(time.monotonic() + 1)  # before its body is read
        waiting = [asyncio.create_task(ask(batcher, samples(1))) for _ in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="6 requests") as full, batcher:
            pass
        scorer.go.set()
        await asyncio.gather(first, *waiting)
        return late.value, full.value

    (late, full), _ = in_loop(test)
    assert late.status == full.status == 503
    assert int(full.headers["Retry-After"]) == 5
    assert int(late.headers["Retry-After"]) >= 1


def test_a_batch_waits_for_others_as_long_as_it_may():
    async def run():
        scorer = Scorer()
        scorer.go.set()
        batcher = Batcher(scorer, Limits(max_batch=2, max_wait_ms=20_000), lambda _: None)
        await asyncio.wait_for(asyncio.gather(ask(batcher, samples(1)), ask(batcher, samples(1))), 15)
        patient = Batcher(scorer, Limits(max_batch=2, max_wait_ms=1), lambda _: None)
        await ask(patient, samples(1))
        return scorer.batches

    assert asyncio.run(run()) == [2, 1]


@pytest.mark.parametrize("wrong", [{"max_batch": 0}, {"max_queue": 0}, {"max_wait_ms": -1.0}])
def test_limits_are_checked(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}"):
        Limits(**wrong)
