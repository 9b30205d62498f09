"""Logs of what users were shown and what they clicked, with the history of clicks beside each row."""

from typing import Any

import numpy as np
import pyarrow as pa

from meshrec.data.faults import DataError, Faults
from meshrec.data.features import Features, Label, Vocabulary
from meshrec.data.features.values import microseconds_of
from meshrec.data.interactions import HISTORY, check_history
from meshrec.data.log_columns import ITEM, USER, LogColumns
from meshrec.data.logs import LogTable, counted_rows
from meshrec.data.movielens import ratings_before
from meshrec.data.nearest import did_you_mean
from meshrec.data.samples import gather_ranges


def features_of_clicks(columns: LogColumns, label: str, history: int) -> Features:
    """Return the features of a log of clicks: the user, the item, the history and further values of items."""
    names = {USER: columns.user, ITEM: columns.item} | {each: each for each in columns.item_features}
    return Features(
        labels=(Label(column=label),),
        features=(
            *(Vocabulary(name=name, column=column) for name, column in names.items()),
            Vocabulary(name=HISTORY, column=HISTORY, table=ITEM, sequence=True, max_length=history),
        ),
    )


def with_histories(log: LogTable, label: str, history: int, faults: Faults) -> pa.Table:
    """Return the rows of a log that count, with a column ``history``: the items that the user clicked before.

    The oldest item comes first. A row knows nothing of its own time or later: clicks of the same time are not
    in its history. The column of the time becomes a timestamp. A log that has a column ``history`` keeps it.

    Args:
        log: the rows.
        label: the column that is above 0 where the user clicked.
        history: the largest number of items in a history.
        faults: handles rows without a user, an item or a time.

    Raises:
        DataError: a column is missing, or no row is left.
    """
    check_history(history)
    known = log.table.column_names
    if label not in known:
        raise DataError(
            f"{log.name}: there is no column {label!r} among {known}.{did_you_mean(label, known)}"
        )
    name, table, columns = counted_rows(log, faults)
    users, items = (table[each].combine_chunks() for each in (columns.user, columns.item))
    times = microseconds_of(table[columns.time].combine_chunks(), columns.time_unit)
    place = table.column_names.index(columns.time)
    table = table.set_column(place, columns.time, pa.array(times).cast(pa.timestamp("us")))
    if HISTORY in table.column_names:
        return table
    codes = users.dictionary_encode().indices.to_numpy().astype(np.int64)
    order = np.lexsort((times, codes))
    past = ratings_before(codes[order], times[order])
    is_click = _numbers(name, table[label], label)[order] > 0
    clicked = order[is_click]
    num_before = np.concatenate([[0], is_click.cumsum()])
    firsts, stops = num_before[past.starts], num_before[past.stops]
    firsts = np.maximum(firsts, stops - history)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    found = gather_ranges(clicked, firsts[back], (stops - firsts)[back])
    lists = pa.LargeListArray.from_arrays(found.offsets, items.take(pa.array(found.values)))
    return table.append_column(HISTORY, lists)


def _numbers(name: str, column: Any, label: str) -> "np.typing.NDArray[np.float64]":
    try:
        numbers: np.typing.NDArray[np.float64] = np.nan_to_num(
            column.combine_chunks().cast(pa.float64()).to_numpy(zero_copy_only=False)
        )
    except pa.ArrowException as error:
        raise DataError(
            f"{name}: column {label!r} holds {column.type}, and a label of clicks holds 0 and 1: {error}"
        ) from error
    return numbers
