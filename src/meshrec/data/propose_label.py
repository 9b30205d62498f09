"""Proposal of how a column is learned as a label: as binary, as a number, or as classes."""

import re
from dataclasses import replace
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from meshrec.data.features import Label
from meshrec.data.features.values import floats_of
from meshrec.data.profile import Profile

Task = Literal["binary", "number", "classes"]
"""How a model learns the label."""
_MAX_CLASSES = 200
"""Maximum label classes."""
_NEGATION = re.compile(r"(?i)\s*(no|not|non|none|never|without|false|negative)\b")
"""Start of a string that is the negative class, of two. If neither string matches, the negative class is the
first in alphabetic order.
"""


def label_of(
    profile: Profile, name: str, task: Task | None, *, skip_unlabelled: bool = False
) -> tuple[Label, str]:
    """Choose how a column is learned as a label.

    Args:
        profile: table statistics.
        name: label column.
        task: how the label is learned; None: inferred from the values.
        skip_unlabelled: whether rows without a label are omitted; otherwise they are an error.

    Returns:
        The label, and the reason for the user.

    Raises:
        ValueError: the values do not fit the task, or are missing.
    """
    column = profile.columns[name]
    if column.num_missing == column.num_rows:
        raise ValueError(f"--label {name}: no row has one. Name another column.")
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
            "--skip-unlabelled of `meshrec inspect` leaves them out, and counts them; or drop them."
        )
    label, reason = _label_of_values(profile, name, task)
    if column.num_missing:
        label = replace(label, missing="skip")
        reason += f"; {column.num_missing:,} rows without a label are left out"
    return label, reason


def _label_of_values(profile: Profile, name: str, task: Task | None) -> tuple[Label, str]:
    """Return the label for a column's values, and the reason; see `label_of` for the arguments."""
    column = profile.columns[name]
    if column.distinct < 2:
        raise ValueError(f"--label {name}: all rows have one class or value. Name another column.")
    if column.kind == "text" or task == "classes":
        return _of_classes(profile, name, task)
    values = floats_of(profile.sample[name], None, "s")
    values = values[np.isfinite(values)]
    if task == "number":
        return Label(column=name, kind="number"), f"a number from {column.low:g} to {column.high:g}"
    # All values are in [0, 1]: probabilities, or 0 and 1.
    is_share = column.low is not None and column.high is not None and column.low >= 0 and column.high <= 1
    if is_share and (column.distinct > 2 or (column.low, column.high) == (0, 1)):
        return Label(column=name), f"binary: {values.mean():.1%} of the rows have 1"
    # Of at most about 500 thresholds, take the one with the most even classes.
    distinct = np.unique(values)[1:]
    shares = np.array([(values >= x).mean() for x in distinct[:: max(1, len(distinct) // 256)]])
    best = float(distinct[:: max(1, len(distinct) // 256)][np.abs(shares - 0.5).argmin()])
    share = (values >= best).mean()
    values_text = f"{len(distinct) + 1} values from {column.low:g} to {column.high:g}"
    reason = f"{values_text}: 1 from {best:g} on ({share:.1%} of the rows)"
    return Label(column=name, positive_from=best), reason


def _of_classes(profile: Profile, name: str, task: Task | None) -> tuple[Label, str]:
    """Return a binary label for two values, or a class label for more, and the reason.

    See `label_of` for the arguments.
    """
    column, counts = profile.columns[name], profile.labels
    values = [] if counts is None else [_recipe_value(value) for value in counts.values.to_pylist()]
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
    # A negation sorts first: False is less than True.
    negative, positive = sorted(values, key=lambda value: (_NEGATION.match(value) is None, value))
    num_rows = counts.counts.to_numpy()
    share = num_rows[values.index(positive)] / num_rows.sum()
    reason = f"binary: {positive!r} is positive ({share:.1%} of the rows), {negative!r} negative"
    return Label(column=name, classes=(negative, positive)), reason


def _recipe_value(value: Any) -> Any:
    """Convert a label value to a type that a recipe (training options, written as YAML) can contain.

    Bytes become strings, and decimals become floats. The hash, by which labels compare values, is the same.
    """
    if isinstance(value, bytes):
        return value.decode()
    return float(value) if isinstance(value, Decimal) else value
