"""Interaction logs from in-memory tables with a user, an item and a time per row.

`filter_log` filters the rows, `fit_log` fits vocabularies on them, and `interactions` sorts them by user
and time. ``histories.py`` does the same for logs larger than memory.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.comms.agreement import together
from meshrec.comms.collectives import gather_objects
from meshrec.comms.mesh import Axis
from meshrec.data.dataset import Feature
from meshrec.data.faults import DataError, Faults, missing_column, rows_text
from meshrec.data.features import Features, IdFeature, Key, Times, Vocabulary
from meshrec.data.features.merging import merge_ranks
from meshrec.data.features.sketches import max_sample_hash, smallest_row_hashes
from meshrec.data.features.values import is_missing, kind_of, microseconds_of, one_number, parse_times, whole
from meshrec.data.frames import column_names
from meshrec.data.hashing import codes_of
from meshrec.data.in_memory import Ranges
from meshrec.data.interactions import HISTORY, SEEN, TIMES, Interactions
from meshrec.data.log_columns import ITEM, USER, LogColumns
from meshrec.data.samples import Bools, Ints
from meshrec.data.shares import cut_rows

_logger = logging.getLogger("meshrec")


class LogTable(NamedTuple):
    """Table with the rows of an interaction log, and the names of its columns."""

    name: str
    """Display name, for messages."""
    table: pa.Table
    columns: LogColumns
    source: Any = None
    """Files or frame from which ``table`` was read. They may have further columns, which a message about a
    missing column lists."""


def valid_rows(log: LogTable, check: Callable[[Bools, Bools, str], None]) -> pa.Table:
    """Return the rows with user, item and time that pass the filters on actions and ratings.

    Args:
        log: a log, or a block of rows from a log.
        check: called as ``check(valid, good, column)`` for every required column with missing values.
            ``valid`` masks the rows that are valid so far, and ``good`` those with a value in the column. The
            function must clear ``valid`` where ``good`` is false, or raise an error.

    Returns:
        The valid rows with an additional column "row", which has the row number in ``log``. If there is a
        time format, times as text are parsed to timestamps.

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
        # Actions are compared as text, whatever the type of the column.
        is_used = pc.is_in(table[columns.action].cast(pa.string()), value_set=pa.array(columns.actions))
        valid &= is_used.to_numpy()
    if columns.rating is not None and columns.min_rating is not None:
        # A row without a rating does not pass the filter.
        valid &= pc.fill_null(pc.greater_equal(table[columns.rating], columns.min_rating), False).to_numpy()
    # Before rows are omitted, so these are the row numbers in the log.
    table = table.append_column("row", pa.array(np.arange(table.num_rows)))
    if not valid.all():
        table = table.filter(pa.array(valid))
    if columns.time_format is not None and kind_of(table[columns.time].type) == "text":
        try:
            times = parse_times(whole(table[columns.time]), columns.time_format)
        except DataError as error:
            raise DataError(
                f"{name}: column {columns.time!r}: {error}. Change time_format, or the data"
            ) from error
        table = table.set_column(names.index(columns.time), columns.time, times)
    return table


def filter_log(log: LogTable, faults: Faults) -> LogTable:
    """Return a log with only the rows that pass the value filters and the minimum user and item counts.

    A row needs a user, an item and a time, and must pass the filters on actions and ratings. Its user and its
    item must both reach the minimum row counts in ``log.columns``.

    Args:
        log: the log.
        faults: raises or skips when a row lacks a user, item or time.

    Returns:
        The log with only these rows, and with an additional column "row", which has the row number in the
        original table.

    Raises:
        DataError: a column is missing, a row lacks a value, or no row remains.
    """
    name, columns = log.name, log.columns

    def check(valid: Bools, good: Bools, column: str) -> None:
        """Report rows without a value in a column to ``faults``, and mark them as invalid.

        Args:
            valid: whether a row is valid so far; modified in place.
            good: whether a row has a value in the column.
            column: column name.
        """
        faults.check(valid, good, f"{name}: column {column!r} has no value in row {{row}}", file=name)

    table = valid_rows(log, check)
    for column in dict.fromkeys([columns.user, columns.item, *columns.item_features]):
        index = table.column_names.index(column)
        table = table.set_column(index, column, one_number(whole(table[column])))
    # Count users and items on the same rows, so the result does not depend on their order.
    frequent = np.ones(table.num_rows, np.bool_)
    for column, min_count in ((columns.user, columns.min_user_count), (columns.item, columns.min_item_count)):
        codes = codes_of(table[column])[0]
        if min_count > 1:
            frequent &= np.bincount(codes)[codes] >= min_count
    table = table.filter(pa.array(frequent))
    check_any_rows(name, table.num_rows)
    return LogTable(name, table, columns)


def check_any_rows(name: str, num_rows: int) -> None:
    """Raise DataError if the filters left no row; ``name`` is the log name."""
    if not num_rows:
        raise DataError(f"{name}: no row is left. Look at the conditions on actions, ratings and counts.")


