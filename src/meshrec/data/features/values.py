"""Arrow column conversion for features: plain values, lists, numbers, date parts."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.exact_columns import (
    as_integers,
    decimal_integers,
    decimal_words,
    is_list,
    plain,
    plain_type,
)
from meshrec.data.faults import DataError
from meshrec.data.hashing import UInt64s, hash_bytes, mix
from meshrec.data.samples import Bools, Ints

Kind = Literal[
    "number", "integer", "text", "time", "list of integer", "list of number", "list of text", "other"
]
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
"""Number of values per part, from 0; 0: unlimited (years)."""

_ENDS: dict[TimeUnit, float] = {"s": 9e12, "ms": 9e15, "us": 9e18, "ns": 9e18}
"""Larger times exceed int64 in microseconds or nanoseconds."""


class Values(NamedTuple):
    """Concatenated values; sample i has those in ``[offsets[i], offsets[i + 1])``."""

    array: Any
    offsets: Ints

    def where(self, mask: Bools) -> "Values":
        """Return the values selected by a mask, for the same samples."""
        before = np.zeros(len(mask) + 1, np.int64)
        np.cumsum(mask, out=before[1:])
        return Values(self.array.filter(pa.array(mask)), before[self.offsets])

    def samples_without(self, mask: Bools) -> Bools:
        """Return which samples have none of the values selected by a mask."""
        before = np.concatenate([[0], np.cumsum(mask)])
        good: Bools = before[self.offsets[1:]] == before[self.offsets[:-1]]
        return good

    def lists(self) -> Any:
        """Return an Arrow array with a list of values per sample."""
        return pa.LargeListArray.from_arrays(self.offsets, self.array)


def kind_of(kind: pa.DataType) -> Kind:
    """Return the value kind of an Arrow type, regardless of width and layout."""
    kind = plain_type(kind)
    if pa.types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if is_list(kind):
        inner = kind_of(kind.value_type)
        return f"list of {inner}" if inner in ("integer", "number", "text") else "other"  # type: ignore[return-value]
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "integer"
    if pa.types.is_decimal(kind) and kind.scale <= 0:
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if is_text(kind):
        return "text"
    times = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_time)
    return "time" if any(check(kind) for check in times) else "other"


def array_of(values: Sequence[Any]) -> Any:
    """Create an Arrow array from Python values; integers beyond int64 become uint64 or decimals."""
    integers = [value for value in values if isinstance(value, int)]
    low, high = min(integers, default=0), max(integers, default=0)
    if low >= -(1 << 63) and high < 1 << 63:
        return plain(pa.array(values))
    kind = pa.uint64() if low >= 0 and high < 1 << 64 else pa.decimal256(76, 0)
    return pa.array(values, kind)


def is_text(kind: pa.DataType) -> bool:
    """Return whether a type is a string or binary type."""
    text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(check(kind) for check in text)


def decoded(array: Any) -> Any:
    """Decode a dictionary array; return others unchanged."""
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _strings(array: Any) -> Any:
    """Decode a dictionary array, and convert binaries to strings; ArrowInvalid if they are not UTF-8."""
    array = decoded(array)
    is_binary = pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
    return array.cast(pa.large_string()) if is_binary else array


def whole(chunks: Any) -> Any:
    """Combine chunks into a single `plain` array."""
    chunks = plain(chunks)
    return chunks.combine_chunks() if isinstance(chunks, pa.ChunkedArray) else chunks


def values_of(chunks: Any) -> Values:
    """Return a column's values, with lists flattened; null lists are empty."""
    array = whole(chunks)
    if not is_list(array.type):
        return Values(array, np.arange(len(array) + 1, dtype=np.int64))
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Values(array.flatten(), offsets)


def converted(array: Any, kind: Kind) -> Any:
    """Convert integral numbers to integers, or integers to numbers, if ``kind`` requires it.

    An integer column is a float column in files where it has nulls. Other arrays are returned unchanged. For
    lists, ``array`` holds the flattened values.

    Raises:
        ValueError: numbers are not integral, or too large for exact floats.
    """
    target = kind.removeprefix("list of ")
    if {kind_of(array.type), target} != {"integer", "number"}:
        return array
    array = decoded(array)
    try:
        return as_integers(array) if target == "integer" else array.cast(pa.float64())
    except ValueError as error:  # ArrowInvalid is one
        raise ValueError(f"numbers that are no {target}s as they were fitted: {error}") from error


def one_number(array: Any) -> Any:
    """Convert integral decimals and floats to integers, other numbers to floats without negative zero."""
    values = decoded(array)
    if kind_of(array.type) != "number" and not pa.types.is_decimal(values.type):
        return array
    try:
        return as_integers(values)
    except ValueError:
        return pc.add(values.cast(pa.float64()), 0.0)


def is_whole(array: Any) -> bool:
    """Return whether all numbers are 64-bit integers, or decimals without fractions."""
    try:
        as_integers(decoded(array))
    except ValueError:
        return False
    return True


