"""Text with a row per line and a delimiter between fields, parsed by Arrow."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshrec.data.arrow import pa, pa_csv, pc
from meshrec.data.faults import DataError, Faults
from meshrec.data.samples import Bools, Ints

# Arrow's own conversion would fail for the whole block, so values are tested before it, one by one.
INT_PATTERN, FLOAT_PATTERN = r"^ *[+-]?[0-9]+ *$", r"^ *[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)? *$"
"""Regular expressions for integers and numbers in text."""


class Lines(NamedTuple):
    """Rows parsed from lines of text. Damaged lines have no row."""

    table: "pa.Table"
    lines: Ints
    """Line number per row, from 0, counted from the start of the parsed text, int64 [n]."""


def parse(
    text: "bytes | pa.Buffer",
    where: str,
    faults: Faults,
    *,
    columns: Sequence[str] | None,
    types: Mapping[str, str],
    delimiter: str,
    quotes: bool = False,
    first_line: int = 0,
) -> Lines:
    """Parse some columns from delimited text.

    Args:
        text: whole lines, UTF-8.
        where: file name, for messages.
        faults: raises for a line with a wrong number of fields or a value with the wrong type, or counts it.
        columns: all column names in the text. None: the first line has the names.
        types: Arrow type name by column, such as "int64"; columns not named here are not parsed. An empty
            field is null, except in a string column.
        delimiter: character between fields.
        quotes: whether fields may be in double quotes.
        first_line: number of the first line in the file, from 0, for messages.
    """
    bad_lines: list[tuple[int, int, int]] = []

    def invalid(row: Any) -> str:
        """Record a line with a wrong number of fields, and make Arrow skip it."""
        # Arrow counts lines from 1.
        bad_lines.append((row.number - 1, row.actual_columns, row.expected_columns))
        return "skip"

    options: dict[str, Any] = {
        # With threads, Arrow does not know the line numbers for invalid rows.
        "read_options": pa_csv.ReadOptions(use_threads=False, column_names=columns, block_size=1 << 24),
        "parse_options": pa_csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if quotes else False,
            # Empty lines count, so line numbers match the file.
            ignore_empty_lines=False,
            invalid_row_handler=invalid,
        ),
    }
    arrow_types = {name: getattr(pa, kind)() for name, kind in types.items()}
    try:
        table = _read(text, options, arrow_types)
    except (pa.ArrowInvalid, KeyError):
        # The second read reports all bad lines again.
        bad_lines.clear()
        # Arrow does not report which rows failed. Read strings, and convert column by column.
        try:
            table = _read(text, options, dict.fromkeys(types, pa.string()))
        except (pa.ArrowInvalid, KeyError) as other:
            raise DataError(f"{where} cannot be parsed for the columns {list(types)}: {other}.") from other
    for line, got, expected in bad_lines:
        faults.report(
            f"{where}: line {first_line + line + 1} has {got} fields, expected {expected} "
            f"(delimiter {delimiter!r})",
            1,
            where,
        )
    lines = _valid_lines(table.num_rows, [line for line, _, _ in bad_lines], header=columns is None)
    return _cast_strings(Lines(table, lines), arrow_types, where, faults, first_line)


def _read(text: Any, options: Any, types: Mapping[str, Any]) -> "pa.Table":
    """Parse the columns in ``types`` with Arrow's CSV reader. Empty fields are null, except strings."""
    convert = pa_csv.ConvertOptions(
        column_types=types, include_columns=list(types), strings_can_be_null=False, null_values=[""]
    )
    return pa_csv.read_csv(pa.BufferReader(text), convert_options=convert, **options)


def _valid_lines(num_rows: int, bad: list[int], *, header: bool) -> Ints:
    """Return the line number per parsed row.

    Args:
        bad: numbers of the lines that Arrow skipped.
    """
    # All lines: parsed ones, skipped ones, and the header.
    lines = np.ones(num_rows + len(bad) + header, dtype=np.bool_)
    lines[bad] = False
    if header:
        lines[0] = False
    return np.flatnonzero(lines)


def _cast_strings(
    parsed: Lines, types: Mapping[str, Any], where: str, faults: Faults, first_line: int
) -> Lines:
    """Convert columns that were read as strings to their types. Rows with other strings are damage.

    Args:
        where: file name, for messages.
        first_line: number of the first line in the file, from 0, for messages.
    """
    table, lines = parsed
    valid: Bools = np.ones(table.num_rows, dtype=np.bool_)
    for name, kind in types.items():
        column = table[name]
        if column.type == kind:
            continue
        pattern = FLOAT_PATTERN if pa.types.is_floating(kind) else INT_PATTERN
        # An empty string stands for a missing value.
        good = pc.or_(pc.match_substring_regex(column, pattern), pc.equal(column, ""))
        mask = pc.fill_null(good, False).to_numpy(zero_copy_only=False)
        if not mask.all():
            at = int((~mask).argmax())
            faults.check(
                valid,
                mask,
                f"{where}: line {first_line + int(lines[at]) + 1}, column {name!r}: "
                f"{column[at].as_py()!r} is not of type {kind}",
                file=where,
            )
    table, lines = table.filter(pa.array(valid)), lines[valid]
    for position, (name, kind) in enumerate(types.items()):
        if table[name].type != kind:
            # The patterns allow surrounding blanks, but Arrow's cast does not.
            text = pc.utf8_trim_whitespace(table[name])
            text = pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)
            table = table.set_column(position, name, text.cast(kind))
    return Lines(table, lines)
