"""Open Inference Protocol v2 requests and answers, as JSON or with binary tensors appended.

https://github.com/kserve/open-inference-protocol; binary tensors and the ``timeout`` parameter (microseconds)
as in NVIDIA's Triton server; ``content_type`` as in MLServer's codecs. A null field counts as absent. Unknown
fields and parameters are refused, because they may change the scores.
"""

import base64
import binascii
import functools
import itertools
import json
import math
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrec.data.faults import shown
from meshrec.data.raw_values import DENSE
from meshrec.serve.requests import (
    SCORES,
    InferRequest,
    Ints,
    Request,
    RequestError,
    Signature,
    as_array,
    check_request,
    encoded_request,
)
from meshrec.serve.samples import read_json

VALUES, LENGTHS = ".values", ".lengths"
"""Name suffixes of the two inputs for a feature: the IDs for all samples, and ID count per sample."""
RAW = "raw."
"""Name prefix of raw inputs."""
STRINGS = "BYTES"
"""Protocol datatype of strings."""
# Maximum number of dimensions in the shape of an input.
_MAX_DIMS = 8
HEADER_LENGTH = "Inference-Header-Content-Length"
"""HTTP header with the number of JSON bytes before binary tensors."""
# Binary format of numeric datatypes.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype("<u2"),  # the upper halves of FP32
}
# IDs are int64, but the protocol also has UINT64.
_MAX_INT64 = (1 << 63) - 1
# MLServer's content type for a column with values other than strings: each value is JSON in a string.
_JSON_COLUMN = "pd_json"
# Datatypes allowed per content type of MLServer's codecs.
_CONTENT_TYPES = {
    "np": {*_DTYPES, STRINGS},
    "pd": {*_DTYPES, STRINGS},
    "str": {STRINGS},
    "datetime": {STRINGS},
    "base64": {STRINGS},
    _JSON_COLUMN: {STRINGS},
}
# Other names are refused: a misspelled option would otherwise be ignored in silence.
_REQUEST_FIELDS = frozenset(("id", "parameters", "inputs", "outputs", "model_name", "model_version"))
_INPUT_FIELDS = frozenset(("name", "shape", "datatype", "parameters", "data"))
# MLServer adds the HTTP headers as a parameter.
_REQUEST_PARAMETERS = frozenset(("binary_data_output", "content_type", "headers", "shared", "timeout"))
_INPUT_PARAMETERS = frozenset(("binary_data_size", "content_type"))
_OUTPUT_PARAMETERS = frozenset(("binary_data", "content_type"))


def inputs_of(signature: Signature) -> dict[str, tuple[str, list[int]]]:
    """Return protocol datatype and shape of the ID and dense inputs, by input name.

    -1 in a shape means any size. A feature ``item`` has the inputs ``item.values`` and ``item.lengths``.
    """
    inputs: dict[str, tuple[str, list[int]]] = {}
    if signature.num_dense:
        inputs[DENSE] = "FP32", [-1, signature.num_dense]
    for feature in signature.features:
        inputs[feature + VALUES] = "INT64", [-1]
        inputs[feature + LENGTHS] = "INT32", [-1]
    return inputs


def raw_inputs_of(signature: Signature) -> dict[str, tuple[str, list[int]]]:
    """Return protocol datatype and shape of the raw value inputs, by input name.

    A request may use them instead of IDs. Empty if the model does not accept raw values.
    """
    inputs: dict[str, tuple[str, list[int]]] = {}
    for name, kind in (signature.raw.kinds if signature.raw is not None else {}).items():
        if kind.startswith("list"):
            inputs[RAW + name + VALUES] = _datatype(kind), [-1]
            inputs[RAW + name + LENGTHS] = "INT32", [-1]
        else:
            inputs[RAW + name] = _datatype(kind), [-1]
    return inputs


def _datatype(kind: str) -> str:
    """Return the protocol datatype for a kind of column values. Times are sent as strings."""
    return {"integer": "INT64", "number": "FP64"}.get(kind.removeprefix("list of "), STRINGS)


