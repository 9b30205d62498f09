"""Raw values, shared features and vectors, through a socket."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
import pytest
import tritonclient.http as triton

from meshrec.export import Predictor, check_package
from meshrec.runs.fitting import features_of
from meshrec.serve import Limits
from meshrec.train import RunFolder
from tests.export.conftest import torchs_own_warnings
from tests.runs.test_export import as_arrays, export_with, trained
from tests.serve.conftest import Client, running
from tests.serve.toys import open_with
from tests.train.shop import shop, source

USER = ["user", "price", "time"]


def make_shop(folder):
    """A run, and packages of its model and of a tower."""
    folder.mkdir()
    run = trained(folder, "two_towers")
    export_with(run, folder / "whole", shared=["user", "hour", "dense"])
    export_with(run, folder / "query", tower="query")
    pq.write_table(shop(40, seed=9), folder / "new.parquet")


@pytest.fixture(scope="module")
def served(made_once):
    """A server of a run's model and of its towers, the columns of some samples, and their scores."""
    folder = made_once("shop", make_shop)
    run, whole, query = RunFolder(folder / "r"), folder / "whole", folder / "query"
    (batch,) = (
        source()
        .dataset_for_scoring(features_of(run), folder / "new.parquet", labelled=False)
        .train.batches(40)
    )
    with torchs_own_warnings(), pytest.MonkeyPatch.context() as patch:
        predictor = Predictor(whole)
        open_with(patch, Predictor, check_package)
        with running({"shop": whole, "query": query}, limits=Limits(max_batch=64)) as server:
            yield server, predictor(*as_arrays(batch)).numpy()


@pytest.fixture
def client(served):
    client = Client(served[0].url)
    yield client
    client.close()


def rows():
    found = shop(40, seed=9).drop_columns(["clicked"]).to_pylist()
    return [{**row, "time": row["time"].isoformat()} for row in found]


def tensors(given, binary, once=()):
    """As tritonclient sends raw values; those of the columns in ``once`` one time."""
    named = {}
    for name, kind in (("price", "FP64"), ("user", "BYTES"), ("city", "BYTES"), ("time", "BYTES")):
        column = [row[name] for row in (given[:1] if name in once else given)]
        if kind == "FP64":
            named[f"raw.{name}"] = np.array([np.nan if v is None else v for v in column]), kind
        else:
            named[f"raw.{name}"] = np.array([(v or "").encode() for v in column], object), kind
    tags = [tag.encode() for row in given for tag in row["tags"]]
    named["raw.tags.values"] = np.array(tags, object), "BYTES"
    named["raw.tags.lengths"] = np.array([len(row["tags"]) for row in given], np.int32), "INT32"
    found = []
    for name, (array, kind) in named.items():
        found.append(triton.InferInput(name, list(array.shape), kind))
        found[-1].set_data_from_numpy(array, binary_data=binary or kind == "FP64")
    return found


def test_raw_samples_are_scored_as_in_prediction(served, client):
    status, _, said = client("POST", "/predict/shop", rows())
    assert status == 200, said
    np.testing.assert_allclose(said["scores"], served[1], rtol=1e-5)
    assert client("POST", "/predict/shop", [])[2]["scores"] == []
    further = [{"clicked": 1, **dict(reversed(row.items())), "more": [None]} for row in rows()]
    assert client("POST", "/predict/shop", further)[2]["scores"] == said["scores"]
    common = {
        "shared": {"user": "u", "more": 1},
        "samples": [{n: v for n, v in r.items() if n != "user"} for r in rows()],
    }
    assert client("POST", "/predict/shop", common)[0] == 200


@pytest.mark.parametrize("binary", [True, False])
def test_raw_tensors_are_scored_by_tritonclient(served, binary):
    client = triton.InferenceServerClient(served[0].url.removeprefix("http://"))
    scores = client.infer("shop", tensors(rows(), binary)).as_numpy("scores")
    np.testing.assert_allclose(scores, served[1], rtol=1e-5)
    metadata = client.get_model_metadata("shop")
    assert {each["name"]: each["datatype"] for each in metadata["inputs"]}["raw.tags.values"] == "BYTES"
    client.close()


