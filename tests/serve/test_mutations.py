"""Valid requests, changed at random: each is refused with a reason, or is still a valid one.

MESHREC_MUTATIONS sets how many of each kind; `make mutations` takes 10,000.
"""

import json
import os
import random

import numpy as np
import pytest

import meshrec
from meshrec.export import Predictor, export
from meshrec.models.dlrm import DLRM
from tests.export.conftest import torchs_own_warnings
from tests.serve.conftest import Client, request_of, running, samples, scores_of
from tests.serve.test_server import infer_body
from tests.serve.toys import FEATURES, NUM_DENSE, NUM_ROWS

NUM = int(os.environ.get("MESHREC_MUTATIONS", "100"))
LENGTH = "Inference-Header-Content-Length"
JUNK = [None, True, -1, 0, 1.5, 10**30, 1 << 62, -(1 << 63), "", "x", [], {}, [[]], [None], {"a": [1]}, "NaN"]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A package, so that what is let through reaches the kernels."""
    folder = tmp_path_factory.mktemp("mutations") / "clicks"
    tables = [
        meshrec.EmbeddingBagConfig(name=f"t_{f}", embedding_dim=4, num_embeddings=NUM_ROWS, feature_names=[f])
        for f in FEATURES
    ]
    model = DLRM(meshrec.EmbeddingBagCollection(tables), NUM_DENSE, [8, 4], [8, 1])
    with pytest.MonkeyPatch.context() as patch, torchs_own_warnings():
        export(model, folder, features=FEATURES, num_dense=NUM_DENSE, compile=False)
        patch.setattr("meshrec.serve.models.Predictor", Predictor)
        with running({"clicks": folder}, max_body=1 << 16) as server:
            yield server, Predictor(folder)


def bytes_changed(draw, data):
    """Some bytes other ones, gone, doubled, or all after a place gone."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data) + 1)
        length = draw.randint(1, 9)
        match draw.randrange(5):
            case 0:
                data[place : place + 1] = bytes([draw.randrange(256)])
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = data[place : place + length]
            case 3:
                data[place:place] = bytes(draw.randrange(256) for _ in range(length))
            case 4:
                del data[place:]
    return bytes(data)


def value_changed(draw, value):
    """A part of a JSON value becomes something else, or goes away."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.15:
        return draw.choice(JUNK)
    changed = dict(value) if isinstance(value, dict) else list(value)
    key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    if draw.random() < 0.15:
        del changed[key]
    else:
        changed[key] = value_changed(draw, value[key])
    return changed


def binary(given):
    """Head and tensors of an inference request."""
    body, tensors = infer_body(given), []
    for tensor in body["inputs"]:
        dtype = {"FP32": "<f4", "INT64": "<i8", "INT32": "<i4"}[tensor["datatype"]]
        tensors.append(np.array(tensor.pop("data"), dtype).tobytes())
        tensor["parameters"] = {"binary_data_size": len(tensors[-1])}
    return body, b"".join(tensors)


def mutated(kind, draw):
    """Path, body, headers."""
    given = samples(draw.randint(1, 4), draw.randrange(100))
    if kind == "samples":
        if draw.random() < 0.5:
            return "/predict", json.dumps(value_changed(draw, given)).encode(), {}
        return "/predict", bytes_changed(draw, json.dumps(given).encode()), {}
    path = "/v2/models/clicks/infer"
    if kind == "json":
        body = infer_body(given)
        if draw.random() < 0.5:
            return path, json.dumps(value_changed(draw, body)).encode(), {}
        return path, bytes_changed(draw, json.dumps(body).encode()), {}
    body, tensors = binary(given)
    if draw.random() < 0.5:
        head = json.dumps(value_changed(draw, body)).encode()
    else:
        head, tensors = json.dumps(body).encode(), bytes_changed(draw, tensors)
    length = (
        len(head) if draw.random() < 0.8 else draw.choice([0, len(head) - 1, len(head) + 1, 10**9, "x", -1])
    )
    return path, head + tensors, {LENGTH: str(length)}


def num_scores(said):
    if isinstance(said, bytes):  # the header of a binary answer is not needed for its length
        raise AssertionError("an answer in binary was not asked for")
    return len(said["scores"]) if "scores" in said else sum(len(each["data"]) for each in said["outputs"])


@pytest.mark.parametrize("kind", ["samples", "json", "binary"])
def test_changed_requests_are_refused_with_a_reason(served, kind):
    server, predictor = served
    draw, client = random.Random(0), Client(server.url)
    sound = samples(3, 7)
    expected = scores_of(predictor, sound)
    assert request_of(sound).num_samples == 3
    refused = 0
    for number in range(NUM):
        path, body, headers = mutated(kind, draw)
        status, _, said = client("POST", path, body, headers)
        if status == 200:
            assert num_scores(said) <= 8, body
        else:
            assert 400 <= status < 500, (status, said, body)
            assert len(said["error"]) > 10, body
            refused += 1
        if number % 50 == 0:
            status, _, said = client("POST", "/predict", sound)
            np.testing.assert_allclose(said["scores"], expected, rtol=1e-5)
    assert refused > NUM / 2
    client.close()
