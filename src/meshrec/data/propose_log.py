"""Proposal of how to read an interaction log for next-item prediction, with reasons."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.csv_dialects import DETECTED, CsvFormat
from meshrec.data.dataset import Paths
from meshrec.data.faults import DataError, Faults
from meshrec.data.features.values import TimeUnit, is_text, kind_of, microseconds_of
from meshrec.data.frames import read_columns
from meshrec.data.log_columns import LogColumns
from meshrec.data.logs import LogTable, filter_log, sorted_order
from meshrec.data.samples import Ints

_UNITS: tuple[tuple[float, TimeUnit], ...] = ((1e11, "s"), (1e14, "ms"), (1e17, "us"), (float("inf"), "ns"))
"""Upper limits of timestamps in every unit, which are reached in the year 5138."""
_REPEATED = 0.05
"""If at most this share of rows repeats a user's item, a ranking leaves out the user's items."""
_TIED, _ASCENDING = 0.01, 0.9
"""Minimum share of rows with the time of the user's previous row, for a check of their order. Minimum share
of these rows in ascending (or descending) item order, in data that is sorted by item.
"""


class LogProposal(NamedTuple):
    """Proposed options for reading a log, and statistics of the log."""

    columns: LogColumns
    """The given columns, with time unit and order of simultaneous rows."""
    history: int
    """Maximum history length, in items."""
    exclude_seen: bool
    """Whether a user's earlier items are left out of a ranking."""
    num_rows: int
    """Rows with user, item and time that pass the filters."""
    num_users: int
    num_items: int
    num_windows: int
    """Training samples per epoch, with the last items held out; see `next_items`."""
    reasons: list[str]
    """Reasons for the proposed options, for the user."""


def propose_log(paths: Paths, columns: LogColumns, form: CsvFormat = DETECTED) -> LogProposal:
    """Analyze a log, and propose how to read it.

    Args:
        paths: files of the log.
        columns: log columns.
        form: known CSV format.

    Raises:
        DataError: the log cannot be read, a column is missing, or hardly any user has three rows.
    """
    faults = Faults("raise")
    table = read_columns(paths, columns.names(), columns.kinds(), form)
    # Messages for the user, in the order of the checks.
    reasons = []
    if columns.time in table.column_names:
        columns, reason = _with_unit(table[columns.time].combine_chunks(), columns)
        reasons += [reason] if reason else []
    name = ", ".join(map(str, [paths] if isinstance(paths, str | Path) else paths))
    rows = filter_log(LogTable(name, table, columns, paths), faults).table
    users, items = (_sorted_codes(rows[name]) for name in (columns.user, columns.item))
    times = microseconds_of(rows[columns.time].combine_chunks(), columns.time_unit)
    # The last key is the primary one: sort by user, then by time. Ties keep the data order.
    order = sorted_order([times, users])
    users, items, times = users[order], items[order], times[order]
    lengths = np.bincount(users)
    if (lengths >= 3).mean() < 0.05:
        raise DataError(
            f"{int((lengths >= 3).sum()):,} of {len(lengths):,} users have three rows or more: there are "
            "no histories to learn from. Look whether the columns of user and item are the right ones."
        )
    columns, tie_reasons = _with_ties(users, items, times, columns)
    # A pair of user and item as one integer.
    repeated = 1 - len(np.unique(users * (int(items.max()) + 1) + items)) / len(users)
    reasons += [*tie_reasons, *_rare(items, columns)]
    if repeated > _REPEATED:
        reasons.append(f"{100 * repeated:.1f} % of the rows repeat an item of the user: they stay candidates")
    # Rounded up to tens, so nine tenths of the users are not cut, unless they have more than 200 items.
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
    """Guess the unit of numeric times from the largest time; return the columns with it, and the reason.

    Timestamps and text need no unit: the columns are unchanged, and the reason is empty.
    """
    if is_text(times.type) or kind_of(times.type) not in ("integer", "number"):
        return columns, ""
    max_value = float(
        np.nanmax(np.abs(times.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)), initial=0)
    )
    unit = next(unit for limit, unit in _UNITS if max_value < limit)
    reason = f"times are numbers up to {max_value:.6g}: taken for {unit} since 1970"
    return replace(columns, time_unit=unit), reason


def _with_ties(users: Ints, items: Ints, times: Ints, columns: LogColumns) -> tuple[LogColumns, list[str]]:
    """Set ``ties="shuffle"`` if simultaneous rows of a user are sorted by item.

    Without shuffling, a model would learn the next item from this order. With few simultaneous rows, or rows
    in another order, the columns are returned unchanged.

    Args:
        users: user number per row, [n]. Rows are sorted by user, then by time.
        items: item number per row, [n], in the order of the item values.
    """
    # Rows with the user and time of the row before.
    tied = (users[1:] == users[:-1]) & (times[1:] == times[:-1])
    if tied.mean() <= _TIED:
        return columns, []
    ascending = (items[1:] > items[:-1])[tied].mean()
    share = f"{100 * tied.mean():.1f} % of the rows have the time of the user's row before"
    if ascending <= _ASCENDING and ascending >= 1 - _ASCENDING:
        return columns, [f"{share}: they keep the order of the data"]
    return replace(columns, ties="shuffle"), [f"{share}, sorted by item: they are shuffled"]


def _rare(items: Ints, columns: LogColumns) -> list[str]:
    """Return a list with a remark on items with fewer than 5 rows.

    The list is empty if all items have more rows, or if ``columns.min_item_count`` is above 1.
    """
    counts = np.bincount(items)
    rare = counts < 5
    if columns.min_item_count > 1 or not rare.any():
        return []
    share = 100 * counts[rare].sum() / len(items)
    return [
        f"{int(rare.sum()):,} of {len(counts):,} items have fewer than 5 rows, {share:.1f} % of all rows: "
        "min_item_count would leave them out"
    ]


def _sorted_codes(column: pa.ChunkedArray) -> Ints:
    """Number the distinct values of a column in ascending order, and return the number per row, int64 [n]."""
    encoded = column.combine_chunks().dictionary_encode()
    position = np.empty(len(encoded.dictionary), np.int64)
    # Rank of every dictionary value.
    position[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(position))
    codes: Ints = position[encoded.indices.to_numpy()]
    return codes