def metadata(name: str, version: str, signature: Signature) -> dict[str, Any]:
    """Return the answer to ``GET /v2/models/NAME``, with raw inputs if the model accepts them.

    Args:
        name: model name.
        version: model version.
        signature: model signature.
    """
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
    """Parse and check the body of a ``POST .../infer`` request.

    Args:
        header_length: value of the header `HEADER_LENGTH`; None: the whole body is JSON.

    Raises:
        RequestError: the body violates the protocol, or does not match the model.
    """
    end = len(body)
    if header_length is not None:
        # int() raises for strings of more than 4,300 digits.
        is_number = header_length.isascii() and header_length.isdecimal() and len(header_length) < 20
        if not is_number or int(header_length) > len(body):
            raise RequestError(
                f"{HEADER_LENGTH} must be a number of bytes up to {len(body)}, got {header_length[:40]!r}."
            )
        end = int(header_length)
    given = read_json(body[:end])
    if not isinstance(given, dict):
        raise RequestError("the request must be a JSON object with inputs.")
    _check_names("field", given, _REQUEST_FIELDS, "the request")
    if header_length is None:
        binary: memoryview | None = None
    else:
        binary = memoryview(body)[end:]
    arrays = _read_inputs(given.get("inputs"), binary, signature)
    is_raw = next(iter(arrays), "").startswith(RAW)  # _read_inputs refuses a mix
    request_id = given.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise RequestError(f"id must be a string, got {type(request_id).__name__}.")
    parameters = _parameters(given, _REQUEST_PARAMETERS, "the request")
    if (content_type := parameters.get("content_type")) not in (None, "np", "pd", "str"):
        raise RequestError(
            f"the request has the content_type {shown(content_type)}; set it on the inputs instead."
        )
    wants_binary = _read_outputs(given, signature.outputs, _bool_parameter(parameters, "binary_data_output"))
    shares = _bool_parameter(parameters, "shared")
    request = _raw_request(arrays, shares, signature) if is_raw else _request(arrays, shares, signature)
    return InferRequest(request, request_id, _parse_timeout(parameters), wants_binary)


def _request(arrays: Mapping[str, Any], shares: bool, signature: Signature) -> Request:
    """Build a request from ID and dense inputs."""
    values = {f: arrays[f + VALUES] for f in signature.features if f + VALUES in arrays}
    lengths = {f: arrays[f + LENGTHS] for f in signature.features if f + LENGTHS in arrays}
    sizes = {name: feature_lengths.size for name, feature_lengths in lengths.items()}
    if DENSE in arrays:
        sizes[DENSE] = len(arrays[DENSE]) if arrays[DENSE].ndim else 0
    shared, num_samples = _split_shared(sizes) if shares else (frozenset[str](), None)
    return check_request(
        signature, arrays.get(DENSE), values, lengths, shared=shared, num_samples=num_samples
    )


def _split_shared(sizes: Mapping[str, int]) -> tuple[frozenset[str], int | None]:
    """Split inputs by row count, for a request with the ``shared`` parameter.

    Args:
        sizes: rows by input name, such as ``{"user": 1, "item": 20}``.

    Returns:
        Names of inputs with one row, which all samples share (``{"user"}``), and the sample count (20). An
        empty set and None if every input has one row.
    """
    several = [size for size in sizes.values() if size != 1]
    if not several:
        return frozenset(), None
    return frozenset(name for name, size in sizes.items() if size == 1), several[0]


def _raw_request(arrays: Mapping[str, Any], shares: bool, signature: Signature) -> Request:
    """Build a request from raw column values."""
    assert signature.raw is not None
    columns, missing = {}, []
    for name, kind in signature.raw.kinds.items():
        # Clients send a list column as a whole, with JSON values, or as flat values and lengths.
        whole, parts = RAW + name, (RAW + name + VALUES, RAW + name + LENGTHS)
        if whole in arrays:
            columns[name] = arrays[whole]
            if not arrays.keys().isdisjoint(parts):
                raise RequestError(f"column {name!r} is given twice, as {whole!r} and in parts. Give one.")
            continue
        names = parts if kind.startswith("list") else (whole,)
        if name in signature.raw.optional and arrays.keys().isdisjoint(names):
            continue
        missing += [part for part in names if part not in arrays]
        if not missing:
            columns[name] = _split_lists(name, *map(arrays.__getitem__, parts))
    if missing:
        raise RequestError(f"the request has raw values but lacks {sorted(missing)}. Give all columns.")
    sizes = {name: len(values) for name, values in columns.items()}
    shared, num_samples = _split_shared(sizes) if shares else (frozenset[str](), None)
    if num_samples is None:
        num_samples = next(iter(sizes.values()))
    for name, size in sizes.items():
        if name not in shared and size != num_samples:
            raise RequestError(
                f"column {name!r} has {size} values for {num_samples} samples; give one per sample."
            )
    per_sample, common = (
        {n: v for n, v in columns.items() if (n in shared) == is_shared} for is_shared in (False, True)
    )
    return encoded_request(per_sample, common, signature)


