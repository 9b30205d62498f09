"""Interaction logs from tables with users, items and times."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.dataset import Feature
from meshrec.data.faults import DataError, Faults, rows_text
from meshrec.data.features import Features, IdFeature, Key, Times, Vocabulary
from meshrec.data.features.values import is_missing, kind_of, microseconds_of, one_number, parsed_times, whole
from meshrec.data.frames import column_names
from meshrec.data.hashing import codes_of
from meshrec.data.in_memory import Ranges
from meshrec.data.interactions import HISTORY, SEEN, TIMES, Interactions
from meshrec.data.log_columns import ITEM, USER, LogColumns
from meshrec.data.nearest import missing_column
from meshrec.data.samples import Bools, Ints

_logger = logging.getLogger("meshrec")


class LogTable(NamedTuple):
    """Log table, and the column names."""

    name: str
    """Display name."""
    table: pa.Table
    columns: LogColumns
    source: Any = None
    """Files or table it was read from, which may have further columns."""


def valid_rows(log: LogTable, check: Callable[[Bools, Bools, str], None]) -> pa.Table:
    """Return the rows with user, item and time that fulfil the conditions on actions and ratings.

    The result has a column "row" with the row number in the log. String times with a format are parsed.

    Args:
        log: a log, or a row block from a log.
        check: called with the valid row mask so far, which it modifies, with the mask of rows that have a
            value, and with the column name.

    Raises:
        DataError: a column is missing, or a string is not a time.
    """
    name, table, columns, source = log
    names = table.column_names
    for column in columns.names():
        if column not in names:
            raise missing_column(name, column, names if source is None else column_names(source))
    valid = np.ones(table.num_rows, np.bool_)
    for column in columns.required():
        missing = is_missing(table[column].combine_chunks())
        if missing is not None:
            check(valid, ~missing, column)
    if columns.action is not None and columns.actions:
        is_used = pc.is_in(table[columns.action].cast(pa.string()), value_set=pa.array(columns.actions))
        valid &= is_used.to_numpy()
    if columns.rating is not None and columns.min_rating is not None:
        valid &= pc.fill_null(pc.greater_equal(table[columns.rating], columns.min_rating), False).to_numpy()
    table = table.append_column("row", pa.array(np.arange(table.num_rows)))
    if not valid.all():
        table = table.filter(pa.array(valid))
    if columns.time_format is not None and kind_of(table[columns.time].type) == "text":
        try:
            times = parsed_times(whole(table[columns.time]), columns.time_format)
        except DataError as error:
            raise DataError(
                f"{name}: column {columns.time!r}: {error}. Change time_format, or the data"
            ) from error
        table = table.set_column(names.index(columns.time), columns.time, times)
    return table


def counted_rows(log: LogTable, faults: Faults) -> LogTable:
    """Return a log's valid rows: with user, item and time, and with sufficient counts.

    The result has a column "row" with the row number in the log.

    Raises:
        DataError: a column is missing, a row lacks a value, or no row remains.
    """
    name, columns = log.name, log.columns

    def check(valid: Bools, good: Bools, column: str) -> None:
        """Report rows without a value in a column.

        Args:
            valid: valid row mask, modified.
            good: mask for rows with a value.
            column: column name.
        """
        faults.check(valid, good, f"{name}: column {column!r} has no value in row {{row}}", file=name)

    table = valid_rows(log, check)
    for column in dict.fromkeys([columns.user, columns.item, *columns.item_features]):
        index = table.column_names.index(column)
        table = table.set_column(index, column, one_number(whole(table[column])))
    # Count users and items on the same rows, so that the result does not depend on their order.
    frequent = np.ones(table.num_rows, np.bool_)
    for column, min_count in ((columns.user, columns.min_user_count), (columns.item, columns.min_item_count)):
        codes = codes_of(table[column])[0]
        if min_count > 1:
            frequent &= np.bincount(codes)[codes] >= min_count
    table = table.filter(pa.array(frequent))
    check_any_rows(name, table.num_rows)
    return LogTable(name, table, columns)


def check_any_rows(name: str, num_rows: int) -> None:
    """Raise DataError if no log row is left."""
    if not num_rows:
        raise DataError(f"{name}: no row is left. Look at the conditions on actions, ratings and counts.")


def log_features(columns: LogColumns, *, users: bool) -> Features:
    """Return a log's unfitted vocabularies; ``users``: whether users are a feature."""
    names = {ITEM: columns.item} | ({USER: columns.user} if users else {})
    names |= {name: name for name in columns.item_features}
    features = tuple(Vocabulary(name=name, column=column) for name, column in names.items())
    return Features(labels=(), features=features)


