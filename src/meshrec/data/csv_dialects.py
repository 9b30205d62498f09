"""CSV delimiter, decimal point and encoding: given by the user, or detected from the first lines."""

import codecs
import csv
import io
import logging
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshrec.data.arrow import pa
from meshrec.data.locations import File, codec_of, is_tsv, opened

_logger = logging.getLogger("meshrec")

_HEAD_BYTES, _HEAD_ROWS = 1 << 16, 100
"""Maximum bytes and rows at a file's start from which the dialect is detected."""
# The comma is preferred, and comes first; see `dialect_of`.
_DELIMITERS = ",;\t|"
_BYTE_ORDER_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""UTF-16 byte order marks. Arrow skips the UTF-8 mark."""
# Numbers with a decimal comma, such as 3,5. Whole numbers have no decimals, and fit either notation.
_WHOLE_OR_COMMA = re.compile(r"\s*-?[0-9]+(,[0-9]+)?\s*")
_WITH_COMMA, _WITH_POINT = re.compile(r"\s*-?[0-9]+,[0-9]+\s*"), re.compile(r"\s*-?[0-9]*\.[0-9]+\s*")


@dataclass(frozen=True, kw_only=True)
class CsvFormat:
    """Format of CSV files. A part that is None is detected in the first lines of every file.

    Raises:
        ValueError: a part is not one that CSV files can have.
    """

    delimiter: str | None = None
    """Character between values, such as ; or a tab."""
    decimal_point: Literal[".", ","] | None = None
    """Character before the decimals of numbers."""
    encoding: str | None = None
    """Character encoding, as Python names it, such as latin-1."""

    def __post_init__(self) -> None:
        delimiter, wrong = self.delimiter, None
        # Arrow parses CSV with a single ASCII byte as the delimiter.
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
            wrong = f"the delimiter {delimiter!r} must be one ASCII character, no quote or line break"
        elif self.decimal_point not in (None, ".", ","):
            wrong = f"the decimal point {self.decimal_point!r} must be '.' or ','"
        elif delimiter is not None and delimiter == self.decimal_point:
            wrong = f"the delimiter and the decimal point are both {delimiter!r}"
        elif self.encoding is not None and not _is_encoding(self.encoding):
            wrong = f"Python knows no encoding {self.encoding!r}; there are utf-8, latin-1, cp1252 and others"
        if wrong is not None:
            raise ValueError(f"format of CSV files: {wrong}.")


def _is_encoding(name: str) -> bool:
    try:
        codecs.lookup(name)
    except LookupError:
        return False
    return True


DETECTED = CsvFormat()
"""All parts are detected."""


class Dialect(NamedTuple):
    """Complete format of a CSV file: every part is given in a `CsvFormat`, or detected."""

    delimiter: str = ","
    decimal_point: str = "."
    encoding: str = "utf8"


def dialect_of(file: File, given: CsvFormat = DETECTED) -> Dialect:
    """Return the dialect of a CSV file with a header; detect the parts that are not given.

    A delimiter fits if it splits all first rows into equally many fields, two or more. A comma is preferred,
    then the delimiter with the most fields. The decimal point is a comma if the delimiter is another
    character, some column has numbers with a comma, and no number has a point.

    Raises:
        OSError: the file is unreachable.
    """
    head, is_whole = _head_of(file)
    encoding = given.encoding or ("utf-16" if head.startswith(_BYTE_ORDER_MARKS) else "utf8")
    # The head may end in the middle of a character, which must not fail.
    text = head.decode(encoding, errors="replace")
    by_delimiter = {
        delimiter: _rows(text, delimiter, is_whole=is_whole)
        for delimiter in given.delimiter or ("\t" if is_tsv(file) else _DELIMITERS)
    }
    fitting = [delimiter for delimiter, rows in by_delimiter.items() if _is_table(rows)]
    if not fitting:
        default = "\t" if is_tsv(file) else ","
        return Dialect(given.delimiter or default, given.decimal_point or ".", encoding)
    widest = max(fitting, key=lambda delimiter: len(by_delimiter[delimiter][0]))
    delimiter = "," if "," in fitting else widest
    has_comma = delimiter != "," and _has_decimal_comma(by_delimiter[delimiter][1:])
    dialect = Dialect(delimiter, given.decimal_point or ("," if has_comma else "."), encoding)
    # Log a dialect that differs from the default, if no option was given.
    if given != DETECTED:
        return dialect
    if dialect != Dialect(delimiter="\t" if is_tsv(file) else ","):
        _logger.info("%s: read as CSV with %s", file, dialect)
    return dialect


def _head_of(file: File) -> tuple[bytes, bool]:
    """Return the first bytes of a file, decompressed, and whether they are the whole file."""
    with opened(file, buffered=True) as source:
        codec = codec_of(file)
        stream = source if codec is None else pa.CompressedInputStream(source, codec)
        head = bytes(stream.read(_HEAD_BYTES))
    return head, len(head) < _HEAD_BYTES


def _rows(text: str, delimiter: str, *, is_whole: bool) -> list[list[str]]:
    """Split the first complete, non-empty lines into fields.

    Args:
        is_whole: whether the text is the whole file. Otherwise the last line may be incomplete.
    """
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if row]
    except csv.Error:
        return []
    # The last row may be cut off in the middle.
    return (rows if is_whole else rows[:-1])[:_HEAD_ROWS]


def _is_table(rows: list[list[str]]) -> bool:
    """Return whether there are rows, and all have the same number of fields, two or more."""
    return bool(rows) and len(rows[0]) > 1 and all(len(row) == len(rows[0]) for row in rows)


def _has_decimal_comma(rows: list[list[str]]) -> bool:
    """Return whether a column has numbers with a comma, and no column has numbers with a point."""
    has_comma = False
    for column in zip(*rows, strict=True):
        values = [value for value in column if value.strip()]
        # A point in any column shows that the file does not use decimal commas.
        if any(_WITH_POINT.fullmatch(value) for value in values):
            return False
        is_number = all(_WHOLE_OR_COMMA.fullmatch(value) for value in values)
        has_comma |= is_number and any(_WITH_COMMA.fullmatch(value) for value in values)
    return has_comma
