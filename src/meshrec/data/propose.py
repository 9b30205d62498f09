"""The proposal of features for each column of a data set, with reasons."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshrec.data.features import (
    Buckets,
    ColumnFeature,
    DatePart,
    Features,
    IdFeature,
    Key,
    Label,
    Number,
    Vocabulary,
)
from meshrec.data.features.values import DatePartName, numbers_of
from meshrec.data.nearest import did_you_mean
from meshrec.data.profile import Column, Profile
from meshrec.data.propose_label import Task, label_of
from meshrec.data.propose_more import ColumnChoice, with_what_pays
from meshrec.modules import can_name_table
from meshrec.ops.index import BYTES_PER_ID

LEAK = 0.99
"""Columns that tell the label this well by themselves are taken for the label in other words."""
_UNIQUE = 0.9
_FEW_ROWS = 1000
_LARGE_VOCABULARY = 1_000_000
_LARGEST_TABLE = 20_000_000
_FEW_VALUES = 64
_BINS = 16
_RARE = 0.02
"""Share of the rows below which a class of the label is rare, and a warning says so."""


class Proposal(NamedTuple):
    """A choice for every column, the features that follow, and what to look at."""

    features: Features
    choices: list[ColumnChoice]
    warnings: list[str]


def propose(
    profile: Profile, *, label: str, time: str | None, task: Task | None = None, query: str | None = None
) -> Proposal:
    """Choose the role and the features of each column.

    Args:
        profile: what the columns hold.
        label: the column to learn.
        time: the column that orders the rows.
        task: what the label is; None: classes if it is text, else 0 and 1.
        query: the column within whose values rows are ranked; None: there is none.

    Raises:
        ValueError: there is no such label or time, or its type does not fit; or no other column is left.
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
    chosen_label, why = label_of(profile, label, "number" if query is not None else task)
    choices = [ColumnChoice(label, "label", why)]
    for name, column in profile.columns.items():
        if name == query:
            choices.append(ColumnChoice(name, "query", "rows are ranked against those of the same value"))
        elif name != label:
            choices.append(
                _time(column)
                if name == time
                else _choice(column, profile.num_rows, in_order=time is not None)
            )
    if chosen_label.kind == "binary":
        choices = with_what_pays(profile, chosen_label, choices, time)
    choices = _with_names_for_tables(choices)
    found = tuple(feature for choice in choices for feature in choice.features)
    if not any(choice.role in ("id", "list") and choice.features for choice in choices):
        raise ValueError(
            f"no column of {list(profile.columns)} names something, such as a user or an item: there is "
            "nothing to make tables of. Use a model without tables, or give columns of ids."
        )
    warnings = [choice.warning for choice in choices if choice.warning is not None]
    warnings += _label_warnings(profile, chosen_label) if chosen_label.kind == "binary" else []
    if time is None and query is None:
        warnings.append(
            "no --time column: the split is random, which is kinder than the future: name one if you can"
        )
    labels = (chosen_label,) if query is None else (chosen_label, Label(column=query, kind="query"))
    return Proposal(Features(labels=labels, features=found), choices, warnings)


def _with_names_for_tables(choices: list[ColumnChoice]) -> list[ColumnChoice]:
    """Rename the features whose column's name no table can have."""
    taken = {feature.name for choice in choices for feature in choice.features}

    def named(feature: ColumnFeature) -> ColumnFeature:
        if can_name_table(feature.name):
            return feature
        name = feature.name.replace(".", "_") or "column"
        while name in taken or not can_name_table(name):
            name += "_"
        taken.add(name)
        return replace(feature, name=name, column=feature.source)

    return [choice._replace(features=tuple(map(named, choice.features))) for choice in choices]