def _split_lists(name: str, values: list[Any], lengths: Ints) -> list[Any]:
    """Split a list column's flat values into a list per sample."""
    if (lengths < 0).any() or lengths.sum() != len(values):
        raise RequestError(
            f"column {name!r}: lengths of 0 or more must sum to the number of values, {len(values)}."
        )
    ends = [0, *lengths.cumsum().tolist()]
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def _read_inputs(inputs: Any, binary: memoryview | None, signature: Signature) -> dict[str, Any]:
    """Parse the inputs of a request.

    Returns:
        By input name: an array for IDs, lengths and dense values; a list for raw values.
    """
    if not isinstance(inputs, list):
        raise RequestError(
            "the request has no list of inputs. Give the tensors listed in the model's metadata."
        )
    allowed = _allowed_inputs(signature)
    arrays: dict[str, Any] = {}
    # `start` is the offset of the next binary tensor: tensors follow each other in the order of the inputs.
    start = num_raw = 0
    # Hot loop: a request has two tensors per feature, so common cases skip the helper calls.
    for given in inputs:
        name = given.get("name") if isinstance(given, dict) else None
        if not isinstance(name, str) or (expected := allowed.get(name)) is None:
            raise RequestError(f"unknown input {shown(name)}; allowed: {list(allowed)}.")
        if name in arrays:
            raise RequestError(f"input {name!r} is given twice. Give it once.")
        if not given.keys() <= _INPUT_FIELDS:
            _check_names("field", given, _INPUT_FIELDS, f"input {name!r}")
        shape = _check_shape(given.get("shape"), name)
        if given.get("parameters") is not None:
            parameters = _parameters(given, _INPUT_PARAMETERS, f"input {name!r}")
            content_type, size = parameters.get("content_type"), parameters.get("binary_data_size")
        else:
            content_type = size = None
        datatype = given.get("datatype")
        if datatype != expected.datatype or content_type is not None:
            _check_datatype(datatype, content_type, expected, name)
        data = given.get("data")
        if size is None:
            if data is None:
                raise RequestError(f"input {name!r} has neither data nor binary_data_size. Give one.")
            array = _array_of(data, datatype, shape, name)
        else:
            raw = _next_binary(binary, start, size, given, name)
            array = _from_bytes(raw, datatype, name)
            start += size
        num_values = shape[0] if len(shape) == 1 else math.prod(shape)
        if array.size != num_values:
            raise RequestError(f"input {name!r}: {array.size} values for the shape {shape}; they must agree.")
        if name == DENSE:
            array = array.reshape(shape)
        elif len(shape) != 1 and (len(shape) != 2 or shape[1] != 1):
            raise RequestError(f"input {name!r} must be of shape [n] or [n, 1], got {shape}.")
        arrays[name] = _values_of(array, content_type, expected, name)
        num_raw += expected.is_raw
    if num_raw and num_raw != len(arrays):
        raise RequestError("the request has both ids and raw values. Give one kind.")
    if binary is not None and start != len(binary):
        raise RequestError(
            f"{len(binary) - start} bytes after the last tensor are not part of a tensor; "
            "set binary_data_size on every binary tensor."
        )
    return arrays


