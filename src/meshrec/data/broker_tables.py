"""Records of Redis streams and Kafka topics as Arrow tables of one schema, for a join with another stream.

[Note: records of a broker as tables]
A label join needs all records of a stream in one order, and in columns of one type.

Partitions are merged by the times of their records, as in [Note: positions in partitions]. A record is handed
out when each other partition has a later one, or no more records at that time. The order is therefore that of
arrival at the broker, also if a backlog is read. Which records a call returns depends on what has arrived. A
reader that must repeat a call logs the positions after it, and the same records come again in the same order.

Columns have the kinds that features know from their fit. Unknown kinds are those of the first values in the
stream, and are part of the position. Whole numbers of features are decimals with 38 digits, because IDs may
be wider than int64, and the type must not depend on the values. Features encode them to the same samples.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from meshrec.data.arrow import pa
from meshrec.data.brokers import Broker, Payload, Records, Requests, check_partitions, sizes
from meshrec.data.exact_columns import is_list
from meshrec.data.faults import DataError, RecordFaults, append_json_lines
from meshrec.data.messages import MessageDecoder, num_rows_of, row_content
from meshrec.data.step_planner import MergedPartitions, Runs
from meshrec.data.table_stream import TableStream

_log = logging.getLogger(__name__)

_PARTITION_BYTES = 1 << 20
"""Approximate size of the records that are read of a partition at a time."""
_LIST_SECONDS = 30.0
"""Time between listings of the partitions, which may become more."""
_POLL_SECONDS = 0.02
"""Least time between two reads, unless there are many records."""
_MANY_ROWS = 1000
_READ_SECONDS = 2.0
"""Time in which records that the broker has should arrive."""
_WHOLE = pa.decimal128(38, 0)
_TYPES = {
    "integer": _WHOLE,
    "number": pa.float64(),
    "text": pa.string(),
    "time": pa.timestamp("us"),
    "list of integer": pa.list_(_WHOLE),
    "list of number": pa.list_(pa.float64()),
    "list of text": pa.list_(pa.string()),
}


class BrokerTables(TableStream):
    """Records of Redis streams or Kafka topics as Arrow tables; see [Note: records of a broker as tables].

    Args:
        broker: the broker. Others must not read with it until `close`.
        columns: columns to read.
        kinds: known column kinds, by column name; see `meshrec.data.encoding.Encoding.fitted_kinds`.
        key: column with the key of a join. In a Redis entry with a field per column, a key of unknown kind is
            text.
        time: column with the event time. Text in it is a time in ISO 8601.
        faults: raises for damaged records, or counts them.
        set_aside: file that receives damaged records as JSON lines; None: they are only counted.
        state: output of `state_dict`; None: start at the first records that the broker has.
    """

    def __init__(
        self,
        broker: Broker,
        columns: Sequence[str],
        kinds: Mapping[str, str],
        *,
        key: str,
        time: str,
        faults: RecordFaults,
        set_aside: Path | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._broker, self.name = broker, broker.name
        self._requests = Requests(self.name)
        state = {"partitions": {}, "kinds": {}} if state is None else state
        self._columns = _Columns([*dict.fromkeys([*columns, key, time])], dict(kinds), key, time)
        self._columns.kinds |= state["kinds"]
        self._faults, self._set_aside = faults, set_aside
        self._merge = MergedPartitions(state["partitions"])
        # Partitions whose readers are known.
        self._known: set[str] = set()
        # Positions and kinds since the last call that returned records; becomes `logged`.
        self._unlogged: dict[str, Any] = {"partitions": {}, "kinds": {}}
        # Whether a warning of a column without values was logged.
        self._is_kind_missing = False
        # Of time.monotonic: next listing, and next read.
        self._next_listing = self._next_read = 0.0

    @override
    def read(self, logged: Any = None) -> Any:
        if logged is not None:
            return self._read_again(logged)
        time.sleep(max(0.0, self._next_read - time.monotonic()))
        while self._fill() and self._know_kinds():
            position, runs = self._merge.take_first()
            if not position:
                return None
            table = self._table(runs)
            self._unlogged["partitions"] |= position
            # No rows if all records are damaged.
            if table.num_rows:
                self.logged, self._unlogged = self._unlogged, {"partitions": {}, "kinds": {}}
                self._next_read = time.monotonic() + (_POLL_SECONDS if table.num_rows < _MANY_ROWS else 0)
                return table
        return None

    def _read_again(self, logged: Mapping[str, Any]) -> Any:
        """Return the records before a position, or None while they have not arrived."""
        self._columns.kinds |= logged["kinds"]
        position = logged["partitions"]
        while missing := [name for name in position if not self._has(name, position[name])]:
            if not self._receive(missing):
                self.is_waiting = True
                return None
        self.is_waiting, self.logged = False, logged
        return self._table(self._merge.take_before(position))

    def _has(self, name: str, values: list[Any]) -> bool:
        """Return whether the records of a partition before a position in it have arrived."""
        return name in self._known and self._merge.has_arrived(name, values)

    def _fill(self) -> bool:
        """Read until every partition has records, or no more at this time. False: some may be missing."""
        self._list()
        names, deadline = self._merge.names, time.monotonic() + _READ_SECONDS
        self.is_waiting = not self._known.issuperset(names) or not names
        if not self._columns.unknown:
            names = [name for name in names if not self._merge.waiting(name).ids]
        while names and not self.is_waiting:
            received = self._receive(names)
            names = [name for name in names if name not in received]
            if not received:
                if self._is_at_end(names):
                    break
                self.is_waiting = self._requests.is_away or time.monotonic() > deadline
        return not self.is_waiting

    def _is_at_end(self, names: list[str]) -> bool:
        """Return whether partitions have no more records. False: unknown, because the broker is away."""
        return self._requests.attempt(lambda: self._broker.at_end(names), otherwise=False)

    def _receive(self, names: list[str]) -> set[str]:
        """Read some records of partitions, and return the partitions that had records."""
        self._list()
        names = [name for name in names if name in self._known]
        if not names:
            return set()
        records: dict[str, Records] = {}
        records = self._requests.attempt(
            lambda: self._broker.read(names, _PARTITION_BYTES * len(names)), records
        )
        for name, received in records.items():
            self._merge.add(name, received, [num_rows_of(payload) for payload in received.payloads])
        return set(records)

    def _list(self) -> None:
        """Look for new partitions from time to time, and start to read them."""
        if time.monotonic() < self._next_listing:
            return
        partitions: Sequence[str] = ()
        partitions = self._requests.attempt(self._broker.partitions, partitions)
        if not partitions:
            return
        self._next_listing = time.monotonic() + _LIST_SECONDS
        check_partitions(self._broker, self._merge.names, partitions)
        for name in sorted(set(partitions) - self._known):
            if name not in self._merge.names:
                self._merge.add_partition(name, self._broker.start)
            self._broker.seek({name: self._merge.last(name)})
            self._known.add(name)

    def _know_kinds(self) -> bool:
        """Take the unknown kinds from the first values. Return whether all kinds are known.

        Raises:
            DataError: a column has no value in many records.
        """
        if not self._columns.unknown:
            return True
        payloads = [payload for name in self._merge.names for payload in self._merge.waiting(name).payloads]
        if not payloads:
            return True
        self._columns.learn(payloads)
        if unknown := self._columns.unknown:
            if sum(sizes(payloads)) > _PARTITION_BYTES:
                raise DataError(
                    f"{self.name}: the first {len(payloads):,} records have no value in the columns "
                    f"{unknown}, whose kinds the features do not know. Train on data that has such values, "
                    "and follow with --from RUN."
                )
            if not self._is_kind_missing:
                self._is_kind_missing = True
                _log.warning("%s: waiting for a record with values in the columns %s", self.name, unknown)
            # A clock must not decide before these records are joined.
            self.is_waiting = True
            return False
        self._unlogged["kinds"] = dict(self._columns.kinds)
        return True

    def _table(self, runs: Runs) -> Any:
        """Decode whole records. Damaged rows are counted and omitted."""
        schema, tables, first = self._columns.schema(), [], 0
        for decoded in MessageDecoder(self._columns).decode(runs.payloads):
            problems = {first + row: problem for row, problem in decoded.problems.items()}
            rows = [first + row for row in decoded.rows]
            for number, part in _typed(decoded.table, schema):
                if isinstance(part, str):
                    problems[rows[number]] = part
                else:
                    tables.append(part)
            for row in sorted(problems):
                self._omit(runs, row, problems[row])
            first += decoded.num_rows
        return pa.concat_tables(tables).combine_chunks() if tables else schema.empty_table()

    def _omit(self, runs: Runs, row: int, problem: str) -> None:
        """Report a damaged row."""
        ends = np.cumsum(runs.num_rows)
        run = int(np.searchsorted(ends, row, side="right"))
        self._faults.report_record(problem.partition(":")[0], f"{runs.name(run)}: {problem}", 1)
        if self._set_aside is not None:
            row -= int(ends[run]) - runs.num_rows[run]
            item = {"stream": self.name, "partition": runs.partitions[run], "id": runs.ids[run], "row": row}
            content = {"problem": problem, "values": row_content(runs.payloads[run], row)}
            append_json_lines(self._set_aside, [item | content])

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"partitions": self._merge.position, "kinds": dict(self._columns.kinds)}

    @override
    def close(self) -> None:
        self._broker.close()


class _Columns:
    """Columns to decode, with their kinds.

    Args:
        names: column names.
        kinds: known kinds, by column name.
        key, time: as for `BrokerTables`.
    """

    def __init__(self, names: list[str], kinds: dict[str, str], key: str, time: str) -> None:
        self._names, self._key, self._time = names, key, time
        # An integer or another number; keys and times are integers.
        whole = {name: "integer" for name in (key, time) if kinds.get(name) == "numeric"}
        kinds = {name: kind.replace("numeric", "number") for name, kind in (kinds | whole).items()}
        self.kinds = {name: kind for name, kind in kinds.items() if name in names}

    @property
    def unknown(self) -> list[str]:
        """Columns of unknown kind."""
        return [name for name in self._names if name not in self.kinds]

    def columns(self) -> list[str]:
        return self._names

    def fitted_kinds(self) -> Mapping[str, str]:
        return self.kinds

    def wrong_columns(self, schema: Any) -> list[str]:
        return [f"there is no column {name!r}" for name in self._names if name not in schema.names]

    def learn(self, payloads: Sequence[Payload]) -> None:
        """Take unknown kinds from the first values of records."""
        from meshrec.data.features.values import kind_of

        if self._key in self.unknown and isinstance(payloads[0], dict):
            # Otherwise the first key would decide whether later ones must be numbers.
            self.kinds[self._key] = "text"
        decoder = MessageDecoder(self)
        for decoded in decoder.decode(payloads):
            for name in self.unknown:
                if decoded.rows and name not in decoder.untyped(decoded.table):
                    kind = kind_of(decoded.table[name].type)
                    if kind not in _TYPES:
                        raise DataError(
                            f"column {name!r} is {decoded.table[name].type}. Write numbers, texts, times, or "
                            "lists of numbers or texts."
                        )
                    self.kinds[name] = "time" if name == self._time and kind == "text" else kind
            if not self.unknown:
                return

    def schema(self) -> Any:
        """Return the Arrow schema of the tables."""
        types = {name: _TYPES[self.kinds[name]] for name in self._names}
        # A join takes integers only as 64 bits.
        types |= {name: pa.int64() for name in (self._key, self._time) if types[name] == _WHOLE}
        return pa.schema(types.items())


def _typed(table: Any, schema: Any) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a table with the types of a schema: the number of the first row, and a table.

    If a row does not fit, yield its number and the problem.
    """
    if table.num_rows == 0:
        return
    try:
        columns = [_column(table[name], schema.field(name)) for name in schema.names]
        yield 0, pa.Table.from_arrays(columns, schema=schema)
    except ValueError as error:
        # Rare, so look at the rows one by one.
        if table.num_rows == 1:
            yield 0, str(error)
            return
        for number in range(table.num_rows):
            yield from ((number, part) for _, part in _typed(table.slice(number, 1), schema))


def _column(column: Any, field: Any) -> Any:
    """Convert a column to the type of a field.

    Raises:
        ValueError: a value does not fit, or the column has another kind.
    """
    from meshrec.data.features.values import converted, decoded, kind_of, whole

    array, expected = decoded(whole(column)), kind_of(field.type)
    kind, numeric = kind_of(array.type), {"integer", "number"}
    is_like = kind.removeprefix("list of ") in numeric and expected.removeprefix("list of ") in numeric
    is_like &= is_list(array.type) == is_list(field.type)
    try:
        if not (kind == expected or is_like or pa.types.is_null(array.type)):
            raise ValueError(f"its kind is {expected} in this stream, got {kind}")
        if not is_list(array.type):
            array = converted(array, expected)
        return array.cast(field.type)
    except (ValueError, pa.ArrowException) as error:
        raise ValueError(f"wrong value in column {field.name!r}: {error}") from error