def _label_warnings(profile: Profile, label: Label) -> list[str]:
    """Tell what the proposal has decided about the label, and that one of the classes is rare."""
    name, sample = label.column, profile.sample[label.column]
    values = numbers_of(sample, None, "s")
    found = []
    positive = values > 0
    if label.positive_from is not None:
        low, high = values.min(), values.max()
        positive = values >= label.positive_from
        found.append(
            f"label {name!r} has values from {low:g} to {high:g}, not 0 and 1: rows with "
            f"{label.positive_from:g} or more count as positive. Change positive_from in the recipe, or "
            f"predict the value: "
            "Label(..., kind='number') with loss=SquaredError()"
        )
    share = positive.mean()
    if min(share, 1 - share) < _RARE:
        kind, rare = ("positive", share) if share < 0.5 else ("negative", 1 - share)
        num = round(rare * profile.num_rows)
        found.append(
            f"label {name!r}: only {rare:.2%} of the rows are {kind}, about {num:,} rows, and "
            f"{round(num / 10):,} of "
            "the test data: metrics of so few vary by chance. Give more rows of them, and compare "
            "results with "
            "`meshrec evaluate --intervals 200`"
        )
    return found


def _time(column: Column) -> ColumnChoice:
    if column.kind not in ("time", "integer", "number"):
        raise ValueError(
            f"--time {column.name}: the column holds {column.kind}, and times are dates, timestamps or "
            "numbers. Convert it."
        )
    if column.num_missing:
        raise ValueError(f"--time {column.name}: {column.num_missing:,} rows have none. Leave them out.")
    unit = _unit(column)
    if unit is None:
        return ColumnChoice(column.name, "time", "orders the rows: the latest are held out")
    why = "orders the rows: the latest are held out. Its hour: "
    why += f"DatePart(name={column.name + '_hour'!r}, column={column.name!r}, part='hour', unit={unit!r})"
    return ColumnChoice(column.name, "time", why)


def _unit(column: Column) -> str | None:
    """Return the unit of a column of times since 1970; None if the column does not look like times."""
    if column.kind == "time":
        return "s"
    middle = column.quantiles[3] if column.quantiles else 0
    for unit, second in (("s", 1), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)):
        if 3e8 * second <= middle <= 4e9 * second:  # from 1979 to 2096
            return unit
    return None


def _choice(column: Column, num_rows: int, *, in_order: bool) -> ColumnChoice:
    name = column.name

    def drop(reason: str, warning: str | None = None) -> ColumnChoice:
        return ColumnChoice(name, "drop", reason, warning=warning)

    if column.kind == "other":
        return drop(f"{column.type} is not read")
    if column.num_missing == column.num_rows:
        return drop("empty", f"column {name!r} is empty")
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
        said: tuple[DatePartName, ...] = ("hour", "weekday")
        if column.type.startswith(("date", "time32", "time64")):  # a day has no hour, an hour no day
            said = ("weekday",) if column.type.startswith("date") else ("hour",)
        parts = tuple(DatePart(name=f"{name}_{part}", column=name, part=part) for part in said)
        rows, why = sum(part.rows for part in parts), f"a time: its {' and '.join(said)}"
        if in_order or "weekday" not in said:  # later rows have times that training has never met
            return ColumnChoice(name, "id", why, parts, rows)
        missing = column.quantiles[3] if column.num_missing else None
        number = Number(name=f"{name}_number", column=name, standardize=True, missing=missing, num_bins=_BINS)
        return ColumnChoice(name, "id", f"{why}; as a number too", (*parts, number), rows)
    if column.counts_up and num_rows >= 10:
        return drop("a row number", f"column {name!r} counts the rows: it says nothing of others")
    if column.kind == "number" and not _is_code(column):
        return _dense(column, "numbers")
    if column.distinct > _UNIQUE * num_rows and num_rows >= _FEW_ROWS and not _is_magnitude(column):
        what = "text" if column.kind == "text" else "id"
        return drop(
            f"almost every row has its own {what}",
            f"column {name!r} differs in almost every row: nothing can be learned of such an id",
        )
    if column.kind == "integer" and _is_magnitude(column):
        return _dense(column, "integers that count something")
    return _ids(column)


def _is_code(column: Column) -> bool:
    """Return whether floats are codes: few whole values, as pandas writes integers with nulls."""
    return (
        column.distinct <= _FEW_VALUES
        and all(float(each).is_integer() for each in column.quantiles)
        and column.distinct > 2
    )