def _next_binary(
    binary: memoryview | None, start: int, size: Any, given: Mapping[str, Any], name: str
) -> memoryview | bytes:
    """Return the bytes of the next binary tensor.

    Args:
        binary: bytes after the JSON; None if the request lacks the header `HEADER_LENGTH`, so that only size
            0 is allowed.
    """
    # A tensor of 0 bytes needs no binary part in the body.
    if (binary is None and size != 0) or given.get("data") is not None:
        raise RequestError(
            f"input {name!r} has a binary_data_size; it needs the header {HEADER_LENGTH} and no data."
        )
    num_left = 0 if binary is None else len(binary) - start
    if not _is_whole(size) or size > num_left:
        raise RequestError(
            f"input {name!r}: binary_data_size is {shown(size)}, but {num_left} bytes "
            "are left; the sizes must agree."
        )
    return b"" if binary is None else binary[start : start + size]


class _InputSpec(NamedTuple):
    """Input tensor which a model accepts.

    Attributes:
        datatype: protocol datatype which the model's metadata reports.
        dtype: numpy dtype in which the model reads the input; None for raw values.
        is_raw: whether the input belongs to requests with raw values instead of IDs.
        accepted_datatypes: other accepted datatypes. Values must fit ``datatype``.
    """

    datatype: str
    dtype: np.dtype[Any] | None
    is_raw: bool
    accepted_datatypes: Set[str]


@functools.lru_cache(16)
def _allowed_inputs(signature: Signature) -> dict[str, _InputSpec]:
    """Return all inputs which a request to this model may have, by input name."""
    whole = {datatype for datatype in _DTYPES if "INT" in datatype}
    accepted = {"INT32": whole, "INT64": whole, "FP32": {*_DTYPES} - {"BOOL"}, "FP64": {*_DTYPES} - {"BOOL"}}
    allowed = {}
    for name, (datatype, _) in inputs_of(signature).items():
        allowed[name] = _InputSpec(datatype, _MODEL_DTYPES[datatype], False, accepted[datatype])
    for name, (datatype, _) in raw_inputs_of(signature).items():
        if name.endswith(LENGTHS):
            allowed[name] = _InputSpec(datatype, _MODEL_DTYPES[datatype], True, whole)
        else:
            # Data frames store booleans, and integers with missing values, in columns of other types.
            numeric = {*_DTYPES} if datatype == "INT64" else accepted.get(datatype, set())
            allowed[name] = _InputSpec(datatype, None, True, numeric)
    for name, kind in (signature.raw.kinds if signature.raw is not None else {}).items():
        if kind.startswith("list"):
            allowed[RAW + name] = _InputSpec(_JSON_COLUMN, None, True, frozenset())
    return allowed


# Lengths are sent as 32 bits; models use 64.
_MODEL_DTYPES = {"FP32": _DTYPES["FP32"], "INT64": _DTYPES["INT64"], "INT32": _DTYPES["INT64"]}


def _check_datatype(datatype: Any, content_type: Any, expected: _InputSpec, name: str) -> None:
    """Raise RequestError unless the input accepts the datatype and content type of the request."""
    if not isinstance(datatype, str):
        raise RequestError(f"input {name!r} must be {expected.datatype}, got {shown(datatype)}.")
    if content_type is not None and datatype not in _CONTENT_TYPES.get(str(content_type), ()):
        raise RequestError(
            f"input {name!r} has the content_type {shown(content_type)} and the datatype {shown(datatype)}; "
            f"content types are {sorted(_CONTENT_TYPES)}; numbers need np or pd."
        )
    takes_json = expected.is_raw and expected.dtype is None
    if content_type == _JSON_COLUMN and takes_json:
        return
    if content_type == _JSON_COLUMN or not (
        datatype == expected.datatype or datatype in expected.accepted_datatypes
    ):
        raise RequestError(
            f"input {name!r} must be {expected.datatype}, got {shown(datatype)} of content_type "
            f"{shown(content_type)}. Send {expected.datatype}."
        )