def split_values_of(chunks: Any, separator: str) -> Values:
    """Split a column's strings into values, stripped and without empty ones."""
    parts, offsets = values_of(pc.split_pattern(_strings(whole(chunks)), separator))
    parts = pc.utf8_trim_whitespace(parts)
    return Values(parts, offsets).where(pc.not_equal(parts, "").to_numpy(zero_copy_only=False))


def hashes_of(array: Any) -> UInt64s:
    """Return 64-bit hashes: equal for equal numbers of any width, and for equal strings.

    Integers, and decimals without a scale: `mix` of the number. Dates and times: `mix` of microseconds since
    1970, UTC, or since midnight. Strings and binaries: `hash_bytes` of UTF-8. Other numbers: `mix` of the
    float64 bits. Nulls and NaN hash like 0 or the empty string.

    Example::

        import pyarrow as pa

        assert hashes_of(pa.array([7], pa.int8())) == hashes_of(pa.array([7], pa.int64()))
    """
    return hashes_and_missing(array)[0]


def hashes_and_missing(array: Any) -> tuple[UInt64s, Bools | None]:
    """Return `hashes_of` the array, and a mask of nulls, NaN and empty strings; None if there are none."""
    array = plain(array)
    if pa.types.is_dictionary(array.type):
        return _by_dictionary(array)
    if is_text(array.type):
        lengths, hashes = hash_bytes(array)
        missing = lengths == 0
        return hashes, missing if missing.any() else None
    return mix(integers_of(array).view(np.uint64)), is_missing(array)


def _by_dictionary(array: Any) -> tuple[UInt64s, Bools | None]:
    """Hash every dictionary value once, unless most of them are unused."""
    if len(array.dictionary) > 2 * len(array):
        return hashes_and_missing(array.dictionary_decode())
    index = array.indices
    if index.null_count:
        index = pc.fill_null(index, len(array.dictionary))
    positions = index.to_numpy(zero_copy_only=False)
    null = hashes_and_missing(pa.nulls(1, array.type.value_type))[0]
    hashes, empty = hashes_and_missing(array.dictionary)
    hashes_by_row: UInt64s = np.concatenate([hashes, null])[positions]
    missing = positions == len(hashes) if array.null_count else None
    if empty is not None:
        flags = np.concatenate([empty, [True]])[positions]
        missing = flags if flags.any() else None
    return hashes_by_row, missing


def integers_of(array: Any) -> Ints:
    """Return int64: integers, times in microseconds, float bits (-0.0 as 0.0); 0 for null and NaN.

    Integral decimals beyond 64 bits become a hash.
    """
    array = plain(array)
    kind = array.type
    if pa.types.is_decimal(kind) and kind.scale <= 0:
        return decimal_integers(array)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        floats = array.cast(pa.float64()).to_numpy(zero_copy_only=False) + 0.0  # null has become NaN
        return np.where(np.isnan(floats), 0.0, floats).view(np.int64)
    if pa.types.is_temporal(kind):  # a common unit, because files may differ
        whole_times = pa.time64("us") if pa.types.is_time(kind) else pa.timestamp("us")
        array = array.cast(whole_times, safe=False).cast(pa.int64())
    elif pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    filled = pc.fill_null(array, 0) if array.null_count else array
    return filled.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)  # type: ignore[no-any-return]


def is_missing(array: Any) -> Bools | None:
    """Return a mask of nulls, NaN and empty strings; None if there are none."""
    array = plain(array)
    text = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    values = decoded(array)
    if is_text(text):
        empty = pc.fill_null(pc.equal(pc.binary_length(values), 0), True)
    elif values.null_count or pa.types.is_floating(text):
        empty = values.is_null(nan_is_null=True)
    else:
        return None
    missing: Bools = empty.to_numpy(zero_copy_only=False)
    return missing if missing.any() else None


