"""Requests as arrays: types, and the checks before a request joins a batch."""

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrec.data.faults import REMEDY, REMEDY_OF_COLUMNS, DataError, shown
from meshrec.data.raw_values import DENSE, RawValues, table_of

# B samples, D dense columns, F features, N IDs

# Maximum number of IDs and dense values in a request after shared values are repeated: 128 MiB of IDs.
_MAX_REPEATED = 1 << 24
# Maximum nesting depth of JSON lists.
_MAX_DEPTH = 16
SCORES = "scores"
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class RequestError(ValueError):
    """Error for a request which the server refuses. The message goes to the client.

    Attributes:
        status: HTTP status of the response.
        headers: additional headers for the response.
    """

    def __init__(self, message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, status, headers)  # all arguments, so that the error can be pickled
        self.status = status
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, eq=False)
class Signature:
    """Inputs and outputs of a served model.

    Attributes:
        features: sparse feature names, in the order of the model's inputs.
        num_dense: number of dense columns.
        rows: exclusive upper limit for IDs by feature: the number of table rows.
        outputs: ``scores`` or ``vectors``.
        shared: features (or "dense") that the model can take once for many samples.
        raw: conversion of raw values (as named in the training data) to IDs; None: requests must have IDs.
        any_ids: features for which every int64 is a valid ID.
    """

    features: list[str]
    num_dense: int
    rows: Mapping[str, int]
    outputs: str = "scores"
    shared: frozenset[str] = frozenset()
    raw: RawValues | None = None
    any_ids: frozenset[str] = frozenset()


