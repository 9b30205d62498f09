"""Python source of recipes that a command writes."""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from meshrec.data.locations import is_address


def seen_from(folder: Path, data: str) -> str:
    """Write a relative path to data as the recipe in ``folder`` needs it."""
    if is_address(data) or Path(data).is_absolute():
        return data
    return os.path.relpath(data, folder)


def call_of(value: Any) -> str:
    """Return the call that makes a dataclass, with the fields that differ from their defaults."""
    words = [
        f"{each.name}={text_of(getattr(value, each.name))}"
        for each in fields(value)
        if getattr(value, each.name) != each.default
    ]
    return f"{type(value).__name__}({', '.join(words)})"


def text_of(value: Any) -> str:
    """Return a value as Python source, with double quotes, as formatters want them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))}{',' if len(value) == 1 else ''})"
    return repr(value)


def in_a_line(name: str) -> str:
    """Return a column's name for a comment, escaped where a line break would end the comment."""
    return name if name.isprintable() else repr(name)
