"""Conversion from plain JSON or YAML values to recipe field types."""

import types
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin


def value_of(hint: Any, saved: Any, where: str, *, remedy: str) -> Any:
    """Convert a plain value from `to_json` to a field's type.

    Args:
        hint: type of the field.
        saved: the plain value.
        where: field name for errors.
        remedy: advice for errors.

    Raises:
        ValueError: the value does not fit the type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for each in arguments:
            try:
                return value_of(each, saved, where, remedy=remedy)
            except ValueError:
                continue
    elif hint in (None, type(None)):
        if saved is None:
            return None
    elif origin is Literal:
        if saved in arguments:
            return saved
    elif origin in (tuple, list, Sequence) or hint in (tuple, list):
        if isinstance(saved, list):
            inner = arguments[0] if arguments else Any
            kinds = arguments if arguments and arguments[-1] is not ... else [inner] * len(saved)
            found = [
                value_of(kind, item, where, remedy=remedy) for kind, item in zip(kinds, saved, strict=False)
            ]
            return found if origin is list else tuple(found)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        return hint(saved)
    elif hint is Path:
        if isinstance(saved, str):
            return Path(saved)
    elif hint is float:
        if isinstance(saved, int | float) and not isinstance(saved, bool):
            return float(saved)
    elif hint is Any or (hint in (bool, int, str) and type(saved) is hint):
        return saved
    raise ValueError(f"{where} is {saved!r:.100}, which does not fit {hint}. {remedy}.")
