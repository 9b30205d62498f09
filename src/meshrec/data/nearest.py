"""Suggestions for mistyped names."""

import difflib
from collections.abc import Iterable

from meshrec.data.faults import DataError


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to a mistyped ``word``; None without a similar name."""
    # Compared without case, but suggested with it.
    lower = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.7)
    return lower[matches[0]] if matches else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `` Did you mean NAME?``, the end of an error message; empty if no name is similar to it."""
    name = nearest(word, names)
    return "" if name is None else f" Did you mean {name}?"


def missing_column(location: str, name: str, names: Iterable[str]) -> DataError:
    """Create the error for a missing column; the message suggests a similar name.

    Args:
        location: file or table with the missing column.
        name: missing column.
        names: all columns of the file or table.
    """
    return DataError(
        f"{location}: there is no column {name!r} among {list(names)}.{did_you_mean(name, names)}"
    )
