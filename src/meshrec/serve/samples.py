"""Samples as people write them: one JSON object each, with the name of each feature."""

import json
from typing import Any

import numpy as np

from meshrec.serve.requests import Floats, Ints, Request, RequestError, Signature, as_array, checked

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)


def read_json(body: bytes) -> Any:
    """What a body says in JSON.

    Raises:
        RequestError: for what is no JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}. Send one JSON object.") from error


def read_samples(body: bytes, signature: Signature) -> Request:
    """``{"dense": [0.5, 1], "user": 17, "seen": [3, 9]}``, or a list of such objects.

    Every feature is there in each object: an id, or a list of ids, which may be empty.

    Raises:
        RequestError: for anything else; it names the sample and the feature.
    """
    given = read_json(body)
    samples = given if isinstance(given, list) else [given]
    dense: list[Floats] = []
    ids: dict[str, list[Ints]] = {feature: [] for feature in signature.features}
    for number, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise RequestError(f"sample {number} must be a JSON object, got {type(sample).__name__}.")
        known = {*signature.features, "dense"} if signature.num_dense else {*signature.features}
        if unknown := sorted(sample.keys() - known):
            raise RequestError(f"sample {number} has unknown {unknown}; there are {sorted(known)}.")
        if missing := sorted(known - sample.keys()):
            raise RequestError(f"sample {number} lacks {missing}. Give a list, empty where there are no ids.")
        if signature.num_dense:
            dense.append(_vector(sample["dense"], _FLOAT32, f"dense of sample {number}"))
            if len(dense[-1]) != signature.num_dense:
                raise RequestError(
                    f"sample {number} has {len(dense[-1])} dense values; give {signature.num_dense}."
                )
        for feature in signature.features:
            value = sample[feature]
            one = value if isinstance(value, list) else [value]
            ids[feature].append(_vector(one, _INT64, f"feature {feature!r} of sample {number}"))
    return checked(
        signature,
        np.stack(dense) if dense else np.zeros((len(samples), signature.num_dense), np.float32),
        {f: np.concatenate([np.empty(0, np.int64), *own]) for f, own in ids.items()},
        {f: np.array([len(each) for each in own], np.int64) for f, own in ids.items()},
    )


def _vector(data: Any, dtype: "np.dtype[Any]", what: str) -> Any:
    array = as_array(data, dtype, what)
    if array.ndim != 1:
        raise RequestError(f"{what} must be a flat list of numbers.")
    return array
