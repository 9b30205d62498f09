"""Writing of scores as JSON in parts, so that other clients do not wait."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from meshrec.serve.requests import Floats

JSON_ANSWER = {"Content-Type": "application/json"}
_AT_ONCE = 4096
"""Numbers that are written at a time, in about 2 ms; then others have their turn."""


async def with_numbers(said: Mapping[str, Any], name: str, numbers: Floats) -> bytes:
    """Return a JSON object with ``numbers`` as its last value, nested as the array is.

    Args:
        said: the other values of the object.
        name: the name of the numbers.
        numbers: scores [B], or vectors [B, V].
    """
    parts = []
    rows = max(1, _AT_ONCE // max(1, numbers[:1].size))
    for start in range(0, len(numbers), rows):
        if start:
            await asyncio.sleep(0)
        parts.append(json.dumps(numbers[start : start + rows].tolist())[1:-1])
    head = json.dumps(said)[:-1] + (", " if said else "")
    return f"{head}{json.dumps(name)}: [{', '.join(parts)}]}}".encode()
