"""Raw values of a request: columns of the data, converted to ids and dense values as in training."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from meshrec.data.faults import REMEDY, DataError, needs
from meshrec.export.raw_values import RawValues
from meshrec.serve.requests import Request, RequestError, Signature, checked, shown

if TYPE_CHECKING:
    from pyarrow import Table

_TAKES: dict[str, tuple[str, tuple[type, ...]]] = {
    "integer": ("a whole number", (int,)),
    "number": ("a number", (int, float)),
    "text": ("a text", (str,)),
    "time": ("a time such as '2030-01-31T12:00:00'", (str, int)),
}
"""Descriptions for messages, and Python types, of the values in JSON of each kind."""


def table_of(columns: Mapping[str, Sequence[Any]], raw: RawValues, where: str = "") -> "Table":
    """Build columns of the data's types from values of JSON.

    Raises:
        RequestError: a value has another type; the message names the column and the sample.
    """
    pa = needs("pyarrow", "data")
    return pa.table(
        {name: _array(name, values, raw.columns[name], where) for name, values in columns.items()}
    )


def encoded_request(own: "Table", shared: "Table", signature: Signature) -> Request:
    """Convert raw values to a request.

    Args:
        own: the columns that each sample has, one row per sample.
        shared: one row of the columns that all samples share; it may have no columns.
        signature: the signature of a model that takes raw values.

    Raises:
        RequestError: a value would be damage in training, too.
    """
    assert signature.raw is not None
    try:
        encoded = signature.raw.encode(own, shared if shared.num_columns else None)
    except DataError as error:
        raise RequestError(f"{str(error).removesuffix(REMEDY)}. Send other values.") from error
    return checked(
        signature,
        encoded.dense,
        encoded.values,
        encoded.lengths,
        shared=encoded.shared,
        num_samples=own.num_rows,
    )


def _array(name: str, values: Sequence[Any], kind: Any, where: str) -> Any:
    pa = needs("pyarrow", "data")
    if not pa.types.is_list(kind):
        return _flat(name, values, kind, lambda at: f"{where}sample {at}")
    lengths, flat = [0], []
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, list):
            raise RequestError(
                f"column {name!r} of {where}sample {number} must be a list, got {shown(value)}."
            )
        flat += value or []
        lengths.append(len(flat))
    sample_of = [number for number, value in enumerate(values) for _ in value or []]
    inner = _flat(name, flat, kind.value_type, lambda at: f"{where}sample {sample_of[at]}")
    return pa.ListArray.from_arrays(pa.array(lengths, pa.int32()), inner)


def _flat(name: str, values: Sequence[Any], kind: Any, sample: Any) -> Any:
    from meshrec.data.features.values import kind_of

    pa = needs("pyarrow", "data")
    words, types = _TAKES.get(kind_of(kind), ("of a known kind", ()))
    for at, value in enumerate(values):
        # JSON's true is no number, except where the data has true and false.
        is_boolean = isinstance(value, bool)
        is_whole = isinstance(value, float) and value.is_integer() and types == (int,)
        wrong = not pa.types.is_boolean(kind) if is_boolean else not (isinstance(value, types) or is_whole)
        if value is not None and wrong:
            raise RequestError(f"column {name!r} of {sample(at)} must be {words}, got {shown(value)}.")
    try:
        if kind_of(kind) == "time" and any(isinstance(value, str) for value in values):
            return _times(values, kind)
        if pa.types.is_boolean(kind):  # tensors have 0 and 1
            return pa.array([{0: False, 1: True}.get(value, value) for value in values], kind)
        if pa.types.is_decimal(kind):  # tensors have NaN for null
            known = [None if value is None or value != value else repr(value) for value in values]
            return pa.array([None if text is None else Decimal(text) for text in known], kind)
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise RequestError(f"column {name!r} must fit {kind}: {error}. Send other values.") from error


def _times(values: Sequence[Any], kind: Any) -> Any:
    """Parse texts as times. An empty text is null, since tensors have no other null."""
    pa = needs("pyarrow", "data")
    texts = [None if value == "" else value for value in values]
    if pa.types.is_time(kind):  # of a day, which Arrow does not cast from texts
        texts = [None if text is None else f"1970-01-01T{text}" for text in texts]
        return pa.array(texts, pa.string()).cast(pa.timestamp(kind.unit)).cast(kind)
    return pa.array(texts, pa.string()).cast(kind)
