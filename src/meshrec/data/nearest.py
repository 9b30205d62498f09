"""Suggestions for mistyped names."""

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that a mistyped ``word`` most likely stands for; None where no name is near."""
    lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.7)
    return lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `` Did you mean NAME?`` with the nearest name, or nothing."""
    found = nearest(word, names)
    return "" if found is None else f" Did you mean {found}?"
