"""Numbers of the users and items in a log: the second stage in [Note: histories on disk] (histories.py)."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.exact_columns import as_integers
from meshrec.data.features import Features
from meshrec.data.features.features import FitState
from meshrec.data.features.sketches import Counts, RowSample
from meshrec.data.features.values import decoded, one_number, whole
from meshrec.data.log_columns import ITEM, USER
from meshrec.data.log_parts import (
    FEATURE,
    MAX_RANGE,
    VERSION,
    LogFiles,
    LogParts,
    bounded_map,
    digest_of,
    num_threads,
)
from meshrec.data.logs import check_any_rows, log_features
from meshrec.data.samples import Bools, Ints

# N log rows, n rows in a part


def options_of(log: LogFiles) -> dict[str, Any]:
    """Return the options that the histories depend on, in addition to the file contents."""
    paths = [str(log.paths)] if isinstance(log.paths, str | Path) else [str(path) for path in log.paths]
    return {"version": VERSION, "paths": paths, "columns": asdict(log.columns)}


class UserItemNumbers:
    """Second stage in [Note: histories on disk]: a number for every user and item, and their row counts.

    The other methods read the stage folder, so `build` must have run, now or in an earlier process.

    Args:
        log: log files and options.
        parts: all log parts.
        path: folder for this stage.
    """

    def __init__(self, log: LogFiles, parts: LogParts, path: Path) -> None:
        self.log, self.parts, self.path = log, parts, path
        # Identifies the inputs of this stage: names of parts contain a digest over file content and options.
        self.key = digest_of([options_of(log), parts.names])

    def values(self, name: str) -> Any:
        """Return the distinct user or item values by number, as a memory-mapped Arrow array.

        Value i belongs to the user or item with number i. ``name`` is `USER` or `ITEM`.
        """
        return self._table(name)["value"].combine_chunks()

    def counts(self, name: str) -> Ints:
        """Return the row count per user or item, int64, by number. ``name`` is `USER` or `ITEM`.

        Counts only rows whose user and item both reach the minimum counts.
        """
        counts: Ints = self._table(name)["count"].to_numpy()
        return counts

    def numbers(self, name: str, part: int, folder: Path | None = None) -> Ints:
        """Return the user number or item number for every row in a part.

        The number is -1 for a user or item that has no row left after infrequent users and items are
        omitted.

        Args:
            name: `USER` or `ITEM`.
            part: index of the part.
            folder: folder with the maps from values to numbers. None: the stage folder. While the stage is
                being built, this is the temporary folder.
        """
        folder = self.path if folder is None else folder
        column = self.parts.parts[part].table()[name].chunk(0)
        if (folder / f"{name}.npy").exists():
            # Integers in a small range: a single map for all parts, indexed by value - low.
            low, *_ = np.load(folder / f"{name}-low.npy")
            of_value = np.load(folder / f"{name}.npy", mmap_mode="r")
            numbers: Ints = of_value[column.to_numpy().astype(np.int64, copy=False) - low]
        else:
            # Other values: a map per part, indexed by the part's dictionary code.
            of_code = np.load(folder / f"{name}-{part}.npy", mmap_mode="r")
            numbers = of_code[column.dictionary_encode().indices.to_numpy()]
        return numbers

    def frequent_rows(self, part: int) -> tuple[pa.Table, Ints, Ints]:
        """Return the rows in a part whose user and item both reach the minimum counts.

        Args:
            part: index of the part.

        Returns:
            - The n rows, without the columns `USER` and `ITEM`.
            - The user number per row, [n].
            - The item number per row, [n].
        """
        table = self.parts.parts[part].table()
        users, items = (self.numbers(name, part) for name in (USER, ITEM))
        table = table.drop_columns([USER, ITEM])
        is_counted = (users >= 0) & (items >= 0)
        if is_counted.all():
            return table, users, items
        rows = np.flatnonzero(is_counted)
        return table.take(pa.array(rows)), users[rows], items[rows]

    def type_of(self, name: str) -> pa.DataType:
        """Return the Arrow type that represents a column in all parts; see `_common_type`."""
        return read_table(self.path / "types.arrow").schema.field(name).type

    def schema(self) -> pa.Schema:
        """Return the Arrow types for the log columns that features read, under their names in the log."""
        columns = self.log.columns
        names = {columns.user: USER, columns.item: ITEM}
        names |= {name: FEATURE + name for name in columns.item_features}
        return pa.schema([(column, self.type_of(name)) for column, name in names.items()])

    def item_features(self, table: pa.Table) -> pa.Table:
        """Return the item feature columns of a part, cast to the types that represent all parts.

        Columns have their names in the log, without the prefix `FEATURE`.
        """
        columns = {
            name: _cast_to_common_type(table[FEATURE + name], self.type_of(FEATURE + name))
            for name in self.log.columns.item_features
        }
        return pa.table(columns)

    def _table(self, name: str) -> pa.Table:
        return read_table(self.path / f"{name}.arrow")

    def _distinct(self, name: str) -> Iterator[Any]:
        """Yield an Arrow array per part that contains every distinct value in a column of the part."""
        return (part.distinct(name) for part in self.parts.parts)

    # -- building ----------------------------------------------------------------------------------------

    def build(self, folder: Path) -> dict[str, Any]:
        """Write the stage: number users and items ordered by first appearance, and count their rows.

        Args:
            folder: temporary folder, renamed to the stage folder afterwards.

        Returns:
            Additional manifest fields, of which this stage has none.
        """
        columns = self.log.columns
        num_parts = len(self.parts.parts)
        check_any_rows(self.log.name, num_parts)
        names = [USER, ITEM, *(FEATURE + name for name in columns.item_features)]
        types = pa.schema([(name, _common_type(self._distinct(name))) for name in names])
        write_table(folder / "types.arrow", types.empty_table())

        def unified(name: str) -> Any:
            """Number users or items: write maps from values to numbers, and return the values by number."""
            kind = types.field(name).type
            # An array indexed by integer avoids hashing. It is possible only for a small range.
            values = self._number_by_lookup(name, kind, folder)
            return self._number_by_hashing(name, kind, folder) if values is None else values

        # Users and items are numbered at the same time, in two threads.
        values = dict(zip((USER, ITEM), bounded_map(unified, (USER, ITEM), 2), strict=True))
        counts = {name: np.zeros(len(values[name]), np.int64) for name in values}

        def user_and_item_numbers(part: int) -> dict[str, Ints]:
            """Return the user number and the item number for every row in a part, by name."""
            return {name: self.numbers(name, part, folder) for name in values}

        # All values in parts have a number so far: -1 appears only in `_renumber_frequent`.
        for numbers in bounded_map(user_and_item_numbers, range(num_parts), num_threads()):
            for name in counts:
                counts[name] += np.bincount(numbers[name], minlength=len(counts[name]))
        # Both masks use the same counts, so the result does not depend on whether users or items come
        # first.
        is_frequent = {
            USER: counts[USER] >= columns.min_user_count,
            ITEM: counts[ITEM] >= columns.min_item_count,
        }
        if not all(mask.all() for mask in is_frequent.values()):
            values, counts = self._renumber_frequent(folder, values, is_frequent)
        check_any_rows(self.log.name, int(counts[USER].sum()))
        for name in counts:
            write_table(folder / f"{name}.arrow", pa.table({"value": values[name], "count": counts[name]}))
        return {}

    def _number_by_hashing(self, name: str, kind: pa.DataType, folder: Path) -> Any:
        """Return the distinct values from all parts, ordered by first appearance.

        Also writes a map per part, ``NAME-PART.npy``: the number for every dictionary code in the part.
        """
        values = pa.array([], kind)
        pending: list[Any] = []  # distinct values of parts from ``first`` on, not merged into ``values`` yet
        first = 0
        # Parts are merged in log order, which gives numbers by first appearance.
        for part, distinct in enumerate(self._distinct(name)):
            pending.append(_cast_to_common_type(distinct.dictionary_encode().dictionary, kind))
            # Every merge hashes all merged values again, which takes quadratic time in total for a merge per
            # part. So merge only when there are at least as many pending values as merged ones.
            if sum(map(len, pending)) < len(values) and part + 1 < len(self.parts.parts):
                continue
            # One dictionary for all chunks: merged values keep their numbers, because they come first.
            encoded = pa.chunked_array([values, *pending]).dictionary_encode()
            values = encoded.chunk(0).dictionary
            for number, chunk in enumerate(encoded.chunks[-len(pending) :]):
                codes = pc.fill_null(chunk.indices, -1).to_numpy(zero_copy_only=False)
                np.save(folder / f"{name}-{first + number}.npy", codes)
            first, pending = part + 1, []
        return values

    def _number_by_lookup(self, name: str, kind: pa.DataType, folder: Path) -> Any:
        """Number integers in a small range without hashing, ordered by first appearance.

        Writes ``NAME.npy``, an array with the number for every integer from the smallest on, and the smallest
        integer in ``NAME-low.npy``.

        Returns:
            The distinct integers by number. None if values are not integers, or span more than `MAX_RANGE`.
        """
        columns = [part.table()[name].chunk(0) for part in self.parts.parts]
        if not all(pa.types.is_integer(column.type) for column in columns):
            return None
        ends = [pc.min_max(column) for column in columns]
        low = min(end["min"].as_py() for end in ends)
        size = max(end["max"].as_py() for end in ends) + 1 - low
        if size > MAX_RANGE:
            return None
        numbers = np.full(size, -1, np.int32)
        order: list[Ints] = []
        num = 0
        for column in columns:
            values = column.to_numpy().astype(np.int64, copy=False) - low
            # `pc.unique` keeps the order of first appearance.
            new = pc.unique(pa.array(values[numbers[values] < 0])).to_numpy()
            numbers[new] = np.arange(num, num + len(new))
            order.append(new + low)
            num += len(new)
        np.save(folder / f"{name}.npy", numbers)
        np.save(folder / f"{name}-low.npy", np.array([low]))
        return pa.array(np.concatenate(order)).cast(kind)

    def _renumber_frequent(
        self, folder: Path, values: dict[str, Any], is_frequent: dict[str, Bools]
    ) -> tuple[dict[str, Any], dict[str, Ints]]:
        """Omit rows with an infrequent user or item, and number the remaining users and items again.

        Rewrites the maps from values to numbers; omitted users and items get -1.

        Args:
            is_frequent: whether a user or item reaches the minimum count, by old number.
        """
        # An omitted row may be the last one of a frequent user. That user gets no number either.
        renumbered = {name: np.full(len(mask), -1, np.int32) for name, mask in is_frequent.items()}
        order: dict[str, list[Ints]] = {name: [] for name in values}
        counts = {name: np.zeros(len(mask), np.int64) for name, mask in is_frequent.items()}
        num = dict.fromkeys(values, 0)
        for part in range(len(self.parts.parts)):
            numbers = {name: self.numbers(name, part, folder) for name in values}
            # Counted once, before any row is omitted: omitting rows does not make further users or items
            # infrequent.
            is_counted = is_frequent[USER][numbers[USER]] & is_frequent[ITEM][numbers[ITEM]]
            for name in values:
                frequent = numbers[name][is_counted]
                counts[name] += np.bincount(frequent, minlength=len(counts[name]))
                appeared = pc.unique(pa.array(frequent)).to_numpy()
                new = appeared[renumbered[name][appeared] < 0]
                renumbered[name][new] = np.arange(num[name], num[name] + len(new))
                order[name].append(new)
                num[name] += len(new)
        for name in values:
            paths = [folder / f"{name}.npy"]
            if not paths[0].exists():
                paths = [folder / f"{name}-{part}.npy" for part in range(len(self.parts.parts))]
            for path in paths:
                numbers_of_values = np.load(path)
                is_number = numbers_of_values >= 0
                numbers_of_values[is_number] = renumbered[name][numbers_of_values[is_number]]
                np.save(path, numbers_of_values)
        orders = {name: np.concatenate(order[name]) for name in values}
        return (
            {name: values[name].take(pa.array(orders[name])) for name in values},
            {name: counts[name][orders[name]] for name in values},
        )

    # -- fitting -----------------------------------------------------------------------------------------

    def fit(self, *, users: bool) -> Features:
        """Return the fitted vocabularies, with a user vocabulary only if ``users`` is true."""
        columns = self.log.columns
        features = log_features(columns, users=users)
        # Users and items are already counted. Only item features need a pass over the parts.
        names = [ITEM, USER] if users else [ITEM]
        counts = {name: Counts(self.values(name), pa.array(self.counts(name))) for name in names}
        num_rows = int(self.counts(USER).sum())
        sample = RowSample(pa.table({"": np.zeros(0, np.bool_)}), np.zeros(0, np.uint64))
        state = FitState(num_rows, sample, {})
        if columns.item_features:
            described = Features(labels=(), features=features.features[len(names) :])
            states = self._states(described)
            state = next(states)
            for other in states:
                state = state.merged(other)
        schema = self.schema()
        messages = features.wrong_columns(schema)
        if messages:
            raise ValueError(f"{messages[0]}.")
        return features.fitted(state._replace(counts={**counts, **state.counts}), schema)

    def _states(self, described: Features) -> Iterator[FitState]:
        """Yield the statistics from which the item features are fitted, part by part."""
        first = 0
        for part in range(len(self.parts.parts)):
            # Rows are numbered among counted rows, as in `fit_log`, so both draw the same sample.
            table = self.item_features(self.frequent_rows(part)[0])
            if table.num_rows:
                yield described.state_of(table, np.arange(first, first + table.num_rows))
            first += table.num_rows


def _common_type(arrays: Iterable[Any]) -> pa.DataType:
    """Return the Arrow type that `one_number` would give the concatenated arrays, without concatenating them.

    Integers and integral floats have an integer type. If any value has a fraction, the type is a float.
    """
    summaries = []
    for array in arrays:
        summary = array.slice(0, 0)
        is_integer = pa.types.is_integer(array.type)
        if is_integer or pa.types.is_floating(array.type) or pa.types.is_decimal(array.type):
            array = array.drop_null()
            if not is_integer:
                array = array.filter(pc.equal(array, array))  # without NaN
                fractions = array.filter(pc.not_equal(pc.floor(array), array))
                summary = pa.concat_arrays([summary, fractions.slice(0, 1)])
            # These values give the same type as the whole array: its extremes decide the width, and a value
            # with a fraction decides between integer and float.
            ends = pc.min_max(array)
            summary = pa.concat_arrays([summary, pa.array([ends["min"], ends["max"]], array.type)])
        summaries.append(pa.table({"": summary}))
    values = pa.concat_tables(summaries, promote_options="permissive")[""]
    return one_number(values.combine_chunks()).type


def _cast_to_common_type(array: Any, kind: pa.DataType) -> Any:
    """Cast an array from a part to ``kind``, the type from `_common_type` that represents all parts."""
    array = decoded(whole(array))
    if pa.types.is_floating(kind):
        return pc.add(array.cast(pa.float64()), 0.0)
    is_number = pa.types.is_floating(array.type) or pa.types.is_decimal(array.type)
    return (as_integers(array) if is_number else array).cast(kind)


def read_table(path: Path) -> pa.Table:
    """Open an Arrow file as a memory-mapped table."""
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def write_table(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
