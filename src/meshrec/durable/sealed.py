"""Sealed JSON: objects with a checksum over their other fields. Also functions to validate JSON values."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from meshrec.durable.files import DamageError

# Part of the file format.
SEAL = "crc32"
"""Name of the field with the checksum."""
_MAX_INT64 = (1 << 63) - 1
_SURROGATE = re.compile(rb"\\u[dD]")


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Serialize an object as JSON, with an additional field: a CRC-32 over all other fields.

    Args:
        fields: fields with JSON values.

    Example::

        content = sealed({"step": 3})
        assert unsealed(content, "state.json", required=True) == {"step": 3}
    """
    return (json.dumps({**fields, SEAL: _checksum(fields)}, indent=1) + "\n").encode()


def unsealed(content: bytes, name: str, *, required: bool) -> dict[str, Any]:
    """Parse the output of `sealed`, verify the checksum, and return the other fields.

    Args:
        content: JSON bytes.
        name: file name in messages.
        required: whether a missing checksum is an error. Files from earlier releases have none.

    Raises:
        DamageError: the JSON is invalid, or the checksum is wrong or missing.
    """
    fields = parse_json(content, name)
    if not isinstance(fields, dict):
        raise DamageError(f"{name} is not a JSON object")
    seal = fields.pop(SEAL, None)
    # A missing checksum may also mean damage, so files written by this release must have one.
    if seal is None and required:
        raise DamageError(f"{name} has no checksum of itself ({SEAL!r})")
    if seal is not None and seal != _checksum(fields):
        raise DamageError(f"{name} does not have the checksum that it was written with")
    return fields


def parse_json(content: bytes, name: str) -> Any:
    """Parse JSON. Unlike ``json.loads``, refuse duplicate names in objects and unpaired surrogates.

    Raises:
        DamageError: ``content`` is invalid JSON, nested too deeply, or has a duplicate name or an unpaired
            surrogate.
    """
    try:
        value = json.loads(content, object_pairs_hook=_object_of_pairs)
        # Only escapes can encode surrogates, so the slow check is rarely needed.
        if _SURROGATE.search(content):
            # An unpaired surrogate such as "\ud800" is valid JSON, but fails when written as UTF-8.
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{name} is not JSON ({error})") from error


def check_integer(value: Any, name: str, low: int = 0, high: int = _MAX_INT64) -> int:
    """Check that a JSON value is an integer in ``[low, high]``, and return it.

    Args:
        value: value to check.
        name: field name in messages.
        low: minimum.
        high: maximum.

    Raises:
        DamageError: ``value`` is out of range or not an integer. A bool does not count as an integer.
    """
    # isinstance would accept True and False.
    if type(value) is not int or not low <= value <= high:
        raise DamageError(f"{name} is {_shortened(value)}; a whole number in [{low}, {high}] was expected")
    return value


def check_string(value: Any, name: str, *, allowed: Sequence[str] | None = None) -> str:
    """Check that a JSON value is a string, and if ``allowed`` is given, an allowed string. Return the string.

    Args:
        value: value to check.
        name: field name in messages.
        allowed: allowed strings; None: any.

    Raises:
        DamageError: ``value`` is not a string, or not an allowed string.
    """
    if not isinstance(value, str) or (allowed is not None and value not in allowed):
        expected = "text" if allowed is None else f"one of {list(allowed)}"
        raise DamageError(f"{name} is {_shortened(value)}; {expected} was expected")
    return value


def check_list(value: Any, name: str, length: int | None = None) -> list[Any]:
    """Check that a JSON value is a list, with the given length unless ``length`` is None. Return the list.

    Args:
        value: value to check.
        name: field name in messages.
        length: required length; None: any.

    Raises:
        DamageError: ``value`` is not a list, or has another length.
    """
    if not isinstance(value, list) or (length is not None and len(value) != length):
        expected = "a list" if length is None else f"a list of {length}"
        raise DamageError(f"{name} is {_shortened(value)}; {expected} was expected")
    return value


def check_names(value: Any, name: str) -> list[str]:
    """Check that a JSON value is a list of distinct strings, and return it. Raises DamageError otherwise."""
    strings = [check_string(item, f"a part of {name}") for item in check_list(value, name)]
    # The lists hold names, so a repeated string is an error.
    if len(set(strings)) != len(strings):
        raise DamageError(f"{name} names something twice: {_shortened(strings)}")
    return strings


def check_integers(value: Any, name: str, length: int | None = None) -> tuple[int, ...]:
    """Check that a JSON value is a list of nonnegative int64 integers, and return them as a tuple.

    Args:
        value: value to check.
        name: field name in messages.
        length: required length; None: any.

    Raises:
        DamageError: ``value`` is not such a list, or has another length.
    """
    return tuple(check_integer(item, f"a part of {name}") for item in check_list(value, name, length))


def check_fields(value: Any, name: str, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Check that a JSON value is an object with all required and no unknown fields, and return it.

    Args:
        value: value to check.
        name: field name in messages.
        names: required fields.
        optional: optional fields.

    Raises:
        DamageError: ``value`` is not an object, a required field is missing, or a field is unknown.
    """
    if not isinstance(value, dict):
        raise DamageError(f"{name} is {_shortened(value)}; an object was expected")
    missing = [name for name in names if name not in value]
    unknown = [name for name in value if name not in names and name not in optional]
    if missing or unknown:
        raise DamageError(f"{name} lacks {_shortened(missing)} and has the unknown {_shortened(unknown)}")
    return value


def check_object(value: Any, name: str) -> dict[str, Any]:
    """Check that a JSON value is an object, with any fields, and return it. Raises DamageError otherwise."""
    if not isinstance(value, dict):
        raise DamageError(f"{name} is {_shortened(value)}; an object was expected")
    return value


def _checksum(fields: Mapping[str, Any]) -> int:
    """Return a CRC-32 over an object, independent of field order and formatting."""
    # Canonical JSON, so the checksum is still valid after a user reformats the file.
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def _object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from (name, value) pairs, for ``json.loads``. Raise ValueError for a duplicate name."""
    mapping = dict(pairs)
    # json.loads itself would silently take the last value.
    if len(mapping) != len(pairs):
        raise ValueError("an object has a name twice, and each must be there once")
    return mapping


def _shortened(value: Any) -> str:
    """Return the ``repr`` of a value for messages, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
