"""Arrow columns in the forms that features need: plain values, rows, numbers, parts of dates."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.faults import DataError
from meshrec.data.hashing import UInt64s, hash_bytes, mix
from meshrec.data.samples import Bools, Ints

Kind = Literal["number", "integer", "text", "time", "list of integer", "list of text", "other"]
DatePartName = Literal["year", "month", "day", "weekday", "hour", "minute", "days"]
TimeUnit = Literal["s", "ms", "us", "ns"]

DATE_PARTS: dict[str, int] = {
    "year": 0,
    "month": 12,
    "day": 31,
    "weekday": 7,
    "hour": 24,
    "minute": 60,
}
"""Number of values of each part, counted from 0; years have no limit, written as 0."""

_ENDS: dict[TimeUnit, float] = {"s": 9e12, "ms": 9e15, "us": 9e18, "ns": 9e18}
"""Times from here on have more microseconds, or nanoseconds, than an int64 holds."""


class Values(NamedTuple):
    """The values of samples one after another: of sample i those in ``[offsets[i], offsets[i + 1])``."""

    array: Any
    offsets: Ints


def kind_of(kind: pa.DataType) -> Kind:
    """Return the kind of values of an Arrow type, whatever their width."""
    if pa.types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if is_list(kind):
        inner = kind_of(kind.value_type)
        return {"integer": "list of integer", "text": "list of text"}.get(inner, "other")  # type: ignore[return-value]
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if is_text(kind):
        return "text"
    return "time" if pa.types.is_temporal(kind) and not pa.types.is_duration(kind) else "other"


def array_of(values: Sequence[Any]) -> Any:
    """Make an Arrow array of Python values; integers beyond int64 give one of uint64."""
    large = any(isinstance(each, int) and each >= 1 << 63 for each in values)
    return pa.array(values, pa.uint64() if large else None)


def is_list(kind: pa.DataType) -> bool:
    """Return whether the type is a list of variable or fixed size."""
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(each(kind) for each in lists)


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is a string or binary type."""
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(each(kind) for each in text)


def _decoded(array: Any) -> Any:
    """Return the plain values of an array that may be kept as a dictionary."""
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def whole(chunks: Any) -> Any:
    """Return one array instead of chunks."""
    return chunks.combine_chunks() if isinstance(chunks, pa.ChunkedArray) else chunks


def values_of(chunks: Any) -> Values:
    """Return a column's values, lists laid flat; null lists are empty."""
    array = whole(chunks)
    if not is_list(array.type):
        return Values(array, np.arange(len(array) + 1, dtype=np.int64))
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Values(array.flatten(), offsets)


def converted(array: Any, kind: Kind) -> Any:
    """Convert whole numbers to integers, or integers to numbers, if ``kind`` asks for it.

    A column of integers is a float column in files where it has nulls. Other arrays stay as they are.

    Raises:
        ValueError: numbers are not whole, or too large for exact floats.
    """
    have = kind_of(array.type)
    if {have, kind} != {"integer", "number"}:
        return array
    array = _decoded(array)
    if kind == "integer" and pa.types.is_floating(array.type):
        array = pc.if_else(pc.is_nan(array), None, array)
    try:
        return array.cast(pa.int64() if kind == "integer" else pa.float64())
    except pa.ArrowInvalid as error:
        raise ValueError(f"numbers that are no {kind}s as they were fitted: {error}") from error


def split_values_of(chunks: Any, separator: str) -> Values:
    """Split a column's texts into values, without spaces around them and without empty ones."""
    array = _decoded(whole(chunks))
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        array = array.cast(pa.large_string())
    parts, offsets = values_of(pc.split_pattern(array, separator))
    parts = pc.utf8_trim_whitespace(parts)
    filled = pc.not_equal(parts, "")
    before = np.zeros(len(parts) + 1, np.int64)
    np.cumsum(filled.to_numpy(zero_copy_only=False), out=before[1:])
    return Values(parts.filter(filled), before[offsets])


def hashes_of(array: Any) -> UInt64s:
    """Return 64 bits for each value: equal for equal numbers of any width, and for equal texts.

    Of integers: `mix` of the number. Of dates and times: `mix` of the microseconds since 1970, UTC, or since
    midnight. Of texts and binaries: `hash_bytes` of their UTF-8. Of other numbers: `mix` of the bits of the
    float64. Nulls, and NaN as well, have the hash of 0 or of the empty text.
    """
    return hashes_and_missing(array)[0]


def hashes_and_missing(array: Any) -> tuple[UInt64s, Bools | None]:
    """Return `hashes_of` the array, and a mask of nulls, NaN and empty texts; None if there are none."""
    if pa.types.is_dictionary(array.type):
        return _by_dictionary(array)
    if is_text(array.type):
        lengths, hashes = hash_bytes(array)
        missing = lengths == 0
        return hashes, missing if missing.any() else None
    return mix(integers_of(array).view(np.uint64)), is_missing(array)


