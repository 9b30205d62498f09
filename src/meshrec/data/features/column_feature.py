"""Functions for numeric features and ID features: checks of column kinds and of fitting, and JSON."""

from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from typing import Any, Protocol, get_args

import pyarrow as pa

from meshrec.data.features.values import DatePartName, Kind, TimeUnit


class UnfittedError(ValueError):
    """Error for a feature that must be fitted before its use."""


class OfColumn(Protocol):
    """Protocol with the feature attributes that the functions in this file need."""

    @property
    def name(self) -> str:
        """Feature name."""

    @property
    def source(self) -> str:
        """Column to read."""

    @property
    def found(self) -> Kind | None:
        """Kind of the column when the feature was fitted; None: not fitted."""

    @property
    def is_fitted(self) -> bool:
        """Whether the feature is fitted, or needs no fitting."""


def wrong_kind(
    feature: OfColumn, allowed: tuple[Kind, ...], kinds: Mapping[str, Kind], *, part: str | None = None
) -> str | None:
    """Return the error message if a feature cannot read its column; None if it can.

    The kind must be allowed. For a fitted feature, it must equal the fitted kind, except that integers and
    other numbers may replace each other.

    Args:
        feature: the feature.
        allowed: kinds that the feature can read.
        kinds: kind by column name.
        part: time part or time format of a feature that reads times. Such a feature also accepts times as
            text, which are checked when they are parsed. None: other features.
    """
    kind = kinds[feature.source]
    if part is not None and kind == "text" and feature.found in (None, "text", "time"):
        return None
    # Fitted on times as text, and now parsed already.
    if part is not None and (kind, feature.found) == ("time", "text"):
        return None
    # Integers with nulls may be floats in some files.
    is_same = kind == feature.found or {kind, feature.found} in (
        {"integer", "number"},
        {"list of integer", "list of number"},
    )
    if feature.found is not None and not is_same:
        return changed_kind_message(feature.source, kind, feature.found, feature.name)
    if kind not in allowed:
        return f"column {feature.source!r} holds {kind}; feature {feature.name!r} takes {', '.join(allowed)}"
    return None


def changed_kind_message(column: str, kind: Kind, fitted: Kind, feature: str) -> str:
    """Return the error message for a column with another kind than when its feature was fitted.

    Args:
        column: column name.
        kind: column kind now.
        fitted: column kind when the feature was fitted.
        feature: feature name.
    """
    return (
        f"column {column!r} holds {kind}, and held {fitted} when feature {feature!r} was fitted. Give it "
        "as it was, or fit and train again"
    )


def check_time(name: str, part: str | None, unit: str) -> None:
    """Raise ValueError for an unknown time part or time unit.

    Args:
        name: feature name, for the message.
        part: time part, such as "hour", or None.
        unit: unit for numeric times, such as "s".
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
    """Return a feature as JSON types: the type and all fields, except fields with default values."""
    saved: dict[str, Any] = {"type": type(feature).__name__}
    for field in fields(feature):
        value = getattr(feature, field.name)
        if isinstance(value, pa.Array):
            values = value.to_pylist()
            # Decimals in a vocabulary are integers, which JSON represents exactly.
            saved[field.name] = [int(item) if isinstance(item, Decimal) else item for item in values]
        elif value != field.default:
            saved[field.name] = list(value) if isinstance(value, tuple) else value
    return saved


def from_json(saved: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    """Create a feature from the result of `to_json`. Raise ValueError if its type is unknown."""
    kind = kinds.get(saved.get("type", ""))
    if kind is None:
        raise ValueError(
            f"there is no feature of type {saved.get('type')!r:.100}; take one of {sorted(kinds)}."
        )
    return kind(
        **{
            # JSON has no tuples, which frozen dataclasses need as fields.
            name: tuple(value) if isinstance(value, list) else value
            for name, value in saved.items()
            if name != "type"
        }
    )
