"""Parsing of samples in JSON: objects with values by feature or by data column."""

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshrec.data.faults import shown
from meshrec.data.raw_values import DENSE
from meshrec.serve.requests import (
    Floats,
    Ints,
    Request,
    RequestError,
    Signature,
    as_array,
    as_integers,
    check_request,
    encoded_request,
)

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
SAMPLES, SHARED = "samples", "shared"
"""Keys of a body in which samples share values."""
Sample = Mapping[str, Any]
"""JSON object of a sample."""


def read_json(body: bytes) -> Any:
    """Parse a request body as JSON.

    Raises:
        RequestError: the body is not JSON, is nested too deep, or has a huge integer.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}. Send one JSON object.") from error
    except UnicodeDecodeError as error:
        raise RequestError("the body is not JSON: it is not encoded as UTF-8. Send UTF-8.") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deep. Send lists of numbers or strings.") from error
    except ValueError as error:
        raise RequestError(
            "the body has an integer with more digits than Python parses. Send 64-bit integers."
        ) from error


def read_samples(body: bytes, signature: Signature) -> Request:
    """Parse samples in JSON, and check them.

    The body is an object such as ``{"dense": [0.5, 1], "user": 17, "seen": [3, 9]}``, or a list of such
    objects. An object has an entry per feature: an ID, or a list of IDs, possibly empty. If the model accepts
    raw values (values as in the training data, before they are converted to IDs), an object has an entry per
    data column instead. Null is a missing value, and columns in `RawValues.optional` may be omitted. In
    ``{"shared": {...}, "samples": [...]}``, all samples share the values in the first object.

    Raises:
        RequestError: the body has another form, or a value is invalid. The message names the sample and the
            feature.
    """
    given = read_json(body)
    if signature.raw is not None:
        names = list(signature.raw.columns)
    else:
        names = [*([DENSE] if signature.num_dense else []), *signature.features]
    common: Sample = {}
    samples = given if isinstance(given, list) else [given]
    if isinstance(given, dict) and SAMPLES in given and SAMPLES not in names:
        if unknown := sorted(given.keys() - {SAMPLES, SHARED}):
            raise RequestError(
                f"unknown {shown(unknown)} next to {SAMPLES!r}; allowed: {SHARED!r} and {SAMPLES!r}."
            )
        common, samples = given.get(SHARED, {}), given[SAMPLES]
        if not isinstance(common, dict) or not isinstance(samples, list):
            raise RequestError(f"{SHARED!r} must be a JSON object and {SAMPLES!r} a list of them.")
        common = {name: common[name] for name in names if name in common}
        if len(common) == len(names):
            raise RequestError(f"{SHARED!r} has all names. Leave at least one to the samples.")
    per_sample = [name for name in names if name not in common]
    optional = {} if signature.raw is None else signature.raw.optional
    _check_names(samples, [name for name in per_sample if name not in optional], common, signature)
    if signature.raw is not None:
        # An optional column that no sample gives is left out of the request, instead of being filled with
        # nulls.
        given_names = set(per_sample).difference(optional).union(*samples)
        columns = {
            name: [sample.get(name) for sample in samples] for name in per_sample if name in given_names
        }
        return encoded_request(columns, {name: [common[name]] for name in common}, signature)
    jagged = {name: _parse_ids(name, samples, "sample ") for name in per_sample if name != DENSE}
    jagged |= {name: _parse_ids(name, [common], "") for name in common if name != DENSE}
    dense = None
    if signature.num_dense:
        given_by = [common] if DENSE in common else samples
        dense = _parse_dense([sample[DENSE] for sample in given_by], signature.num_dense)
    return check_request(
        signature,
        dense,
        {name: values for name, (values, _) in jagged.items()},
        {name: lengths for name, (_, lengths) in jagged.items()},
        shared=common.keys(),
        num_samples=len(samples),
    )


def _check_names(
    samples: Sequence[Any], required: Sequence[str], common: Sample, signature: Signature
) -> None:
    """Raise RequestError if a sample lacks a required name, or repeats a shared one.

    Unknown names are ignored, as in data files.
    """
    names = set(required)
    for number, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise RequestError(f"sample {number} must be a JSON object, got {type(sample).__name__}.")
        if twice := sorted(sample.keys() & common.keys()):
            raise RequestError(f"sample {number} has {shown(twice)}, as {SHARED!r} does. Give it once.")
        if names <= sample.keys():
            continue
        missing = sorted(names - sample.keys())
        empty = "null for a missing value" if signature.raw else "a list, possibly empty"
        raise RequestError(f"sample {number} lacks {missing}. Give {empty}.")


def _parse_dense(rows: Sequence[Any], num_dense: int) -> Floats:
    """Convert the dense values of samples to float32 [B, D]."""
    for number, row in enumerate(rows):
        if isinstance(row, list) and len(row) == num_dense:
            continue
        length = len(_parse_vector(row, _FLOAT32, f"dense of sample {number}"))
        raise RequestError(f"sample {number} has {length} dense values; give {num_dense}.")
    if not rows:
        return np.zeros((0, num_dense), np.float32)
    # All rows in one call, which is much faster. An error is reported for the row that causes it, below.
    with contextlib.suppress(RequestError):
        array: Floats = as_array(rows, _FLOAT32, "dense")
        if array.ndim == 2:
            return array
    # A row is wrong, or the rows have no common type: check them one by one.
    return np.stack(
        [_parse_vector(row, _FLOAT32, f"dense of sample {number}") for number, row in enumerate(rows)]
    )


def _parse_ids(name: str, samples: Sequence[Sample], label_prefix: str) -> tuple[Ints, Ints]:
    """Return the IDs of a feature, int64 [N], and the ID count per sample, int64 [B]."""
    given = [sample[name] for sample in samples]
    lists = [value if type(value) is list else [value] for value in given]
    flat = list(itertools.chain.from_iterable(lists))
    if float in set(map(type, flat)):
        flat = as_integers(flat)
    # Types are compared exactly, because `bool` is a subclass of `int`.
    if set(map(type, flat)) <= {int}:
        with contextlib.suppress(OverflowError):
            return np.array(flat, np.int64), np.fromiter(map(len, lists), np.int64, len(lists))
    for number, sample_ids in enumerate(lists):  # locate the wrong sample
        where = f"{label_prefix}{number}" if label_prefix else SHARED
        _parse_vector(sample_ids, _INT64, f"feature {name!r} of {where}")
    raise AssertionError(f"ids of {name!r} failed together but not individually")


def _parse_vector(data: Any, dtype: "np.dtype[Any]", label: str) -> Any:
    """Convert a flat JSON list to an array. ``label`` is the name of the data in errors."""
    array = as_array(data, dtype, label)
    if array.ndim != 1:
        raise RequestError(f"{label} must be a flat list of numbers.")
    return array
