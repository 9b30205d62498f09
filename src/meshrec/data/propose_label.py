"""Proposal of the kind of a label: 0 and 1, a number, or one of several classes."""

from typing import Literal

import numpy as np

from meshrec.data.features import Label
from meshrec.data.features.values import numbers_of
from meshrec.data.profile import Profile

Task = Literal["binary", "number", "classes"]
"""The kind of a label, as a model learns it."""
_MOST_CLASSES = 200


def label_of(profile: Profile, name: str, task: Task | None) -> tuple[Label, str]:
    """Choose the kind of label for a column; return the label and the reason.

    Raises:
        ValueError: the column cannot be that label.
    """
    column = profile.columns[name]
    if task is None and column.kind == "text":
        task = "classes"
    if column.kind not in ("integer", "number") and task != "classes":
        raise ValueError(
            f"--label {name}: it holds {column.kind}, and labels are numbers, booleans or texts. "
            "Make one of it."
        )
    if column.num_missing:
        raise ValueError(
            f"--label {name}: {column.num_missing:,} of {column.num_rows:,} rows have none. Leave them out."
        )
    if column.distinct < 2:
        raise ValueError(f"--label {name}: all rows have the same. Name another column, or give more data.")
    if task == "classes":
        return _classes(profile, name)
    values = numbers_of(profile.sample[name], None, "s")
    if task == "number":
        return Label(column=name, kind="number"), f"a number from {column.low:g} to {column.high:g}"
    if column.low is not None and column.high is not None and column.low >= 0 and column.high <= 1:
        return Label(column=name), f"binary: {values.mean():.1%} of the rows have 1"
    distinct = np.unique(values)[1:]
    shares = np.array([(values >= each).mean() for each in distinct[:: max(1, len(distinct) // 256)]])
    best = float(distinct[:: max(1, len(distinct) // 256)][np.abs(shares - 0.5).argmin()])
    share = (values >= best).mean()
    values_text = f"{len(distinct) + 1} values from {column.low:g} to {column.high:g}"
    why = f"{values_text}: 1 from {best:g} on ({share:.1%} of the rows)"
    return Label(column=name, positive_from=best), why


def _classes(profile: Profile, name: str) -> tuple[Label, str]:
    found = profile.sample[name].unique().to_pylist()
    if len(found) > _MOST_CLASSES or len(found) < 2:
        raise ValueError(
            f"--label {name}: it has {len(found):,} classes; a model learns 2 to {_MOST_CLASSES}. "
            "Name another column, or make groups of its values."
        )
    classes = tuple(sorted(found))
    return Label(column=name, kind="class", classes=classes), f"one of {len(classes)} classes"
