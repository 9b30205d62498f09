"""Requests and answers of the Open Inference Protocol v2, as JSON or with binary tensors behind it.

https://github.com/kserve/open-inference-protocol; binary tensors and the parameter ``timeout`` (microseconds)
as NVIDIA's Triton server extends it.
"""

import functools
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrec.export.program import DENSE
from meshrec.serve.columns import encoded_request, table_of
from meshrec.serve.requests import Floats, Request, RequestError, Signature, as_array, checked, shown
from meshrec.serve.samples import read_json
from meshrec.serve.writing import JSON_ANSWER, with_numbers

SCORES = "scores"
VALUES, LENGTHS = ".values", ".lengths"
RAW = "raw."
"""The prefix of the names of raw inputs."""
TEXTS = "BYTES"
_MOST_DIMS = 8
HEADER_LENGTH = "Inference-Header-Content-Length"
_DTYPES: dict[str, np.dtype[Any]] = {
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "INT64": np.dtype("<i8"),
    "INT32": np.dtype("<i4"),
}


class InferRequest(NamedTuple):
    """A request, its id, the seconds that it may take, and how the scores are wanted."""

    request: Request
    id: str | None
    timeout: float
    wants_scores: bool
    wants_binary: bool


def inputs_of(signature: Signature) -> dict[str, tuple[str, list[int]]]:
    """Return datatype and shape of each input of ids and dense values; -1 is any size."""
    inputs: dict[str, tuple[str, list[int]]] = {}
    if signature.num_dense:
        inputs[DENSE] = "FP32", [-1, signature.num_dense]
    for feature in signature.features:
        inputs[feature + VALUES] = "INT64", [-1]
        inputs[feature + LENGTHS] = "INT32", [-1]
    return inputs


def raw_inputs_of(signature: Signature) -> dict[str, tuple[str, list[int]]]:
    """Return datatype and shape of each input of raw values, which a request may have instead of ids."""
    inputs: dict[str, tuple[str, list[int]]] = {}
    for name, kind in (signature.raw.kinds if signature.raw is not None else {}).items():
        if kind.startswith("list"):
            inputs[RAW + name + VALUES] = _datatype(kind), [-1]
            inputs[RAW + name + LENGTHS] = "INT32", [-1]
        else:
            inputs[RAW + name] = _datatype(kind), [-1]
    return inputs


def _datatype(kind: str) -> str:
    """Return the datatype of a column's values; times are texts."""
    return {"integer": "INT64", "number": "FP64"}.get(kind.removeprefix("list of "), TEXTS)


def metadata(name: str, version: str, signature: Signature) -> dict[str, Any]:
    """Return the answer to ``GET /v2/models/NAME``. Its inputs are raw values if the model takes them."""
    inputs = (raw_inputs_of(signature) or inputs_of(signature)).items()
    shape = [-1] if signature.outputs == SCORES else [-1, -1]
    return {
        "name": name,
        "versions": [version],
        "platform": "meshrec",
        "inputs": [{"name": n, "datatype": dtype, "shape": shape} for n, (dtype, shape) in inputs],
        "outputs": [{"name": signature.outputs, "datatype": "FP32", "shape": shape}],
    }


def read_infer(body: bytes, header_length: str | None, signature: Signature) -> InferRequest:
    """Parse the body of ``POST .../infer``.

    Args:
        body: JSON, which binary tensors may follow.
        header_length: how many bytes are JSON (from the header of that name); None if all are.
        signature: the model's signature.

    Raises:
        RequestError: the protocol or the model does not allow the body.
    """
    end = len(body)
    if header_length is not None:
        # A number of many digits is too large, and Python refuses to read one of more than 4,300.
        is_number = header_length.isascii() and header_length.isdecimal() and len(header_length) < 20
        if not is_number or int(header_length) > len(body):
            raise RequestError(
                f"{HEADER_LENGTH} must be a number of bytes up to {len(body)}, got {header_length[:40]!r}."
            )
        end = int(header_length)
    given = read_json(body[:end])
    if not isinstance(given, dict):
        raise RequestError("the request must be a JSON object with inputs.")
    if header_length is None:
        binary: memoryview | None = None
    else:
        binary = memoryview(body)[end:]
    arrays = _read_inputs(given.get("inputs"), binary, signature)
    is_raw = next(iter(arrays), "").startswith(RAW)  # they are all of one kind
    request_id = given.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise RequestError(f"id must be a string, got {type(request_id).__name__}.")
    parameters = _parameters(given, "the request")
    wants_scores, wants_binary = _read_outputs(
        given, signature.outputs, _flag(parameters, "binary_data_output")
    )
    shares = _flag(parameters, "shared")
    request = _raw_request(arrays, shares, signature) if is_raw else _request(arrays, shares, signature)
    return InferRequest(request, request_id, _timeout(parameters), wants_scores, wants_binary)


