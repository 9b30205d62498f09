"""Folder with fitted features. ``meshrec fit`` writes it, and training runs read it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshrec.data.faults import DataError, shown
from meshrec.data.features.features import Features
from meshrec.durable import DamageError, sealed, unsealed, write_durably

FILE = "features.json"
"""File in the folder. Vocabularies are next to it, see `meshrec.data.features.storage`."""
_FIT = "fit"
"""Field of the file: the options of the fit."""


def write_fit(fitted: Features, folder: Path, options: Mapping[str, Any]) -> None:
    """Write fitted features to a folder, which is created if it does not exist.

    Args:
        fitted: the features.
        folder: the folder. Features in it are replaced.
        options: options on which the fit depends, as JSON types; see `read_fit`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    # Sealed, because changed features would silently change every prediction.
    write_durably(path, sealed({**fitted.write_vocabularies(path), _FIT: options}))


def read_fit(folder: Path, options: Mapping[str, Any]) -> Features:
    """Read fitted features from a folder.

    Args:
        folder: folder from `write_fit`.
        options: options of the reader, which must equal those of the fit. The vocabularies of another split,
            for example, would contain values that only the reader's test rows have.

    Raises:
        DataError: the folder has no features, they are damaged, or they were fitted with other options.
    """
    path = folder / FILE
    try:
        saved = unsealed(path.read_bytes(), path.name, required=True)
    except (OSError, DamageError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Write it by: meshrec fit RECIPE --out {folder}"
        ) from error
    # As JSON has them: lists for tuples.
    before, now = saved.pop(_FIT, None), json.loads(json.dumps(dict(options)))
    if before != now:
        name, value_before, value_now = _first_difference(before, now, "fit")
        raise DataError(
            f"{path} was fitted with {name} {shown(value_before)}, and the recipe has {shown(value_now)}. "
            "Fit again, or use the recipe with which it was fitted."
        )
    return Features.from_saved(saved, path)


def _first_difference(before: Any, now: Any, name: str) -> tuple[str, Any, Any]:
    """Return the first part in which two different JSON values differ: its name, and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            if before.get(key) != now.get(key):
                return _first_difference(before.get(key), now.get(key), f"{name}.{key}")
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (item_before, item_now) in enumerate(zip(before, now, strict=True)):
            if item_before != item_now:
                return _first_difference(item_before, item_now, f"{name}.{number}")
    return name, before, now
