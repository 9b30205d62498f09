"""Proposal of crosses and number ranges as features, if they predict a binary label better than the columns.

A cross combines the values of two columns into one ID. A range is a bucket of numbers. A quick trial fits
two logistic regressions, with and without the candidate, on half of the sampled training rows. The other
half compares them. A candidate is proposed if it lowers the log loss by much more than chance.

Shape legend: n rows.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshrec.data.features import Buckets, ColumnFeature, Cross, IdFeature, Label, Number, hashes_of
from meshrec.data.features.values import floats_of, whole
from meshrec.data.profile import Profile
from meshrec.data.propose_time_order import ColumnChoice, TimeOrder, is_drifting_cross

Codes = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float64]

_MIN_ROWS = 2000
"""Minimum sampled training rows. With fewer, no candidate is tried."""
_MAX_ROWS = 40_000
"""Maximum sampled training rows that are used."""
_MAX_VALUES = 5000
"""Maximum distinct values of a column that is crossed."""
_TRAINING = 0.8
"""Share of the rows that the proposed split uses for training."""
_BUCKETS = 16
"""Buckets of a proposed number range."""
_SMOOTHING = 10.0
"""Imaginary rows with the probability 1/2 added to every value. They shrink the rare values' weights."""
_ROUNDS = 6
"""Passes over the base columns that fit the base model, before a candidate is added."""
_MIN_SHARE = 0.002
"""Minimum log loss share that a proposed feature must save."""
_DEVIATIONS = 3.0
"""Minimum gain of a proposed feature, in standard errors. Dozens of pairs are tried, so a limit of two would
accept some by chance.
"""
_MAX_COLUMNS = 10
"""Number of columns of which all pairs are tried. The number of pairs grows quadratically."""
_MAX_PAIRS = 3
"""Maximum number of proposed pairs."""


def with_useful_crosses(
    profile: Profile, label: Label, choices: list[ColumnChoice], time: str | None, order: TimeOrder | None
) -> list[ColumnChoice]:
    """Add features that lower the log loss on held-out rows: crosses of ID columns, and buckets of numbers.

    Args:
        profile: table statistics.
        label: binary label.
        choices: role and features of every column.
        time: column with a row's time; None: the split is random.
        order: time order of the sampled rows, to omit crosses that drift with time. None: the split is
            random, or the sample is small.

    Returns:
        The choices, where some numeric columns have buckets as a second feature, followed by a choice for
        every added cross.
    """
    rows = _training_rows(profile, time)
    truth = label.targets(whole(profile.sample[label.column]))
    # Rows without a label, which training skips.
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
        # With more values, most pairs would occur once or never in the sample.
        if choice.role == "id" and column.kind in ("integer", "text") and column.distinct <= _MAX_VALUES:
            hashes = hashes_of(sample[choice.column].combine_chunks())
            codes[choice.column] = np.unique(hashes, return_inverse=True)[1]
        extended.append(_with_ranges(choice, sample, labels) if choice.role == "dense" else choice)
    used_names = {feature.name for choice in extended for feature in choice.features}
    for first, second, share in best_crosses(codes, labels):
        name = f"{first}_x_{second}".replace(".", "_")
        if name in used_names or name in profile.columns:
            continue
        if order is not None and is_drifting_cross(profile, (first, second), order):
            continue
        # Twice the pairs in the sample, so that few pairs share a row.
        num = 2 * len(np.unique(_pair_codes(codes[first], codes[second]))) + 2
        cross = Cross(name=name, columns_crossed=(first, second), num_embeddings=num)
        reason = f"their cross saves {share:.1%} of the loss in a quick look"
        extended.append(ColumnChoice(f"{first} x {second}", "id", reason, (cross,), num))
    return extended


def _training_rows(profile: Profile, time: str | None) -> Codes:
    """Return the indices of at most 40,000 sampled rows that the proposed split would use for training."""
    num = profile.sample.num_rows
    if time is None:
        return np.arange(min(int(_TRAINING * num), _MAX_ROWS))  # sampled rows are in random order
    times = floats_of(profile.sample[time], None, "s")
    early = np.flatnonzero(times <= np.quantile(times, _TRAINING))
    return early[:_MAX_ROWS]


def _with_ranges(choice: ColumnChoice, sample: pa.Table, labels: Vector) -> ColumnChoice:
    """Add ranges to the choice for a numeric column, if they predict better than a linear term."""
    number = choice.features[0]
    # A number that is also looked up as IDs, such as an hour, needs no ranges.
    if not isinstance(number, Number) or any(isinstance(feature, IdFeature) for feature in choice.features):
        return choice
    result = ranges_gain(floats_of(sample[choice.column], number.part, number.unit), labels)
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
    return choice._replace(reason=reason, features=(number, ranges), rows=_BUCKETS + 1)


class Gain(NamedTuple):
    """Improvement of a logistic regression by a candidate feature; see `gain`."""

    share: float
    """Share of the log loss that the candidate saves on held-out rows."""
    is_significant: bool
    """Whether the gain is large enough, and larger than chance."""


