"""Functions for features of numbers and of IDs alike: the kind of a column, fitting, and JSON."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol, get_args

import pyarrow as pa

from meshrec.data.features.values import DatePartName, Kind, TimeUnit


class UnfittedError(ValueError):
    """A feature that must be fitted on data was used before it was."""


class OfColumn(Protocol):
    """Base class of features that read one column."""

    @property
    def name(self) -> str:
        """The name of the feature."""

    @property
    def source(self) -> str:
        """The name of its column."""

    @property
    def found(self) -> Kind | None:
        """The kind of values that the column held when it was fitted."""

    @property
    def is_fitted(self) -> bool:
        """Whether the feature is fitted, or needs no fitting."""


def wrong_kind(feature: OfColumn, allowed: tuple[Kind, ...], kinds: Mapping[str, Kind]) -> str | None:
    """Return what is wrong with the kind of its column, if anything is."""
    kind = kinds[feature.source]
    is_same = kind == feature.found or {kind, feature.found} == {"integer", "number"}
    if feature.found is not None and not is_same:
        return changed_kind(feature.source, kind, feature.found, feature.name)
    if kind not in allowed:
        return f"column {feature.source!r} holds {kind}; feature {feature.name!r} takes {', '.join(allowed)}"
    return None


def changed_kind(column: str, kind: Kind, found: Kind, feature: str) -> str:
    """Return the error of a column whose kind is not the one of the fit."""
    return (
        f"column {column!r} holds {kind}, and held {found} when feature {feature!r} was fitted. Give it "
        "as it was, or fit and train again"
    )


def check_time(name: str, part: str | None, unit: str) -> None:
    """Raise ValueError for an unknown part or unit of times."""
    parts, units = get_args(DatePartName), get_args(TimeUnit)
    if (part is not None and part not in parts) or unit not in units:
        raise ValueError(
            f"feature {name!r}: part is one of {list(parts)} and unit one of {list(units)}, got "
            f"{part!r:.100} and {unit!r:.100}."
        )


def need_fitted(feature: OfColumn) -> None:
    """Raise UnfittedError if the feature must be fitted first."""
    if not feature.is_fitted:
        raise UnfittedError(
            f"feature {feature.name!r} is not fitted yet: Features.fit(...) on the training data comes "
            "first; `meshrec train` does it, and saves the result in the run's folder."
        )


def to_json(feature: Any) -> dict[str, Any]:
    """Return the feature as plain JSON types, without values that are defaults."""
    found: dict[str, Any] = {"type": type(feature).__name__}
    for each in fields(feature):
        value = getattr(feature, each.name)
        if isinstance(value, pa.Array):
            found[each.name] = value.to_pylist()
        elif value != each.default:
            found[each.name] = list(value) if isinstance(value, tuple) else value
    return found


def from_json(saved: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    """Make a feature from what `to_json` gave.

    Raises:
        ValueError: it is of none of the ``kinds``.
    """
    kind = kinds.get(saved.get("type", ""))
    if kind is None:
        raise ValueError(
            f"there is no feature of type {saved.get('type')!r:.100}; take one of {sorted(kinds)}."
        )
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in saved.items()
            if name != "type"
        }
    )
