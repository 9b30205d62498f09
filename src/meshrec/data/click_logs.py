"""Impression logs with click labels: every row gets the items that its user clicked before."""

from typing import Any

import numpy as np
import pyarrow as pa

from meshrec.data.faults import DataError, Faults, missing_column
from meshrec.data.features import Features, Label, Vocabulary
from meshrec.data.features.values import microseconds_of
from meshrec.data.hashing import codes_of
from meshrec.data.interactions import HISTORY
from meshrec.data.log_columns import ITEM, USER, LogColumns
from meshrec.data.logs import LogTable, filter_log
from meshrec.data.movielens_data import ratings_before
from meshrec.data.next_item_data import check_history
from meshrec.data.samples import gather_ranges


def features_of_clicks(columns: LogColumns, label: str, history: int) -> Features:
    """Return unfitted features for a table from `with_histories`: user, item, further item columns, history.

    Args:
        columns: names of the log columns.
        label: label column.
        history: maximum history length, in items.
    """
    names = {USER: columns.user, ITEM: columns.item} | {name: name for name in columns.item_features}
    return Features(
        labels=(Label(column=label),),
        features=(
            *(Vocabulary(name=name, column=column) for name, column in names.items()),
            # With the items' table, because a history consists of items.
            Vocabulary(name=HISTORY, column=HISTORY, table=ITEM, sequence=True, max_length=history),
        ),
    )


def with_histories(log: LogTable, label: str, history: int, faults: Faults) -> pa.Table:
    """Return the rows from `filter_log`, with a column ``history``: the items that the user clicked before.

    A history has the oldest item first, and only clicks before the row's time: simultaneous clicks are not
    included. If the log has a column ``history``, that column is kept. The time column becomes a timestamp.

    Args:
        log: log with a row per impression (an item shown to a user).
        label: column with a number above 0 where the user clicked.
        history: maximum history length, in items.
        faults: raises or skips when a row lacks a user, item or time.

    Raises:
        DataError: a column is missing, or no row remains.
    """
    check_history(history)
    names = log.table.column_names
    if label not in names:
        raise missing_column(log.name, label, names)
    name, table, columns, _ = filter_log(log, faults)
    items = table[columns.item].combine_chunks()
    times = microseconds_of(table[columns.time].combine_chunks(), columns.time_unit)
    position = table.column_names.index(columns.time)
    table = table.set_column(position, columns.time, pa.array(times).cast(pa.timestamp("us")))
    if HISTORY in table.column_names:
        return table
    codes, _ = codes_of(table[columns.user])
    # The last key is the primary one: sort by user, then by time.
    order = np.lexsort((times, codes))
    # The same rule as for ratings: simultaneous impressions do not count as earlier.
    past = ratings_before(codes[order], times[order])
    # In sorted order, as ``past``.
    is_click = _label_values(name, table[label], label)[order] > 0
    clicked = order[is_click]
    num_before = np.concatenate([[0], is_click.cumsum()])
    # ``past`` has ranges of sorted impressions. The number of clicks before an impression converts them to
    # ranges of clicks, of which the last ones are taken.
    firsts, stops = num_before[past.starts], num_before[past.stops]
    firsts = np.maximum(firsts, stops - history)
    # Ranges are in sorted order; the table is not.
    rank_of_row = np.empty_like(order)
    rank_of_row[order] = np.arange(len(order))
    histories = gather_ranges(clicked, firsts[rank_of_row], (stops - firsts)[rank_of_row])
    lists = pa.LargeListArray.from_arrays(histories.offsets, items.take(pa.array(histories.values)))
    return table.append_column(HISTORY, lists)


def _label_values(name: str, column: Any, label: str) -> "np.typing.NDArray[np.float64]":
    """Return the label column as float64, 0 for null and NaN."""
    try:
        # Null becomes NaN in the conversion, and then 0.
        values: np.typing.NDArray[np.float64] = np.nan_to_num(
            column.combine_chunks().cast(pa.float64()).to_numpy(zero_copy_only=False)
        )
    except pa.ArrowException as error:
        raise DataError(
            f"{name}: column {label!r} holds {column.type}, and a label of clicks holds 0 and 1: {error}"
        ) from error
    return values
