"""A program for `make clients`: it builds requests with MLServer's codecs or KServe's client.

    python real_clients.py ROWS URL OUT

It sends the rows of the JSON file ROWS to the model ``shop`` at URL in every form that the library knows,
reads the answers with the library, and writes requests and scores to OUT. Each library has an environment
without MeshRec, since it needs other versions of the server's dependencies.
"""

import asyncio
import importlib.util
import json
import sys
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path

import numpy as np

TEXTS = ("user", "city", "time")
HEADER = "Inference-Header-Content-Length"


def texts_of(rows, name):
    return [row[name] or "" for row in rows]


def prices_of(rows):
    return np.array([np.nan if row["price"] is None else row["price"] for row in rows])


def tags_of(rows):
    return [tag for row in rows for tag in row["tags"]], np.array(
        [len(row["tags"]) for row in rows], np.int32
    )


def mlservers(rows):
    """Yield name, body, header and the reader of an answer of each form that MLServer's codecs have."""
    import pandas as pd
    from mlserver.codecs import Base64Codec, DatetimeCodec, NumpyCodec, PandasCodec, StringCodec
    from mlserver.codecs.json import encode_to_json_bytes
    from mlserver.types import InferenceRequest, InferenceResponse, RequestOutput

    def read(body, _):
        return NumpyCodec.decode_output(InferenceResponse.model_validate_json(body).outputs[0]).reshape(-1)

    frame = pd.DataFrame(
        {
            f"raw.{name}": texts_of(rows, name) if name in TEXTS else [row[name] for row in rows]
            for name in rows[0]
        }
    ).astype({f"raw.{name}": object for name in (*TEXTS, "tags")})
    yield (
        "PandasCodec",
        PandasCodec.encode_request(frame, use_bytes=False).model_dump_json().encode(),
        None,
        read,
    )
    yield (
        "PandasCodec bytes",
        encode_to_json_bytes(PandasCodec.encode_request(frame).model_dump()),
        None,
        read,
    )

    values, lengths = tags_of(rows)
    numbers = [
        NumpyCodec.encode_input("raw.price", prices_of(rows)),
        NumpyCodec.encode_input("raw.tags.lengths", lengths),
    ]
    for name, encode in (
        ("StringCodec", StringCodec.encode_input),
        ("Base64Codec", Base64Codec.encode_input),
    ):
        given = (
            (lambda texts: texts) if name == "StringCodec" else (lambda texts: [t.encode() for t in texts])
        )
        inputs = [encode(f"raw.{text}", given(texts_of(rows, text)), use_bytes=False) for text in TEXTS]
        inputs.append(encode("raw.tags.values", given(values), use_bytes=False))
        request = InferenceRequest(inputs=[*inputs, *numbers], outputs=[RequestOutput(name="scores")])
        yield name, encode_to_json_bytes(request.model_dump()), None, read
        every = request.model_dump(exclude_unset=False, exclude_none=False)
        yield name + ", every field", encode_to_json_bytes(every), None, read
    inputs[2] = DatetimeCodec.encode_input("raw.time", texts_of(rows, "time"), use_bytes=False)
    request = InferenceRequest(inputs=[*inputs, *numbers], outputs=[])
    yield "DatetimeCodec", encode_to_json_bytes(request.model_dump()), None, read


def kserves(rows):
    """Yield name, body, header and the reader of an answer of each form that KServe's client has."""
    import orjson
    from kserve import InferInput, InferRequest, InferResponse
    from kserve.protocol.infer_type import RequestedOutput

    def read(body, length):
        if length is None:
            answer = InferResponse.from_rest(json.loads(body))
        else:
            answer = InferResponse.from_bytes(body, int(length))
        return answer.outputs[0].as_numpy()

    values, lengths = tags_of(rows)
    columns = {f"raw.{name}": (np.array(texts_of(rows, name), object), "BYTES") for name in TEXTS}
    columns["raw.price"] = prices_of(rows), "FP64"
    columns["raw.tags.values"] = np.array(values, object), "BYTES"
    columns["raw.tags.lengths"] = lengths, "INT32"
    for is_binary in (False, True):
        for width in ((), (1,)):
            inputs = []
            for name, (array, datatype) in columns.items():
                inputs.append(InferInput(name, [len(array), *width], datatype))
                inputs[-1].set_data_from_numpy(array.reshape(-1, *width), binary_data=is_binary)
            more = {}
            if is_binary:
                more["parameters"] = {"binary_data_output": True}
                if width:
                    more["request_outputs"] = [RequestedOutput("scores", {"binary_data": False})]
            body, length = InferRequest("shop", inputs, request_id="7", **more).to_rest()
            body = body if isinstance(body, bytes) else orjson.dumps(body)
            yield f"{'binary' if is_binary else 'JSON'} {list(width)}", body, length, read
    inputs = [InferInput(f"raw.{name}", [len(rows)], "BYTES", [row[name] for row in rows]) for name in TEXTS]
    inputs += [
        InferInput(name, list(a.shape), k, a.tolist()) for name, (a, k) in columns.items() if k != "BYTES"
    ]
    inputs.append(InferInput("raw.tags.values", [len(values)], "BYTES", values))
    yield "lists", orjson.dumps(InferRequest("shop", inputs, request_id="8").to_rest()[0]), None, read


async def ask_kserve(rows, url):
    """Ask by KServe's own client."""
    from kserve import InferenceRESTClient, InferRequest
    from kserve.inference_client import RESTConfig

    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, "shop")
    for _, body, length, _ in kserves(rows):
        request = InferRequest.from_bytes(body, length or len(body), "shop")
        answer = await client.infer(url, request, model_name="shop")
        assert answer.outputs[0].as_numpy().shape == (len(rows),)
    await client.close()


def main(path, url, out):
    rows = json.loads(Path(path).read_text())
    library = "mlserver" if importlib.util.find_spec("mlserver") else "kserve"
    recorded = []
    for name, body, length, read in (mlservers if library == "mlserver" else kserves)(rows):
        headers = {} if length is None else {HEADER: str(length)}
        request = urllib.request.Request(f"{url}/v2/models/shop/infer", body, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                scores = read(answer.read(), answer.headers[HEADER])
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{library}, {name}: {error.read().decode()}\n{body[:2000]!r}") from error
        recorded.append(
            {
                "client": f"{library} {version(library)}, {name}",
                "body": body.hex() if length else body.decode(),
                "header_length": length,
                "scores": np.asarray(scores, float).tolist(),
            }
        )
    if library == "kserve":
        asyncio.run(ask_kserve(rows, url))
    Path(out).write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
