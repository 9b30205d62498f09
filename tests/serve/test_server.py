"""Everything through a socket."""

import asyncio
import json
import re
import socket
import ssl
import subprocess
import threading
import time

import numpy as np
import pytest
import tritonclient.http as triton

from meshrec.serve import Limits, ServerOptions
from meshrec.serve.options import listen
from tests.serve.conftest import (
    Client,
    link,
    request_of,
    running,
    samples,
    scores_of,
)
from tests.serve.toys import FEATURES, NUM_DENSE


def infer_body(given, **more):
    request = request_of(given)
    inputs = [
        {
            "name": "dense",
            "datatype": "FP32",
            "shape": [len(given), NUM_DENSE],
            "data": request.dense.tolist(),
        }
    ]
    for feature, values, lengths in zip(FEATURES, request.values, request.lengths, strict=True):
        for name, kind, array in (("values", "INT64", values), ("lengths", "INT32", lengths)):
            inputs.append(
                {"name": f"{feature}.{name}", "datatype": kind, "shape": [len(array)], "data": array.tolist()}
            )
    return {"inputs": inputs, **more}


def tensors(given, binary):
    request = request_of(given)
    named = {"dense": (request.dense, "FP32")}
    for feature, values, lengths in zip(FEATURES, request.values, request.lengths, strict=True):
        named[f"{feature}.values"] = values, "INT64"
        named[f"{feature}.lengths"] = lengths.astype(np.int32), "INT32"
    found = []
    for name, (array, kind) in named.items():
        found.append(triton.InferInput(name, list(array.shape), kind))
        found[-1].set_data_from_numpy(array, binary_data=binary)
    return found


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("num", [0, 1, 7, 200])
def test_tritonclient_works_unchanged(server, predictors, binary, num):
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    given = samples(num, num)
    outputs = None if binary else [triton.InferRequestedOutput("scores", binary_data=False)]
    result = client.infer(
        "clicks", tensors(given, binary), outputs=outputs, request_id="7", timeout=60_000_000
    )
    assert result.get_response()["id"] == "7"
    assert result.get_response()["model_version"] == predictors[0].version
    np.testing.assert_allclose(result.as_numpy("scores"), scores_of(predictors[0], given), rtol=1e-5)
    client.close()


def test_tritonclient_asks_for_health_metadata_and_the_repository(server):
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("clicks")
    assert not client.is_model_ready("clicks", "other")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "meshrec"
    metadata = client.get_model_metadata("clicks")
    assert metadata["inputs"][1] == {"name": "user.values", "datatype": "INT64", "shape": [-1]}
    assert [each["name"] for each in metadata["outputs"]] == ["scores"]
    assert client.get_model_repository_index()[0]["state"] == "READY"
    client.load_model("clicks")
    for changes in ({"config": '{"max_batch_size": 8}'}, {"config": "{}", "files": {"file:1/model": b"x"}}):
        with pytest.raises(triton.InferenceServerException, match="'config'"):
            client.load_model("clicks", **changes)
    with pytest.raises(triton.InferenceServerException, match="'other'"):
        client.load_model("other")
    client.close()


