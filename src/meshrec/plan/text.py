"""JSON files that users write or name."""

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path, wanted: str) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ValueError: the file is not JSON, or not an object; the message asks for ``wanted``.
    """
    try:
        values = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}. Give {wanted}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, no object. Give {wanted}.")
    return values


def size_text(num_bytes: float) -> str:
    """Format a number of bytes with the unit that fits, such as ``1.58 GiB`` or ``12 B``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:.0f} B"