class Request(NamedTuple):
    """B samples to score, as arrays in the order of the model's inputs.

    Samples can share inputs: for example, all candidate items for a user share the user's features. Shared
    inputs have R rows instead of B.

    Attributes:
        dense: dense values, float32 [B, D].
        values: for every feature, the IDs, int64 [N], sample by sample.
        lengths: for every feature, the ID count per sample, int64 [B].
        group: for every sample, the row in the shared inputs, int64 [B]. For example, with [0, 0, 1] samples
            0 and 1 share row 0. None: samples share nothing.
    """

    dense: Floats
    values: list[Ints]
    lengths: list[Ints]
    group: Ints | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples, B."""
        return len(self.dense) if self.group is None else len(self.group)


class InferRequest(NamedTuple):
    """Parsed body of a scoring request, in either protocol.

    Attributes:
        request: samples to score, already checked.
        id: request ID to repeat in the answer; None: the client gave none.
        timeout: maximum duration in seconds; infinite if the client gave none.
        wants_binary: whether to return the scores as a binary tensor.
    """

    request: Request
    id: str | None
    timeout: float
    wants_binary: bool


class RequestSplitter:
    """Splitter of a request which has too many samples for a batch."""

    def __init__(self, request: Request) -> None:
        self._request = request
        # Per feature: position of every sample's first ID, and the end. None for a shared feature, which
        # every piece gets as a whole.
        num = request.num_samples
        self._ends = [
            np.concatenate([np.zeros(1, np.int64), lengths_B.cumsum()])
            if request.group is None or len(lengths_B) == num
            else None
            for lengths_B in request.lengths
        ]

    def __call__(self, start: int, stop: int) -> Request:
        """Return a request with the samples ``[start, stop)`` and all shared values."""
        whole = self._request
        num = whole.num_samples
        rows = slice(start, stop)
        values, lengths = [], []
        for values_N, lengths_B, ends in zip(whole.values, whole.lengths, self._ends, strict=True):
            if ends is None:
                values.append(values_N)
                lengths.append(lengths_B)
            else:
                values.append(values_N[ends[start] : ends[min(stop, num)]])
                lengths.append(lengths_B[rows])
        # Shared dense values are a single row, which every part of the request needs.
        is_shared = whole.group is not None and len(whole.dense) != num
        group = None if whole.group is None else whole.group[rows]
        return Request(whole.dense if is_shared else whole.dense[rows], values, lengths, group)


def check_request(
    signature: Signature,
    dense: Floats | None,
    values: Mapping[str, Ints],
    lengths: Mapping[str, Ints],
    *,
    shared: Set[str] = frozenset(),
    num_samples: int | None = None,
) -> Request:
    """Check the arrays of a request, and build a `Request` with the features in model order.

    If the model cannot take a shared input once for all samples, the input is repeated for every sample.

    Args:
        dense: dense values, float32 [B, D]; None is allowed for a model without dense columns.
        values: IDs by feature, int64 [N], sample by sample.
        lengths: ID count per sample by feature, int64 [B].
        shared: features (or "dense") that are given once for all samples. Their lengths are [1], and dense is
            [1, D] if it is shared.
        num_samples: B, if it cannot be derived from the arrays.

    Raises:
        RequestError: an input is invalid. The message has the feature, the sample and the ID.
    """
    for part, given in (("values", values), ("lengths", lengths)):
        for feature in signature.features:
            if feature not in given:
                raise RequestError(f"feature {feature!r} has no {part}. Give them, empty if there are none.")
    per_sample = [feature for feature in signature.features if feature not in shared]
    if dense is None and signature.num_dense:
        raise RequestError(f"the dense values are missing. Give {signature.num_dense} per sample.")
    if num_samples is None:
        if dense is not None and DENSE not in shared:
            num_samples = len(dense) if dense.ndim else 0
        else:
            num_samples = len(lengths[per_sample[0]]) if per_sample and lengths[per_sample[0]].ndim else 0
    num_rows = 1 if DENSE in shared else num_samples
    if dense is None:
        dense = np.zeros((num_rows, 0), np.float32)
    _check_dense(dense, num_rows, signature.num_dense)
    _check_lengths(per_sample, num_samples, values, lengths)
    _check_lengths([feature for feature in signature.features if feature in shared], 1, values, lengths)
    values_F = [values[feature] for feature in signature.features]
    lengths_F = [lengths[feature] for feature in signature.features]
    _check_ids(signature, values_F, lengths_F)
    if not shared:
        return Request(dense, values_F, lengths_F)
    # Pass shared inputs once only if all inputs which the model shares are shared; else repeat them.
    shared_once = signature.shared if signature.shared and signature.shared <= shared else frozenset[str]()
    repeated = [f for f, feature in enumerate(signature.features) if feature in shared - shared_once]
    # Repeating a feature copies its IDs and one length.
    num_repeated = (
        sum(len(values_F[f]) + 1 for f in repeated) + (DENSE in shared - shared_once) * dense.shape[1]
    )
    if num_repeated * num_samples > _MAX_REPEATED:
        raise RequestError(
            f"the shared values have too many ids to repeat for {num_samples} samples. Send fewer samples, "
            "or export the model with these features as shared.",
            413,
        )
    for f in repeated:
        values_F[f] = np.tile(values_F[f], num_samples)
        lengths_F[f] = np.repeat(lengths_F[f], num_samples)
    if DENSE in shared - shared_once:
        dense = np.repeat(dense, num_samples, axis=0)
    group = np.zeros(num_samples, np.int64) if shared_once else None
    return Request(dense, values_F, lengths_F, group)


def encoded_request(
    per_sample: Mapping[str, Sequence[Any]], shared: Mapping[str, Sequence[Any]], signature: Signature
) -> Request:
    """Convert raw values, as named in the training data, to a request with IDs.

    Args:
        per_sample: values by column, one per sample.
        shared: values by column, a single value for all samples.
        signature: inputs and outputs for a model which accepts raw values.

    Raises:
        RequestError: a value has the wrong type, or training would reject it as damaged.
    """
    assert signature.raw is not None
    try:
        table = table_of(per_sample, signature.raw)
        once = table_of(shared, signature.raw, "shared, ") if shared else None
        encoded = signature.raw.encode(table, once)
    except DataError as error:
        reason = str(error).removesuffix(REMEDY).removesuffix(REMEDY_OF_COLUMNS)
        raise RequestError(f"{reason}. Send other values.") from error
    return check_request(
        signature,
        encoded.dense,
        encoded.values,
        encoded.lengths,
        shared=encoded.shared,
        num_samples=table.num_rows,
    )


def _check_dense(dense: Floats, num_rows: int, num_dense: int) -> None:
    """Raise RequestError unless dense values are finite and have the shape [num_rows, num_dense]."""
    if dense.shape != (num_rows, num_dense):
        raise RequestError(
            f"dense must have shape [{num_rows}, {num_dense}] (a row per sample, or 1 if samples "
            f"share it), got {list(dense.shape)}."
        )
    # The model would turn NaN or infinity into scores that are NaN.
    finite = np.isfinite(dense)
    if not finite.all():
        sample, column = (int(axis[0]) for axis in np.nonzero(~finite))
        raise RequestError(
            f"dense value {column} of sample {sample} is {dense[sample, column]}; it must be a finite number."
        )


def concat_requests(requests: Sequence[Request]) -> Request:
    """Concatenate the samples of several requests."""
    # Most often, and then nothing is copied.
    if len(requests) == 1:
        return requests[0]
    features = range(len(requests[0].values))
    return Request(
        np.concatenate([request.dense for request in requests]),
        [np.concatenate([request.values[f] for request in requests]) for f in features],
        [np.concatenate([request.lengths[f] for request in requests]) for f in features],
        _concat_groups(requests),
    )


def _concat_groups(requests: Sequence[Request]) -> Ints | None:
    """Concatenate the groups of several requests (see `Request.group`); None if no request shares inputs.

    If only some requests share inputs, every sample of the other requests gets a separate row in the shared
    inputs.
    """
    if all(request.group is None for request in requests):
        return None
    # Rows of the concatenated shared inputs so far.
    groups, num_rows = [], 0
    for request in requests:
        group = np.arange(request.num_samples) if request.group is None else request.group
        groups.append(group + num_rows)
        num_rows += request.num_samples if request.group is None else int(group.max(initial=0)) + 1
    return np.concatenate(groups)


def _check_lengths(
    features: Sequence[str], num_samples: int, values: Mapping[str, Ints], lengths: Mapping[str, Ints]
) -> None:
    """Raise RequestError unless every feature has ``num_samples`` lengths that sum to its number of IDs."""
    for feature in features:
        feature_lengths = lengths[feature]
        if feature_lengths.ndim != 1 or len(feature_lengths) != num_samples:
            raise RequestError(
                f"feature {feature!r}: lengths of shape {list(feature_lengths.shape)} for {num_samples} "
                "samples; give one per sample."
            )
    if not features:
        return
    # One array for all features, so that the checks are few NumPy calls.
    lengths_FB = np.stack([lengths[feature] for feature in features])
    if lengths_FB.size and lengths_FB.min() < 0:
        f, sample = (int(axis[0]) for axis in np.nonzero(lengths_FB < 0))
        raise RequestError(
            f"feature {features[f]!r}: the length of sample {sample} is {lengths_FB[f, sample]}; "
            "it must be 0 or more."
        )
    sums = lengths_FB.sum(1).tolist()
    for feature, total in zip(features, sums, strict=True):
        if values[feature].ndim != 1 or len(values[feature]) != total:
            raise RequestError(
                f"feature {feature!r}: the lengths sum to {total}, but the ids have shape "
                f"{list(values[feature].shape)}; give as many ids as the lengths say."
            )


def _check_ids(signature: Signature, values_F: Sequence[Ints], lengths_F: Sequence[Ints]) -> None:
    """Raise RequestError if an ID lies outside the feature's table."""
    bounded = [index for index, feature in enumerate(signature.features) if feature not in signature.any_ids]
    if not bounded:
        return
    features = [signature.features[index] for index in bounded]
    values_F, lengths_F = ([given[index] for index in bounded] for given in (values_F, lengths_F))
    most = np.iinfo(np.int64).max
    # The limit per ID, so that all features are checked in one comparison.
    limits = np.repeat(
        [signature.rows.get(feature, most) for feature in features], [len(v) for v in values_F]
    )
    ids = np.concatenate(values_F)
    # Viewed as unsigned, negative IDs are huge, so a single comparison detects both errors.
    wrong = ids.view(np.uint64) >= limits.view(np.uint64)
    if not wrong.any():
        return
    index = int(wrong.argmax())
    for feature, values, lengths in zip(features, values_F, lengths_F, strict=True):
        if index < len(values):
            sample = int(np.searchsorted(lengths.cumsum(), index, side="right"))
            rows = signature.rows.get(feature, most)
            raise RequestError(
                f"feature {feature!r}: id {values[index]} of sample {sample} is outside [0, {rows}). "
                "Use ids from training."
            )
        index -= len(values)