def test_one_user_and_many_items(served, client):
    given = rows()
    user = {name: given[0][name] for name in USER}
    plain = client("POST", "/predict/shop", [{**row, **user} for row in given])[2]["scores"]
    items = [{name: value for name, value in row.items() if name not in USER} for row in given]
    status, _, said = client("POST", "/predict/shop", {"shared": user, "samples": items})
    assert status == 200, said
    np.testing.assert_allclose(said["scores"], plain, rtol=1e-6)
    # More shared than the package takes once, and less: repeated here.
    for more, names in ((["city"], [*USER, "city"]), ([], ["user"])):
        common = {name: given[0][name] for name in names}
        rest = [{n: v for n, v in {**row, **user}.items() if n not in names} for row in given]
        said = client("POST", "/predict/shop", {"shared": common, "samples": rest})[2]
        expected = client("POST", "/predict/shop", [{**row, **user, **common} for row in given])[2]
        np.testing.assert_allclose(said["scores"], expected["scores"], rtol=1e-6, err_msg=str(more))
    asked = triton.InferenceServerClient(served[0].url.removeprefix("http://"))
    found = asked.infer("shop", tensors(given, True, USER), parameters={"shared": True}).as_numpy("scores")
    np.testing.assert_allclose(found, plain, rtol=1e-6)
    asked.close()


def test_users_that_ask_at_once_keep_their_own_items(served):
    given = rows()

    def ask(number):
        client = Client(served[0].url)
        user = {name: given[number][name] for name in USER}
        items = [{n: v for n, v in row.items() if n not in USER} for row in given[: number + 1]]
        body = {"shared": user, "samples": items} if number % 3 else [{**item, **user} for item in items]
        scores = client("POST", "/predict/shop", body)[2]["scores"]
        client.close()
        return scores

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(20)))
    for number, scores in enumerate(together):
        np.testing.assert_allclose(scores, ask(number), rtol=1e-5)
        np.testing.assert_allclose(scores[number], served[1][number], rtol=1e-5)


def test_vectors_of_users(client):
    given = [{name: row[name] for name in USER} for row in rows()]
    status, _, said = client("POST", "/embed/query", given)
    assert status == 200, said
    vectors = np.array(said["vectors"])
    assert vectors.shape == (40, 4)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    assert (
        "returns vectors, not scores. Ask /embed/query" in client("POST", "/predict/query", given)[2]["error"]
    )
    assert "not vectors. Ask /predict/shop" in client("POST", "/embed/shop", rows())[2]["error"]
    metadata = client("GET", "/v2/models/query")[2]
    assert metadata["outputs"] == [{"name": "vectors", "datatype": "FP32", "shape": [-1, -1]}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: {k: v for k, v in r.items() if k != "city"}, r"sample 0 lacks \['city'\]. Give null"),
        (lambda r: {**r, "user": 3}, "column 'user' of sample 0 must be a text, got 3"),
        (lambda r: {**r, "price": "x"}, "column 'price' of sample 0 must be a number, got 'x'"),
        (lambda r: {**r, "price": 10**400}, "column 'price' must fit double"),
        (lambda r: {**r, "tags": "t1"}, "column 'tags' of sample 0 must be a list, got 't1'"),
        (lambda r: [r, {**r, "tags": ["a", 1]}], "column 'tags' of sample 1 must be a text, got 1"),
        (lambda r: {**r, "time": "soon"}, r"column 'time' must fit timestamp\[ms\]"),
        (lambda r: {**r, "user": "\ud800"}, "column 'user' must fit string"),
        (lambda r: {"samples": [r], "x": 1}, r"\['x'\] next to 'samples'"),
        (lambda r: {"samples": 3}, "'samples' a list"),
        (lambda r: {"shared": r, "samples": [{}]}, "'shared' has all names"),
        (lambda r: {"shared": {"city": 1}, "samples": [r]}, r"sample 0 has \['city'\], as 'shared' does"),
    ],
)
def test_bad_raw_samples_are_named(client, change, message):
    status, _, said = client("POST", "/predict/shop", change(rows()[0]))
    assert status == 400
    assert re.search(message, said["error"]), said


