"""Decoding of records from message brokers: JSON objects, Arrow IPC streams, and strings by column.

[Note: values in messages]

A message has the values that a file has, and is encoded to the same samples. Features know the kind of each
column from their fit (`meshrec.data.encoding.Encoding.fitted_kinds`), which decides which values are allowed:

- JSON: one object per message, with a value or a list per column. Arrow parses many messages at once. If it
  refuses one, all of them are parsed by Python, which knows integers beyond 64 bits, 2.0 in a column of
  integers, booleans for 0 and 1, and which message or value is damaged.
- Arrow IPC stream: any number of rows. The columns have types, so nothing is converted.
- Strings by column, as in a Redis entry: numbers and times are parsed as in CSV files, and lists as JSON.

A missing JSON key or string is null. Columns that the features do not read are ignored.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from meshrec.data.arrow import pa, pa_json
from meshrec.data.brokers import Payload
from meshrec.data.delimited import FLOAT_PATTERN, INT_PATTERN
from meshrec.data.exact_columns import plain_table
from meshrec.data.faults import DataError, shown

_ARROW_START = b"\xff\xff\xff\xff"
"""First bytes of an Arrow IPC stream."""
_TYPES = {
    "integer": "int64",
    "number": "float64",
    "text": "string",
    "time": "string",
    "list of integer": "list<int64>",
    "list of number": "list<float64>",
    "list of text": "list<string>",
}
_INT, _FLOAT = re.compile(INT_PATTERN), re.compile(FLOAT_PATTERN)
_FORMS = "A record is a JSON object, an Arrow IPC stream, or a Redis entry with a text per column"


class _Form(Enum):
    """Form of a message."""

    JSON, ARROW, TEXTS = range(3)


def _form_of(payload: Payload) -> _Form:
    if isinstance(payload, dict):
        return _Form.TEXTS
    return _Form.ARROW if payload.startswith(_ARROW_START) else _Form.JSON


class DecodedRows(NamedTuple):
    """Rows of consecutive messages of one form."""

    table: "pa.Table"
    """Columns that the features read, for the rows that can be decoded."""
    rows: list[int]
    """Row number per row of the table, counted over all rows of the messages."""
    num_rows: int
    """Number of rows of the messages, including damaged ones."""
    problems: dict[int, str]
    """Problem by row number, for rows that are not in the table. It starts with the reason and a colon."""


def num_rows_of(payload: Payload) -> int:
    """Return the number of rows in a message; 1 if it is damaged."""
    if _form_of(payload) is not _Form.ARROW:
        return 1
    try:
        return sum(batch.num_rows for batch in pa.ipc.open_stream(payload))
    except (pa.ArrowException, OSError):
        return 1


class Columns(Protocol):
    """Columns to decode, such as those of a `meshrec.data.encoding.Encoding`."""

    def columns(self) -> Sequence[str]:
        """Return the names of the columns."""

    def fitted_kinds(self) -> Mapping[str, str]:
        """Return the known column kinds, by column name."""

    def wrong_columns(self, schema: Any) -> list[str]:
        """Return a message per missing or unreadable column of an Arrow schema."""


class MessageDecoder:
    """Decoder of messages to the columns that features read; see [Note: values in messages].

    Args:
        features: fitted features, or other columns.
    """

    def __init__(self, features: Columns) -> None:
        self._features = features
        self._columns = list(features.columns())
        self._kinds: dict[str, str] = dict(features.fitted_kinds())

    def decode(self, payloads: Sequence[Payload]) -> Iterator[DecodedRows]:
        """Decode messages, in runs of one form."""
        for form, group in itertools.groupby(payloads, _form_of):
            run: list[Any] = list(group)
            if form is _Form.ARROW:
                yield from self._arrow(run)
            else:
                yield self._texts(run) if form is _Form.TEXTS else self._json(run)

    def untyped(self, table: "pa.Table") -> list[str]:
        """Return the decoded columns without a value, also in lists, whose kind the features do not know."""
        from meshrec.data.features.values import values_of

        columns = {
            name: values_of(table[name]).array for name in table.column_names if name not in self._kinds
        }
        return [name for name, values in columns.items() if values.null_count == len(values)]

    def _arrow(self, payloads: list[bytes]) -> Iterator[DecodedRows]:
        """Decode Arrow IPC streams. Consecutive ones with the same columns become one table."""
        decoded = map(self._arrow_message, payloads)
        for _, run in itertools.groupby(decoded, lambda rows: None if rows.problems else rows.table.schema):
            pieces = [*run]
            if pieces[0].problems:
                yield from pieces
            else:
                table = pa.concat_tables([rows.table for rows in pieces]).combine_chunks()
                yield DecodedRows(table, list(range(table.num_rows)), table.num_rows, {})

    def _arrow_message(self, payload: bytes) -> DecodedRows:
        """Decode an Arrow IPC stream."""
        num = num_rows_of(payload)
        try:
            table = plain_table(pa.ipc.open_stream(payload).read_all())
            wrong = self._features.wrong_columns(table.schema)
        except (pa.ArrowException, OSError) as error:
            table, wrong = pa.table({}), [f"no Arrow IPC stream: {error}"]
        if wrong:
            return DecodedRows(table, [], num, dict.fromkeys(range(num), wrong[0]))
        return DecodedRows(table.select(self._columns), list(range(num)), num, {})

    def _json(self, payloads: list[bytes]) -> DecodedRows:
        """Decode messages with a JSON object each."""
        values, problems = [], {}
        if (table := self._parse(payloads)) is not None:
            return DecodedRows(table, list(range(len(payloads))), len(payloads), {})
        for row, payload in enumerate(payloads):
            try:
                value = json.loads(payload)
                if not isinstance(value, dict):
                    raise ValueError(f"it is {shown(value)}")
                values.append(value)
            except (ValueError, RecursionError) as error:
                text = shown(payload[:60]) if payload else "no value"
                problems[row] = f"no JSON object: {error}; it starts with {text}. {_FORMS}"
                values.append({})
        return self._rows_of(
            {name: [value.get(name) for value in values] for name in self._columns}, problems
        )

    def _parse(self, payloads: list[bytes]) -> "pa.Table | None":
        """Parse JSON objects with Arrow. Return None if Python must parse them."""
        # Arrow skips line breaks between and inside of objects alike. Only a message that starts and ends
        # with a brace and has no line break is one object, if there are as many objects as messages.
        text = b"\n".join(payloads)
        if text.count(b"\n") != len(payloads) - 1:
            return None
        if not all(payload[:1] == b"{" and payload[-1:] == b"}" for payload in payloads):
            return None
        try:
            text.decode()  # Arrow does not check strings
            first = json.loads(payloads[0])
            kinds = {name: self._kinds.get(name) or _kind_of_value(first.get(name)) for name in self._columns}
            types = [(name, _type_of(kind, first.get(name))) for name, kind in kinds.items()]
            table = pa_json.read_json(
                pa.BufferReader(text),
                pa_json.ReadOptions(use_threads=False, block_size=len(text) + 1),
                pa_json.ParseOptions(explicit_schema=pa.schema(types), unexpected_field_behavior="ignore"),
            )
            if table.num_rows != len(payloads):
                return None
            return self._with_times(table, kinds)
        except (pa.ArrowException, ValueError, RecursionError):
            return None

    def _with_times(self, table: "pa.Table", kinds: Mapping[str, str]) -> "pa.Table":
        """Parse the strings in columns of times. Raise DataError for other strings."""
        from meshrec.data.features.values import parse_times

        for position, name in enumerate(table.column_names):
            if kinds[name] == "time":
                table = table.set_column(position, name, parse_times(table[name].combine_chunks()))
        return table

    def _texts(self, payloads: list[dict[bytes, bytes]]) -> DecodedRows:
        """Decode messages with a string per column."""
        columns: dict[str, list[Any]] = {}
        problems: dict[int, str] = {}
        for name in self._columns:
            key, values = name.encode(), []
            kind = self._kinds.get(name)
            for row, payload in enumerate(payloads):
                try:
                    text = payload.get(key)
                    values.append(None if text is None else _value_of_text(text.decode(), kind))
                except ValueError as error:
                    problems.setdefault(row, _problem(name, error))
                    values.append(None)
            columns[name] = values
        return self._rows_of(columns, problems)

    def _rows_of(self, columns: Mapping[str, list[Any]], problems: dict[int, str]) -> DecodedRows:
        """Build Arrow columns from Python values.

        Args:
            problems: problem by row, for rows that are damaged already; more are added.
        """
        num_rows = len(next(iter(columns.values())))
        arrays = {}
        for name, values in columns.items():
            # Without a value, any kind will do.
            default = "list of integer" if any(isinstance(value, list) for value in values) else "number"
            kind = self._kinds.get(name) or next(filter(None, map(_kind_of_value, values)), default)
            arrays[name] = _array(name, values, kind, problems)
        rows = [row for row in range(num_rows) if row not in problems]
        table = pa.table(arrays)
        if problems:
            table = table.take(pa.array(rows, pa.int64())).combine_chunks()
        return DecodedRows(table, rows, num_rows, problems)


def _array(name: str, values: list[Any], kind: str, problems: dict[int, str]) -> Any:
    """Build an Arrow array from Python values. A value that has another kind becomes null, with a problem."""
    from meshrec.data.features.values import parse_times
    from meshrec.data.raw_values import column_of

    if kind == "numeric":
        kind = "number" if any(isinstance(value, float) for value in values) else "integer"

    def build(values: list[Any]) -> Any:
        if kind == "time":
            if any(not isinstance(value, str | None) for value in values):
                raise DataError(f"it must be a time as ISO 8601 text, got {shown(values[0])}")
            return parse_times(pa.array(values, pa.string()))
        # Of decimals, because integers beyond 64 bits have no other type. Others get int64.
        target = _TYPES[kind].replace("int64", "decimal256")
        return column_of(name, values, _arrow_type(target))

    try:
        return build(values)
    except DataError:
        # Rare, so find the values one by one.
        values = list(values)
        for row, value in enumerate(values):
            try:
                build([value])
            except DataError as error:
                problems.setdefault(row, _problem(name, error))
                values[row] = None
        return build(values)


def _problem(name: str, error: Exception) -> str:
    """Describe a value that cannot be converted to the kind of its column."""
    text = str(error).replace(f"column {name!r} of sample 0 must", "it must")
    return f"wrong value in column {name!r}: {text}"


def _kind_of_value(value: Any) -> str:
    """Return the kind of a JSON value; empty for null and empty lists."""
    if isinstance(value, list):
        inner = next(filter(None, map(_kind_of_value, value)), "")
        return inner and f"list of {inner}"
    if isinstance(value, float):
        return "number"
    return "integer" if isinstance(value, int) else "text" if isinstance(value, str) else ""


def _type_of(kind: str, first: Any) -> Any:
    """Return the Arrow type for parsing JSON values of a kind, of which ``first`` is one."""
    if isinstance(first, bool) and kind in ("integer", "numeric"):
        return pa.bool_()
    if kind == "numeric":
        kind = "number" if isinstance(first, float) else "integer"
    return _arrow_type(_TYPES[kind or "number"])


def _arrow_type(name: str) -> Any:
    """Return an Arrow type by its name."""
    if name.startswith("list<"):
        return pa.list_(_arrow_type(name[5:-1]))
    return pa.decimal256(76, 0) if name == "decimal256" else getattr(pa, name)()


def _value_of_text(text: str, kind: str | None) -> Any:
    """Convert a string to a value of a kind. None: a number if possible."""
    if kind in ("text", "time"):
        return text
    if kind is not None and kind.startswith("list"):
        return json.loads(text)
    if not text.strip():
        return None
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text) or text.lower() == "nan":
        return float(text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is None:
        return text
    raise ValueError(f"{shown(text)} is no {kind.replace('numeric', 'number')}")


def row_content(payload: Payload, row: int) -> Any:
    """Return a row of a message as a JSON value, for a file with rows that were set aside."""
    if isinstance(payload, dict):
        texts = {key: value.decode(errors="backslashreplace") for key, value in payload.items()}
        return {key.decode(errors="backslashreplace"): text for key, text in texts.items()}
    if payload.startswith(_ARROW_START):
        try:
            return pa.ipc.open_stream(payload).read_all().slice(row, 1).to_pylist()[0]
        except (pa.ArrowException, OSError, IndexError):
            pass  # damaged: its bytes follow
    return payload.decode(errors="backslashreplace")
