"""A request as arrays, which is checked before it joins a batch with others."""

import itertools
import reprlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshrec.export.program import DENSE
from meshrec.export.raw_values import RawValues

# B samples, D dense columns, F features, N ids

_MOST_REPEATED = 1 << 24
"""Most ids and dense values that a request may have once its shared values are repeated."""
_MOST_DEEP = 16
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxlong = 3, 4, 4, 60, 40
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class RequestError(ValueError):
    """A request that gets no scores; ``status`` is the HTTP status, and the message gives the reason."""

    def __init__(self, message: str, status: int = 400, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, status, headers)  # all of them, as processes hand errors to each other
        self.status = status
        self.headers = dict(headers or {})

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, eq=False)
class Signature:
    """The inputs and outputs of a model.

    Attributes:
        features: the features in order.
        num_dense: the number of dense columns.
        rows: the number of rows that ids may name, by feature.
        outputs: ``scores``, or ``vectors``.
        shared: features (or "dense") that the model takes once for many samples.
        raw: the conversion of raw values; None if requests must have ids.
        any_ids: features of which every int64 is an ID.
    """

    features: list[str]
    num_dense: int
    rows: Mapping[str, int]
    outputs: str = "scores"
    shared: frozenset[str] = frozenset()
    raw: RawValues | None = None
    any_ids: frozenset[str] = frozenset()


class Request(NamedTuple):
    """Samples as arrays: dense [B, D], and per feature ids [N] and lengths [B].

    With ``group`` [B], samples share rows: shared features (and dense, if it is shared) have R rows instead
    of B, and ``group`` names the row of each sample.
    """

    dense: Floats
    values: list[Ints]
    lengths: list[Ints]
    group: Ints | None = None

    @property
    def num_samples(self) -> int:
        """The number of samples, B."""
        return len(self.dense) if self.group is None else len(self.group)