def test_null_and_json_in_tensors_of_raw_values_are_values_of_samples(client):
    """MLServer's PandasCodec writes columns that are not all texts as JSON in texts."""
    given = [{**rows()[row], "price": price} for row, price in ((0, None), (16, 2.0))]  # 16 has no city
    inputs = [
        {"name": f"raw.{name}", "datatype": "BYTES", "shape": [2, 1], "data": [row[name] for row in given]}
        for name in ("user", "city", "time", "tags")
    ]
    inputs[-1]["data"] = [json.dumps(row["tags"]) for row in given]
    inputs[-1]["parameters"] = {"content_type": "pd_json"}
    expected = client("POST", "/predict/shop", given)[2]["scores"]
    price = {"name": "raw.price", "shape": [2, 1], "datatype": "FP64", "data": [None, 2.0]}
    nested = {**price, "datatype": "FP32", "data": [[None], [2]]}
    as_json = {**price, "datatype": "BYTES", "data": ["null", "2"], "parameters": inputs[-1]["parameters"]}
    for one in (price, nested, as_json, {**as_json, "data": [None, "2.0"]}):
        status, _, said = client("POST", "/v2/models/shop/infer", {"inputs": [*inputs, one]})
        assert status == 200, said
        np.testing.assert_allclose(said["outputs"][0]["data"], expected, rtol=1e-6)
    for one, named in (
        ({**as_json, "data": ["{", "2"]}, "'{' is not pd_json"),
        ({**as_json, "data": ["1", "2"], "parameters": None}, "must be FP64, got 'BYTES'"),
        ({**inputs[0], "parameters": {"content_type": "base64"}}, "'user-16' is not base64"),
        ({**inputs[0], "name": "raw.tags.values"}, "column 'tags' is given twice"),
    ):
        others = [each for each in inputs if each["name"] != one["name"]]
        body = {"inputs": [*others, *([] if one["name"] == "raw.price" else [price]), one]}
        status, _, said = client("POST", "/v2/models/shop/infer", body)
        assert (status, named in said["error"]) == (400, True), said


def test_bad_raw_tensors_are_named(client):
    def infer(*inputs, **more):
        return client("POST", "/v2/models/shop/infer", {"inputs": list(inputs), **more})[2]["error"]

    user = {"name": "raw.user", "datatype": "BYTES", "shape": [1], "data": ["u"]}
    ids = {"name": "user.values", "datatype": "INT64", "shape": [1], "data": [1]}
    assert "lacks ['raw.city', " in infer(user)
    assert "has both ids and raw values" in infer(user, ids)
    assert "must be strings, got 1" in infer({**user, "data": [1]})
    flat = ["user", "city", "time"]
    rest = [{**user, "name": f"raw.{name}", "shape": []} for name in flat]
    rest.append({"name": "raw.price", "datatype": "FP64", "shape": [1], "data": [1.0]})
    rest.append({"name": "raw.tags.values", "datatype": "BYTES", "shape": [0], "data": []})
    rest.append({"name": "raw.tags.lengths", "datatype": "INT32", "shape": [1], "data": [0]})
    assert "'raw.user' must be of shape [n] or [n, 1], got []" in infer(*rest)
    rest[-1] = {**rest[-1], "data": [2]}
    assert "lengths of 0 or more must sum to" in infer(
        *[{**each, "shape": [len(each["data"])]} for each in rest]
    )
    head = json.dumps({"inputs": [{k: v for k, v in user.items() if k != "data"}]}).replace(
        '"shape"', '"parameters": {"binary_data_size": 6}, "shape"'
    )
    for tail, message in (
        (b"\x09\0\0\0ab", "string 0"),
        (b"\x02\0\0\0\xff\xff", "is not UTF-8"),
    ):
        body = head.encode() + tail
        said = client(
            "POST",
            "/v2/models/shop/infer",
            body,
            {"Inference-Header-Content-Length": str(len(head))},
        )
        assert message in said[2]["error"]


def test_ids_are_taken_as_well(served, client):
    """Through the protocol: the features that the package has."""
    signature = served[0].repository.get("shop").signature
    inputs = [{"name": "dense", "datatype": "FP32", "shape": [2, 1], "data": [0.0, 1.0]}]
    for feature in signature.features:
        inputs += [
            {"name": f"{feature}.values", "datatype": "INT64", "shape": [2], "data": [1, 2]},
            {"name": f"{feature}.lengths", "datatype": "INT32", "shape": [2], "data": [1, 1]},
        ]
    both = client("POST", "/v2/models/shop/infer", {"inputs": inputs})[2]["outputs"][0]["data"]
    for each in inputs:
        name = each["name"].split(".")[0]
        if name in ("user", "hour", "dense"):
            each["data"], each["shape"] = each["data"][:1], [1, *each["shape"][1:]]
    said = client("POST", "/v2/models/shop/infer", {"inputs": inputs, "parameters": {"shared": True}})[2]
    assert said["outputs"][0]["data"][0] == pytest.approx(both[0], rel=1e-6)
    assert len(said["outputs"][0]["data"]) == 2