def floats_of(
    array: Any, part: DatePartName | None, unit: TimeUnit, time_format: str | None = None
) -> npt.NDArray[np.float64]:
    """Return float64, NaN for null.

    Times, including ISO 8601 strings, become their ``part`` (UTC), or seconds since 1970.

    Args:
        array: numbers, times or strings.
        part: time part, or None.
        unit: integer time unit.
        time_format: strptime format for string times; None: ISO 8601.
    """
    array = decoded(whole(array))
    if part is None and not pa.types.is_temporal(array.type) and not is_text(array.type):
        return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    times = _times(array, unit, time_format)
    if part is None:
        return times.cast(pa.int64()).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / 1e6  # type: ignore[no-any-return]
    return _part(times, part).cast(pa.float64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def microseconds_of(array: Any, unit: TimeUnit, time_format: str | None = None) -> Ints:
    """Return times as microseconds since 1970, UTC.

    Fractions are used down to microseconds.

    Args:
        array: numbers, times or strings, without nulls.
        unit: unit of numbers.
        time_format: strptime format of strings; None: ISO 8601.

    Raises:
        DataError: a string is not a time, or a number is NaN or too large.
    """
    array = decoded(whole(array))
    times = _times(array, unit, time_format).cast(pa.int64())
    if times.null_count:
        at = int(times.is_null().to_numpy(zero_copy_only=False).argmax())
        raise DataError(f"{array[at].as_py()!r} is no time in {unit}. Give the unit of the times")
    return times.to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def parsed_times(strings: Any, time_format: str | None = None) -> Any:
    """Parse strings as times in microseconds, UTC; null and empty strings become null.

    Digits beyond microseconds are truncated.

    Args:
        strings: strings or binaries.
        time_format: strptime format; None: ISO 8601.

    Raises:
        DataError: a string is not a time.
    """
    strings = pc.replace_substring_regex(
        pc.utf8_trim_whitespace(_strings(strings)), r"(\.[0-9]{6})[0-9]+", r"\1"
    )
    strings = pc.if_else(pc.equal(strings, ""), None, strings)
    if time_format is not None:
        times = pc.strptime(strings, format=time_format, unit="us", error_is_null=True)
        wrong = strings.filter(pc.and_(strings.is_valid(), times.is_null()))
        if len(wrong):
            raise DataError(f"{wrong[0].as_py()!r} is not a time as {time_format!r} has it")
        return times
    reasons = []
    for kind in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        try:
            return strings.cast(kind).cast(pa.timestamp("us"))
        except pa.ArrowInvalid as error:
            reasons.append(error)
    raise DataError(
        f"texts are no times: {reasons[-1]}. Write them as 2024-05-01 12:30:00, all or none with a zone"
    ) from reasons[-1]


def is_utf8(array: Any) -> bool:
    """Return whether all strings or binaries are UTF-8."""
    try:
        decoded(array).cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def are_times(strings: Any) -> bool:
    """Return whether all non-empty strings are ISO 8601 dates or times."""
    strings = decoded(whole(strings))
    try:
        # Arrow also parses years and months as dates, but such strings are usually other codes.
        is_date = pc.match_substring_regex(strings, r"^\s*([0-9]{4}-[0-9]{2}-[0-9]{2}.*)?$")
        if not pc.all(is_date).as_py():
            return False
        parsed_times(strings)
    except (DataError, pa.ArrowInvalid):  # other strings, or bytes that are not text
        return False
    return True


def parts_of(array: Any, part: DatePartName, unit: TimeUnit, time_format: str | None = None) -> Any:
    """Return a part of dates and times (UTC) as integers from 0, null for null or NaN.

    Args:
        array: times, integers or strings.
        part: part of times.
        unit: integer time unit.
        time_format: strptime format for string times; None: ISO 8601.
    """
    return _part(_times(decoded(whole(array)), unit, time_format), part)


def _times(array: Any, unit: TimeUnit, time_format: str | None = None) -> Any:
    if is_text(array.type):
        return parsed_times(array, time_format)
    if pa.types.is_timestamp(array.type):
        if array.type.unit in ("s", "ms"):
            return _times(array.cast(pa.int64()), array.type.unit)
        return array.cast(pa.timestamp("us"))  # drop the zone: parts are in UTC
    if pa.types.is_date(array.type):
        return array.cast(pa.timestamp("us"))
    if pa.types.is_time(array.type):  # of day
        return array.cast(pa.time64("us"), safe=False).cast(pa.int64()).cast(pa.timestamp("us"))
    in_range = pc.less(pc.abs(array.cast(pa.float64(), safe=False)), _ENDS[unit])
    array = pc.if_else(in_range, array, None)  # NaN, infinite, or too large: null
    return _microseconds(array, unit).cast(pa.timestamp("us"))


def _microseconds(array: Any, unit: TimeUnit) -> Any:
    """Convert numbers in a unit to microseconds, floored, int64."""
    kind = array.type
    missing = array.is_null().to_numpy(zero_copy_only=False)
    power = {"s": 6, "ms": 3, "us": 0, "ns": -3}[unit]
    if pa.types.is_decimal(kind) and kind.scale > 0:
        # Without trailing digits, the stored integers of scale `power` are microseconds.
        scale = max(power, 0)
        if kind.scale > scale:
            array = pc.round(array, scale, "down")
        words, _ = decimal_words(array.cast(pa.decimal256(76, scale)), scaled=True)
        stored = np.ascontiguousarray(words[:, 0])
        return pa.array(stored if power >= 0 else stored // 1000, mask=missing)
    if pa.types.is_floating(kind):
        values = pc.fill_null(array.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False) * 10.0**power
        # Float64 seconds are off by up to half the float spacing: 0.3 s times 1e6 may be 299999.99999999994.
        near = np.rint(values)
        floats = np.where(np.abs(values - near) <= np.spacing(np.abs(values)), near, np.floor(values))
        return pa.array(floats.astype(np.int64), mask=missing)
    integers = integers_of(array)
    return pa.array(integers * 10**power if power >= 0 else integers // 1000, mask=missing)


def _part(times: Any, part: DatePartName) -> Any:
    if part == "days":
        return pc.days_between(pa.scalar(0, pa.int64()).cast(times.type), times)
    functions = {
        "year": pc.year,
        "month": lambda x: pc.subtract(pc.month(x), 1),
        "day": lambda x: pc.subtract(pc.day(x), 1),
        "weekday": pc.day_of_week,
        "hour": pc.hour,
        "minute": pc.minute,
    }
    return functions[part](times).cast(pa.int64())