def as_array(data: Any, dtype: "np.dtype[Any]", label: str) -> NDArray[Any]:
    """Convert JSON numbers, or nested lists of them, to an array.

    Args:
        data: number, or nested list with numbers.
        dtype: dtype of the array.
        label: name of the data in errors.

    Raises:
        RequestError: a value is not a number, or does not fit ``dtype``.
    """
    # Check types first: numpy would accept true as 1, and widen all items to the longest string.
    types = _types_in(data, label)
    kind = "numbers" if dtype.kind == "f" else "whole numbers that fit 64 bits"
    if types - {int, float}:
        raise RequestError(f"{label} must be {kind}, got {shown(data)}.")
    if float in types and dtype.kind == "i":
        data = as_integers(data)
    try:
        array = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            f"{label} must be numbers in a regular shape, got lists of several lengths."
        ) from error
    if array.size == 0 and array.dtype == np.float64:
        return array.astype(dtype)
    if array.dtype.kind not in ("iuf" if dtype.kind == "f" else "i"):
        raise RequestError(f"{label} must be {kind}, got {shown(data)}.")
    with np.errstate(over="ignore"):
        result: NDArray[Any] = array.astype(dtype)
    if dtype.kind == "i" and dtype.itemsize < 8 and not np.array_equal(result, array):
        raise RequestError(f"{label} must fit {dtype}, got {shown(data)}.")
    return result


def as_integers(data: Any) -> Any:
    """Convert JSON floats without a fraction, such as 1e3, to int, also in nested lists."""
    if type(data) is list:
        return [as_integers(item) for item in data]
    return int(data) if type(data) is float and data.is_integer() else data


def _types_in(data: Any, label: str) -> set[type]:
    """Return the types of all values in nested lists.

    Iterative, because deep nesting must not exhaust the stack.
    """
    seen: set[type] = set()
    level = [data]
    # Level by level instead of recursively: the client determines how deep the lists are nested.
    for _ in range(_MAX_DEPTH):
        types = set(map(type, level))
        seen |= types
        if list not in types:
            return seen - {list}
        lists = [item for item in level if type(item) is list]
        level = list(itertools.chain.from_iterable(lists))
    raise RequestError(f"{label} is nested more than {_MAX_DEPTH} lists deep. Send flat lists.")
