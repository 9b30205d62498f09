"""Conversion of Arrow columns to a few types.

[Note: exact columns]

Programs that write data use different Arrow types for the same value. For example, an ID may be an int64, a
decimal128(38, 0), or a double in a column with nulls. There are two conversions:

- `plain` merges types that differ only in memory layout, such as string and string view. It depends on the
  type only. File readers, frame readers and features apply it first.
- `as_integers` converts decimals and floats to integers. It depends on the values: they must be integral.

``docs/guides/column-types.md`` lists types and kinds.
"""

import functools
from typing import Any

import numpy as np

from meshrec.data.arrow import pa, pc
from meshrec.data.hashing import UInt64s, mix
from meshrec.data.samples import Bools, Ints

_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), np.uint8).reshape(256, 2)
"""The two hexadecimal digits of every byte, as ASCII codes, [256, 2]."""
# Binary values of this width become UUID strings, with dashes.
_UUID_BYTES = 16
_UUID_DIGITS = np.array([at for at in range(36) if at not in (8, 13, 18, 23)])
"""Positions of the 32 digits in a UUID string, without dashes."""


def is_list(kind: "pa.DataType") -> bool:
    """Return whether a type is a list, in any Arrow list layout."""
    lists = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(check(kind) for check in lists)


@functools.lru_cache(maxsize=1024)  # many checks, for each column of each table
def plain_type(kind: "pa.DataType") -> "pa.DataType":
    """Return the type to which `plain` converts a column with the type ``kind``."""
    if isinstance(kind, pa.BaseExtensionType):
        if kind.extension_name == "arrow.opaque":
            return kind  # an opaque type's storage does not define its values
        return plain_type(kind.storage_type)
    if pa.types.is_dictionary(kind):
        inner = plain_type(kind.value_type)
        return inner if pa.types.is_nested(inner) else pa.dictionary(kind.index_type, inner, kind.ordered)
    if pa.types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if is_list(kind):
        inner = plain_type(kind.value_type)
        is_plain = inner == kind.value_type and (pa.types.is_list(kind) or pa.types.is_large_list(kind))
        return kind if is_plain else pa.large_list(inner)
    if pa.types.is_string_view(kind) or pa.types.is_fixed_size_binary(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if str(kind).startswith(("decimal32", "decimal64")):
        return pa.decimal128(kind.precision, kind.scale)
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    return pa.time64("us") if kind == pa.time64("ns") else kind


def plain(column: Any) -> Any:
    """Convert a column to one of a few plain types; see [Note: exact columns].

    Views, run-end encoding and extension types are resolved. A fixed-size binary becomes a string with
    hexadecimal digits, in UUID notation if it has 16 bytes. Nanoseconds are floored to microseconds. A column
    that is plain already is returned unchanged.

    Args:
        column: Arrow array or chunked array.
    """
    kind = plain_type(column.type)
    if kind == column.type:
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_plain_array(chunk) for chunk in column.chunks], kind)
    return _plain_array(column)


def plain_schema(schema: "pa.Schema") -> "pa.Schema":
    """Return the schema to which `plain_table` converts a table with the given schema."""
    return pa.schema([field.with_type(plain_type(field.type)) for field in schema])


def plain_table(table: "pa.Table") -> "pa.Table":
    """Convert all columns of a table with `plain`."""
    schema = plain_schema(table.schema)
    if schema.types == table.schema.types:
        return table
    return pa.Table.from_arrays([plain(column) for column in table.columns], schema=schema)


def _plain_array(array: Any) -> Any:
    """Convert an Arrow array with `plain`."""
    kind, target = array.type, plain_type(array.type)
    if kind == target:
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_array(array.storage)
    if pa.types.is_dictionary(kind):
        values = _plain_array(array.dictionary)
        if pa.types.is_nested(target):
            return values.take(array.indices)
        return pa.DictionaryArray.from_arrays(array.indices, values, ordered=kind.ordered)
    if pa.types.is_run_end_encoded(kind):
        # A slice shares its runs with the whole array, and a row is in the first run that ends after it.
        rows = np.arange(array.offset, array.offset + len(array))
        return _plain_array(array.values).take(np.searchsorted(array.run_ends.to_numpy(), rows, side="right"))
    if is_list(kind):
        return _plain_lists(array)
    if pa.types.is_fixed_size_binary(kind):
        return _hex_strings(array)
    if pa.types.is_temporal(kind):
        integers, missing = _int64s(array)
        # From ns to µs, rounded down also before 1970.
        return pa.array(integers // 1000, mask=missing).cast(target)
    return array.cast(target)


def _int64s(array: Any) -> tuple[Ints, Bools]:
    """Return the stored 64-bit integers of a time array [n], 0 for null, and the mask of nulls [n]."""
    missing: Bools = array.is_null().to_numpy(zero_copy_only=False)
    return pc.fill_null(array.cast(pa.int64()), 0).to_numpy(zero_copy_only=False), missing


def _plain_lists(array: Any) -> Any:
    """Convert a list array of any layout to a large list array with `plain` values."""
    kind, num = array.type, len(array)
    missing = array.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(kind):
        # Fixed-size lists are stored one after the other, also null ones.
        starts = (array.offset + np.arange(num, dtype=np.int64)) * kind.list_size
        sizes = np.full(num, kind.list_size, np.int64)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = array.offsets.to_numpy().astype(np.int64)
        starts, sizes = offsets[:-1], np.diff(offsets)
    else:
        starts, sizes = (part.to_numpy().astype(np.int64) for part in (array.offsets, array.sizes))
    sizes = np.where(missing, 0, sizes)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    # Arrow's own cast of list views loses values, so gather the values by position.
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
    mask = pa.array(missing) if missing.any() else None
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), _plain_array(array.values).take(pa.array(positions)), mask=mask
    )


