"""Proposal of a label and features for a table with unknown structure, with a reason per column.

`meshrec inspect` shows the proposal, and writes it as a recipe. It is based on column statistics (`Profile`).
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshrec.data.faults import did_you_mean
from meshrec.data.features import (
    Buckets,
    ColumnFeature,
    DatePart,
    Features,
    Hashed,
    IdFeature,
    Key,
    Label,
    Number,
    Vocabulary,
)
from meshrec.data.features.values import DatePartName, whole
from meshrec.data.profile import Column, Profile
from meshrec.data.propose_crosses import with_useful_crosses
from meshrec.data.propose_label import Task, label_of
from meshrec.data.propose_time_order import ColumnChoice, TimeOrder, drop_drifting_columns
from meshrec.modules import can_name_table
from meshrec.ops.index import BYTES_PER_ID

LEAK = 0.99
"""AUC from which on a single column is considered a leak: it reveals the label, and is dropped."""
_MIN_ROWS = 10
"""Minimum rows of a table. A tenth of the rows is for validation, and a tenth for testing."""
_UNIQUE = 0.9
"""Maximum distinct values in an ID column, relative to the rows. Values that occur once teach nothing."""
_FEW_ROWS = 1000
"""Tables with fewer rows keep ID columns in which almost all values are distinct."""
_LARGE_VOCABULARY = 1_000_000
"""Distinct values above which a column gets hashed table keys, because a vocabulary is stored with every run.
"""
_MAX_TABLE_ROWS = 20_000_000
"""Maximum rows of a proposed hashed table."""
_FEW_VALUES = 64
"""Integer columns with at most this many distinct values are IDs, whatever the distribution."""
_BINS = 16
"""Bins or buckets of a proposed numeric feature."""
_FLOATS = ("double", "float", "halffloat")
_RARE = 0.02
"""Share of the rarer label class below which a warning is given."""


class Proposal(NamedTuple):
    """Proposed features for a table, and how they were chosen."""

    features: Features
    """Label and features, not fitted."""
    choices: list[ColumnChoice]
    """Role and features of every column and every column cross, with a reason."""
    warnings: list[str]
    """Messages about the data for the user."""


def propose(
    profile: Profile,
    *,
    label: str,
    time: str | None,
    task: Task | None = None,
    query: str | None = None,
    skip_unlabelled: bool = False,
) -> Proposal:
    """Choose every column's role in a table, and features for the columns to learn from.

    Args:
        profile: table statistics.
        label: column to predict.
        time: column with a row's time, for a split in time order; None: the split is random.
        task: how the label is learned. None: as classes for text with three or more values, otherwise as a
            binary label.
        query: column with a row's query, within which rows are ranked; None: no ranking.
        skip_unlabelled: whether rows without a label are omitted; otherwise they are an error.

    Raises:
        ValueError: a named column is missing or has a wrong kind, or no column remains to learn from.
    """
    for role, name in (("label", label), ("time", time), ("query", query)):
        if name is not None and name not in profile.columns:
            raise ValueError(
                f"--{role} {name}: there is no such column; there are {list(profile.columns)}."
                f"{did_you_mean(name, profile.columns)}"
            )
    if query is not None and task not in (None, "number"):
        raise ValueError(
            f"--task {task} with --query {query}: rows are ranked by the label, a number. Leave --task "
            "out, or --query."
        )
    _check_rows(profile)
    label_task = "number" if query is not None else task
    label_feature, reason = label_of(profile, label, label_task, skip_unlabelled=skip_unlabelled)
    choices = [ColumnChoice(label, "label", reason)]
    for name, column in profile.columns.items():
        if name == query:
            choices.append(ColumnChoice(name, "query", "rows are ranked against those of the same value"))
        elif name != label:
            choice = (
                _time(column)
                if name == time
                else _choose_features(column, profile.num_rows, in_order=time is not None)
            )
            choices.append(_with_text_warning(choice, column))
    order = None if time is None else TimeOrder.of(profile, time)
    if order is not None:
        choices = drop_drifting_columns(profile, choices, order)
    if label_feature.kind == "binary":
        # After drifting columns are dropped, so they are not crossed.
        choices = with_useful_crosses(profile, label_feature, choices, time, order)
    # If nothing else is left, columns that tell the label by themselves come back, with a warning.
    if not any(choice.features for choice in choices):
        choices = [_with_leak(profile, choice, in_order=time is not None) for choice in choices]
    if not _has_ids(choices):
        choices = [_with_ranges_as_ids(choice) for choice in choices]
    # Last, because the steps above add features.
    choices = _with_valid_names(choices)
    features = tuple(feature for choice in choices for feature in choice.features)
    if not _has_ids(choices):
        raise ValueError(
            f"no column of {list(profile.columns)} but the label tells anything: there is nothing to learn "
            "from. Give columns of numbers or of ids, such as a user or an item."
        )
    warnings = [choice.warning for choice in choices if choice.warning is not None]
    warnings += _label_warnings(profile, label_feature) if label_feature.kind == "binary" else []
    if time is None and query is None:
        warnings.append(
            "no --time column: the split is random, which is kinder than the future: name one if you can"
        )
    labels = (label_feature,) if query is None else (label_feature, Label(column=query, kind="query"))
    return Proposal(Features(labels=labels, features=features), choices, warnings)


def _has_ids(choices: list[ColumnChoice]) -> bool:
    return any(isinstance(feature, IdFeature) for choice in choices for feature in choice.features)


def _with_leak(profile: Profile, choice: ColumnChoice, *, in_order: bool) -> ColumnChoice:
    """Undo the decision to drop a column as a label leak: choose its features, and add a warning.

    Called for tables without any other column to learn from. The choice is returned unchanged if the column
    was not dropped, or was dropped for another reason.
    """
    column = profile.columns[choice.column]
    if choice.role != "drop" or column.signal is None or column.signal < LEAK:
        return choice
    warning = (
        f"column {column.name!r} tells the label by itself (AUC {column.signal:.4f}): it may be the label in "
        "other words, or known only afterwards. It is taken because there is no other column"
    )
    # Without the signal, `_choose_features` does not drop the column again.
    used = _choose_features(replace(column, signal=None), profile.num_rows, in_order=in_order)
    return used._replace(warning=warning)


def _with_ranges_as_ids(choice: ColumnChoice) -> ColumnChoice:
    """Add ranges of a numeric feature as IDs: a model needs an embedding table, even without ID columns."""
    if not choice.features or not isinstance(choice.features[0], Number):
        return choice
    number = choice.features[0]
    ranges = Buckets(name=f"{number.name}_range", column=number.source, num_buckets=_BINS)
    reason = f"{choice.reason}, and its ranges as IDs"
    return choice._replace(reason=reason, features=(number, ranges), rows=_BINS + 1)


def _check_rows(profile: Profile) -> None:
    """Raise ValueError for a table that training would reject: too few rows, or infinite values."""
    if profile.num_rows < _MIN_ROWS:
        raise ValueError(
            f"the data has {profile.num_rows} rows: a tenth of them is for validation and a tenth for the "
            f"test, so there must be {_MIN_ROWS} at least. Give more."
        )
    for name, column in profile.columns.items():
        if column.num_infinite:
            raise ValueError(
                f"column {name!r} has {column.num_infinite:,} infinite values, which are not numbers to "
                f"learn from. Make them null, as frame[{name!r}].replace([np.inf, -np.inf], np.nan) of "
                "pandas does."
            )


def _with_text_warning(choice: ColumnChoice, column: Column) -> ColumnChoice:
    """Add a warning to the choice if the column has numbers written as text."""
    if column.written_number is None or column.kind != "text":
        return choice
    remark = (
        f"column {column.name!r} holds numbers written as text, such as {column.written_number!r}: as text "
        f"they are {column.distinct:,} IDs without an order. Write plain numbers, such as 1234.56, and leave "
        "missing ones empty"
    )
    return choice._replace(warning=remark)


def _with_valid_names(choices: list[ColumnChoice]) -> list[ColumnChoice]:
    """Rename features whose name cannot be an embedding table's name."""
    # Renamed features must not take the name of another feature.
    used_names = {feature.name for choice in choices for feature in choice.features}

    def named(feature: ColumnFeature) -> ColumnFeature:
        if can_name_table(feature.name):
            return feature
        name = feature.name.replace(".", "_") or "column"
        while name in used_names or not can_name_table(name):
            name += "_"
        used_names.add(name)
        return replace(feature, name=name, column=feature.source)

    return [choice._replace(features=tuple(map(named, choice.features))) for choice in choices]


