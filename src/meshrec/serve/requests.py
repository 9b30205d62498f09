"""A request as arrays, checked sample by sample before it joins a batch with those of others."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# B samples, D dense columns, F features, N ids

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class RequestError(ValueError):
    """A request that is not answered with scores: ``status`` is that of HTTP, and the text says why."""

    def __init__(self, message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


class Signature(NamedTuple):
    """What a model's requests have: features in order, dense columns, and the rows that ids may name."""

    features: list[str]
    num_dense: int
    rows: Mapping[str, int]


class Request(NamedTuple):
    """Samples: dense [B, D], and per feature ids [N] and lengths [B]."""

    dense: Floats
    values: list[Ints]
    lengths: list[Ints]

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self.dense)


def checked(
    signature: Signature, dense: Floats | None, values: Mapping[str, Ints], lengths: Mapping[str, Ints]
) -> Request:
    """Puts the arrays of a request in order.

    Args:
        signature: of the model.
        dense: [B, D]; a model without dense columns needs none.
        values, lengths: per feature ids [N] and lengths [B].

    Raises:
        RequestError: for what a model cannot score; it names the feature, the sample and the id.
    """
    for what, given in (("values", values), ("lengths", lengths)):
        for feature in signature.features:
            if feature not in given:
                raise RequestError(
                    f"feature {feature!r} has no {what}. Give them, empty where there are none."
                )
    lengths_F = [lengths[feature] for feature in signature.features]
    values_F = [values[feature] for feature in signature.features]
    if dense is None:
        if signature.num_dense:
            raise RequestError(f"the dense values are missing. Give {signature.num_dense} for each sample.")
        dense = np.zeros((len(lengths_F[0]) if lengths_F else 0, 0), np.float32)
    if dense.ndim != 2 or dense.shape[1] != signature.num_dense:
        raise RequestError(
            f"dense must be of shape [samples, {signature.num_dense}], got {list(dense.shape)}."
        )
    finite = np.isfinite(dense)
    if not finite.all():
        sample, column = (int(each[0]) for each in np.nonzero(~finite))
        raise RequestError(
            f"dense value {column} of sample {sample} is {dense[sample, column]}; it must be a finite number."
        )
    _check_lengths(signature, len(dense), values_F, lengths_F)
    _check_ids(signature, values_F, lengths_F)
    return Request(dense, values_F, lengths_F)


def joined(requests: Sequence[Request]) -> Request:
    """The samples of all of them, as one."""
    if len(requests) == 1:
        return requests[0]
    features = range(len(requests[0].values))
    return Request(
        np.concatenate([request.dense for request in requests]),
        [np.concatenate([request.values[f] for request in requests]) for f in features],
        [np.concatenate([request.lengths[f] for request in requests]) for f in features],
    )


def _check_lengths(
    signature: Signature, num_samples: int, values_F: Sequence[Ints], lengths_F: Sequence[Ints]
) -> None:
    for feature, lengths in zip(signature.features, lengths_F, strict=True):
        if lengths.ndim != 1 or len(lengths) != num_samples:
            raise RequestError(
                f"feature {feature!r}: lengths of shape {list(lengths.shape)} for {num_samples} samples; "
                "give one for each sample."
            )
    if not lengths_F:
        return
    lengths_FB = np.stack(lengths_F)
    if lengths_FB.size and lengths_FB.min() < 0:
        f, sample = (int(each[0]) for each in np.nonzero(lengths_FB < 0))
        raise RequestError(
            f"feature {signature.features[f]!r}: the length of sample {sample} is {lengths_FB[f, sample]}; "
            "it must be 0 or more."
        )
    sums = lengths_FB.sum(1).tolist()
    for feature, values, total in zip(signature.features, values_F, sums, strict=True):
        if values.ndim != 1 or len(values) != total:
            raise RequestError(
                f"feature {feature!r}: the lengths sum to {total}, but the ids have shape "
                f"{list(values.shape)}; give as many ids as the lengths say."
            )


def _check_ids(signature: Signature, values_F: Sequence[Ints], lengths_F: Sequence[Ints]) -> None:
    if not values_F:
        return
    most = np.iinfo(np.int64).max
    limits = np.repeat(
        [signature.rows.get(feature, most) for feature in signature.features], [len(v) for v in values_F]
    )
    ids = np.concatenate(values_F)
    # A number below 0 is a large one without its sign; so one comparison finds both.
    wrong = ids.view(np.uint64) >= limits.view(np.uint64)
    if not wrong.any():
        return
    place = int(wrong.argmax())
    for feature, values, lengths in zip(signature.features, values_F, lengths_F, strict=True):
        if place < len(values):
            sample = int(np.searchsorted(lengths.cumsum(), place, side="right"))
            rows = signature.rows.get(feature, most)
            raise RequestError(
                f"feature {feature!r}: id {values[place]} of sample {sample} is outside [0, {rows}). "
                "Give ids that were there in training."
            )
        place -= len(values)


def as_array(data: Any, dtype: "np.dtype[Any]", what: str) -> NDArray[Any]:
    """Numbers of JSON, nested or not, as an array of ``dtype``.

    Raises:
        RequestError: for what is no number, or does not fit the type.
    """
    try:
        array = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            f"{what} must be numbers in a regular shape, got lists of several lengths."
        ) from error
    if array.size == 0 and array.dtype == np.float64:
        return array.astype(dtype)
    allowed = "iuf" if dtype.kind == "f" else "i"
    if array.dtype.kind not in allowed or _has_boolean(data):
        kind = "numbers" if dtype.kind == "f" else "whole numbers that fit 64 bits"
        raise RequestError(f"{what} must be {kind}, got {_shown(data)}.")
    with np.errstate(over="ignore"):
        result: NDArray[Any] = array.astype(dtype)
    if dtype.kind == "i" and dtype.itemsize < 8 and not np.array_equal(result, array):
        raise RequestError(f"{what} must fit {dtype}, got {_shown(data)}.")
    return result


def _has_boolean(data: Any) -> bool:
    """numpy takes true for 1 where numbers stand beside it."""
    stack = [data]
    while stack:
        each = stack.pop()
        if isinstance(each, list):
            stack.extend(each)
        elif isinstance(each, bool):
            return True
    return False


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else f"{text[:57]}..."
