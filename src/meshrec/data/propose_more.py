"""Proposals of crosses and ranges that lower the loss in a quick trial on training rows."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from meshrec.data.features import Buckets, ColumnFeature, Cross, IdFeature, Label, Number, hashes_of
from meshrec.data.features.values import numbers_of
from meshrec.data.pays import best_crosses, ranges_pay
from meshrec.data.profile import Profile

_FEWEST_ROWS = 2000
_MOST_ROWS = 40_000
_MOST_VALUES = 5000
_TRAINING = 0.8
"""Share of the rows that the proposed split leaves for training."""
_BUCKETS = 16


class ColumnChoice(NamedTuple):
    """Role of a column: ``label``, ``time``, ``dense``, ``id``, ``list`` or ``drop``, and why."""

    column: str
    role: str
    reason: str
    features: tuple[ColumnFeature, ...] = ()
    rows: int | None = None
    warning: str | None = None


def with_what_pays(
    profile: Profile, label: Label, choices: list[ColumnChoice], time: str | None
) -> list[ColumnChoice]:
    """Add crosses of ID columns and ranges of numbers that lower the loss of rows that did not fit them."""
    rows = _training_rows(profile, time)
    if len(rows) < _FEWEST_ROWS:
        return choices
    sample = profile.sample.take(pa.array(rows))
    values = numbers_of(sample[label.column], None, "s")
    positive = values > 0 if label.positive_from is None else values >= label.positive_from
    labels = positive.astype(np.float64)
    if not 0 < labels.mean() < 1:
        return choices
    codes, found = {}, []
    for choice in choices:
        column = profile.columns[choice.column]
        if choice.role == "id" and column.kind in ("integer", "text") and column.distinct <= _MOST_VALUES:
            hashes = hashes_of(sample[choice.column].combine_chunks())
            codes[choice.column] = np.unique(hashes, return_inverse=True)[1]
        found.append(_with_ranges(choice, sample, labels) if choice.role == "dense" else choice)
    taken = {feature.name for choice in found for feature in choice.features}
    for first, second, share in best_crosses(codes, labels):
        name = f"{first}_x_{second}".replace(".", "_")
        if name in taken or name in profile.columns:
            continue
        pairs = len(np.unique(codes[first] * (codes[second].max() + 1) + codes[second]))
        num = 2 * pairs + 2
        cross = Cross(name=name, columns_crossed=(first, second), num_embeddings=num)
        why = f"their cross saves {share:.1%} of the loss in a quick look"
        found.append(ColumnChoice(f"{first} x {second}", "id", why, (cross,), num))
    return found


def _training_rows(profile: Profile, time: str | None) -> "np.typing.NDArray[np.int64]":
    """Return rows of the sample that training will see, at most 40,000, as the proposed split has it."""
    num = profile.sample.num_rows
    if time is None:
        return np.arange(min(int(_TRAINING * num), _MOST_ROWS))  # rows of the sample are in random order
    times = numbers_of(profile.sample[time], None, "s")
    early = np.flatnonzero(times <= np.quantile(times, _TRAINING))
    return early[:_MOST_ROWS]


def _with_ranges(
    choice: ColumnChoice, sample: pa.Table, labels: "np.typing.NDArray[np.float64]"
) -> ColumnChoice:
    """Add the ranges of a number, if they tell clearly more than a straight line."""
    number = choice.features[0]
    if not isinstance(number, Number) or any(isinstance(each, IdFeature) for each in choice.features):
        return choice
    said = ranges_pay(numbers_of(sample[choice.column], number.part, number.unit), labels)
    if not said.pays:
        return choice
    ranges: ColumnFeature = Buckets(
        name=f"{number.name}_range",
        column=number.source,
        num_buckets=_BUCKETS,
        part=number.part,
        unit=number.unit,
    )
    why = f"{choice.reason}, and its ranges, which save {said.share:.1%} of the loss in a quick look"
    return choice._replace(reason=why, features=(replace(number), ranges), rows=_BUCKETS + 1)