def _label_warnings(profile: Profile, label: Label) -> list[str]:
    """Return warnings about which label values count as positive, and about a class with few rows."""
    name, column = label.column, profile.columns[label.column]
    targets = label.targets(whole(profile.sample[name]))
    positive = targets[np.isfinite(targets)] > 0
    warnings = []
    if label.classes:
        warnings.append(
            f"label {name!r}: {label.classes[1]!r} counts as positive, {label.classes[0]!r} as negative. For "
            "the other way round, swap classes in the recipe"
        )
    if label.positive_from is not None:
        low, high = column.low, column.high
        warnings.append(
            f"label {name!r} has values from {low:g} to {high:g}, not 0 and 1: rows with "
            f"{label.positive_from:g} or more count as positive. Change positive_from in the recipe, or "
            f"predict the value: "
            "Label(..., kind='number') with loss=SquaredError()"
        )
    share = positive.mean()
    if min(share, 1 - share) < _RARE:
        kind, rare = ("positive", share) if share < 0.5 else ("negative", 1 - share)
        num = round(rare * profile.num_rows)
        warnings.append(
            f"label {name!r}: only {rare:.2%} of the rows are {kind}, about {num:,} rows, and "
            f"{round(num / 10):,} of "
            "the test data: metrics of so few vary by chance. Give more rows of them, and compare "
            "results with "
            "`meshrec evaluate --intervals 200`"
        )
    return warnings


