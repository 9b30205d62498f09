"""Drawn bad requests and clients that misbehave, mixed with good requests whose answers are checked."""

import contextlib
import json
import random
import socket

import numpy as np
import pytest

from meshrec.serve import ConnectionLimits, Limits
from tests.hostile.damage import NUMBER, Tally
from tests.serve.conftest import Client, running, samples, scores_of
from tests.serve.test_mutations import mutated, raw_columns, served  # noqa: F401 - a fixture
from tests.serve.toys import Toy, check_toy, make_toy, open_with

SEED = 31
GIVEN = samples(3, 7)
BODY = json.dumps(GIVEN).encode()
HEAD = b"POST /predict/clicks HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n"
HUGE = 10**4300 - 1


def check_good(server, expected):
    client = Client(server.url)
    status, _, said = client("POST", "/predict/clicks", GIVEN)
    assert status == 200, said
    np.testing.assert_allclose(said["scores"], expected, rtol=1e-5)
    assert client("GET", "/v2/health/ready")[0] == 200
    client.close()


def odd(draw):
    """Path, body and headers of a request that no change of a few bytes leads to."""
    depth = draw.choice([15, 90, 976, 20_000])
    deep = f'{{"dense": [1, 2, 3], "item": 1, "user": {"[" * depth}1{"]" * depth}}}'
    many = [{"dense": [0, 1, 2], "user": 1, "item": []}] * draw.randrange(1000)
    tensor = {"name": "dense", "datatype": "FP32", "shape": [3] * draw.randrange(99), "data": [1, 2, 3]}
    body, headers = draw.choice(
        [
            (deep, {}),
            (json.dumps({**GIVEN[0], "user": HUGE}), {}),
            (json.dumps({**GIVEN[0], "user": HUGE}).replace("999", "9999"), {}),
            (json.dumps({**GIVEN[0], "item": ["x" * 60_000, *range(1000)]}), {}),
            (json.dumps({"shared": {"user": list(range(50)) * 50}, "samples": many}), {}),
            (json.dumps({f"f{n}": n for n in range(2000)}), {}),
            (json.dumps({"inputs": [tensor]}), {}),
            ("{}", {"Inference-Header-Content-Length": "1" * draw.choice([1, 30, 4301])}),
            ("{}", {"X-Timeout-Ms": draw.choice(["1" * 5000, "nan", "-1", "1e-9"])}),
            ("{}", {"Content-Encoding": "gzip"}),
        ]
    )
    paths = ["/predict/clicks", "/predict/raw", "/v2/models/clicks/infer", "/embed/clicks"]
    paths.append("/v2/repository/models/x/rollback/" + "9" * draw.choice([1, 4301]))
    return draw.choice(paths), body.encode()[: 1 << 16], headers


def test_bad_requests_are_refused_with_words(served):  # noqa: F811
    server, predictor = served
    expected = scores_of(predictor, GIVEN)
    draw, tally, client = random.Random(SEED), Tally("bad requests"), Client(server.url)
    kinds = ["samples", "json", "binary", "raw", "shared", "raw tensors"]

    def attempt(path, body, headers):
        status, _, said = client("POST", path, body, headers)
        # 504 is what the documentation says of a deadline that has passed.
        expired = status == 504 and "X-Timeout-Ms" in headers
        assert status == 200 or 400 <= status < 500 or expired, (status, said)
        assert status == 200 or len(said["error"]) > 10

    for number in range(10 * NUMBER or 60):
        request = odd(draw) if number % 4 == 0 else mutated(kinds[number % 6], draw)
        tally.attempt(f"request {number}", lambda request=request: attempt(*request))
        if number % 20 == 0:
            tally.attempt(f"the good one after {number}", lambda: check_good(server, expected))
    client.close()
    tally.finish()


@pytest.mark.parametrize("change", [{"user": "\ud800"}, {"item": ["a", "\udfff"]}])
def test_half_of_a_pair_of_surrogates_is_refused_with_words(served, change):  # noqa: F811
    """JSON has it, and UTF-8 does not."""
    server, _ = served
    columns = raw_columns(GIVEN)
    raw = {name: values[0] for name, values in columns.items()}
    client = Client(server.url)
    for path, sample in (("/predict/raw", raw), ("/predict/clicks", GIVEN[0])):
        status, _, said = client("POST", path, [{**sample, **change}])
        assert (status, len(said["error"]) > 10) == (400, True), (path, said)
    client.close()


@contextlib.contextmanager
def connected(server):
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        yield connection


def misbehave(draw, kind):
    """What a client sends before it says no more."""
    return {
        "silent": b"",
        "unfinished header": (HEAD % 9)[: draw.randrange(1, 60)],
        "unfinished body": HEAD % len(BODY) + b"\r\n" + BODY[: draw.randrange(len(BODY))],
        "idle": HEAD % len(BODY) + b"\r\n" + BODY,
        "large header": HEAD % 9 + b"a: " + b"v" * draw.randrange(1 << 18),
        "many headers": HEAD % 9 + b"a: v\r\n" * draw.randrange(20_000),
        "endless chunks": b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"1;"
        + b"x" * draw.randrange(1 << 18),
        "many at once": (HEAD % len(BODY) + b"\r\n" + BODY) * draw.randrange(1, 300),
        "no HTTP": bytes(draw.randrange(256) for _ in range(draw.randrange(1, 500))) + b"\r\n\r\n",
        "large body": HEAD % (1 << 19) + b"\r\n" + b"[" + b'{"x":1},' * 60_000,
    }[kind]


KINDS = ["silent", "unfinished header", "unfinished body", "idle", "large header", "many headers"]
KINDS += ["endless chunks", "many at once", "no HTTP", "large body"]


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    package = make_toy(tmp_path_factory.mktemp("limited") / "clicks", 1)
    limits = ConnectionLimits(max_per_client=16, header_seconds=1.0, body_seconds=1.0, idle_seconds=1.0)
    with pytest.MonkeyPatch.context() as patch:
        open_with(patch, Toy, check_toy)
        with running({"clicks": package}, connections=limits, limits=Limits(max_queue=64)) as server:
            yield server, scores_of(Toy(package), GIVEN)


@pytest.mark.parametrize("kind", KINDS)
def test_misbehaving_clients_harm_nobody(limited, kind):
    server, expected = limited
    draw, tally = random.Random(f"{SEED} {kind}"), Tally(f"client: {kind}")
    with contextlib.ExitStack() as stack:
        for number in range(NUMBER or 24):
            connection = stack.enter_context(connected(server))
            with contextlib.suppress(OSError):  # it may be refused before it has sent all
                connection.setblocking(False)
                connection.send(misbehave(draw, kind))
            tally.attempt(f"the good one after {number}", lambda: check_good(server, expected))
            if number % 100 == 99:
                stack.close()
    tally.finish()
