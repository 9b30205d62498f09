"""JSON objects that carry a checksum of themselves, and checks of what they say."""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from meshrec.durable.files import DamageError

SEAL = "crc32"
"""The field that holds the checksum."""
_LARGEST = (1 << 63) - 1
_SURROGATE = re.compile(rb"\\u[dD]")


def sealed(said: Mapping[str, Any]) -> bytes:
    """Write an object as JSON with one more field, the checksum of the others."""
    return (json.dumps({**said, SEAL: _checksum(said)}, indent=1) + "\n").encode()


def unsealed(content: bytes, what: str, *, required: bool) -> dict[str, Any]:
    """Read what `sealed` wrote.

    Args:
        content: the JSON.
        what: how errors call it.
        required: whether the checksum must be there; files of earlier releases have none.

    Raises:
        DamageError: for anything else, and for another checksum.
    """
    said = parse(content, what)
    if not isinstance(said, dict):
        raise DamageError(f"{what} is not a JSON object")
    seal = said.pop(SEAL, None)
    if seal is None and required:
        raise DamageError(f"{what} has no checksum of itself ({SEAL!r})")
    if seal is not None and seal != _checksum(said):
        raise DamageError(f"{what} does not have the checksum that it was written with")
    return said


def parse(content: bytes, what: str) -> Any:
    """Parse JSON in which every name of an object occurs once, and every text can be written as UTF-8.

    Raises:
        DamageError: for anything else.
    """
    try:
        found = json.loads(content, object_pairs_hook=_unique)
        if _SURROGATE.search(content):
            # Half of a pair, such as "\ud800" alone, is JSON, but would fail where the text is written.
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{what} is not JSON ({error})") from error


def integer(value: Any, what: str, low: int = 0, high: int = _LARGEST) -> int:
    """Check that a value is a whole number in ``[low, high]``, and return it."""
    if type(value) is not int or not low <= value <= high:
        raise DamageError(f"{what} is {_short(value)}; a whole number in [{low}, {high}] was expected")
    return value


def text(value: Any, what: str, *, allowed: Sequence[str] | None = None) -> str:
    """Check that a value is text, one of those ``allowed``, and return it."""
    if not isinstance(value, str) or (allowed is not None and value not in allowed):
        expected = "text" if allowed is None else f"one of {list(allowed)}"
        raise DamageError(f"{what} is {_short(value)}; {expected} was expected")
    return value


def items(value: Any, what: str, length: int | None = None) -> list[Any]:
    """Check that a value is a list, of this length, and return it."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        expected = "a list" if length is None else f"a list of {length}"
        raise DamageError(f"{what} is {_short(value)}; {expected} was expected")
    return value


def texts(value: Any, what: str) -> list[str]:
    """Check that a value is a list of texts that all differ, and return it."""
    found = [text(each, f"a part of {what}") for each in items(value, what)]
    if len(set(found)) != len(found):
        raise DamageError(f"{what} names something twice: {_short(found)}")
    return found


def integers(value: Any, what: str, length: int | None = None) -> tuple[int, ...]:
    """Check that a value is a list of whole numbers from 0 on, and return them."""
    return tuple(integer(each, f"a part of {what}") for each in items(value, what, length))


def fields(value: Any, what: str, names: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """Check that a value is an object with these fields and no others, and return it."""
    if not isinstance(value, dict):
        raise DamageError(f"{what} is {_short(value)}; an object was expected")
    missing = [name for name in names if name not in value]
    unknown = [name for name in value if name not in names and name not in optional]
    if missing or unknown:
        raise DamageError(f"{what} lacks {_short(missing)} and has the unknown {_short(unknown)}")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """Check that a value is an object, and return it."""
    if not isinstance(value, dict):
        raise DamageError(f"{what} is {_short(value)}; an object was expected")
    return value


def _checksum(said: Mapping[str, Any]) -> int:
    """Return a CRC-32 of the object that does not depend on spaces or the order of fields."""
    return zlib.crc32(json.dumps(said, sort_keys=True, separators=(",", ":")).encode())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice, and each must be there once")
    return found


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 80 else f"{said[:77]}..."