def _time(column: Column) -> ColumnChoice:
    """Return the choice for the column that orders the rows: role "time", no features."""
    if column.kind not in ("time", "integer", "number"):
        raise ValueError(
            f"--time {column.name}: the column holds {column.kind}, such as {column.examples[:1]}, and times "
            "are dates, timestamps, numbers, or texts such as 2024-05-01 12:30:00. Convert it."
        )
    if column.num_missing:
        raise ValueError(f"--time {column.name}: {column.num_missing:,} rows have none. Leave them out.")
    unit = _unit(column)
    if unit is None:
        choice = ColumnChoice(column.name, "time", "orders the rows: the latest are held out")
        if column.kind == "integer":  # such as a day or a row number
            return choice
        remark = (
            f"--time {column.name}: its values, such as {', '.join(column.examples[:2])}, are no times since "
            "1970. The rows with the largest are held out, as if they were the latest"
        )
        return choice._replace(warning=remark)
    reason = "orders the rows: the latest are held out. Its hour: "
    reason += f"DatePart(name={column.name + '_hour'!r}, column={column.name!r}, part='hour', unit={unit!r})"
    return ColumnChoice(column.name, "time", reason)


def _unit(column: Column) -> str | None:
    """Guess the unit for times since 1970 in a column, from the median; None if no unit is plausible."""
    if column.kind == "time":
        return "s"
    middle = column.quantiles[3] if column.quantiles else 0
    for unit, second in (("s", 1), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        if 3e8 * second <= middle <= 4e9 * second:  # from 1979 to 2096
            return unit
    return None


def _choose_features(column: Column, num_rows: int, *, in_order: bool) -> ColumnChoice:
    """Choose the role and the features of a column that is not the label, the time or the query."""
    name = column.name

    def drop(reason: str, warning: str | None = None) -> ColumnChoice:
        return ColumnChoice(name, "drop", reason, warning=warning)

    if column.kind == "other":
        is_vector = "list" in column.type and any(name in column.type for name in (*_FLOATS, "decimal"))
        return drop("vectors of numbers are not read" if is_vector else f"{column.type} is not read")
    if column.num_missing == column.num_rows:
        return drop("empty", f"column {name!r} is empty")
    # A value that is missing in some rows still distinguishes rows.
    if column.distinct <= 1 and (column.num_missing == 0 or column.kind.startswith("list")):
        return drop("constant", f"column {name!r} is constant")
    if column.signal is not None and column.signal >= LEAK:
        return drop(
            f"tells the label by itself (AUC {column.signal:.4f})",
            f"column {name!r} tells the label by itself (AUC {column.signal:.4f}): it is the label in other "
            "words, or known only afterwards. It is left out; put it back if that is wrong",
        )
    if column.kind.startswith("list") or column.separator is not None:
        return _list(column)
    if column.kind == "time":
        return _time_features(column, in_order=in_order)
    if column.counts_up and num_rows >= 10:
        return drop("a row number", f"column {name!r} counts the rows: it says nothing of others")
    if column.kind == "number":
        return _dense(column, "numbers")
    if column.distinct > _UNIQUE * num_rows and num_rows >= _FEW_ROWS and not _is_magnitude(column):
        noun = "text" if column.kind == "text" else "id"
        return drop(
            f"almost every row has its own {noun}",
            f"column {name!r} differs in almost every row: nothing can be learned of such an id",
        )
    if column.kind == "integer" and _is_magnitude(column):
        return _dense(column, "integers that count something")
    return _ids(column)


def _time_features(column: Column, *, in_order: bool) -> ColumnChoice:
    """Choose features for a column with times: hour and weekday, and the time as a number."""
    name = column.name
    is_text = "string" in column.type or "binary" in column.type
    part: DatePartName | None = "days" if is_text else None
    fields: tuple[DatePartName, ...] = ("hour", "weekday")
    if is_text and all(seconds % 86400 == 0 for seconds in column.quantiles):
        fields = ("weekday",)
    # Dates have no hour, times of day no weekday.
    elif column.type.startswith(("date", "time32", "time64")):
        fields = ("weekday",) if column.type.startswith("date") else ("hour",)
    parts = tuple(DatePart(name=f"{name}_{field}", column=name, part=field) for field in fields)
    rows, reason = sum(part.rows for part in parts), f"a time: its {' and '.join(fields)}"
    # Test rows are later than all training rows, so absolute time cannot generalize.
    if in_order or "weekday" not in fields:
        return ColumnChoice(name, "id", reason, parts, rows)
    missing = (
        float(column.quantiles[3] // 86400 if is_text else column.quantiles[3])
        if column.num_missing
        else None
    )
    number = Number(
        name=f"{name}_number",
        column=name,
        part=part,
        standardize=True,
        missing=missing,
        num_bins=_BINS,
    )
    return ColumnChoice(name, "id", f"{reason}; as a number too", (*parts, number), rows)


def _is_magnitude(column: Column) -> bool:
    """Return whether integers are magnitudes, such as counts and prices, and not IDs.

    Integers are magnitudes if half of them are in the lowest tenth of the range, or if a value is in fewer
    than five rows on average. Columns with few distinct values, or with a name such as ``user_id``, have IDs.
    """
    if column.kind != "integer" or column.distinct <= _FEW_VALUES or _named_like_an_id(column.name):
        return False
    # Minimum, median and 99 % quantile: the highest values may be outliers.
    low, _, _, middle, _, high, _ = column.quantiles
    crowded = (middle - low) < 0.1 * (high - low)
    rare = column.num_rows / column.distinct < 5
    return crowded or rare


def _named_like_an_id(name: str) -> bool:
    lowered = name.lower()
    return (
        lowered in ("user", "item")
        or lowered.endswith(("id", "_key", "code", "zip"))
        or lowered.startswith("id_")
    )


def _dense(column: Column, noun: str) -> ColumnChoice:
    """Choose a numeric feature with suitable normalization, and ranges as IDs if some values are missing."""
    low, first, _, middle, _, last, high = column.quantiles
    # A long tail, of which a linear scale would leave most values near 0.
    log = low >= 0 and high > 20 * max(middle, 1e-9)
    # Far outliers would leave the other values in a small part of the scale.
    far = high - low > 10 * max(last - first, 1e-12)
    missing = float(np.float32(middle)) if column.num_missing else None
    feature = Number(
        name=column.name,
        log=log,
        clip=(0.01, 0.99) if far and not log else None,
        standardize=True,
        missing=missing,
        num_bins=_BINS,
    )
    steps = [noun, f"{low:g} to {high:g}"]
    steps += ["a long tail: log"] if log else []
    steps += ["far outliers: clipped"] if feature.clip is not None else []
    steps += [f"{column.missing:.1%} missing: the median"] if column.num_missing else []
    if not column.num_missing:
        return ColumnChoice(column.name, "dense", ", ".join(steps), (feature,))
    steps += ["and its ranges as IDs, where missing has a row"]
    ranges = Buckets(name=f"{column.name}_range", column=column.name, num_buckets=_BINS)
    return ColumnChoice(column.name, "dense", ", ".join(steps), (feature, ranges), _BINS + 1)


def _ids(column: Column) -> ColumnChoice:
    """Choose ID features for a column.

    Most columns get a vocabulary. If the vocabulary would be too large, the column gets hashed table keys. If
    values are not UTF-8, they are hashed to table rows. Integers with a vocabulary get a numeric feature,
    too.
    """
    name, distinct = column.name, column.distinct
    per_value = column.num_rows * (1 - column.missing) / max(distinct, 1)
    reason = f"{distinct:,} values, each in {per_value:,.{0 if per_value >= 10 else 1}f} rows on average"
    reason += f", {column.missing:.1%} missing" if column.num_missing else ""
    reason += ", whole numbers as floats" if column.type in _FLOATS else ""
    warning = None
    if column.type in _FLOATS and max(abs(column.low or 0), abs(column.high or 0)) > 2**53:
        warning = (
            f"column {name!r} holds integers beyond 2^53 as floats, which are rounded: different IDs may "
            "have become one. Export them as integers, decimals or text"
        )
    if distinct > _LARGE_VOCABULARY:
        rows = min(distinct, _MAX_TABLE_ROWS)
        feature: ColumnFeature = Key(name=name, max_rows=rows, min_count=2)
        reason += f": keys with rows of their own from the second read on, {_cost(rows)}"
        return ColumnChoice(name, "id", reason, (feature,), rows, warning)
    if column.has_bytes:
        # Twice as many rows as values, so that few values share a row.
        rows = 2 * distinct + 2
        return ColumnChoice(
            name, "id", f"{reason}, bytes: hashed", (Hashed(name=name, num_embeddings=rows),), rows
        )
    features: list[ColumnFeature] = [Vocabulary(name=name, min_count=3 if distinct > _FEW_VALUES else 1)]
    if column.kind == "integer" and distinct > 2:
        is_id = _named_like_an_id(name)
        missing = column.quantiles[3] if column.num_missing or is_id else None  # serving may see null IDs
        features.append(
            Number(name=f"{name}_number", column=name, standardize=True, missing=missing, num_bins=_BINS)
        )
        use = "if IDs are given in order" if is_id else "if its size means something"
        reason += f"; as a number too, {use}"
    return ColumnChoice(name, "id", reason, tuple(features), distinct + 2, warning)


def _cost(rows: int) -> str:
    """Describe the memory for a hashed table with ``rows`` rows, trained with Adam at embedding size 16."""
    width, adam, last = 16, 3, 4  # weights and two moments; LRU timestamp per row
    row = 4 * width * adam + last
    index = f"of which {rows * BYTES_PER_ID / 2**20:,.0f} MiB find them"
    return f"{rows * (row + BYTES_PER_ID) / 2**20:,.0f} MiB with Adam at width {width}, {index}"


def _list(column: Column) -> ColumnChoice:
    """Choose an ID feature for a column with lists, or with several values per string; cut long lists."""
    assert column.max_length is not None
    assert column.mean_length is not None
    # `_ids` counts rows per value, and a list has several values.
    choice = _ids(replace(column, num_rows=round(column.num_rows * max(column.mean_length, 1e-9))))
    feature = choice.features[0]
    assert isinstance(feature, IdFeature)
    limit = min(column.max_length, max(8, round(4 * column.mean_length)))
    max_length = limit if limit < column.max_length else None
    feature = replace(feature, max_length=max_length, separator=column.separator)
    cut = f", cut to the last {limit}" if limit < column.max_length else ""
    lengths = f"{column.mean_length:.1f} on average, {column.max_length} at most"
    noun = "lists" if column.separator is None else f"values with {column.separator!r} between them, lists"
    reason = f"{noun} of {lengths}{cut}; {column.distinct:,} values"
    return ColumnChoice(column.name, "list", reason, (feature,), choice.rows)


def as_json(profile: Profile, proposal: Proposal) -> dict[str, Any]:
    """Return the statistics and the proposal as JSON types, for the report page of `meshrec inspect`."""
    choices = {choice.column: choice for choice in proposal.choices}
    return {
        "rows": profile.num_rows,
        "warnings": proposal.warnings,
        "columns": [
            {
                "name": name,
                "type": column.type,
                "missing": column.missing,
                "distinct": column.distinct,
                "low": column.low,
                "high": column.high,
                "examples": column.examples,
                "top": column.top_shares,
                "signal": column.signal,
                "role": choices[name].role,
                "reason": choices[name].reason,
                "rows": choices[name].rows,
            }
            for name, column in profile.columns.items()
        ],
    }