class Pieces:
    """The pieces of a request with too many samples for one batch.

    Args:
        request: the whole request.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        num = request.num_samples
        self._ends = [
            np.concatenate([np.zeros(1, np.int64), lengths_B.cumsum()])
            if request.group is None or len(lengths_B) == num
            else None
            for lengths_B in request.lengths
        ]

    def __call__(self, start: int, stop: int) -> Request:
        """Return the samples in ``[start, stop)``, with all shared values."""
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
        is_shared = whole.group is not None and len(whole.dense) != num
        group = None if whole.group is None else whole.group[rows]
        return Request(whole.dense if is_shared else whole.dense[rows], values, lengths, group)


def checked(
    signature: Signature,
    dense: Floats | None,
    values: Mapping[str, Ints],
    lengths: Mapping[str, Ints],
    *,
    shared: Set[str] = frozenset(),
    num_samples: int | None = None,
) -> Request:
    """Check the arrays of a request, and put them in the model's order.

    Args:
        signature: the model's signature.
        dense: [B, D]; None is allowed for a model without dense columns.
        values, lengths: per feature ids [N] and lengths [B].
        shared: features (or "dense") that are given once for all samples: one length, one row.
        num_samples: B, if it does not follow from the arrays.

    Raises:
        RequestError: the model cannot score it; the message names the feature, the sample and the id.
    """
    for what, given in (("values", values), ("lengths", lengths)):
        for feature in signature.features:
            if feature not in given:
                raise RequestError(
                    f"feature {feature!r} has no {what}. Give them, empty where there are none."
                )
    own = [feature for feature in signature.features if feature not in shared]
    if dense is None and signature.num_dense:
        raise RequestError(f"the dense values are missing. Give {signature.num_dense} for each sample.")
    if num_samples is None:
        if dense is not None and DENSE not in shared:
            num_samples = len(dense) if dense.ndim else 0
        else:
            num_samples = len(lengths[own[0]]) if own and lengths[own[0]].ndim else 0
    num_rows = 1 if DENSE in shared else num_samples
    if dense is None:
        dense = np.zeros((num_rows, 0), np.float32)
    _check_dense(dense, num_rows, signature.num_dense)
    _check_lengths(own, num_samples, values, lengths)
    _check_lengths([feature for feature in signature.features if feature in shared], 1, values, lengths)
    values_F = [values[feature] for feature in signature.features]
    lengths_F = [lengths[feature] for feature in signature.features]
    _check_ids(signature, values_F, lengths_F)
    if not shared:
        return Request(dense, values_F, lengths_F)
    # The model takes what it shares once, or else all of it sample by sample.
    kept = signature.shared if signature.shared and signature.shared <= shared else frozenset[str]()
    repeated = [f for f, feature in enumerate(signature.features) if feature in shared - kept]
    num_repeated = sum(len(values_F[f]) + 1 for f in repeated) + (DENSE in shared - kept) * dense.shape[1]
    if num_repeated * num_samples > _MOST_REPEATED:
        raise RequestError(
            f"what is shared has too many ids to repeat them for {num_samples} samples. Send fewer samples, "
            "or export the model with these features as shared ones.",
            413,
        )
    for f in repeated:
        values_F[f] = np.tile(values_F[f], num_samples)
        lengths_F[f] = np.repeat(lengths_F[f], num_samples)
    if DENSE in shared - kept:
        dense = np.repeat(dense, num_samples, axis=0)
    group = np.zeros(num_samples, np.int64) if kept else None
    return Request(dense, values_F, lengths_F, group)


def _check_dense(dense: Floats, num_rows: int, num_dense: int) -> None:
    """Raise RequestError unless the values are finite numbers [num_rows, num_dense]."""
    if dense.shape != (num_rows, num_dense):
        raise RequestError(
            f"dense must be of shape [{num_rows}, {num_dense}], a row for each sample, or 1 where samples "
            f"share it, got {list(dense.shape)}."
        )
    finite = np.isfinite(dense)
    if not finite.all():
        sample, column = (int(each[0]) for each in np.nonzero(~finite))
        raise RequestError(
            f"dense value {column} of sample {sample} is {dense[sample, column]}; it must be a finite number."
        )


def joined(requests: Sequence[Request]) -> Request:
    """Join requests into one that has the samples of all."""
    if len(requests) == 1:
        return requests[0]
    features = range(len(requests[0].values))
    return Request(
        np.concatenate([request.dense for request in requests]),
        [np.concatenate([request.values[f] for request in requests]) for f in features],
        [np.concatenate([request.lengths[f] for request in requests]) for f in features],
        _joined_groups(requests),
    )


def _joined_groups(requests: Sequence[Request]) -> Ints | None:
    """Join the groups of requests. Each sample of a request without a group gets a row of its own."""
    if all(request.group is None for request in requests):
        return None
    groups, num_rows = [], 0
    for request in requests:
        own = np.arange(request.num_samples) if request.group is None else request.group
        groups.append(own + num_rows)
        num_rows += request.num_samples if request.group is None else 1
    return np.concatenate(groups)


def _check_lengths(
    features: Sequence[str], num_samples: int, values: Mapping[str, Ints], lengths: Mapping[str, Ints]
) -> None:
    for feature in features:
        own = lengths[feature]
        if own.ndim != 1 or len(own) != num_samples:
            raise RequestError(
                f"feature {feature!r}: lengths of shape {list(own.shape)} for {num_samples} samples; "
                "give one for each sample."
            )
    if not features:
        return
    lengths_FB = np.stack([lengths[feature] for feature in features])
    if lengths_FB.size and lengths_FB.min() < 0:
        f, sample = (int(each[0]) for each in np.nonzero(lengths_FB < 0))
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
    chosen = [place for place, feature in enumerate(signature.features) if feature not in signature.any_ids]
    if not chosen:
        return
    features = [signature.features[place] for place in chosen]
    values_F, lengths_F = ([given[place] for place in chosen] for given in (values_F, lengths_F))
    most = np.iinfo(np.int64).max
    limits = np.repeat(
        [signature.rows.get(feature, most) for feature in features], [len(v) for v in values_F]
    )
    ids = np.concatenate(values_F)
    # A number below 0 is a large one without its sign; so one comparison finds both.
    wrong = ids.view(np.uint64) >= limits.view(np.uint64)
    if not wrong.any():
        return
    place = int(wrong.argmax())
    for feature, values, lengths in zip(features, values_F, lengths_F, strict=True):
        if place < len(values):
            sample = int(np.searchsorted(lengths.cumsum(), place, side="right"))
            rows = signature.rows.get(feature, most)
            raise RequestError(
                f"feature {feature!r}: id {values[place]} of sample {sample} is outside [0, {rows}). "
                "Give ids that were there in training."
            )
        place -= len(values)


def as_array(data: Any, dtype: "np.dtype[Any]", what: str) -> NDArray[Any]:
    """Return numbers of JSON, nested or not, as an array of ``dtype``.

    Raises:
        RequestError: a value is not a number, or does not fit the type.
    """
    # The types come first: numpy takes true for 1, and one long text beside numbers for room for as many.
    types = _types_in(data, what)
    kind = "numbers" if dtype.kind == "f" else "whole numbers that fit 64 bits"
    if types - ({int, float} if dtype.kind == "f" else {int}):
        raise RequestError(f"{what} must be {kind}, got {shown(data)}.")
    try:
        array = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise RequestError(
            f"{what} must be numbers in a regular shape, got lists of several lengths."
        ) from error
    if array.size == 0 and array.dtype == np.float64:
        return array.astype(dtype)
    if array.dtype.kind not in ("iuf" if dtype.kind == "f" else "i"):
        raise RequestError(f"{what} must be {kind}, got {shown(data)}.")
    with np.errstate(over="ignore"):
        result: NDArray[Any] = array.astype(dtype)
    if dtype.kind == "i" and dtype.itemsize < 8 and not np.array_equal(result, array):
        raise RequestError(f"{what} must fit {dtype}, got {shown(data)}.")
    return result


def _types_in(data: Any, what: str) -> set[type]:
    """Return the types of the values in nested lists."""
    found: set[type] = set()
    level = [data]
    for _ in range(_MOST_DEEP):
        types = set(map(type, level))
        found |= types
        if list not in types:
            return found - {list}
        lists = [each for each in level if type(each) is list]
        level = list(itertools.chain.from_iterable(lists))
    raise RequestError(f"{what} is nested more than {_MOST_DEEP} lists deep. Send flat lists.")


def shown(value: Any) -> str:
    """Return the beginning of a value for a message, without formatting the rest."""
    return _SHORT.repr(value)