def test_samples_as_json(client, predictors):
    given = samples(5, 3)
    status, _, said = client("POST", "/predict", given)
    assert status == 200
    assert said["model"] == "clicks"
    np.testing.assert_allclose(said["scores"], scores_of(predictors[0], given), rtol=1e-5)
    one = {**given[0], "user": 7}
    assert (
        client("POST", "/predict/clicks", one)[2]["scores"]
        == client("POST", "/predict", [{**one, "user": [7], "further": "x"}])[2]["scores"]
        == client("POST", "/predict", {**one, "user": 7.0})[2]["scores"]
    )
    assert client("POST", "/predict", [])[2]["scores"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: "text", "sample 0 must be a JSON object, got str"),
        (lambda s: {k: v for k, v in s.items() if k != "item"}, r"sample 0 lacks \['item'\]"),
        (lambda s: {**s, "dense": [1.0]}, "sample 0 has 1 dense values; give 3"),
        (lambda s: {**s, "dense": [1, "a", 3]}, "dense of sample 0 must be numbers"),
        (lambda s: {**s, "item": None}, "feature 'item' of sample 0 must be whole numbers"),
        (lambda s: {**s, "item": [[1]]}, "feature 'item' of sample 0 must be a flat list"),
        (lambda s: [s, {**s, "item": [3, 50]}], r"feature 'item': id 50 of sample 1 is outside \[0, 50\)"),
    ],
)
def test_bad_samples_are_named(client, change, message):
    status, _, said = client("POST", "/predict", change(samples(1)[0]))
    assert status == 400
    assert re.search(message, said["error"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: [], "must be a JSON object"),
        (lambda b: {}, "no list of inputs"),
        (lambda b: {**b, "id": 3}, "id must be a string, got int"),
        (lambda b: {**b, "parameters": []}, "must be an object, got list"),
        (lambda b: {**b, "parameters": {"timeout": -1}}, "timeout must be microseconds"),
        (lambda b: {**b, "parameters": {"binary_data_output": 1}}, "must be true or false"),
        (lambda b: {**b, "outputs": [{"name": "x"}]}, "unknown output 'x'"),
        (lambda b: {**b, "outputs": 3}, "outputs must be a list"),
        (lambda b: {"inputs": b["inputs"][1:]}, "dense values are missing"),
        (lambda b: {"inputs": b["inputs"][:-1]}, "feature 'item' has no lengths"),
        (lambda b: {"inputs": [*b["inputs"], b["inputs"][0]]}, "input 'dense' is given twice"),
        (lambda b: {"inputs": [{**b["inputs"][0], "name": "x"}]}, "unknown input 'x'"),
        (lambda b: {"inputs": [{**b["inputs"][0], "datatype": "BYTES"}]}, "must be FP32, got 'BYTES'"),
        (lambda b: {"inputs": [{**b["inputs"][0], "datatype": ["FP32"]}]}, r"must be FP32, got \['FP32'\]"),
        (lambda b: {"inputs": [{**b["inputs"][1], "datatype": "FP64"}]}, "must be INT64, got 'FP64'"),
        (
            lambda b: {"inputs": [{**b["inputs"][1], "shape": [2], "data": [None, 1]}]},
            "'user.values' has null",
        ),
        (lambda b: {"inputs": [{**b["inputs"][0], "datatype": "BF16"}]}, "BF16"),
        (lambda b: {"inputs": [{**b["inputs"][1], "datatype": "INT8", "data": [300]}]}, "INT8, got 300"),
        (
            lambda b: {"inputs": [{**b["inputs"][0], "datatype": "FP16", "data": 6 * [1e5]}]},
            "FP16, got 100000",
        ),
        (
            lambda b: {"inputs": [{**b["inputs"][0], "data": 3 * [[1, 2]]}]},
            r"\[3, 2\] for the shape \[2, 3\]",
        ),
        (lambda b: {"inputs": [{**b["inputs"][0], "data": 1}]}, "'dense' must be a list, got 1"),
        (lambda b: {"inputs": [{**b["inputs"][0], "parameter": {}}]}, "'parameter' of input 'dense'"),
        (lambda b: {"inputs": [{**b["inputs"][0], "parameters": {"shared_memory_region": "r"}}]}, "_region'"),
        (lambda b: {"inputs": [{**b["inputs"][0], "parameters": {"content_type": "str"}}]}, "'str'"),
        (lambda b: {**b, "output": []}, "'output' of the request"),
        (lambda b: {**b, "parameters": {"sequence_id": 3}}, "'sequence_id' of the request"),
        (lambda b: {**b, "parameters": {"content_type": "pickle"}}, "'pickle'"),
        (
            lambda b: {**b, "outputs": [{"name": "scores", "parameters": {"classification": 2}}]},
            "'classification'",
        ),
        (lambda b: {**b, "outputs": [{"name": "scores", "parameters": {"content_type": "str"}}]}, "'str'"),
        (lambda b: {**b, "outputs": 2 * [{"name": "scores"}]}, "2 outputs"),
        (lambda b: {"inputs": [{**b["inputs"][0], "shape": [-1]}]}, "shape must be a list of sizes"),
        (lambda b: {"inputs": [{**b["inputs"][0], "shape": [2, 2]}]}, r"\[2, 3\] for the shape \[2, 2\]"),
        (lambda b: {"inputs": [{"name": "dense", "datatype": "FP32", "shape": [0, 3]}]}, "neither data nor"),
        (
            lambda b: {"inputs": [{**b["inputs"][0], "parameters": {"binary_data_size": 4}}]},
            "needs the header Inference-Header-Content-Length",
        ),
    ],
)
def test_bad_inference_requests_are_named(client, change, message):
    status, _, said = client("POST", "/v2/models/clicks/infer", change(infer_body(samples(2))))
    assert status == 400
    assert re.search(message, said["error"])


