"""The proposal of a recipe for a log of users, items and times, with reasons."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.dataset import Paths
from meshrec.data.faults import DataError, Faults
from meshrec.data.features.values import TimeUnit, is_text, kind_of, microseconds_of
from meshrec.data.frames import read_columns
from meshrec.data.log_columns import LogColumns
from meshrec.data.logs import LogTable, counted_rows
from meshrec.data.samples import Ints

_UNITS: tuple[tuple[float, TimeUnit], ...] = ((1e11, "s"), (1e14, "ms"), (1e17, "us"), (float("inf"), "ns"))
"""Times in each unit lie below these values until the year 5138."""
_REPEATED = 0.05
_TIED, _ASCENDING = 0.01, 0.9


class LogProposal(NamedTuple):
    """The contents of a log, and the options to read it with."""

    columns: LogColumns
    history: int
    """Largest number of items in a history."""
    exclude_seen: bool
    """Whether items that a user had before are left out of the ranking."""
    num_rows: int
    num_users: int
    num_items: int
    num_windows: int
    """Number of training samples of an epoch."""
    reasons: list[str]


def propose_log(paths: Paths, columns: LogColumns) -> LogProposal:
    """Look at a log, and propose how to read it.

    Raises:
        DataError: the log cannot be read, a column is missing, or hardly any user has three rows.
    """
    faults = Faults("raise")
    table = read_columns(paths, columns.names())
    reasons = []
    if columns.time in table.column_names:
        columns, reason = _with_unit(table[columns.time].combine_chunks(), columns)
        reasons += [reason] if reason else []
    rows = counted_rows(LogTable(str(paths), table, columns), faults).table
    users, items = (_numbers(rows[name]) for name in (columns.user, columns.item))
    times = microseconds_of(rows[columns.time].combine_chunks(), columns.time_unit)
    order = np.lexsort((times, users))
    users, items, times = users[order], items[order], times[order]
    lengths = np.bincount(users)
    if (lengths >= 3).mean() < 0.05:
        raise DataError(
            f"{int((lengths >= 3).sum()):,} of {len(lengths):,} users have three rows or more: there are "
            "no histories to learn from. Look whether the columns of user and item are the right ones."
        )
    columns, more = _with_ties(users, items, times, columns)
    repeated = 1 - len(np.unique(users * (int(items.max()) + 1) + items)) / len(users)
    reasons += [*more, *_rare(items, columns)]
    if repeated > _REPEATED:
        reasons.append(f"{100 * repeated:.1f} % of the rows repeat an item of the user: they stay candidates")
    history = int(np.clip(-(-np.quantile(lengths, 0.9) // 10) * 10, 10, 200))
    reasons.append(f"nine tenths of the users have at most {int(np.quantile(lengths, 0.9))} items")
    return LogProposal(
        columns=columns,
        history=history,
        exclude_seen=repeated <= _REPEATED,
        num_rows=len(users),
        num_users=len(lengths),
        num_items=int(items.max()) + 1,
        num_windows=int((-(-np.maximum(lengths - 3, 0) // history)).sum()),
        reasons=reasons,
    )


def _with_unit(times: pa.Array, columns: LogColumns) -> tuple[LogColumns, str]:
    """Return the columns with the unit of times that are numbers."""
    if is_text(times.type) or kind_of(times.type) not in ("integer", "number"):
        return columns, ""
    largest = float(
        np.nanmax(np.abs(times.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)), initial=0)
    )
    unit = next(unit for limit, unit in _UNITS if largest < limit)
    why = f"times are numbers up to {largest:.6g}: taken for {unit} since 1970"
    return replace(columns, time_unit=unit), why


def _with_ties(users: Ints, items: Ints, times: Ints, columns: LogColumns) -> tuple[LogColumns, list[str]]:
    """Return the columns with the order of a user's rows of the same time."""
    tied = (users[1:] == users[:-1]) & (times[1:] == times[:-1])
    if tied.mean() <= _TIED:
        return columns, []
    ascending = (items[1:] > items[:-1])[tied].mean()
    share = f"{100 * tied.mean():.1f} % of the rows have the time of the user's row before"
    if ascending <= _ASCENDING and ascending >= 1 - _ASCENDING:
        return columns, [f"{share}: they keep the order of the data"]
    return replace(columns, ties="shuffle"), [f"{share}, sorted by item: they are shuffled"]


def _rare(items: Ints, columns: LogColumns) -> list[str]:
    """Return a remark on items that are rare."""
    counts = np.bincount(items)
    rare = counts < 5
    if columns.min_item_count > 1 or not rare.any():
        return []
    share = 100 * counts[rare].sum() / len(items)
    return [
        f"{int(rare.sum()):,} of {len(counts):,} items have fewer than 5 rows, {share:.1f} % of all rows: "
        "min_item_count would leave them out"
    ]


def _numbers(column: pa.ChunkedArray) -> Ints:
    """Return the number of each value among the distinct ones in ascending order."""
    encoded = column.combine_chunks().dictionary_encode()
    place = np.empty(len(encoded.dictionary), np.int64)
    place[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(place))
    numbers: Ints = place[encoded.indices.to_numpy()]
    return numbers