def _request(arrays: Mapping[str, NDArray[Any]], shares: bool, signature: Signature) -> Request:
    values = {f: arrays[f + VALUES] for f in signature.features if f + VALUES in arrays}
    lengths = {f: arrays[f + LENGTHS] for f in signature.features if f + LENGTHS in arrays}
    sizes = {name: each.size for name, each in lengths.items()}
    if DENSE in arrays:
        sizes[DENSE] = len(arrays[DENSE]) if arrays[DENSE].ndim else 0
    shared, num_samples = _common(sizes) if shares else (frozenset[str](), None)
    return checked(signature, arrays.get(DENSE), values, lengths, shared=shared, num_samples=num_samples)


def _common(sizes: Mapping[str, int]) -> tuple[frozenset[str], int | None]:
    """Return the inputs that have one row for all samples, and the number of samples of the others."""
    several = [size for size in sizes.values() if size != 1]
    if not several:
        return frozenset(), None
    return frozenset(name for name, size in sizes.items() if size == 1), several[0]


def _raw_request(arrays: Mapping[str, NDArray[Any]], shares: bool, signature: Signature) -> Request:
    assert signature.raw is not None
    if missing := sorted(raw_inputs_of(signature).keys() - arrays.keys()):
        raise RequestError(f"the request has raw values, and lacks {missing}. Give all columns.")
    columns = {}
    for name, kind in signature.raw.kinds.items():
        if kind.startswith("list"):
            columns[name] = _lists(name, arrays[RAW + name + VALUES], arrays[RAW + name + LENGTHS])
        else:
            if arrays[RAW + name].ndim != 1:
                raise RequestError(f"input {RAW + name!r} must have one dimension, the samples.")
            columns[name] = arrays[RAW + name].tolist()
    sizes = {name: len(values) for name, values in columns.items()}
    shared, num_samples = _common(sizes) if shares else (frozenset[str](), None)
    if num_samples is None:
        num_samples = next(iter(sizes.values()))
    for name, size in sizes.items():
        if name not in shared and size != num_samples:
            raise RequestError(
                f"column {name!r} has {size} values for {num_samples} samples; give one for each."
            )
    own, common = (
        table_of({n: v for n, v in columns.items() if (n in shared) == is_shared}, signature.raw)
        for is_shared in (False, True)
    )
    return encoded_request(own, common, signature)


def _lists(name: str, values: NDArray[Any], lengths: NDArray[Any]) -> list[Any]:
    if lengths.ndim != 1 or values.ndim != 1 or (lengths < 0).any() or lengths.sum() != len(values):
        raise RequestError(
            f"column {name!r}: lengths of 0 or more must sum to the number of values, {values.size}."
        )
    return [part.tolist() for part in np.split(values, np.cumsum(lengths)[:-1])] if len(lengths) else []


