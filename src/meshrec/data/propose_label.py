"""Proposed label type: binary, numeric, or classes."""

import re
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from meshrec.data.features import Label
from meshrec.data.features.values import floats_of
from meshrec.data.profile import Profile

Task = Literal["binary", "number", "classes"]
"""Label type, as learned by a model."""
_MAX_CLASSES = 200
_NEGATION = re.compile(r"(?i)\s*(no|not|non|none|never|without|false|negative)\b")
"""Strings that are the negative one of two. If neither matches, the first in alphabetic order is."""


def label_of(
    profile: Profile, name: str, task: Task | None, *, skip_unlabelled: bool = False
) -> tuple[Label, str]:
    """Choose the label type for a column.

    Args:
        profile: column statistics.
        name: label column.
        task: label type; None: inferred from values.
        skip_unlabelled: omit rows without a label.

    Returns:
        The label, and the reason.

    Raises:
        ValueError: the column does not support this type.
    """
    column = profile.columns[name]
    if column.kind not in ("integer", "number", "text"):
        raise ValueError(
            f"--label {name}: it holds {column.kind}, and labels are numbers, booleans or texts. "
            "Make one of it."
        )
    if column.kind == "text" and task == "number":
        raise ValueError(
            f"--label {name} with --task number: it holds text, such as {column.examples[:2]}. Leave --task "
            "out, or make numbers of it."
        )
    if column.num_missing and not skip_unlabelled:
        raise ValueError(
            f"--label {name}: {column.num_missing:,} of {column.num_rows:,} rows have none. "
            "--skip-unlabelled leaves them out, and counts them."
        )
    label, reason = _label_of_values(profile, name, task)
    if column.num_missing:
        label = replace(label, missing="skip")
        reason += f"; {column.num_missing:,} rows without a label are left out"
    return label, reason


def _label_of_values(profile: Profile, name: str, task: Task | None) -> tuple[Label, str]:
    column = profile.columns[name]
    if column.distinct < 2:
        raise ValueError(f"--label {name}: all rows have one class or value. Name another column.")
    if column.kind == "text" or task == "classes":
        return _of_classes(profile, name, task)
    values = floats_of(profile.sample[name], None, "s")
    values = values[np.isfinite(values)]
    if task == "number":
        return Label(column=name, kind="number"), f"a number from {column.low:g} to {column.high:g}"
    is_share = column.low is not None and column.high is not None and column.low >= 0 and column.high <= 1
    if is_share and (column.distinct > 2 or (column.low, column.high) == (0, 1)):
        return Label(column=name), f"binary: {values.mean():.1%} of the rows have 1"
    distinct = np.unique(values)[1:]
    shares = np.array([(values >= x).mean() for x in distinct[:: max(1, len(distinct) // 256)]])
    best = float(distinct[:: max(1, len(distinct) // 256)][np.abs(shares - 0.5).argmin()])
    share = (values >= best).mean()
    values_text = f"{len(distinct) + 1} values from {column.low:g} to {column.high:g}"
    reason = f"{values_text}: 1 from {best:g} on ({share:.1%} of the rows)"
    return Label(column=name, positive_from=best), reason


def _of_classes(profile: Profile, name: str, task: Task | None) -> tuple[Label, str]:
    """Return a binary label for two strings, and a class label for more."""
    column, counts = profile.columns[name], profile.labels
    values = [] if counts is None else [_plain(value) for value in counts.values.to_pylist()]
    if task == "binary" and len(values) != 2:
        raise ValueError(
            f"--label {name} with --task binary: it has {column.distinct:,} values, such as "
            f"{column.examples[:3]}, and a binary label has two. Leave --task out for a model of classes, or "
            "make two values of them."
        )
    if counts is None or len(values) > _MAX_CLASSES:
        raise ValueError(
            f"--label {name}: it has {column.distinct:,} classes; a model learns 2 to {_MAX_CLASSES}. "
            "Name another column, or make groups of its values."
        )
    if len(values) > 2 or task == "classes":
        classes = tuple(sorted(values))
        return Label(column=name, kind="class", classes=classes), f"one of {len(classes)} classes"
    negative, positive = sorted(values, key=lambda value: (_NEGATION.match(value) is None, value))
    num_rows = counts.counts.to_numpy()
    share = num_rows[values.index(positive)] / num_rows.sum()
    reason = f"binary: {positive!r} is positive ({share:.1%} of the rows), {negative!r} negative"
    return Label(column=name, classes=(negative, positive)), reason


def _plain(value: Any) -> Any:
    """Return a label as a recipe contains it: bytes as text, decimals as floats. Their hashes are equal."""
    if isinstance(value, bytes):
        return value.decode()
    return float(value) if isinstance(value, Decimal) else value
