"""Valid requests, changed at random: each is refused with a reason, or is still a valid one.

MESHREC_MUTATIONS sets how many of each kind; `make mutations` takes 10,000.
"""

import json
import os
import random

import numpy as np
import pyarrow as pa
import pytest

import meshrec
from meshrec.data.features import Features, Hashed, Number
from meshrec.data.raw_values import RawValues
from meshrec.export import Predictor, check_package, export
from meshrec.models.dlrm import DLRM
from tests.export.conftest import torchs_own_warnings
from tests.serve.conftest import Client, request_of, running, samples, scores_of
from tests.serve.test_server import infer_body
from tests.serve.toys import FEATURES, NUM_DENSE, NUM_ROWS, open_with

NUM = int(os.environ.get("MESHREC_MUTATIONS", "50"))
LENGTH = "Inference-Header-Content-Length"
JUNK = [None, True, -1, 0, 1.5, 10**30, 1 << 62, -(1 << 63), "", "x", [], {}, [[]], [None], {"a": [1]}, "NaN"]


def make_packages(folder):
    """A model's packages, of rows and of raw values."""
    tables = [
        meshrec.EmbeddingBagConfig(name=f"t_{f}", embedding_dim=4, num_embeddings=NUM_ROWS, feature_names=[f])
        for f in FEATURES
    ]
    model = DLRM(meshrec.EmbeddingBagCollection(tables), NUM_DENSE, [8, 4], [8, 1])
    options = {"features": FEATURES, "num_dense": NUM_DENSE, "compile": False}
    folder.mkdir()
    with torchs_own_warnings():
        export(model, folder / "clicks", **options)
        export(model, folder / "raw", shared=["user", "dense"], raw=raw_values(), **options)


@pytest.fixture(scope="module")
def served(made_once):
    """A package, so that what is let through reaches the kernels."""
    folder = made_once("mutations", make_packages)
    with pytest.MonkeyPatch.context() as patch, torchs_own_warnings():
        open_with(patch, Predictor, check_package)
        with running({name: folder / name for name in ("clicks", "raw")}, max_body=1 << 16) as server:
            yield server, Predictor(folder / "clicks")


def raw_values():
    """Texts, lists of them and numbers, for the same model."""
    features = Features(
        labels=(),
        features=(
            *(Number(name=f"d{at}", missing=0.0) for at in range(NUM_DENSE)),
            Hashed(name="user", num_embeddings=NUM_ROWS),
            Hashed(name="item", num_embeddings=NUM_ROWS, max_length=5),
        ),
        num_labels=1,
    )
    table = pa.table(raw_columns(samples(9)))
    return RawValues(features.fit([table]), table.schema)


def raw_columns(given):
    """The same samples with texts for ids."""
    found = {f"d{at}": [each["dense"][at] for each in given] for at in range(NUM_DENSE)}
    found["user"] = ["".join(f"u{i}" for i in each["user"]) for each in given]
    found["item"] = [[f"i{i}" for i in each["item"]] for each in given]
    return found


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


def raw_binary(columns, shares):
    """Head and tensors of a request of raw values."""

    def texts(values):
        return b"".join(len(v).to_bytes(4, "little") + v for v in (value.encode() for value in values))

    arrays = [
        (f"raw.{name}", "FP64", np.array(values, "<f8").tobytes(), len(values))
        for name, values in columns.items()
        if name[0] == "d"
    ]
    arrays.append(("raw.user", "BYTES", texts(columns["user"]), len(columns["user"])))
    flat = [value for values in columns["item"] for value in values]
    lengths = np.array([len(values) for values in columns["item"]], "<i4")
    arrays.append(("raw.item.values", "BYTES", texts(flat), len(flat)))
    arrays.append(("raw.item.lengths", "INT32", lengths.tobytes(), len(lengths)))
    inputs = [
        {"name": name, "datatype": kind, "shape": [size], "parameters": {"binary_data_size": len(data)}}
        for name, kind, data, size in arrays
    ]
    return {"inputs": inputs, "parameters": {"shared": shares}}, b"".join(each[2] for each in arrays)


def mutated(kind, draw):
    """Path, body, headers."""
    given = samples(draw.randint(1, 4), draw.randrange(100))
    if kind in ("samples", "raw", "shared"):
        path = "/predict/clicks" if kind == "samples" else "/predict/raw"
        if kind != "samples":
            columns = raw_columns(given)
            given = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        if kind == "shared":
            common = {name: given[0][name] for name in draw.sample(list(given[0]), 3)}
            own = [{name: row[name] for name in row if name not in common} for row in given]
            given = {"shared": common, "samples": own}
        if draw.random() < 0.5:
            return path, json.dumps(value_changed(draw, given)).encode(), {}
        return path, bytes_changed(draw, json.dumps(given).encode()), {}
    if kind == "raw tensors":
        body, tensors = raw_binary(raw_columns(given), shares=draw.random() < 0.3)
        tensors = bytes_changed(draw, tensors) if draw.random() < 0.7 else tensors
        body = value_changed(draw, body) if draw.random() < 0.5 else body
        head = json.dumps(body).encode()
        return "/v2/models/raw/infer", head + tensors, {LENGTH: str(len(head))}
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


def test_a_number_that_no_float_holds_is_named(served):
    client, sample = Client(served[0].url), {f"d{at}": 1e300 for at in range(NUM_DENSE)}
    status, _, said = client("POST", "/predict/raw", {**sample, "user": "u", "item": []})
    client.close()
    assert (status, "row 0 is too large for float32" in said["error"]) == (400, True)


@pytest.mark.parametrize("kind", ["samples", "json", "binary", "raw", "shared", "raw tensors"])
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
            status, _, said = client("POST", "/predict/clicks", sound)
            np.testing.assert_allclose(said["scores"], expected, rtol=1e-5)
    assert refused > NUM / (2 if kind in ("samples", "json", "binary") else 4)
    client.close()
