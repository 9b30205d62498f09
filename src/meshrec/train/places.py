"""Relative paths in a recipe, resolved from the recipe file's folder."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from meshrec.data.locations import is_address
from meshrec.train.recipe import Recipe

T = TypeVar("T")
DATA = ("train", "validation", "test", "log")
"""Data source fields with string paths; in all other fields only a ``Path`` is a path."""


def from_folder(recipe: Recipe, folder: Path) -> Recipe:
    """Resolve the recipe's relative paths to data and to a plan from ``folder``."""
    return dataclasses.replace(
        recipe, data=_moved(recipe.data, folder, texts=DATA), placement=_moved(recipe.placement, folder)
    )


def _moved(holder: T, folder: Path, *, texts: tuple[str, ...] = ()) -> T:
    if not dataclasses.is_dataclass(holder):
        return holder
    values = {each.name: getattr(holder, each.name) for each in dataclasses.fields(holder) if each.init}
    places = {name: _absolute(value, folder, text=name in texts) for name, value in values.items()}
    # Only changed fields, so that a recipe without relative paths stays the same object.
    moved = {name: place for name, place in places.items() if place is not values[name]}
    return dataclasses.replace(holder, **moved) if moved else holder  # type: ignore[type-var]


def _absolute(value: Any, folder: Path, *, text: bool) -> Any:
    """Return ``folder / value``, or ``value`` itself if it is not a relative path."""
    if isinstance(value, tuple | list):
        found = type(value)(_absolute(each, folder, text=text) for each in value)
        return value if found == value else found
    if isinstance(value, Path):
        # `Path()` is a default that means no path.
        return value if value.is_absolute() or value == Path() else folder / value
    if text and isinstance(value, str) and value and not is_address(value):
        return value if Path(value).is_absolute() else str(folder / value)
    return value
