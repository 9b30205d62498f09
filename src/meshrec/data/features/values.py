"""Conversion of Arrow columns for features: to flattened lists, numbers, hashes, times and time parts."""

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
"""Kind of the values in a column, regardless of width and memory layout.

"number" is a float, or a decimal with a scale above 0. "text" includes binary values. "time" is a date, a
timestamp or a time of day. "other" cannot be read.
"""
DatePartName = Literal["year", "month", "day", "weekday", "hour", "minute", "days"]
"""Part of a time in UTC. "days" is the number of days since 1970."""
TimeUnit = Literal["s", "ms", "us", "ns"]
"""Unit of a time since 1970 that is stored as a number."""

DATE_PARTS: dict[str, int] = {
    "year": 0,
    "month": 12,
    "day": 31,
    "weekday": 7,
    "hour": 24,
    "minute": 60,
}
"""Number of different values of a time part, which are counted from 0; 0: unlimited (years)."""

_ENDS: dict[TimeUnit, float] = {"s": 9e12, "ms": 9e15, "us": 9e18, "ns": 9e18}
"""Limit of times per unit: larger ones exceed int64 in microseconds (or nanoseconds, for "ns")."""


class Values(NamedTuple):
    """Values for n samples, concatenated. Sample i has ``array[offsets[i] : offsets[i + 1]]``."""

    array: Any
    """Arrow array with the N values for all samples."""
    offsets: Ints
    """Start per sample, and the end of the last sample, int64 [n + 1]."""

    def where(self, mask: Bools) -> "Values":
        """Return the same samples with only the values that a mask [N] selects."""
        before = np.zeros(len(mask) + 1, np.int64)
        np.cumsum(mask, out=before[1:])
        return Values(self.array.filter(pa.array(mask)), before[self.offsets])

    def samples_without(self, mask: Bools) -> Bools:
        """Return a mask [n] for the samples without any value selected by a mask [N]."""
        before = np.concatenate([[0], np.cumsum(mask)])
        good: Bools = before[self.offsets[1:]] == before[self.offsets[:-1]]
        return good

    def lists(self) -> Any:
        """Return an Arrow list array with a list of values per sample."""
        return pa.LargeListArray.from_arrays(self.offsets, self.array)


def kind_of(kind: pa.DataType) -> Kind:
    """Return the kind for values with this Arrow type."""
    kind = plain_type(kind)
    if pa.types.is_dictionary(kind):
        return kind_of(kind.value_type)
    if is_list(kind):
        inner = kind_of(kind.value_type)
        return f"list of {inner}" if inner in ("integer", "number", "text") else "other"  # type: ignore[return-value]
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "integer"
    # Decimals without digits after the point are whole numbers.
    if pa.types.is_decimal(kind) and kind.scale <= 0:
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "number"
    if is_text(kind):
        return "text"
    times = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_time)
    return "time" if any(check(kind) for check in times) else "other"


def array_of(values: Sequence[Any]) -> Any:
    """Create an Arrow array from Python values. Integers beyond int64 give an array of uint64 or decimals."""
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
    """Convert an Arrow array or chunked array to a single array with a `plain` type."""
    chunks = plain(chunks)
    if not isinstance(chunks, pa.ChunkedArray):
        return chunks
    # Arrow would copy a single chunk.
    return chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()


def values_of(chunks: Any) -> Values:
    """Return a column's values, with lists flattened. A null list is an empty list."""
    array = whole(chunks)
    if not is_list(array.type):
        return Values(array, np.arange(len(array) + 1, dtype=np.int64))
    if array.null_count:
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
        # A slice of a longer array starts later.
        offsets -= offsets[0]
    return Values(array.flatten(), offsets)