def log_features(columns: LogColumns, *, users: bool) -> Features:
    """Return unfitted vocabularies for the items, the item features and, if ``users`` is true, the users."""
    names = {ITEM: columns.item} | ({USER: columns.user} if users else {})
    names |= {name: name for name in columns.item_features}
    features = tuple(Vocabulary(name=name, column=column) for name, column in names.items())
    return Features(labels=(), features=features)


def fit_log(log: LogTable, *, users: bool) -> Features:
    """Fit the vocabularies from `log_features` on rows from `filter_log`."""
    return log_features(log.columns, users=users).fit([log.table])


def fit_log_on_ranks(log: LogTable, axis: Axis, *, users: bool) -> Features | None:
    """Fit the vocabularies as `fit_log` does, of which every rank counts a share of the rows. Collective.

    Args:
        log: rows from `filter_log`, the same on all ranks.
        axis: the ranks.
        users: whether users are a feature, too.

    Returns:
        The fitted features on rank 0, None on other ranks.

    Raises:
        ValueError: a column has a wrong kind; raised on every rank.
    """
    name, features = "fitting features", log_features(log.columns, users=users)
    first, last = cut_rows(log.table.num_rows, axis.size)[axis.rank : axis.rank + 2]
    with together(axis, name):
        if messages := features.wrong_columns(log.table.schema):
            raise ValueError(f"{messages[0]}.")
        rows = np.arange(first, last)
        hashes = smallest_row_hashes([rows])
    max_hash = max_sample_hash(gather_objects(hashes, axis, name))
    with together(axis, name):
        state = features.state_of(log.table.slice(first, last - first), rows, max_hash)
    merged = merge_ranks([state] if last > first else [], axis)
    fitted = None
    with together(axis, name):
        if merged is not None:
            fitted = features.fitted(merged, log.table.schema)
    return fitted


class LoggedUsers(NamedTuple):
    """Interactions of a log, and the user column value that every user number stands for."""

    log: Interactions
    values: Any
    """Arrow array with the user column value, by user number."""


def interactions(
    log: LogTable, features: Features, *, num_rows: int, hashed: Key | None = None, seed: int = 0
) -> LoggedUsers:
    """Sort a log's rows by user and time, number the users, and convert items to IDs.

    Rows with items outside the vocabulary are omitted, and counted in a warning. Their users remain, possibly
    without interactions. A user outside the user vocabulary gets a number, but no ID.

    Args:
        log: rows from `filter_log`.
        features: fitted features, from `fit_log`.
        num_rows: row count in the original log.
        hashed: feature hashing items to keys, for a hashed item table. None: an item ID is the row in a table
            with fixed size.
        seed: seed that orders a user's simultaneous rows, if ``log.columns.ties`` is "shuffle".

    Raises:
        DataError: a column's kind differs from the fitted kind.
    """
    name, table, columns, _ = log
    item = vocabulary_of(features, ITEM)
    check_kinds(name, features, table.schema)
    # Numbered before rows are omitted, so users without a known item remain.
    users, values = codes_of(table[columns.user])
    in_vocabulary = item.lookup_values(table[columns.item].combine_chunks()) >= 0
    users, table = users[in_vocabulary], table.filter(pa.array(in_vocabulary))
    warn_of_unknown(name, int((~in_vocabulary).sum()), len(users))
    ids = item_ids(item, table[columns.item].combine_chunks(), hashed)
    times = microseconds_of(table[columns.time].combine_chunks(), columns.time_unit)
    keys = [times, users]
    if columns.ties == "shuffle":
        # Data order would reveal the next item if the data are sorted by item.
        keys.insert(0, np.random.default_rng(seed).permutation(len(users)))
    order = sorted_order(keys)
    sample = None
    if columns.item_features:
        # An item's values come from its first row.
        sampled_ids, first_rows = np.unique(ids, return_index=True)
        sample = ItemSample(sampled_ids, table.take(pa.array(first_rows)))
    arrays = SortedRows(
        offsets=np.concatenate([[0], np.cumsum(np.bincount(users, minlength=len(values)))]),
        items=ids[order],
        # Sorted by microseconds, but stored in seconds.
        times=times[order] // 1_000_000,
        rows=table["row"].to_numpy()[order],
    )
    return logged_users(name, features, arrays, values, num_rows=num_rows, hashed=hashed, sample=sample)


def sorted_order(keys: list[Ints]) -> Ints:
    """Return the same order as ``np.lexsort(keys)`` for integer keys: stable, with the last key the primary.

    This is a radix sort. A pass packs a digit of the key and the row's position into an int64 (digit in the
    upper bits, position in the lower bits), and sorts these integers with ``np.sort``. ``np.sort`` is
    vectorized, and about ten times as fast as ``np.argsort``.
    """
    num_rows = len(keys[0])
    bits = max(num_rows - 1, 1).bit_length()
    width = 63 - bits
    positions = np.arange(num_rows)
    order = None  # None: the rows are still in their original order
    for key in keys:
        values = key.astype(np.int64) - int(key.min(initial=0 if not num_rows else int(key[0])))
        if (values[1:] >= values[:-1]).all() and order is None:
            continue  # already sorted, as times in most logs are
        for shift in range(0, int(values.max(initial=0)).bit_length(), width):
            packed = values if order is None else values[order]
            packed = (packed >> shift & (1 << width) - 1) << bits
            packed |= positions
            # Positions break ties between equal digits, which makes the sort stable.
            packed.sort()
            packed &= (1 << bits) - 1
            order = packed if order is None else order[packed]
    return positions if order is None else order