def _array_of(data: Any, datatype: str, shape: list[int], name: str) -> NDArray[Any]:
    """Convert an input's JSON data to a flat array, with dtype object if values are strings or null."""
    if not isinstance(data, list):
        raise RequestError(f"the data of input {name!r} must be a list, got {shown(data)}.")
    is_nested = bool(data) and type(data[0]) is list
    if not (is_nested or datatype in (STRINGS, "BOOL") or None in data):
        return _numeric_array(data, datatype, name)
    # The trailing None keeps numpy from treating inner lists as rows.
    array = np.array(data, object) if is_nested else np.array([*data, None], object)[:-1]
    if is_nested and list(array.shape) != shape:
        raise RequestError(
            f"input {name!r}: lists of shape {list(array.shape)} for the shape {shape}; they must agree."
        )
    values = array.reshape(-1).tolist()
    present = [value for value in values if value is not None]
    if datatype not in (STRINGS, "BOOL"):
        numeric = _numeric_array(present, datatype, name)
        if len(present) == len(values):
            return numeric
        present = numeric.tolist()
    elif wrong := [value for value in present if type(value) is not (str if datatype == STRINGS else bool)]:
        kind = "strings" if datatype == STRINGS else "true or false"
        raise RequestError(f"input {name!r} must be {kind}, got {shown(wrong[0])}.")
    # Puts the nulls back between the converted values.
    remaining = iter(present)
    return np.array([*(None if value is None else next(remaining) for value in values), None], object)[:-1]


def _numeric_array(data: list[Any], datatype: str, name: str) -> NDArray[Any]:
    """Convert JSON numbers to an array of a protocol datatype, such as ``FP32``."""
    if datatype == "BF16":
        raise RequestError(f"input {name!r} is BF16, which JSON cannot represent. Send it as binary.")
    sent = _DTYPES[datatype]
    wide = as_array(data, np.dtype(np.float64 if sent.kind == "f" else np.int64), f"input {name!r}")
    with np.errstate(over="ignore"):
        # Overflow gives infinity, which the next line detects. A value that was infinite before is not an
        # overflow.
        array = wide.reshape(-1).astype(sent)
    fits = np.isfinite(array) | ~np.isfinite(wide) if sent.kind == "f" else array == wide
    if not fits.all():
        raise RequestError(f"input {name!r} must fit {datatype}, got {wide[~fits][0]}.")
    return array


def _from_bytes(data: memoryview | bytes, datatype: str, name: str) -> NDArray[Any]:
    """Convert binary tensor data to a flat array of numbers or strings.

    In the data, a string has its length in bytes before it, as 4 bytes, little-endian.
    """
    if (sent := _DTYPES.get(datatype)) is not None:
        if len(data) % sent.itemsize:
            raise RequestError(
                f"input {name!r}: {len(data)} bytes are not a multiple of {datatype}; send whole values."
            )
        array: NDArray[Any] = np.frombuffer(data, sent)
        if datatype == "BF16":
            # bf16 has the upper 16 bits of fp32.
            return (array.astype(np.uint32) << 16).view(np.float32)
        if datatype == "BOOL" and (array.view(np.uint8) > 1).any():
            raise RequestError(f"input {name!r} has bytes above 1; BOOL allows only 0 and 1.")
        return array
    texts: list[str] = []
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        text = bytes(data[at + 4 : at + 4 + size])
        at += 4 + size
        if at > len(data) or len(text) != size:
            raise RequestError(
                f"input {name!r}: string {len(texts)} exceeds the remaining bytes; send complete strings."
            )
        try:
            texts.append(text.decode())
        except UnicodeDecodeError as error:
            raise RequestError(f"input {name!r}: string {len(texts)} is not UTF-8. Send UTF-8.") from error
    return np.array([*texts, ""], object)[:-1]


def _values_of(array: NDArray[Any], content_type: str | None, expected: _InputSpec, name: str) -> Any:
    """Convert an input to the form that the model takes: an array with the model's dtype, or raw values."""
    if (dtype := expected.dtype) is not None:
        if array.dtype == object:
            raise RequestError(f"input {name!r} has null; only raw values may be null.")
        if dtype.kind == "i" and array.dtype == np.uint64 and (array > _MAX_INT64).any():
            raise RequestError(f"input {name!r} must fit int64, got {array.max()}.")
        # astype copies: a binary tensor may be unaligned.
        with np.errstate(over="ignore"):
            return array.astype(dtype) if name == DENSE else array.reshape(-1).astype(dtype)
    values = array.reshape(-1).tolist()
    if content_type in ("base64", _JSON_COLUMN):
        return [None if value is None else _decode(value, content_type, name) for value in values]
    if expected.datatype == "INT64" and array.dtype.kind == "f":
        # NaN stands for a missing integer.
        return [None if value != value else value for value in values]
    return values


