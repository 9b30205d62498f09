"""Tables of users, items and times as logs of interactions."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.dataset import Feature
from meshrec.data.faults import DataError, Faults, rows_text
from meshrec.data.features import Features, IdFeature, Key, Times, Vocabulary
from meshrec.data.features.values import is_missing, microseconds_of
from meshrec.data.in_memory import Ranges
from meshrec.data.interactions import HISTORY, SEEN, TIMES, Interactions
from meshrec.data.log_columns import ITEM, USER, LogColumns
from meshrec.data.nearest import did_you_mean
from meshrec.data.samples import Ints

_logger = logging.getLogger("meshrec")


class LogTable(NamedTuple):
    """The table of a log, and what its columns are."""

    name: str
    """Name for reports."""
    table: pa.Table
    columns: LogColumns


def counted_rows(log: LogTable, faults: Faults) -> LogTable:
    """Return the rows of a log that count: with users, items and times, and enough of each.

    The column "row" of the result has the number of each row in the log.

    Raises:
        DataError: a column is missing, a row lacks a value, or no row is left.
    """
    name, table, columns = log
    known = table.column_names
    for each in columns.names():
        if each not in known:
            raise DataError(f"{name}: there is no column {each!r} among {known}.{did_you_mean(each, known)}")
    kept = np.ones(table.num_rows, np.bool_)
    for each in dict.fromkeys([columns.user, columns.item, columns.time]):
        missing = is_missing(table[each].combine_chunks())
        if missing is not None:
            faults.check(kept, ~missing, f"{name}: column {each!r} has no value in row {{row}}", file=name)
    if columns.action is not None and columns.actions:
        found = pc.is_in(table[columns.action].cast(pa.string()), value_set=pa.array(columns.actions))
        kept &= found.to_numpy()
    if columns.rating is not None and columns.min_rating is not None:
        kept &= pc.fill_null(pc.greater_equal(table[columns.rating], columns.min_rating), False).to_numpy()
    table = table.append_column("row", pa.array(np.arange(table.num_rows))).filter(pa.array(kept))
    enough = np.ones(table.num_rows, np.bool_)
    for each, least in ((columns.user, columns.min_user_count), (columns.item, columns.min_item_count)):
        codes = _codes(table[each])[0]
        if least > 1:
            enough &= np.bincount(codes)[codes] >= least
    table = table.filter(pa.array(enough))
    if not table.num_rows:
        raise DataError(f"{name}: no row is left. Look at the conditions on actions, ratings and counts.")
    return LogTable(name, table, columns)


def fit_log(log: LogTable, *, users: bool) -> Features:
    """Fit the vocabularies of a log on the rows that count; ``users``: whether users are a feature."""
    names = {ITEM: log.columns.item} | ({USER: log.columns.user} if users else {})
    names |= {each: each for each in log.columns.item_features}
    wanted = tuple(Vocabulary(name=name, column=column) for name, column in names.items())
    return Features(labels=(), features=wanted).fit([log.table])


class LoggedUsers(NamedTuple):
    """The interactions of a log, and the values of its users by number."""

    log: Interactions
    values: Any


def interactions(
    log: LogTable, features: Features, *, num_rows: int, hashed: Key | None = None, seed: int = 0
) -> LoggedUsers:
    """Sort the rows of a log that count, with numbers for users and IDs for items.

    Rows of items that the vocabulary lacks are left out, and a warning says how many.

    Args:
        log: the rows, from `counted_rows`.
        features: the fitted features.
        num_rows: number of rows of the whole log.
        hashed: the keys of a table without a fixed number of rows; None: IDs are rows.
        seed: seed of the shuffle of ties.

    Raises:
        DataError: no item is in the vocabulary.
    """
    name, table, columns = log
    item = vocabulary_of(features, ITEM)
    known = item.lookup_values(table[columns.item].combine_chunks()) >= 0
    table = table.filter(pa.array(known))
    if not table.num_rows:
        raise DataError(f"{name}: its items are none of those of the training data. Compare the columns.")
    if not known.all():
        missing = rows_text(int((~known).sum()))
        _logger.warning("%s: left out %s of items that training did not meet", name, missing)
    ids = item_ids(item, table[columns.item].combine_chunks(), hashed)
    users, values = _codes(table[columns.user])
    times = microseconds_of(table[columns.time].combine_chunks(), columns.time_unit)
    ties = np.arange(len(users))
    if columns.ties == "shuffle":
        ties = np.random.default_rng(seed).permutation(ties)
    order = np.lexsort((ties, times, users))
    catalogue = np.sort(item_ids(item, item.vocabulary, hashed))
    described = {}
    if columns.item_features:
        sample = table.take(pa.array(np.unique(ids, return_index=True)[1]))
        sampled = np.unique(ids)
        for each in columns.item_features:
            described[each] = _described(vocabulary_of(features, each), sample, sampled, catalogue)
    user = vocabulary_of(features, USER) if USER in [each.name for each in features.ids] else None
    found = Interactions(
        name=name,
        users=users[order],
        items=ids[order],
        times=times[order] // 1_000_000,
        rows=table["row"].to_numpy()[order],
        num_rows=num_rows,
        item=(item if hashed is None else hashed).feature(),
        catalogue=catalogue,
        user=None if user is None else user.feature(),
        user_ids=None if user is None else user.rows_of(values),
        described=described,
    )
    return LoggedUsers(found, values)


def requests_of_histories(
    item: Vocabulary, *, history: int, times: bool, seen: bool, more: Sequence[Vocabulary] = ()
) -> tuple[Features, pa.Schema]:
    """Return the features of a request for recommendations, and the types of its columns.

    Args:
        item: the vocabulary of the items.
        history: largest number of items in a history; longer ones are cut to their last items.
        times: whether the model reads the times of the items, in seconds.
        seen: whether items that the user had are left out.
        more: further features of the log that a request has.
    """
    kind = "list of text" if item.found == "text" else "list of integer"
    lists = replace(item, found=kind, sequence=True, table=ITEM)  # type: ignore[arg-type]
    wanted: list[IdFeature] = [replace(lists, name=HISTORY, column=HISTORY, max_length=history)]
    wanted += [Times(name=TIMES, history=HISTORY, max_length=history)] if times else []
    wanted += [replace(lists, name=SEEN, column=SEEN)] if seen else []
    kinds = {each.name: pa.int64() if each.name == TIMES else item.vocabulary.type for each in wanted}
    schema = pa.schema([(name, pa.list_(of)) for name, of in kinds.items()])
    for each in more:
        of = each.vocabulary.type
        schema = schema.append(
            pa.field(each.source, pa.list_(of) if str(each.found).startswith("list") else of)
        )
    return Features(labels=(), features=(*wanted, *more)), schema


def vocabulary_of(features: Features, name: str) -> Vocabulary:
    """Return a feature by name. The features of logs all have vocabularies."""
    found = features[name]
    assert isinstance(found, Vocabulary)
    return found


def item_ids(item: Vocabulary, values: Any, hashed: Key | None) -> Ints:
    """Return the IDs of items in their table."""
    return item.rows_of(values) if hashed is None else hashed.rows_of(values)


def _described(
    feature: Vocabulary, sample: pa.Table, sampled: Ints, catalogue: Ints
) -> tuple[Feature, Ranges]:
    """Return a feature of items with the values of each item of the catalogue."""
    found = feature.values(sample)
    lengths, starts = (np.zeros(len(catalogue), np.int64) for _ in range(2))
    at = np.searchsorted(catalogue, sampled)
    lengths[at], starts[at] = np.diff(found.offsets), found.offsets[:-1]
    average = float(lengths.mean())
    return replace(feature.feature(), average_length=average), Ranges(
        feature.rows_of(found.array), starts, lengths
    )


def _codes(column: Any) -> tuple[Ints, Any]:
    """Return numbers from 0 in the order of first appearance, and the values that they stand for."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary
