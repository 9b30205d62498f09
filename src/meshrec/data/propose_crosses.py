"""Proposed crosses and ranges that lower the loss in a quick trial on training rows."""

from dataclasses import replace

import numpy as np
import pyarrow as pa

from meshrec.data.column_choice import ColumnChoice
from meshrec.data.feature_gain import best_crosses, ranges_gain
from meshrec.data.features import Buckets, ColumnFeature, Cross, IdFeature, Label, Number, hashes_of
from meshrec.data.features.values import numbers_of, whole
from meshrec.data.profile import Profile
from meshrec.data.propose_time_order import marching_pair

_MIN_ROWS = 2000
_MAX_ROWS = 40_000
_MAX_VALUES = 5000
_TRAINING = 0.8
"""Share of rows for training in the proposed split."""
_BUCKETS = 16


def with_useful_crosses(
    profile: Profile, label: Label, choices: list[ColumnChoice], time: str | None
) -> list[ColumnChoice]:
    """Add ID column crosses and number ranges that lower the loss on held-out rows.

    Args:
        profile: column statistics.
        label: binary label.
        choices: choice per column.
        time: column that orders the rows, or None.
    """
    rows = _training_rows(profile, time)
    truth = label.numbers(whole(profile.sample[label.column]))
    rows = rows[np.isfinite(truth[rows])]
    if len(rows) < _MIN_ROWS:
        return choices
    sample = profile.sample.take(pa.array(rows))
    labels = (truth[rows] > 0).astype(np.float64)
    if not 0 < labels.mean() < 1:
        return choices
    codes, extended = {}, []
    for choice in choices:
        column = profile.columns[choice.column]
        if choice.role == "id" and column.kind in ("integer", "text") and column.distinct <= _MAX_VALUES:
            hashes = hashes_of(sample[choice.column].combine_chunks())
            codes[choice.column] = np.unique(hashes, return_inverse=True)[1]
        extended.append(_with_ranges(choice, sample, labels) if choice.role == "dense" else choice)
    used_names = {feature.name for choice in extended for feature in choice.features}
    for first, second, share in best_crosses(codes, labels):
        name = f"{first}_x_{second}".replace(".", "_")
        if name in used_names or name in profile.columns or marching_pair(profile, (first, second), time):
            continue
        pairs = len(np.unique(codes[first] * (codes[second].max() + 1) + codes[second]))
        num = 2 * pairs + 2
        cross = Cross(name=name, columns_crossed=(first, second), num_embeddings=num)
        reason = f"their cross saves {share:.1%} of the loss in a quick look"
        extended.append(ColumnChoice(f"{first} x {second}", "id", reason, (cross,), num))
    return extended


def _training_rows(profile: Profile, time: str | None) -> "np.typing.NDArray[np.int64]":
    """Return at most 40,000 sampled rows that the proposed split uses for training."""
    num = profile.sample.num_rows
    if time is None:
        return np.arange(min(int(_TRAINING * num), _MAX_ROWS))  # sampled rows are in random order
    times = numbers_of(profile.sample[time], None, "s")
    early = np.flatnonzero(times <= np.quantile(times, _TRAINING))
    return early[:_MAX_ROWS]


def _with_ranges(
    choice: ColumnChoice, sample: pa.Table, labels: "np.typing.NDArray[np.float64]"
) -> ColumnChoice:
    """Add the ranges of a number, if significantly better than a linear term."""
    number = choice.features[0]
    if not isinstance(number, Number) or any(isinstance(feature, IdFeature) for feature in choice.features):
        return choice
    result = ranges_gain(numbers_of(sample[choice.column], number.part, number.unit), labels)
    if not result.is_significant:
        return choice
    ranges: ColumnFeature = Buckets(
        name=f"{number.name}_range",
        column=number.source,
        num_buckets=_BUCKETS,
        part=number.part,
        unit=number.unit,
    )
    reason = f"{choice.reason}, and its ranges, which save {result.share:.1%} of the loss in a quick look"
    return choice._replace(reason=reason, features=(replace(number), ranges), rows=_BUCKETS + 1)
