"""Detection of columns that drift with time: the values in the latest rows do not occur in earlier rows.

Examples are months, days and row numbers. A model learns nothing from them for later rows. Messages to users
say that such a column "marches with time".
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from meshrec.data.features import ColumnFeature
from meshrec.data.features.values import decoded, floats_of, hashes_and_missing, hashes_of, whole
from meshrec.data.profile import Column, Profile
from meshrec.data.samples import Bools

_TRAINING, _TEST = 0.8, 0.1
"""Shares of the rows in the proposed split: the earliest rows are for training, the latest for testing."""
_MIN_ROWS = 10
"""Minimum test rows in the sample. With fewer, no column is found to drift."""
_NEW = 0.9
"""A column drifts if at least this share of test rows has a value that no training row has."""
_BY_CHANCE = 0.5
"""Maximum share of test rows with a new value in a random split, relative to the split by time. IDs that are
rare in the sample are new in any split, and do not drift.
"""
_FEW_VALUES = 64
"""Maximum distinct values of columns such as weekday or month, which may drift without rising or falling. A
column with more values must rise or fall: a user ID may occur in only one session of the sample, and yet
return later.
"""
_ORDERED = 0.9
"""Minimum absolute correlation between the ranks of values and times, in a column that rises or falls."""


class ColumnChoice(NamedTuple):
    """Proposed use of a column, or of a two-column cross."""

    column: str
    """Column name; for a cross, both names with " x " between them."""
    role: str
    """``label``, ``query``, ``time``, ``dense``, ``id``, ``list`` or ``drop``."""
    reason: str
    """Reason for the role and the features, for the user."""
    features: tuple[ColumnFeature, ...] = ()
    """Proposed features; none for a column that is not learned from."""
    rows: int | None = None
    """Embedding table rows of the features together; None without a table."""
    warning: str | None = None
    """Warning for the user, or None."""


class TimeOrder(NamedTuple):
    """Time order for n sampled rows, and two splits: by time, and at random for comparison."""

    ranks: npt.NDArray[np.float64]
    """Rank in time per row, from 0, [n]."""
    training: Bools
    """Mask of the earliest rows, [n]."""
    test: Bools
    """Mask of the latest rows, [n]."""
    chance_training: Bools
    """Mask of the training rows in the random split, [n]."""
    chance_test: Bools
    """Mask of the test rows in the random split, [n]."""

    @classmethod
    def of(cls, profile: Profile, time: str) -> "TimeOrder | None":
        """Rank and split the sampled rows by a time column; None for fewer than ``_MIN_ROWS`` test rows."""
        times = floats_of(whole(profile.sample[time]), None, "s")
        ranks = np.empty(len(times))
        ranks[np.argsort(times, kind="stable")] = np.arange(len(times))
        # The rows were sampled in random order, so their positions split them by chance.
        positions = [order / max(len(times), 1) for order in (ranks, np.arange(len(times)))]
        # Training and test mask by time, then by chance, in the order of the fields.
        masks = [mask for shares in positions for mask in (shares < _TRAINING, shares >= 1 - _TEST)]
        order = cls(ranks, *masks)
        return order if order.test.sum() >= _MIN_ROWS else None

    def unseen_share(self, keys: npt.NDArray[Any], is_present: Bools) -> float:
        """Return the share of test rows whose key is absent from the training rows.

        Rows are split by time. The result is 0 if the share in a random split exceeds ``_BY_CHANCE`` times
        this share: then keys are absent because they are rare, not because they are new.

        Args:
            keys: hash or code of the value per sampled row, [n].
            is_present: whether the row has a value, [n].
        """
        by_time = _new_share(keys, self.training & is_present, self.test & is_present)
        by_chance = _new_share(keys, self.chance_training & is_present, self.chance_test & is_present)
        # Values that are new in a random split as well are only rare.
        return by_time if by_chance <= _BY_CHANCE * by_time else 0.0

    def is_ordered(self, array: Any, is_present: Bools) -> bool:
        """Return whether values rise or fall with time, as row numbers do."""
        # Ranks, so text and numbers are compared alike.
        values = np.asarray(pc.rank(array, sort_keys="ascending", tiebreaker="dense"))[is_present]
        if len(values) < 2 or values.min() == values.max():
            return False
        return bool(abs(np.corrcoef(values, self.ranks[is_present])[0, 1]) >= _ORDERED)

    def share_outside(self, values: npt.NDArray[np.float64]) -> float:
        """Return the share of test rows with a number outside the range of the training rows."""
        finite = np.isfinite(values)
        training, test = values[self.training & finite], values[self.test & finite]
        if not len(training) or len(test) < _MIN_ROWS:
            return 0.0
        return float(((test < training.min()) | (test > training.max())).mean())


def _new_share(keys: npt.NDArray[Any], training: Bools, test: Bools) -> float:
    """Return the share of test rows whose key no training row has; 0 with too few test rows."""
    if test.sum() < _MIN_ROWS:
        return 0.0
    return float((~np.isin(keys[test], np.unique(keys[training]))).mean())


def drop_drifting_columns(
    profile: Profile, choices: list[ColumnChoice], order: TimeOrder
) -> list[ColumnChoice]:
    """Drop the features from columns drifting with time, with a warning per column.

    The weights that a model learns for the values in such a column are useless later, because later rows have
    other values. If no features would remain, nothing is dropped.

    Args:
        profile: table statistics.
        choices: choices for the columns.
        order: sampled rows' time order.
    """
    remaining = [_without_drift(profile, choice, order) for choice in choices]
    return remaining if any(choice.features for choice in remaining) else choices


def _without_drift(profile: Profile, choice: ColumnChoice, order: TimeOrder) -> ColumnChoice:
    """Return the choice to drop a column if it drifts with time, otherwise the given choice."""
    column = profile.columns.get(choice.column)
    # Times always have new values in later rows.
    if choice.role not in ("id", "dense") or column is None or column.kind == "time":
        return choice
    share = _drifting_share(profile, column, order)
    if share < _NEW:
        return choice
    remark = (
        f"column {column.name!r} marches with time: {share:.0%} of the latest rows have values that no "
        "training row has, so nothing learned of them holds later. It is left out; put it back if its values "
        "come again"
    )
    return choice._replace(role="drop", reason="marches with time", features=(), rows=None, warning=remark)


def _drifting_share(profile: Profile, column: Column, order: TimeOrder) -> float:
    """Return the share of test rows whose value is new: an unseen ID, or a number outside the training range.

    Returns 0 for a column that does not drift, such as a random ID.
    """
    array = whole(profile.sample[column.name])
    shares = []
    if column.kind in ("integer", "text"):
        hashes, missing = hashes_and_missing(array)
        is_present = np.ones(len(hashes), dtype=bool) if missing is None else ~missing
        # IDs drift only if they have few values, or are ordered in time.
        if column.distinct <= _FEW_VALUES or order.is_ordered(decoded(array), is_present):
            shares.append(order.unseen_share(hashes, is_present))
    if column.kind in ("integer", "number"):
        shares.append(order.share_outside(floats_of(array, None, "s")))
    return max(shares, default=0.0)


def is_drifting_cross(profile: Profile, columns: tuple[str, str], order: TimeOrder) -> bool:
    """Return whether a two-column cross drifts with time, such as the cross of year and month.

    Args:
        profile: table statistics.
        columns: the two columns.
        order: sampled rows' time order.
    """
    codes = [
        np.unique(hashes_of(whole(profile.sample[name])), return_inverse=True)[1].astype(np.int64)
        for name in columns
    ]
    keys = codes[0] * (codes[1].max(initial=0) + 1) + codes[1]
    return order.unseen_share(keys, np.ones(len(keys), dtype=bool)) >= _NEW