def _hex_strings(array: Any) -> Any:
    """Convert a fixed-size binary array to strings with hexadecimal digits, in UUID notation for 16 bytes."""
    num, width = len(array), array.type.byte_width
    data = array.buffers()[1]
    stored = np.frombuffer(b"" if data is None else data, np.uint8)
    # The buffer may start before the array, because slices share it.
    digits = _HEX[stored[array.offset * width : (array.offset + num) * width]].reshape(num, 2 * width)
    if width == _UUID_BYTES:
        texts = np.full((num, 36), ord("-"), np.uint8)
        texts[:, _UUID_DIGITS] = digits
        digits = texts
    offsets = np.arange(num + 1, dtype=np.int64) * digits.shape[1]
    buffers = (pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digits)))
    strings = pa.LargeStringArray.from_buffers(num, *buffers)
    return pc.if_else(array.is_valid(), strings, None) if array.null_count else strings


def as_integers(array: Any) -> Any:
    """Convert integral decimals or floats to integers; see [Note: exact columns].

    The type is the first that represents all values: int64, uint64, or, only for decimals, a decimal without
    a scale. NaN becomes null, and -0.0 becomes 0. Arrays of other types are returned unchanged.

    Args:
        array: Arrow array without dictionary encoding.

    Raises:
        ValueError: a number has a fraction, or a float does not fit 64 bits.
    """
    kind = array.type
    if pa.types.is_decimal(kind):
        try:
            return _narrowed(_without_scale(array))
        except pa.ArrowInvalid as error:
            raise ValueError(str(error)) from error
    if not pa.types.is_floating(kind):
        return array
    array = array.cast(pa.float64())
    array = pc.if_else(pc.is_nan(array), None, array)
    try:
        return array.cast(pa.int64())
    except pa.ArrowInvalid as error:
        try:
            # Numbers of 2**63 or more fit only into uint64.
            return array.cast(pa.uint64())
        except pa.ArrowInvalid:
            raise ValueError(str(error)) from error


def _without_scale(array: Any) -> Any:
    """Convert decimals to 128-bit or 256-bit decimals with scale 0; ArrowInvalid for a fraction."""
    kind = array.type
    wide = pa.types.is_decimal256(kind)
    if kind.scale == 0 and (wide or pa.types.is_decimal128(kind)):
        return array
    return array.cast(pa.decimal256(76, 0) if wide else pa.decimal128(38, 0))


def decimal_words(array: Any, *, scaled: bool = False) -> tuple[Ints, Bools]:
    """Return decimals as wide integers, in 64-bit words.

    Args:
        array: n decimals with 128 or 256 bits.
        scaled: whether to return the stored integers, which are the values times ``10**scale``. Otherwise
            decimals must be integral, and the values are returned.

    Returns:
        - The words of the integers in two's complement, lowest word first; int64 [n, 2] or [n, 4]; 0 for
          null.
        - Whether the lowest word alone represents the value, as int64 or uint64; bool [n].
    """
    array = array if scaled else _without_scale(array)
    num_words = array.type.byte_width // 8
    first = array.offset * num_words
    # Read the buffer directly: Arrow has no cast from decimals to words.
    words = np.frombuffer(array.buffers()[1] or b"", np.int64)[first : first + len(array) * num_words]
    words = words.reshape(len(array), num_words)
    if array.null_count:
        words = np.where(array.is_null().to_numpy(zero_copy_only=False)[:, None], 0, words)
    upper = words[:, 1:]
    # The upper words only repeat the sign (int64), or are 0 (uint64).
    is_narrow = (upper == words[:, :1] >> 63).all(1) | (upper == 0).all(1)
    return words, is_narrow


def _narrowed(array: Any) -> Any:
    """Convert decimals with scale 0 to int64 or uint64 if all values fit; otherwise return them unchanged."""
    words, _ = decimal_words(array)
    low, upper = words[:, 0], words[:, 1:]
    mask = array.is_null().to_numpy(zero_copy_only=False)
    if (upper == low[:, None] >> 63).all():
        return pa.array(low, mask=mask)
    return pa.array(low.view(np.uint64), mask=mask) if (upper == 0).all() else array


def decimal_integers(array: Any) -> Ints:
    """Return an int64 per integral decimal: the value if 64 bits can represent it, otherwise a hash.

    Values beyond int64 that fit uint64 have the same bits as in uint64. Equal values in decimal128 and
    decimal256 give equal results.
    """
    words, is_narrow = decimal_words(array)
    if is_narrow.all():
        return np.ascontiguousarray(words[:, 0])
    unsigned: UInt64s = np.ascontiguousarray(words).view(np.uint64)
    hashes = mix(mix(unsigned[:, 0]) ^ unsigned[:, 1])
    if words.shape[1] > 2:  # equal values must have equal hashes, whatever their width
        longer = (words[:, 2:] != words[:, 1:2] >> 63).any(1)
        more = mix(mix(hashes ^ unsigned[:, 2]) ^ unsigned[:, 3])
        hashes = np.where(longer, more, hashes)
    return np.where(is_narrow, words[:, 0], hashes.view(np.int64))
