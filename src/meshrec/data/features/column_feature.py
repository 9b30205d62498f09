"""Functions shared by numeric and ID features: column kinds, fitting, and JSON."""

from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any, Protocol, get_args

import pyarrow as pa

from meshrec.data.features.values import DatePartName, Kind, TimeUnit


class UnfittedError(ValueError):
    """Use of a feature before it was fitted."""


class OfColumn(Protocol):
    """Protocol of features that read a single column."""

    @property
    def name(self) -> str:
        """Feature name."""

    @property
    def source(self) -> str:
        """Column name."""

    @property
    def found(self) -> Kind | None:
        """Column kind when the feature was fitted."""

    @property
    def is_fitted(self) -> bool:
        """Whether the feature is fitted, or needs no fitting."""


def wrong_kind(
    feature: OfColumn, allowed: tuple[Kind, ...], kinds: Mapping[str, Kind], *, part: str | None = None
) -> str | None:
    """Return an error message for a column with the wrong kind, or None.

    A feature reading a ``part`` of times accepts text; parsing reports invalid times.

    Args:
        feature: the feature.
        allowed: allowed kinds.
        kinds: kind by column.
        part: time part to read, or None.
    """
    kind = kinds[feature.source]
    if part is not None and kind == "text" and feature.found in (None, "text", "time"):
        return None
    if part is not None and (kind, feature.found) == ("time", "text"):
        return None
    is_same = kind == feature.found or {kind, feature.found} in (
        {"integer", "number"},
        {"list of integer", "list of number"},
    )
    if feature.found is not None and not is_same:
        return changed_kind(feature.source, kind, feature.found, feature.name)
    if kind not in allowed:
        return f"column {feature.source!r} holds {kind}; feature {feature.name!r} takes {', '.join(allowed)}"
    return None


def changed_kind(column: str, kind: Kind, fitted: Kind, feature: str) -> str:
    """Return the error message for a column whose kind differs from the fitted kind.

    Args:
        column: column name.
        kind: present kind.
        fitted: fitted kind.
        feature: feature name.
    """
    return (
        f"column {column!r} holds {kind}, and held {fitted} when feature {feature!r} was fitted. Give it "
        "as it was, or fit and train again"
    )


def check_time(name: str, part: str | None, unit: str) -> None:
    """Raise ValueError for an unknown time part or unit.

    Args:
        name: feature name.
        part: time part, or None.
        unit: integer time unit.
    """
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
    """Return the feature as plain JSON types, without default values."""
    saved: dict[str, Any] = {"type": type(feature).__name__}
    for field in fields(feature):
        value = getattr(feature, field.name)
        if isinstance(value, pa.Array):
            values = value.to_pylist()
            saved[field.name] = [int(item) if isinstance(item, Decimal) else item for item in values]
        elif value != field.default:
            saved[field.name] = list(value) if isinstance(value, tuple) else value
    return saved


def from_json(saved: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    """Create a feature from `to_json` output.

    Raises:
        ValueError: unknown feature type.
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