def fit_log(log: LogTable, *, users: bool) -> Features:
    """Fit a log's vocabularies on the valid rows; ``users``: whether users are a feature."""
    return log_features(log.columns, users=users).fit([log.table])


class LoggedUsers(NamedTuple):
    """Interactions in a log, and user values by number."""

    log: Interactions
    values: Any


def interactions(
    log: LogTable, features: Features, *, num_rows: int, hashed: Key | None = None, seed: int = 0
) -> LoggedUsers:
    """Sort a log's valid rows, with user numbers and item IDs.

    Rows with items outside the vocabulary are omitted, and counted in a warning. Their users remain, possibly
    without interactions. A user outside the user vocabulary has no ID.

    Args:
        log: rows from `counted_rows`.
        features: fitted features.
        num_rows: rows in the whole log.
        hashed: hashed key feature for a table without a fixed row count; None: IDs are rows.
        seed: seed for shuffling ties.

    Raises:
        DataError: a column's kind differs from the fitted kind.
    """
    name, table, columns, _ = log
    item = vocabulary_of(features, ITEM)
    check_kinds(name, features, table.schema)
    users, values = codes_of(table[columns.user])
    in_vocabulary = item.lookup_values(table[columns.item].combine_chunks()) >= 0
    users, table = users[in_vocabulary], table.filter(pa.array(in_vocabulary))
    warn_of_unknown(name, int((~in_vocabulary).sum()), len(users))
    ids = item_ids(item, table[columns.item].combine_chunks(), hashed)
    times = microseconds_of(table[columns.time].combine_chunks(), columns.time_unit)
    ties = np.arange(len(users))
    if columns.ties == "shuffle":
        # Data order would reveal the next item if the data are sorted by item.
        ties = np.random.default_rng(seed).permutation(ties)
    # The last key is the primary one: users, then times, then ties.
    order = np.lexsort((ties, times, users))
    sample = None
    if columns.item_features:
        # An item's values come from its first row.
        sampled_ids, first_rows = np.unique(ids, return_index=True)
        sample = ItemSample(sampled_ids, table.take(pa.array(first_rows)))
    arrays = SortedRows(
        offsets=np.concatenate([[0], np.cumsum(np.bincount(users, minlength=len(values)))]),
        items=ids[order],
        times=times[order] // 1_000_000,
        rows=table["row"].to_numpy()[order],
    )
    return logged_users(name, features, arrays, values, num_rows=num_rows, hashed=hashed, sample=sample)


class SortedRows(NamedTuple):
    """Log rows sorted by user and time, as in `Interactions`; int32 or int64, possibly mapped files."""

    offsets: Ints
    items: Ints
    times: Ints
    rows: Ints


class ItemSample(NamedTuple):
    """A row for each item with interactions: item IDs, ascending, and the log rows."""

    ids: Ints
    table: pa.Table


def logged_users(
    name: str,
    features: Features,
    arrays: SortedRows,
    values: pa.Array,
    *,
    num_rows: int,
    hashed: Key | None,
    sample: ItemSample | None,
) -> LoggedUsers:
    """Return sorted rows with a log's features and catalogue.

    Args:
        name: display name.
        features: fitted features.
        arrays: sorted rows.
        values: user values by number.
        num_rows: rows in the whole log.
        hashed: hashed key feature, or None: IDs are rows.
        sample: item feature source; None: the log has none.
    """
    item = vocabulary_of(features, ITEM)
    catalogue = np.sort(item_ids(item, item.vocabulary, hashed))
    described = {}
    if sample is not None:
        for feature in features.ids:
            if isinstance(feature, Vocabulary) and feature.name not in (ITEM, USER):
                described[feature.name] = _catalog_values(feature, sample, catalogue)
    user = vocabulary_of(features, USER) if USER in [feature.name for feature in features.ids] else None
    log_interactions = Interactions(
        name=name,
        offsets=arrays.offsets,
        items=arrays.items,
        times=arrays.times,
        rows=arrays.rows,
        num_rows=num_rows,
        item=(item if hashed is None else hashed).feature(),
        catalogue=catalogue,
        user=None if user is None else user.feature(),
        user_ids=None if user is None else user.lookup_values(values),
        described=described,
    )
    return LoggedUsers(log_interactions, values)