def best_crosses(codes: dict[str, Codes], labels: Vector) -> list[tuple[str, str, float]]:
    """Return the column pairs whose cross predicts the label significantly better than the two columns alone.

    Tries only pairs of the ``_MAX_COLUMNS`` columns that predict the label best by themselves.

    Args:
        codes: by column name, an integer per row that stands for the value, from 0, int64 [n].
        labels: 0 or 1 per row, [n].

    Returns:
        A tuple per pair with the names of both columns, and the share of the log loss that the cross saves.
        The pair with the largest share is first, and there are at most three pairs.
    """
    # Every column alone, compared with a constant.
    single_gains = {name: gain([], column, labels).share for name, column in codes.items()}
    names = sorted(single_gains, key=lambda name: -single_gains[name])[:_MAX_COLUMNS]
    pairs = []
    for first, second in itertools.combinations([name for name in codes if name in names], 2):
        cross = np.unique(_pair_codes(codes[first], codes[second]), return_inverse=True)[1]
        result = gain([codes[first], codes[second]], cross, labels)
        if result.is_significant:
            pairs.append((first, second, result.share))
    return sorted(pairs, key=lambda pair: -pair[2])[:_MAX_PAIRS]


def ranges_gain(values: Vector, labels: Vector) -> Gain:
    """Return the gain from ranges of a number, compared with a linear term in the number; see `gain`.

    With fewer than ``2 * _BUCKETS`` finite numbers, the gain is 0.

    Args:
        values: numbers, NaN for null, [n]. NaN and infinity are a range, too.
        labels: 0 or 1 per row, [n].
    """
    finite = np.isfinite(values)
    if finite.sum() < 2 * _BUCKETS:
        return Gain(0.0, False)
    edges = np.unique(np.quantile(values[finite], np.linspace(0, 1, _BUCKETS + 1)[1:-1]))
    # Range 0 is for missing values.
    ranges = np.where(finite, 1 + np.searchsorted(edges, values, side="right"), 0)
    middle, deviation = np.median(values[finite]), values[finite].std() or 1.0
    # Clipped, so that outliers do not dominate the linear term.
    numeric = np.clip((np.where(finite, values, middle) - middle) / deviation, -5.0, 5.0)
    return gain([], ranges.astype(np.int64), labels, numeric=numeric)


def gain(
    base_columns: Sequence[Codes], candidate: Codes, labels: Vector, numeric: Vector | None = None
) -> Gain:
    """Return the share of the log loss that a candidate column saves in a logistic regression.

    The base model has a weight for every value in every base column, and a slope for ``numeric``. The
    candidate then adds a weight for every value. The weights are fitted on half the rows, and the loss is
    measured on the other half.

    Args:
        base_columns: by column, an integer per row that stands for the value, from 0, int64 [n].
        candidate: an integer per row that stands for the value, from 0, int64 [n].
        labels: 0 or 1 per row, [n].
        numeric: numeric feature of the base model, standardized, [n]. None: no such feature.
    """
    # Rows are in random order, so alternate rows are random halves.
    fits = np.arange(len(labels)) % 2 == 0
    logits = np.full(len(labels), _logit(labels[fits].mean()))
    for _ in range(_ROUNDS):
        for codes in base_columns:
            logits += _step(codes, labels, logits, fits)
        if numeric is not None:
            logits += _numeric_step(numeric, labels, logits, fits)
    base_losses = _losses(logits, labels)[~fits]
    for _ in range(3):
        logits += _step(candidate, labels, logits, fits)
    saved = base_losses - _losses(logits, labels)[~fits]
    if not len(saved) or not base_losses.mean() > 0:
        return Gain(0.0, False)
    share, deviation = saved.mean() / base_losses.mean(), saved.std() / np.sqrt(len(saved))
    return Gain(float(share), bool(share > _MIN_SHARE and saved.mean() > _DEVIATIONS * deviation))


def _step(codes: Codes, labels: Vector, logits: Vector, fits: npt.NDArray[np.bool_]) -> Vector:
    """Return the change in all logits by a damped Newton step in the weights for one column, [n].

    Args:
        fits: mask for the rows on which the weights are fitted, [n].
    """
    probability = 1 / (1 + np.exp(-logits))
    num = int(codes.max(initial=0)) + 1
    slope = np.bincount(codes[fits], (labels - probability)[fits], minlength=num)
    # Second derivative of the log loss by the weight of a value.
    curvature = np.bincount(codes[fits], (probability * (1 - probability))[fits], minlength=num)
    # Smoothing shrinks the rare values' weights, which would otherwise fit noise.
    weights: Vector = slope / (curvature + _SMOOTHING / 4)
    return weights[codes]


def _numeric_step(numeric: Vector, labels: Vector, logits: Vector, fits: npt.NDArray[np.bool_]) -> Vector:
    """Return the change in all logits by a Newton step in the bias and the slope for ``numeric``, [n]."""
    probability = 1 / (1 + np.exp(-logits))
    columns = np.stack([np.ones_like(numeric), numeric])
    slope = columns[:, fits] @ (labels - probability)[fits]
    curvature = (columns[:, fits] * (probability * (1 - probability))[fits]) @ columns[:, fits].T
    weights = np.linalg.solve(curvature + 1e-3 * np.eye(2), slope)
    step: Vector = (weights @ columns).astype(np.float64)
    return step


def _losses(logits: Vector, labels: Vector) -> Vector:
    """Return the log loss per row, [n]."""
    losses: Vector = np.logaddexp(0, logits) - labels * logits
    return losses


def _pair_codes(first: Codes, second: Codes) -> Codes:
    """Return an integer per row that stands for the pair of values in two columns, [n]."""
    codes: Codes = first * (second.max(initial=0) + 1) + second
    return codes


def _logit(share: float) -> float:
    """Return the log-odds of a fraction, clamped to [1e-6, 1 - 1e-6] so that the result is finite."""
    share = min(max(float(share), 1e-6), 1 - 1e-6)
    return float(np.log(share / (1 - share)))