@pytest.mark.parametrize(
    "change",
    [
        lambda b: {**b, "id": None, "parameters": None, "outputs": None},
        lambda b: {**b, "parameters": {}, "outputs": [], "model_name": "clicks"},
        lambda b: {**b, "outputs": [{"name": "scores", "parameters": None}]},
        lambda b: {**b, "parameters": {"content_type": "np", "headers": None, "timeout": None}},
        lambda b: {"inputs": [{**i, "parameters": {"content_type": "np", "x": None}} for i in b["inputs"]]},
        lambda b: {"inputs": [{**i, "parameters": None} for i in b["inputs"]]},
        lambda b: {"inputs": [b["inputs"][0], *({**i, "shape": [*i["shape"], 1]} for i in b["inputs"][1:])]},
        lambda b: {
            "inputs": [
                b["inputs"][0],
                *(
                    {**i, "datatype": "UINT16", "shape": [*i["shape"], 1], "data": [[v] for v in i["data"]]}
                    for i in b["inputs"][1:]
                    if i["data"]
                ),
            ]
        },
        lambda b: {"inputs": [{**b["inputs"][0], "datatype": "FP64"}, *b["inputs"][1:]]},
    ],
)
def test_optional_fields_may_be_null_and_numbers_of_every_fitting_datatype(client, predictors, change):
    given = [{"dense": [0.5, n, -2.0], "user": [n, 7], "item": [3]} for n in range(2)]
    status, _, said = client("POST", "/v2/models/clicks/infer", change(infer_body(given)))
    assert status == 200, said
    np.testing.assert_allclose(said["outputs"][0]["data"], scores_of(predictors[0], given), rtol=1e-5)


@pytest.mark.parametrize("name", ["FP16", "BF16", "FP64", "INT8", "UINT64"])
def test_binary_tensors_of_other_datatypes_are_converted(client, predictors, name):
    """The values of the test are exact in each of them."""
    given = [{"dense": [2.0, n, 3.0], "user": [n, 7], "item": []} for n in range(3)]
    kinds = {"FP16": "<f2", "FP64": "<f8", "INT8": "i1", "UINT64": "<u8"}
    parts, inputs = [], []
    for one in infer_body(given)["inputs"]:
        is_float, values = one["name"] == "dense", np.array(one.pop("data"), np.float32)
        if is_float and name == "BF16":
            parts.append((values.view(np.uint32) >> 16).astype("<u2").tobytes())
        else:
            one["datatype"] = name if is_float or "INT" in name else one["datatype"]
            sent = kinds.get(one["datatype"], {"INT64": "<i8", "INT32": "<i4"}.get(one["datatype"]))
            parts.append(values.astype(sent).tobytes())
        if is_float:
            one["datatype"] = name
        inputs.append({**one, "data": None, "parameters": {"binary_data_size": len(parts[-1])}})
    head = json.dumps({"inputs": inputs}).encode()
    name = "Inference-Header-Content-Length"
    said = client("POST", "/v2/models/clicks/infer", head + b"".join(parts), {name: str(len(head))})[2]
    np.testing.assert_allclose(said["outputs"][0]["data"], scores_of(predictors[0], given), rtol=1e-5)