def _by_dictionary(array: Any) -> tuple[UInt64s, Bools | None]:
    """Hash each value of the dictionary once, unless few of them are used."""
    if len(array.dictionary) > 2 * len(array):
        return hashes_and_missing(array.dictionary_decode())
    index = array.indices
    if index.null_count:
        index = pc.fill_null(index, len(array.dictionary))
    at = index.to_numpy(zero_copy_only=False)
    null = hashes_and_missing(pa.nulls(1, array.type.value_type))[0]
    hashes, empty = hashes_and_missing(array.dictionary)
    found: UInt64s = np.concatenate([hashes, null])[at]
    missing = at == len(hashes) if array.null_count else None
    if empty is not None:
        flags = np.concatenate([empty, [True]])[at]
        missing = flags if flags.any() else None
    return found, missing


def integers_of(array: Any) -> Ints:
    """Return int64: integers, times in microseconds, the bits of floats (-0.0 as 0.0); 0 for null and NaN."""
    kind = array.type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        floats = array.cast(pa.float64()).to_numpy(zero_copy_only=False) + 0.0  # null has become NaN
        return np.where(np.isnan(floats), 0.0, floats).view(np.int64)
    if pa.types.is_temporal(kind):  # whatever its unit, so that files may differ in it
        whole_times = pa.time64("us") if pa.types.is_time(kind) else pa.timestamp("us")
        array = array.cast(whole_times, safe=False).cast(pa.int64())
    elif pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    filled = pc.fill_null(array, 0) if array.null_count else array
    return filled.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)  # type: ignore[no-any-return]


def is_missing(array: Any) -> Bools | None:
    """Return where values are null, NaN or empty texts; None if none is."""
    text = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    plain = _decoded(array)
    if is_text(text):
        empty = pc.fill_null(pc.equal(pc.binary_length(plain), 0), True)
    elif plain.null_count or pa.types.is_floating(text):
        empty = plain.is_null(nan_is_null=True)
    else:
        return None
    missing: Bools = empty.to_numpy(zero_copy_only=False)
    return missing if missing.any() else None


def numbers_of(array: Any, part: DatePartName | None, unit: TimeUnit) -> npt.NDArray[np.float64]:
    """Return float64, NaN for null. Times become their ``part`` (UTC), or the seconds since 1970."""
    array = _decoded(whole(array))
    if part is None and not pa.types.is_temporal(array.type):
        return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    times = _times(array, unit)
    if part is None:
        return times.cast(pa.int64()).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / 1e6  # type: ignore[no-any-return]
    return _part(times, part).cast(pa.float64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def microseconds_of(array: Any, unit: TimeUnit) -> Ints:
    """Return times as microseconds since 1970, UTC. Texts are dates or times as ISO 8601 writes them.

    Args:
        array: numbers, times or texts, without nulls.
        unit: the unit of numbers.

    Raises:
        DataError: a text is no time, or a number is NaN or too large.
    """
    array = _decoded(whole(array))
    if is_text(array.type):
        array = _parsed_times(array)
    times = _times(array, unit).cast(pa.int64())
    if times.null_count:
        at = int(times.is_null().to_numpy(zero_copy_only=False).argmax())
        raise DataError(f"{array[at].as_py()!r} is no time in {unit}. Give the unit of the times")
    return times.to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def _parsed_times(texts: Any) -> Any:
    for kind in (pa.timestamp("us"), pa.timestamp("us", "UTC")):
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid as error:
            why = error
    raise DataError(f"texts are no times: {why}. Write them as 2024-05-01 12:30:00, or with a zone") from why


def parts_of(array: Any, part: DatePartName, unit: TimeUnit) -> Any:
    """Return a part of dates and times (UTC) as integers from 0, null where null or NaN."""
    return _part(_times(_decoded(whole(array)), unit), part)


def _times(array: Any, unit: TimeUnit) -> Any:
    if pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("us"), safe=False)  # without a zone: parts are of UTC
    if pa.types.is_date(array.type):
        return array.cast(pa.timestamp("us"))
    if pa.types.is_time(array.type):  # of day
        return array.cast(pa.time64("us"), safe=False).cast(pa.int64()).cast(pa.timestamp("us"))
    if pa.types.is_floating(array.type):
        array = pc.floor(array.cast(pa.float64()))
    known = pc.less(pc.abs(array.cast(pa.float64(), safe=False)), _ENDS[unit])
    array = pc.if_else(known, array, None)  # NaN, infinite, or too large: no time
    return array.cast(pa.int64(), safe=False).cast(pa.timestamp(unit)).cast(pa.timestamp("us"), safe=False)


def _part(times: Any, part: DatePartName) -> Any:
    if part == "days":
        return pc.days_between(pa.scalar(0, pa.int64()).cast(times.type), times)
    functions = {
        "year": pc.year,
        "month": lambda each: pc.subtract(pc.month(each), 1),
        "day": lambda each: pc.subtract(pc.day(each), 1),
        "weekday": pc.day_of_week,
        "hour": pc.hour,
        "minute": pc.minute,
    }
    return functions[part](times).cast(pa.int64())
