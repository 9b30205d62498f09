"""Serialize scores as JSON in parts, so that other clients do not wait."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from meshrec.serve.requests import Floats

JSON_ANSWER = {"Content-Type": "application/json"}
_AT_ONCE = 4096
"""Numbers serialized at a time, in about 2 ms."""


async def json_with_array(fields: Mapping[str, Any], name: str, array: Floats) -> bytes:
    """Return a JSON object with an array, nested as in numpy, as the last value.

    Args:
        fields: other values of the object.
        name: key of the array.
        array: scores [B] or vectors [B, V].
    """
    parts = []
    rows = max(1, _AT_ONCE // max(1, array[:1].size))
    for start in range(0, len(array), rows):
        if start:
            await asyncio.sleep(0)
        parts.append(json.dumps(array[start : start + rows].tolist())[1:-1])
    head = json.dumps(fields)[:-1] + (", " if fields else "")
    return f"{head}{json.dumps(name)}: [{', '.join(parts)}]}}".encode()
