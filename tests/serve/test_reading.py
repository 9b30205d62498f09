"""Bodies, large and small, good and bad."""

import asyncio
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from meshrec.serve import reading
from meshrec.serve.reading import Body, BodyReader
from meshrec.serve.requests import RequestError
from tests.serve.conftest import SIGNATURE, request_of, samples
from tests.serve.toys import FEATURES


@pytest.fixture
def reader():
    reader = BodyReader()
    yield reader
    reader.close()


def ask(reader, body):
    return asyncio.run(reader(Body(False, None, body), SIGNATURE)).request


def test_large_bodies_are_read_alike_by_another_process(reader, monkeypatch):
    given = samples(40)
    here = ask(reader, json.dumps(given).encode())
    monkeypatch.setattr(reading, "_AT_ONCE", 0)
    for _ in range(2):
        there = ask(reader, json.dumps(given).encode())
        for found, same, expected in zip(there[:3], here[:3], request_of(given)[:3], strict=True):
            for one, two, three in zip(found, same, expected, strict=True):
                assert np.array_equal(one, two)
                assert np.array_equal(one, three)
        with pytest.raises(RequestError, match="sample 0") as caught:
            ask(reader, b'{"x": 1}')
        assert caught.value.status == 400
    os.kill(reader._child._pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, reader, b"[]")
        os.kill(reader._child._pid, signal.SIGKILL)
        with pytest.raises(RequestError, match="requests") as caught:
            asked.result(60)
    assert caught.value.status == 503
    assert ask(reader, b"[]").num_samples == 0


def nested(depth):
    return f'{{"dense": [1, 2, 3], "item": 1, "user": {"[" * depth}1{"]" * depth}}}'.encode()


@pytest.mark.parametrize(
    "body",
    [nested(976), nested(20), nested(90_000), nested(1).replace(b"1]", b"1" * 4301 + b"]"), b"\xff{}"],
)
def test_what_python_does_not_read_is_refused_with_words(client, body):
    status, _, said = client("POST", "/predict", body)
    assert (status, len(said["error"]) > 20) == (400, True)
    status, _, said = client("POST", "/v2/models/clicks/infer", body)
    assert status == 400


def test_numbers_of_many_digits_in_headers_and_paths(client):
    header = {"Inference-Header-Content-Length": "1" * 4301}
    status, _, said = client("POST", "/v2/models/clicks/infer", b"{}", header)
    assert (status, "must be a number of bytes" in said["error"]) == (400, True)
    path = "/v2/repository/models/clicks/rollback/" + "1" * 4301
    status, _, said = client("POST", path)
    assert (status, "must be a number" in said["error"]) == (400, True)


def test_a_request_of_many_samples_is_answered_in_pieces(client):
    given = {
        "shared": {"user": [3, 4]},
        "samples": [{"dense": [0, n % 7, 1], "item": n % 50} for n in range(3000)],
    }
    each = [{**given["shared"], **sample} for sample in given["samples"]]
    scores = client("POST", "/predict", given)[2]["scores"]
    assert len(scores) == 3000
    alone = client("POST", "/predict", each[:7] + each[-7:])[2]["scores"]
    np.testing.assert_allclose(scores[:7] + scores[-7:], alone, rtol=1e-5)
    assert set(FEATURES) == {"user", "item"}