def _decode(value: str, content_type: str, name: str) -> Any:
    """Decode a string of content type ``base64`` or ``pd_json``."""
    try:
        if content_type == _JSON_COLUMN:
            return json.loads(value)
        return base64.b64decode(value, validate=True).decode()
    except (ValueError, binascii.Error) as error:
        raise RequestError(f"input {name!r}: {shown(value)} is not {content_type}: {error}.") from error


def _read_outputs(given: dict[str, Any], output_name: str, binary_by_default: bool) -> bool:
    """Return whether the client wants the scores as a binary tensor.

    Args:
        given: JSON object of the request. The field ``outputs`` may be absent or empty.
        binary_by_default: result if ``outputs`` does not name the output, or names it without the parameter
            ``binary_data``.
    """
    outputs = given.get("outputs")
    if outputs is None:
        return binary_by_default
    if not isinstance(outputs, list):
        raise RequestError("outputs must be a list of objects with a name.")
    if len(outputs) > 1:
        raise RequestError(
            f"the request has {len(outputs)} outputs; the model only has {output_name!r}. Name it once."
        )
    wants_binary = binary_by_default
    for output in outputs:
        name = output.get("name") if isinstance(output, dict) else None
        if name != output_name:
            raise RequestError(f"unknown output {shown(name)}; the model only has {output_name!r}.")
        _check_names("field", output, {"name", "parameters"}, f"output {output_name!r}")
        parameters = _parameters(output, _OUTPUT_PARAMETERS, f"output {output_name!r}")
        if parameters.get("content_type") not in (None, "np"):
            raise RequestError(
                f"output {output_name!r} must have content_type 'np', got {parameters['content_type']!r}."
            )
        if "binary_data" in parameters:
            wants_binary = _bool_parameter(parameters, "binary_data")
    return wants_binary


def _parameters(given: dict[str, Any], allowed: Set[str], owner: str) -> dict[str, Any]:
    """Return the parameters of a JSON object, without those that are null."""
    parameters = given.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise RequestError(
            f"the parameters of {owner} must be an object, got {type(parameters).__name__}. Send an object."
        )
    _check_names("parameter", parameters, allowed, owner)
    return {name: value for name, value in parameters.items() if value is not None}


def _check_names(kind: str, given: Mapping[str, Any], allowed: Set[str], owner: str) -> None:
    """Raise RequestError if a non-null field or parameter is not allowed."""
    if unknown := sorted(name for name in given.keys() - allowed if given[name] is not None):
        raise RequestError(
            f"unknown {kind} {shown(unknown[0])} of {owner}; allowed: {sorted(allowed)}. Remove it."
        )


def _bool_parameter(parameters: dict[str, Any], name: str) -> bool:
    """Return a boolean parameter; False if it is absent."""
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"the parameter {name} must be true or false, got {shown(value)}.")
    return value


def _parse_timeout(parameters: dict[str, Any]) -> float:
    """Return the timeout in seconds, from Triton's parameter in microseconds."""
    value = parameters.get("timeout")
    if value is None:
        return math.inf
    if not _is_whole(value) or value == 0:
        raise RequestError(f"the parameter timeout must be microseconds, at least 1, got {shown(value)}.")
    return min(float(value), 1e12) / 1e6


def _check_shape(shape: Any, name: str) -> list[int]:
    """Return the shape of an input. Raises RequestError if it is not a list of at most `_MAX_DIMS` sizes."""
    if isinstance(shape, list) and len(shape) <= _MAX_DIMS:  # the product of a million sizes takes minutes
        for dim in shape:
            if not _is_whole(dim) or dim >= 1 << 40:
                break
        else:
            return shape
    raise RequestError(
        f"input {name!r}: shape must be a list of sizes, {_MAX_DIMS} at most, got {shown(shape)}."
    )


def _is_whole(value: Any) -> bool:
    """Return whether a JSON value is an integer in [0, 2**62)."""
    return type(value) is int and 0 <= value < 1 << 62  # isinstance would accept bool