def converted(array: Any, kind: Kind) -> Any:
    """Convert numbers to integers, or integers to floats, if the fitted column kind requires it.

    For example, files may have floats in an integer column with nulls. Other arrays are returned unchanged.

    Args:
        array: values of a column, an Arrow array. For lists, the flattened values.
        kind: column kind when the feature was fitted.

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
    """Convert decimals or floats to integers if all are integral, otherwise to floats with 0.0 for -0.0.

    After the conversion, equal numbers from columns with different types are equal. Other arrays are returned
    unchanged.
    """
    values = decoded(array)
    if kind_of(array.type) != "number" and not pa.types.is_decimal(values.type):
        return array
    try:
        return as_integers(values)
    except ValueError:
        return pc.add(values.cast(pa.float64()), 0.0)


def is_whole(array: Any) -> bool:
    """Return whether all numbers in an Arrow array are integral, and floats fit 64-bit integers."""
    try:
        as_integers(decoded(array))
    except ValueError:
        return False
    return True


def split_values_of(chunks: Any, separator: str) -> Values:
    """Split the strings of a column into values, without surrounding blanks and without empty values."""
    parts, offsets = values_of(pc.split_pattern(_strings(whole(chunks)), separator))
    parts = pc.utf8_trim_whitespace(parts)
    return Values(parts, offsets).where(pc.not_equal(parts, "").to_numpy(zero_copy_only=False))


def hashes_of(array: Any) -> UInt64s:
    """Return the hash per value of an Arrow array, uint64 [n].

    Equal numbers have equal hashes for all integer widths, and equal strings for all string types:

    - Integers, and decimals without a scale: `mix` of the number.
    - Dates and times: `mix` of the microseconds since 1970 in UTC, or since midnight.
    - Strings and binaries: `hash_bytes` of the bytes, in UTF-8.
    - Other numbers: `mix` of the float64 bits.

    Null and NaN have the hash of 0 or of the empty string.

    Example::

        import pyarrow as pa

        assert hashes_of(pa.array([7], pa.int8())) == hashes_of(pa.array([7], pa.int64()))
    """
    return hashes_and_missing(array)[0]


def hashes_and_missing(array: Any) -> tuple[UInt64s, Bools | None]:
    """Return the hash per value, uint64 [n], and the mask for missing values, bool [n].

    Missing values are null, NaN and the empty string. The mask is None if there are none.
    """
    array = plain(array)
    if pa.types.is_dictionary(array.type):
        return _by_dictionary(array)
    if is_text(array.type):
        lengths, hashes = hash_bytes(array)
        missing = lengths == 0
        return hashes, missing if missing.any() else None
    return mix(integers_of(array).view(np.uint64)), is_missing(array)


def _by_dictionary(array: Any) -> tuple[UInt64s, Bools | None]:
    """Return hashes and mask of a dictionary array, see `hashes_and_missing`.

    Every dictionary value is hashed once. A dictionary with more than twice as many values as the array has
    rows would cost more than it saves: then every row is decoded and hashed.
    """
    if len(array.dictionary) > 2 * len(array):
        return hashes_and_missing(array.dictionary_decode())
    index = array.indices
    # Null points behind the dictionary, where the hash for null is appended.
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
    """Map the values in an Arrow array to integers, for hashing or as keys: int64 [n].

    An integer is mapped to itself, a time to microseconds, and a float to the float64 bits, with 0.0 for
    -0.0. A decimal without a scale is mapped to the integer, or to a hash if it exceeds 64 bits. Null and NaN
    give 0.
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
    """Return the mask of null, NaN and the empty string in an Arrow array, [n]; None if there are none."""
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
    """Convert numbers or times to float64 [n], with NaN for null.

    Args:
        array: numbers, times, or times as text: an Arrow array or chunked array.
        part: part of the times to return, in UTC. None: numbers as they are, and times in seconds since 1970.
        unit: unit for numeric times; used only with ``part``.
        time_format: strptime format for times as text; None: ISO 8601.
    """
    array = decoded(whole(array))
    if part is None and not pa.types.is_temporal(array.type) and not is_text(array.type):
        return array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    times = _times(array, unit, time_format)
    if part is None:
        return times.cast(pa.int64()).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / 1e6  # type: ignore[no-any-return]
    return _part(times, part).cast(pa.float64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def microseconds_of(array: Any, unit: TimeUnit, time_format: str | None = None) -> Ints:
    """Convert times to microseconds since 1970 in UTC, int64 [n].

    Args:
        array: numbers, times, or times as text, without null: an Arrow array or chunked array.
        unit: unit for numeric times. Fractions of the unit count, down to microseconds.
        time_format: strptime format for times as text; None: ISO 8601.

    Raises:
        DataError: a string is not a time, or a number is NaN or too large.
    """
    array = decoded(whole(array))
    times = _times(array, unit, time_format).cast(pa.int64())
    if times.null_count:
        at = int(times.is_null().to_numpy(zero_copy_only=False).argmax())
        raise DataError(f"{array[at].as_py()!r} is no time in {unit}. Give the unit of the times")
    return times.to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def parse_times(strings: Any, time_format: str | None = None) -> Any:
    """Parse strings as Arrow timestamps in microseconds, in UTC. Null and empty strings become null.

    Digits beyond microseconds are truncated.

    Args:
        strings: an Arrow array with strings or binaries.
        time_format: strptime format; None: ISO 8601.

    Raises:
        DataError: a string is not a time.
    """
    # Arrow parses at most six digits of a second's fraction, the microseconds.
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
    # Arrow requires a time zone in all strings for the first type, and in no string for the second.
    for kind in (pa.timestamp("us", "UTC"), pa.timestamp("us")):
        try:
            return strings.cast(kind).cast(pa.timestamp("us"))
        except pa.ArrowInvalid as error:
            reasons.append(error)
    raise DataError(
        f"texts are no times: {reasons[-1]}. Write them as 2024-05-01 12:30:00, all or none with a zone"
    ) from reasons[-1]


def is_utf8(array: Any) -> bool:
    """Return whether all strings or binaries in an Arrow array are UTF-8."""
    try:
        decoded(array).cast(pa.large_string())
    except pa.ArrowInvalid:
        return False
    return True


def are_times(strings: Any) -> bool:
    """Return whether all strings in an Arrow array, except empty ones, are ISO 8601 dates or times."""
    strings = decoded(whole(strings))
    try:
        # Arrow also parses years and months as dates, but such strings are usually other codes.
        is_date = pc.match_substring_regex(strings, r"^\s*([0-9]{4}-[0-9]{2}-[0-9]{2}.*)?$")
        if not pc.all(is_date).as_py():
            return False
        parse_times(strings)
    except (DataError, pa.ArrowInvalid):  # other strings, or bytes that are not text
        return False
    return True


def parts_of(array: Any, part: DatePartName, unit: TimeUnit, time_format: str | None = None) -> Any:
    """Return a part of the times in a column, in UTC, as an int64 Arrow array; null for null or NaN.

    Months, days and weekdays are counted from 0: January, the first day of a month, and Monday are 0.

    Args:
        array: numbers, times, or times as text: an Arrow array or chunked array.
        part: part to return.
        unit: unit for numeric times.
        time_format: strptime format for times as text; None: ISO 8601.
    """
    return _part(_times(decoded(whole(array)), unit, time_format), part)


def _times(array: Any, unit: TimeUnit, time_format: str | None = None) -> Any:
    """Convert numbers, times, or times as text to Arrow timestamps in microseconds, without a time zone.

    Null, NaN, infinity and times beyond the limit of int64 become null.
    """
    if is_text(array.type):
        return parse_times(array, time_format)
    if pa.types.is_timestamp(array.type):
        # They may exceed int64 in microseconds. As integers, they are compared with the limit below.
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
    """Convert numbers in a time unit to microseconds, rounded down, as an int64 Arrow array."""
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
    """Return a part of Arrow timestamps, counted from 0; see `parts_of`."""
    # A difference, because Arrow has no function for the days since 1970.
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