class SortedRows(NamedTuple):
    """Log rows sorted by user and time, as arrays. They become the `Interactions` fields with the same names.

    The arrays are int32 or int64, and may be memory-mapped files.
    """

    offsets: Ints
    items: Ints
    times: Ints
    rows: Ints


class ItemSample(NamedTuple):
    """First log row with every item, from which the item's features are taken."""

    ids: Ints
    """Item ID per row, ascending."""
    table: pa.Table
    """The rows, with the columns of the item features."""


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
    """Create the `Interactions` for sorted rows: add the features and the catalog.

    Args:
        name: display name.
        features: fitted features.
        arrays: sorted rows.
        values: user column value, by user number.
        num_rows: row count in the original log.
        hashed: feature hashing items to keys; None: an item ID is a table row.
        sample: log rows from which item features are taken; None: without item features.
    """
    item = vocabulary_of(features, ITEM)
    catalogue = np.sort(item_ids(item, item.vocabulary, hashed))
    described = {}
    if sample is not None:
        for feature in features.ids:
            if isinstance(feature, Vocabulary) and feature.name not in (ITEM, USER):
                described[feature.name] = _catalog_values(feature, sample, catalogue)
    # Features for windows have no vocabulary of users; see `LogSource.fit`.
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
    """Raise DataError if a log column has another kind than the fitted feature that reads it.

    Args:
        name: log name, for the message.
        features: fitted features.
        schema: the log's Arrow schema.
    """
    for feature in features.ids:
        wrong = feature.kind_error({feature.source: kind_of(schema.field(feature.source).type)})
        if wrong is not None:
            raise DataError(f"{name}: {wrong}.")


def warn_of_unknown(name: str, num_omitted: int, num_left: int) -> None:
    """Log a warning if rows were omitted because their items are not in the vocabulary.

    Args:
        name: log name.
        num_omitted: omitted row count; 0: no warning.
        num_left: remaining row count.
    """
    if num_omitted:
        advice = "" if num_left else ". No row is left: compare the columns"
        message = "%s: left out %s of items that training did not meet%s"
        _logger.warning(message, name, rows_text(num_omitted), advice)


def requests_of_histories(
    item: Vocabulary, *, history: int, times: bool, more: Sequence[Vocabulary] = ()
) -> tuple[Features, pa.Schema]:
    """Return fitted features that convert recommendation requests to the features in `next_items`.

    A request has the history and, optionally, further items not to recommend.

    Args:
        item: item vocabulary.
        history: maximum history length; longer histories keep their last items.
        times: whether the model reads history timestamps, in seconds.
        more: further features in a request: the user, and item features.

    Returns:
        The features, and a schema with the Arrow type per request column.
    """
    kind = "list of text" if item.found == "text" else "list of integer"
    lists = replace(item, found=kind, sequence=True, table=ITEM, known_only=True)  # type: ignore[arg-type]
    request_features: list[IdFeature] = [replace(lists, name=HISTORY, column=HISTORY, max_length=history)]
    request_features += [Times(name=TIMES, history=HISTORY, max_length=history)] if times else []
    # Items of the history count as seen, too, and a request may leave out the column.
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
    """Return the feature with the given name, which must be a `Vocabulary`, as all features of a log are."""
    feature = features[name]
    assert isinstance(feature, Vocabulary)
    return feature


def item_ids(item: Vocabulary, values: Any, hashed: Key | None) -> Ints:
    """Convert item values to IDs in the item table, int64 [n].

    Args:
        item: item vocabulary.
        values: item column values, an Arrow array [n].
        hashed: feature hashing items to keys; None: the ID is the row in the vocabulary.
    """
    return item.rows_of(values) if hashed is None else hashed.rows_of(values)


def _catalog_values(feature: Vocabulary, sample: ItemSample, catalogue: Ints) -> tuple[Feature, Ranges]:
    """Return an item feature for the dataset, and its IDs for every catalog item."""
    values = feature.values(sample.table)
    lengths, starts = (np.zeros(len(catalogue), np.int64) for _ in range(2))
    # The catalog has all vocabulary items, and the sample has no others.
    positions = np.searchsorted(catalogue, sample.ids)
    lengths[positions], starts[positions] = np.diff(values.offsets), values.offsets[:-1]
    average = float(lengths.mean())
    return replace(feature.feature(), average_length=average), Ranges(
        feature.rows_of(values.array), starts, lengths
    )