def test_an_id_beyond_64_bits_with_a_sign_is_named(client):
    one = {"name": "user.values", "datatype": "UINT64", "shape": [1], "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [one]}).encode()
    body = head + (2**63).to_bytes(8, "little")
    name = "Inference-Header-Content-Length"
    status, _, said = client("POST", "/v2/models/clicks/infer", body, {name: str(len(head))})
    assert (status, str(2**63) in said["error"]) == (400, True)


def test_binary_tensors_are_counted(client):
    head = json.dumps(
        {
            "inputs": [
                {"name": "dense", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}}
            ]
        }
    ).encode()
    name = "Inference-Header-Content-Length"
    for length, tail, message in (
        (len(head), b"\0" * 8, "binary_data_size is 12, but 8 bytes are left"),
        (len(head), b"\0" * 16, "4 bytes after the last tensor"),
        (10**9, b"", "must be a number of bytes up to"),
        ("-1", b"", "must be a number of bytes up to"),
        (5, b"", "the body is not JSON"),
    ):
        status, _, said = client("POST", "/v2/models/clicks/infer", head + tail, {name: str(length)})
        assert status == 400
        assert message in said["error"]


def test_what_is_not_there_is_404(client):
    for method, path in (("GET", "/nowhere"), ("POST", "/predict/x"), ("GET", "/v2/models/x")):
        status, _, said = client(method, path, b"" if method == "POST" else None)
        assert status == 404
        assert said["error"]
    for path in ("/predict", "/v2/models/clicks/infer", "/v2/models/clicks/versions/1/infer"):
        status, headers, said = client("GET", path)
        assert (status, headers["allow"]) == (405, "POST")
        assert "POST" in said["error"]
    assert "has no version '9'" in client("GET", "/v2/models/clicks/versions/9")[2]["error"]


def test_the_repository_takes_its_options_and_no_others(packages):
    with running({"a": packages[0], "b": packages[1]}) as server:
        client = Client(server.url)
        unload = {"parameters": {"unload_dependents": False, "more": None}}
        assert client("POST", "/v2/repository/models/b/unload", unload)[0] == 200
        index = "/v2/repository/index"
        for body, names in ((None, "ab"), ({}, "ab"), ({"ready": False}, "ab"), ({"ready": True}, "a")):
            assert [each["name"] for each in client("POST", index, body)[2]] == list(names)
        load = "/v2/repository/models/b/load"
        for path, body, name in (
            (index, {"ready": 1}, "got 1"),
            (index, {"redy": True}, "'redy'"),
            (index, [], "[]"),
            (index, b"[" * 100_000, "nested"),
            (load, {"parameters": {"file:1/model": "eA=="}}, "'file:1/model'"),
            (load, {"parameters": "x"}, "'x'"),
            (load, {"delta": 3}, "'delta'"),
            (load.replace("load", "rollback/1"), {"parameters": {"config": "{}"}}, "'config'"),
        ):
            status, _, said = client("POST", path, body)
            assert (status, name in said["error"]) == (400, True), said
        assert [each["name"] for each in client("POST", index, {"ready": True})[2]] == ["a"]
        client.close()