def check_kinds(name: str, features: Features, schema: pa.Schema) -> None:
    """Raise DataError unless a log's columns have the kinds in fitted features.

    Args:
        name: log name, for the message.
        features: fitted features.
        schema: log schema.
    """
    for feature in features.ids:
        wrong = feature.kind_error({feature.source: kind_of(schema.field(feature.source).type)})
        if wrong is not None:
            raise DataError(f"{name}: {wrong}.")


def warn_of_unknown(name: str, num_omitted: int, num_left: int) -> None:
    """Log how many rows were left out, because their items are not in the vocabulary.

    Args:
        name: log name.
        num_omitted: omitted row count.
        num_left: remaining row count.
    """
    if num_omitted:
        advice = "" if num_left else ". No row is left: compare the columns"
        message = "%s: left out %s of items that training did not meet%s"
        _logger.warning(message, name, rows_text(num_omitted), advice)


def requests_of_histories(
    item: Vocabulary, *, history: int, times: bool, more: Sequence[Vocabulary] = ()
) -> tuple[Features, pa.Schema]:
    """Return the features in a recommendation request, and the column types.

    Args:
        item: item vocabulary.
        history: maximum history length; longer histories keep their last items.
        times: whether the model reads item timestamps, in seconds.
        more: additional log features in a request.
    """
    kind = "list of text" if item.found == "text" else "list of integer"
    lists = replace(item, found=kind, sequence=True, table=ITEM, known_only=True)  # type: ignore[arg-type]
    request_features: list[IdFeature] = [replace(lists, name=HISTORY, column=HISTORY, max_length=history)]
    request_features += [Times(name=TIMES, history=HISTORY, max_length=history)] if times else []
    request_features.append(replace(lists, name=SEEN, column=SEEN, also=HISTORY))
    kinds = {f.name: pa.int64() if f.name == TIMES else item.vocabulary.type for f in request_features}
    schema = pa.schema([(name, pa.list_(of)) for name, of in kinds.items()])
    more = [replace(f, known_only=True) if f.name == USER else f for f in more]
    for feature in more:
        of = feature.vocabulary.type
        schema = schema.append(
            pa.field(feature.source, pa.list_(of) if str(feature.found).startswith("list") else of)
        )
    return Features(labels=(), features=(*request_features, *more)), schema


def vocabulary_of(features: Features, name: str) -> Vocabulary:
    """Return a feature by name. All log features have vocabularies."""
    feature = features[name]
    assert isinstance(feature, Vocabulary)
    return feature


def item_ids(item: Vocabulary, values: Any, hashed: Key | None) -> Ints:
    """Return item IDs in their table.

    Args:
        item: item vocabulary.
        values: item values, an Arrow array [n].
        hashed: hashed key feature, or None: IDs are rows.
    """
    return item.rows_of(values) if hashed is None else hashed.rows_of(values)


def _catalog_values(feature: Vocabulary, sample: ItemSample, catalogue: Ints) -> tuple[Feature, Ranges]:
    """Return an item feature with values for every catalogue item (IDs, ascending)."""
    values = feature.values(sample.table)
    lengths, starts = (np.zeros(len(catalogue), np.int64) for _ in range(2))
    positions = np.searchsorted(catalogue, sample.ids)
    lengths[positions], starts[positions] = np.diff(values.offsets), values.offsets[:-1]
    average = float(lengths.mean())
    return replace(feature.feature(), average_length=average), Ranges(
        feature.rows_of(values.array), starts, lengths
    )
