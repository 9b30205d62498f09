"""Samples in JSON: one object each, with the values by feature or column."""

import contextlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshrec.export.program import DENSE
from meshrec.serve.columns import encoded_request, table_of
from meshrec.serve.requests import Floats, Ints, Request, RequestError, Signature, as_array, checked, shown

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
SAMPLES, SHARED = "samples", "shared"
Sample = Mapping[str, Any]


def read_json(body: bytes) -> Any:
    """Parse a body as JSON.

    Raises:
        RequestError: the body is not JSON.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}. Send one JSON object.") from error
    except UnicodeDecodeError as error:
        raise RequestError("the body is not JSON: it is not encoded as UTF-8. Send UTF-8.") from error
    except ValueError as error:
        raise RequestError(
            "the body has an integer of more digits than Python reads. Send integers of 64 bits."
        ) from error


def read_samples(body: bytes, signature: Signature) -> Request:
    """Read samples in JSON: ``{"dense": [0.5, 1], "user": 17, "seen": [3, 9]}``, or a list of such objects.

    Each object has all features: an id, or a list of ids, which may be empty. For a model that takes raw
    values it has the columns of the data instead; null is a missing value. ``{"shared": {...}, "samples":
    [...]}`` gives the values that all samples share once.

    Raises:
        RequestError: the body is anything else; the message names the sample and the feature.
    """
    given = read_json(body)
    if signature.raw is not None:
        known = list(signature.raw.columns)
    else:
        known = [*([DENSE] if signature.num_dense else []), *signature.features]
    common: Sample = {}
    samples = given if isinstance(given, list) else [given]
    if isinstance(given, dict) and SAMPLES in given and SAMPLES not in known:
        if unknown := sorted(given.keys() - {SAMPLES, SHARED}):
            raise RequestError(f"{shown(unknown)} beside {SAMPLES!r}; give {SHARED!r} and {SAMPLES!r}.")
        common, samples = given.get(SHARED, {}), given[SAMPLES]
        if not isinstance(common, dict) or not isinstance(samples, list):
            raise RequestError(f"{SHARED!r} must be a JSON object and {SAMPLES!r} a list of them.")
        if unknown := sorted(common.keys() - set(known)):
            raise RequestError(f"{SHARED!r} has unknown {shown(unknown)}; there are {sorted(known)}.")
        if len(common) == len(known):
            raise RequestError(f"{SHARED!r} has all there is. Leave to samples what tells them apart.")
    own = [name for name in known if name not in common]
    _check_names(samples, own, signature)
    if signature.raw is not None:
        shared = table_of({name: [common[name]] for name in common}, signature.raw, f"{SHARED}, ")
        columns = {name: [sample[name] for sample in samples] for name in own}
        return encoded_request(table_of(columns, signature.raw), shared, signature)
    jagged = {name: _ids(name, samples, "sample ") for name in own if name != DENSE}
    jagged |= {name: _ids(name, [common], "") for name in common if name != DENSE}
    dense = None
    if signature.num_dense:
        given_by = [common] if DENSE in common else samples
        dense = _dense([sample[DENSE] for sample in given_by], signature.num_dense)
    return checked(
        signature,
        dense,
        {name: values for name, (values, _) in jagged.items()},
        {name: lengths for name, (_, lengths) in jagged.items()},
        shared=common.keys(),
        num_samples=len(samples),
    )


def _check_names(samples: Sequence[Any], own: Sequence[str], signature: Signature) -> None:
    names = set(own)
    for number, sample in enumerate(samples):
        if isinstance(sample, dict) and sample.keys() == names:
            continue
        if not isinstance(sample, dict):
            raise RequestError(f"sample {number} must be a JSON object, got {type(sample).__name__}.")
        if unknown := sorted(sample.keys() - names):
            raise RequestError(f"sample {number} has unknown {shown(unknown)}; there are {sorted(own)}.")
        missing = sorted(names - sample.keys())
        empty = "null where a value is not known" if signature.raw else "a list, empty where there are no ids"
        raise RequestError(f"sample {number} lacks {missing}. Give {empty}.")


def _dense(rows: Sequence[Any], num_dense: int) -> Floats:
    for number, row in enumerate(rows):
        if isinstance(row, list) and len(row) == num_dense:
            continue
        length = len(_vector(row, _FLOAT32, f"dense of sample {number}"))
        raise RequestError(f"sample {number} has {length} dense values; give {num_dense}.")
    if not rows:
        return np.zeros((0, num_dense), np.float32)
    with contextlib.suppress(RequestError):
        found: Floats = as_array(rows, _FLOAT32, "dense")
        if found.ndim == 2:
            return found
    # One of them is wrong, or numbers of all of them together have no common type; each is looked at alone.
    return np.stack([_vector(row, _FLOAT32, f"dense of sample {number}") for number, row in enumerate(rows)])


def _ids(name: str, samples: Sequence[Sample], sample_is: str) -> tuple[Ints, Ints]:
    """Return the ids and the lengths of a feature."""
    given = [sample[name] for sample in samples]
    lists = [each if type(each) is list else [each] for each in given]
    flat = list(itertools.chain.from_iterable(lists))
    if set(map(type, flat)) <= {int}:
        with contextlib.suppress(OverflowError):
            return np.array(flat, np.int64), np.fromiter(map(len, lists), np.int64, len(lists))
    for number, one in enumerate(lists):  # which of them is it?
        where = f"{sample_is}{number}" if sample_is else SHARED
        _vector(one, _INT64, f"feature {name!r} of {where}")
    raise AssertionError(f"the ids of {name!r} are neither right nor wrong")


def _vector(data: Any, dtype: "np.dtype[Any]", what: str) -> Any:
    array = as_array(data, dtype, what)
    if array.ndim != 1:
        raise RequestError(f"{what} must be a flat list of numbers.")
    return array