@pytest.mark.parametrize(
    ("path", "option"),
    [
        ("/predict?timeout=1", "timeout"),
        ("/predict/clicks?k=5", "k"),
        ("/embed?", None),
        ("/embed?x", "x"),
        ("/v2/models/clicks/infer?shared=true", "shared"),
        ("/recommend?K=1", "K"),
        ("/recommend?k=1&keep_seen=1&k=2", "k"),
    ],
)
def test_options_in_an_address_are_known_and_there_once(client, path, option):
    status, _, said = client("POST", path, samples(1))
    assert status == 400
    assert (f"{option!r}" in said["error"]) == (option is not None)


def test_pages(client):
    document = client("GET", "/openapi.json")[2]
    sample = document["paths"]["/predict/clicks"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert sample["oneOf"][0]["required"] == ["dense", *FEATURES]
    assert b"/v2/models/clicks/infer" in client("GET", "/")[2]


def test_figures_count_outcomes(server, client):
    def count(outcome):
        text = client("GET", "/metrics")[2].decode()
        found = re.search(rf'meshrec_requests_total{{model="clicks",outcome="{outcome}"}} (\S+)', text)
        return float(found[1]) if found else 0.0

    before = count("ok"), count("bad_request"), count("expired")
    client("POST", "/predict", samples(2))
    client("POST", "/predict", b"{")
    client("POST", "/predict", samples(1), {"X-Timeout-Ms": "1e-6"})
    assert (count("ok"), count("bad_request"), count("expired")) == tuple(n + 1 for n in before)
    text = client("GET", "/metrics")[2].decode()
    assert 'meshrec_batch_samples_bucket{le="64.0",model="clicks"}' in text
    assert 'meshrec_request_seconds_count{model="clicks"}' in text


def test_deadlines_of_the_header(client):
    status, _, said = client("POST", "/predict", samples(1), {"X-Timeout-Ms": "0.000001"})
    assert status == 504
    assert "deadline" in said["error"]
    for wrong in ("0", "-1", "soon", "nan"):
        status, _, said = client("POST", "/predict", samples(1), {"X-Timeout-Ms": wrong})
        assert status == 400
        assert "must be milliseconds above 0" in said["error"]
    assert client("POST", "/predict", samples(1), {"X-Timeout-Ms": "60000"})[0] == 200


def raw(server, text):
    """What the server says to bytes, until it closes or has answered."""
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(text)
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
        return b"".join(parts)


def test_bodies_that_are_too_large_are_refused_before_they_are_read(server):
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
    said = raw(server, head)  # the body is never sent
    assert said.startswith(b"HTTP/1.1 413")
    assert b"larger than 1048576 bytes" in said
    chunk = b"%x\r\n" % (1 << 20) + b"1" * (1 << 20) + b"\r\n"
    head = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw(server, head + chunk + b"1\r\n1\r\n").startswith(b"HTTP/1.1 413")


def test_compressed_bodies_are_refused(client):
    status, _, said = client("POST", "/predict", b"x", {"Content-Encoding": "gzip"})
    assert status == 415
    assert "'gzip'" in said["error"]


def test_the_token_is_asked_for(packages):
    with running({"clicks": packages[0]}, token="secret") as server:
        client = Client(server.url)
        assert client("GET", "/v2/health/ready")[0] == 200
        status, headers, said = client("GET", "/v2/models/clicks")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "bearer token" in said["error"]
        assert client("GET", "/v2/models/clicks", None, {"Authorization": "Bearer wrong"})[0] == 401
        for shown in ("Bearer secret", "bearer secret", "BEARER   secret \t"):
            assert client("GET", "/v2/models/clicks", None, {"Authorization": shown})[0] == 200
        for shown in ("Basic secret", "secret", "Bearersecret", "Bearer secret x", "Bearer SECRET", "Bearer"):
            assert client("GET", "/v2/models/clicks", None, {"Authorization": shown})[0] == 401
        client.close()


def test_https(packages, tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with running({"clicks": packages[0]}, tls_cert=cert, tls_key=key) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=cert)
        context.check_hostname = False
        client = Client(server.url, context)
        assert client("POST", "/predict", samples(1))[0] == 200
        client.close()


def test_several_models(packages, predictors):
    with running({"old": packages[0], "new": packages[1]}) as server:
        client = Client(server.url)
        given = samples(3)
        for name, predictor in zip(("old", "new"), predictors, strict=True):
            np.testing.assert_allclose(
                client("POST", f"/predict/{name}", given)[2]["scores"], scores_of(predictor, given), rtol=1e-5
            )
        assert "there are several models" in client("POST", "/predict", given)[2]["error"]
        assert client("POST", "/v2/repository/models/old/unload")[0] == 200
        assert "was unloaded" in client("POST", "/predict/old", given)[2]["error"]
        assert client("GET", "/v2/health/ready")[0] == 200
        assert client("POST", "/v2/repository/models/old/load")[0] == 200
        assert client("POST", "/predict/old", given)[0] == 200
        client.close()


def test_a_model_that_cannot_be_loaded_is_named_and_the_old_one_stays(packages, tmp_path, caplog):
    place = tmp_path / "clicks"
    link(packages[0], place)
    with running({"clicks": place}) as server:
        client = Client(server.url)
        version = client("POST", "/predict", samples(1))[2]["version"]
        (tmp_path / "broken").mkdir()
        link(tmp_path / "broken", place)
        status, _, said = client("POST", "/v2/repository/models/clicks/load")
        assert status == 400
        assert "is no package" in said["error"]
        assert "is no package" in caplog.text
        assert client("POST", "/predict", samples(1))[2]["version"] == version
        link(packages[1], place)
        assert client("POST", "/v2/repository/models/clicks/load")[0] == 200
        assert client("POST", "/predict", samples(1))[2]["version"] != version
        client.close()


def test_recorded_requests_warm_up(packages, tmp_path):
    (tmp_path / "warm").write_text(json.dumps(samples(2)) + "\n\n" + json.dumps(samples(1)[0]) + "\n")
    with running({"clicks": packages[0]}, warm_up=tmp_path / "warm") as server:
        assert server.repository.is_ready
    (tmp_path / "warm").write_text('{"x": 1}\n')
    with running({"clicks": packages[0]}, wait=False, warm_up=tmp_path / "warm") as server:
        client = Client(server.url)
        while "being loaded" in (reason := client("POST", "/v2/repository/index")[2][0]["reason"]):
            pass
        assert "sample 0 lacks ['dense', 'item', " in reason
        assert client("GET", "/v2/health/ready")[0] == 503
        assert client("GET", "/v2/health/live")[0] == 200
        status, headers, said = client("POST", "/predict", samples(1))
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "is not ready: sample 0" in said["error"]
        client.close()


def test_a_full_server_refuses_by_the_headers_and_keeps_the_connection(packages, predictors):
    given = samples(2)
    with running({"clicks": packages[0]}, limits=Limits(max_queue=1)) as server:
        client, batcher = Client(server.url), server.repository.get_only().batcher
        with batcher:
            status, _, said = client("GET", "/v2/health/ready")
            assert (status, said["reason"]) == (503, "the queue of model 'clicks' is full")
            for path in ("/predict/clicks", "/v2/models/clicks/infer"):
                for large in (b"", b"?" * (1 << 20)):
                    status, headers, said = client("POST", path, large)
                    assert (status, headers["Retry-After"]) == (503, "1")
                    assert "1 requests are already waiting" in said["error"]
                    assert "connection" not in headers
        said = client("POST", "/predict", given)[2]  # over the connection that was refused
        np.testing.assert_allclose(said["scores"], scores_of(predictors[0], given), rtol=1e-5)
        figures = client("GET", "/metrics")[2].decode()
        assert re.search(r'meshrec_requests_total{model="clicks",outcome="overloaded"} 4\.0', figures)
        assert client("GET", "/v2/health/ready")[0] == 200
        client.close()


def test_reloads_and_the_end_lose_no_request(packages, predictors, tmp_path):
    place = tmp_path / "clicks"
    link(packages[0], place)
    given = samples(4)
    expected = {p.version: scores_of(p, given) for p in predictors}
    seen, wrong, ended = set(), [], threading.Event()

    def ask():
        client = Client(server.url)
        while not ended.is_set():
            try:
                status, headers, said = client("POST", "/predict", given)
            except ConnectionRefusedError:
                break  # never sent
            if status != 200 or not np.allclose(said["scores"], expected[said["version"]], rtol=1e-5):
                wrong.append((status, said))
            seen.add(said["version"])
            if headers.get("connection") == "close":
                client.close()
        client.close()

    with running({"clicks": place}, limits=Limits(max_batch=16)) as server:
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        client = Client(server.url)
        for turn in range(1, 5):
            link(packages[turn % 2], place)
            assert client("POST", "/v2/repository/models/clicks/load")[0] == 200
            assert client("POST", "/predict", given)[2]["version"] == predictors[turn % 2].version
        client.close()
        server.stop()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert wrong == []
    assert seen == expected.keys()


def test_models_that_were_not_loaded_at_the_start_are_tried_again(packages, tmp_path):
    places = {name: tmp_path / name for name in ("clicks", "views")}
    with running(places, wait=False) as server:
        client = Client(server.url)
        while "is no package" not in server.repository.problems.get("views", ""):
            time.sleep(0.01)
        assert client("POST", "/v2/repository/models/views/unload")[0] == 200
        for place in places.values():
            link(packages[0], place)
        while not server.repository.is_ready:
            time.sleep(0.01)
        assert client("POST", "/predict/clicks", samples(3))[0] == 200
        assert client("POST", "/predict/views", samples(3))[0] == 404
        client.close()


def test_reloads_that_wait_are_one(packages, monkeypatch):
    """Otherwise a hundred signals would have the server load for minutes."""
    begun, goes_on = [], threading.Event()

    async def load_all():
        begun.append(1)
        await asyncio.to_thread(goes_on.wait, 60)

    async def reload_often(server):
        for _ in range(10):
            server.reload()
            await asyncio.sleep(0)
        goes_on.set()
        while server._tasks:
            await asyncio.sleep(0.01)

    with running({"clicks": packages[0]}) as server:
        monkeypatch.setattr(server.repository, "load_all", load_all)
        loop = server._uvicorn.servers[0].get_loop()
        asyncio.run_coroutine_threadsafe(reload_often(server), loop).result(60)
    assert len(begun) == 2  # the one that ran, and one for all that came meanwhile


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 70000}, "port"),
        ({"max_body": 0}, "max_body"),
        ({"tls_cert": "a"}, "tls_cert.*tls_key"),
        ({"token": " "}, "ASCII"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        ServerOptions(**options)


def test_connections_send_without_delay():
    with listen(ServerOptions(port=0)) as bound:
        with socket.create_connection(bound.getsockname()):
            while True:
                try:
                    accepted = bound.accept()[0]
                except BlockingIOError:
                    continue
                break
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_an_address_that_cannot_be_had_is_named():
    with (
        listen(ServerOptions(port=0)) as bound,
        pytest.raises(ValueError, match=r"cannot listen at 127.0.0.1:\d+: Address"),
    ):
        listen(ServerOptions(port=bound.getsockname()[1]))


def test_a_bad_package_does_not_block_others(packages, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "manifest.json").write_text("{}")  # the toy raises KeyError
    with running({"a": bad, "clicks": packages[0]}, wait=False) as server:
        client = Client(server.url)
        while "being loaded" in str(said := client("POST", "/v2/repository/index")[2]):
            pass
        assert [each["state"] for each in said] == ["UNAVAILABLE", "READY"]
        assert "KeyError" in said[0]["reason"]
        status, _, said = client("GET", "/v2/health/ready")
        assert (status, "model 'a' is not ready" in said["reason"]) == (503, True)
        client.close()
