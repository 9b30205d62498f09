"""Reading of JSON files named by users, and formatting of byte counts."""

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path, expected: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        expected: Description of a valid file, for errors, such as "a plan that `meshrec plan` wrote".

    Raises:
        ValueError: The file is not JSON, or not an object.
    """
    try:
        values = json.loads(Path(path).read_text())
    # OSError passes through: the message already names the file.
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}. Give {expected}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, no object. Give {expected}.")
    return values


def size_text(num_bytes: float) -> str:
    """Format a byte count in binary units, such as ``1.58 GiB`` or ``12 B``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:.0f} B"