def _is_magnitude(column: Column) -> bool:
    """Return whether integers are magnitudes, such as counts and prices, and not IDs.

    IDs are few, or repeat often; counts crowd at the small end of a long range.
    """
    if column.kind != "integer" or column.distinct <= _FEW_VALUES or _named_like_an_id(column.name):
        return False
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


def _dense(column: Column, what: str) -> ColumnChoice:
    low, first, _, middle, _, last, high = column.quantiles
    log = low >= 0 and high > 20 * max(middle, 1e-9)
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
    steps = [what, f"{low:g} to {high:g}"]
    steps += ["a long tail: log"] if log else []
    steps += ["far outliers: clipped"] if feature.clip is not None else []
    steps += [f"{column.missing:.1%} missing: the median"] if column.num_missing else []
    if not column.num_missing:
        return ColumnChoice(column.name, "dense", ", ".join(steps), (feature,))
    steps += ["and its ranges as IDs, where missing has a row"]
    ranges = Buckets(name=f"{column.name}_range", column=column.name, num_buckets=_BINS)
    return ColumnChoice(column.name, "dense", ", ".join(steps), (feature, ranges), _BINS + 1)


def _ids(column: Column) -> ColumnChoice:
    name, distinct = column.name, column.distinct
    each = column.num_rows * (1 - column.missing) / max(distinct, 1)
    why = f"{distinct:,} values, each in {each:,.{0 if each >= 10 else 1}f} rows"
    why += f", {column.missing:.1%} missing" if column.num_missing else ""
    if distinct > _LARGE_VOCABULARY:
        rows = min(distinct, _LARGEST_TABLE)
        feature: ColumnFeature = Key(name=name, max_rows=rows, min_count=2)
        why += f": keys with rows of their own from the second read on, {_cost(rows)}"
        return ColumnChoice(name, "id", why, (feature,), rows)
    features: list[ColumnFeature] = [Vocabulary(name=name, min_count=3 if distinct > _FEW_VALUES else 1)]
    if column.kind in ("integer", "number") and distinct > 2:
        is_id = _named_like_an_id(name)
        missing = column.quantiles[3] if column.num_missing or is_id else None  # an ID may be null later
        features.append(
            Number(name=f"{name}_number", column=name, standardize=True, missing=missing, num_bins=_BINS)
        )
        use = "if IDs are given in order" if is_id else "if its size means something"
        why += f"; as a number too, {use}"
    return ColumnChoice(name, "id", why, tuple(features), distinct + 2)


def _cost(rows: int) -> str:
    """Tell how much memory a table with hashed keys takes, as the proposed recipe trains it."""
    width, adam, last = 16, 3, 4  # weights and two moments; what LRU keeps of a row
    row = 4 * width * adam + last
    index = f"of which {rows * BYTES_PER_ID / 2**20:,.0f} MiB find them"
    return f"{rows * (row + BYTES_PER_ID) / 2**20:,.0f} MiB with Adam at width {width}, {index}"


def _list(column: Column) -> ColumnChoice:
    assert column.max_length is not None
    assert column.mean_length is not None
    choice = _ids(replace(column, num_rows=round(column.num_rows * max(column.mean_length, 1e-9))))
    feature = choice.features[0]
    assert isinstance(feature, IdFeature)
    longest = min(column.max_length, max(8, round(4 * column.mean_length)))
    max_length = longest if longest < column.max_length else None
    feature = replace(feature, max_length=max_length, separator=column.separator)
    cut = f", cut to the last {longest}" if longest < column.max_length else ""
    lengths = f"{column.mean_length:.1f} on average, {column.max_length} at most"
    what = "lists" if column.separator is None else f"values with {column.separator!r} between them, lists"
    why = f"{what} of {lengths}{cut}; {column.distinct:,} values"
    return ColumnChoice(column.name, "list", why, (feature,), choice.rows)


def as_json(profile: Profile, proposal: Proposal) -> dict[str, Any]:
    """Return the profile and the proposal as JSON types, for the report page."""
    chosen = {choice.column: choice for choice in proposal.choices}
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
                "role": chosen[name].role,
                "reason": chosen[name].reason,
                "rows": chosen[name].rows,
            }
            for name, column in profile.columns.items()
        ],
    }
