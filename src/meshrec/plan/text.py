"""JSON files that users write or name."""

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path, wanted: str) -> dict[str, Any]:
    """The object in a JSON file. ValueError says that ``wanted`` was to be there."""
    try:
        values = json.loads(Path(path).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}. Give {wanted}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a JSON {type(values).__name__}, no object. Give {wanted}.")
    return values


def size_text(num_bytes: float) -> str:
    """``1.58 GiB``, ``24.70 MiB``, ``1.00 KiB`` or ``12 B``: with the unit that fits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:.0f} B"