async def answer(
    infer: InferRequest, name: str, version: str, outputs: str, scores: Floats
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of an answer; ``outputs`` is ``scores``, or ``vectors``."""
    said: dict[str, Any] = {"model_name": name, "model_version": version}
    if infer.id is not None:
        said["id"] = infer.id
    if not infer.wants_scores:
        return json.dumps({**said, "outputs": []}).encode(), dict(JSON_ANSWER)
    output: dict[str, Any] = {"name": outputs, "datatype": "FP32", "shape": list(scores.shape)}
    if not infer.wants_binary:
        tensor = await with_numbers(output, "data", scores.reshape(-1))
        return b'%s, "outputs": [%s]}' % (json.dumps(said)[:-1].encode(), tensor), dict(JSON_ANSWER)
    data = scores.astype("<f4", copy=False).tobytes()
    output["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({**said, "outputs": [output]}).encode()
    return head + data, {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}


def _read_inputs(inputs: Any, binary: memoryview | None, signature: Signature) -> dict[str, NDArray[Any]]:
    if not isinstance(inputs, list):
        raise RequestError(
            "the request has no list of inputs. Give the tensors that the model's metadata names."
        )
    allowed = _allowed(signature)
    found: dict[str, NDArray[Any]] = {}
    start = num_raw = 0
    # A request has two tensors a feature; so what is looked at for each counts.
    for given in inputs:
        name = given.get("name") if isinstance(given, dict) else None
        if not isinstance(name, str) or (expected := allowed.get(name)) is None:
            raise RequestError(f"there is no input {shown(name)}; the model has {list(allowed)}.")
        if name in found:
            raise RequestError(f"input {name!r} is there twice. Give it once.")
        if given.get("datatype") != expected.datatype:
            raise RequestError(
                f"input {name!r} must be {expected.datatype}, got {shown(given.get('datatype'))}."
            )
        shape = _shape(given.get("shape"), name)
        parameters = given.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            parameters = _parameters(given, "input", name)
        size = None if parameters is None else parameters.get("binary_data_size")
        if size is None:
            if "data" not in given:
                raise RequestError(f"input {name!r} has neither data nor binary_data_size. Give one.")
            array = _array_of(given["data"], expected, name)
        else:
            if binary is None or "data" in given:
                raise RequestError(
                    f"input {name!r} has a binary_data_size; it needs the header {HEADER_LENGTH} and no data."
                )
            if not _is_whole(size) or start + size > len(binary):
                raise RequestError(
                    f"input {name!r}: binary_data_size is {shown(size)}, but {len(binary) - start} bytes "
                    "are left; give as many as it says."
                )
            array = _from_bytes(binary[start : start + size], expected, name)
            start += size
        num_values = shape[0] if len(shape) == 1 else math.prod(shape)
        if array.size != num_values:
            raise RequestError(f"input {name!r}: {array.size} values for the shape {shape}; they must agree.")
        found[name] = array if len(shape) == 1 else array.reshape(shape)
        num_raw += expected.is_raw
    if num_raw and num_raw != len(found):
        raise RequestError("the request has both ids and raw values. Give one kind.")
    if binary is not None and start != len(binary):
        raise RequestError(
            f"{len(binary) - start} bytes behind the last tensor belong to none; "
            "give each binary tensor its binary_data_size."
        )
    return found


class _Input(NamedTuple):
    """An allowed input: its datatype, and the dtypes in which it is sent and kept (None for texts)."""

    datatype: str
    sent: np.dtype[Any] | None
    kept: np.dtype[Any] | None
    is_raw: bool


@functools.lru_cache(16)
def _allowed(signature: Signature) -> dict[str, _Input]:
    """Return the allowed inputs of a model, by name."""
    found = {}
    for is_raw, inputs in ((False, inputs_of(signature)), (True, raw_inputs_of(signature))):
        for name, (datatype, _) in inputs.items():
            sent = _DTYPES.get(datatype)
            # Lengths are sent in 32 bits, and the model takes 64.
            kept = _DTYPES["INT64"] if name.endswith(LENGTHS) and not is_raw else sent
            found[name] = _Input(datatype, sent, kept, is_raw)
    return found


def _array_of(data: Any, expected: _Input, name: str) -> NDArray[Any]:
    """Return numbers or texts of JSON as a flat array."""
    if expected.sent is not None:
        array = as_array(data, expected.sent, f"input {name!r}").reshape(-1)
        return array.astype(expected.kept, copy=False)
    if not isinstance(data, list) or not all(isinstance(each, str) for each in data):
        raise RequestError(f"input {name!r} must be a flat list of texts.")
    return np.array([*data, ""], object)[:-1]


def _from_bytes(data: memoryview, expected: _Input, name: str) -> NDArray[Any]:
    """Parse binary numbers, or texts that follow their lengths of four bytes each."""
    if (sent := expected.sent) is not None:
        if len(data) % sent.itemsize:
            raise RequestError(
                f"input {name!r}: {len(data)} bytes are not a whole number of {expected.datatype}; "
                "give all of each."
            )
        # A copy: the tensor may stand at any byte.
        return np.frombuffer(data, sent).astype(expected.kept)
    found: list[str] = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        text = bytes(data[at + 4 : at + 4 + size])
        at += 4 + size
        if at > len(data) or len(text) != size:
            raise RequestError(f"input {name!r}: text {len(found)} ends behind its bytes; give all of each.")
        try:
            found.append(text.decode())
        except UnicodeDecodeError as error:
            raise RequestError(f"input {name!r}: text {len(found)} is not UTF-8. Send UTF-8.") from error
    return np.array([*found, ""], object)[:-1]


def _read_outputs(given: dict[str, Any], known: str, binary_by_default: bool) -> tuple[bool, bool]:
    outputs = given.get("outputs")
    if outputs is None:
        return True, binary_by_default
    if not isinstance(outputs, list):
        raise RequestError("outputs must be a list of objects with a name.")
    wants_binary = binary_by_default
    for output in outputs:
        name = output.get("name") if isinstance(output, dict) else None
        if name != known:
            raise RequestError(f"there is no output {shown(name)}; the model has {known!r}.")
        parameters = _parameters(output, "output", known)
        if "binary_data" in parameters:
            wants_binary = _flag(parameters, "binary_data")
    return bool(outputs), wants_binary


def _parameters(given: dict[str, Any], what: str, name: str | None = None) -> dict[str, Any]:
    parameters = given.get("parameters", {})
    if isinstance(parameters, dict):
        return parameters
    if name is not None:
        what = f"{what} {name!r}"
    raise RequestError(f"the parameters of {what} must be an object, got {type(parameters).__name__}.")


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"the parameter {name} must be true or false, got {shown(value)}.")
    return value


def _timeout(parameters: dict[str, Any]) -> float:
    """Return the timeout in seconds; Triton's parameter is in microseconds."""
    value = parameters.get("timeout")
    if value is None:
        return math.inf
    if not _is_whole(value) or value == 0:
        raise RequestError(f"the parameter timeout must be microseconds, at least 1, got {shown(value)}.")
    return min(float(value), 1e12) / 1e6


def _shape(shape: Any, name: str) -> list[int]:
    if isinstance(shape, list) and len(shape) <= _MOST_DIMS:  # of a million, the product would take minutes
        for dim in shape:
            if not _is_whole(dim) or dim >= 1 << 40:
                break
        else:
            return shape
    raise RequestError(
        f"input {name!r}: shape must be a list of sizes, {_MOST_DIMS} at most, got {shown(shape)}."
    )


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62  # true is an int, and no number
