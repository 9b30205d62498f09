"""Handling of damaged data: raise an error, or skip the rows and count them. Suggestions in errors."""

import difflib
import importlib
import json
import logging
import reprlib
import sys
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import numpy as np
from typing_extensions import override

from meshrec.data.samples import Bools, Ints
from meshrec.lazy import without_gc

OnError = Literal["raise", "skip"]

_log = logging.getLogger(__name__)


REMEDY = (
    ". Repair the data, or leave such rows out: on_error='skip', which is --data.on-error skip of "
    "`meshrec train` and --on-error skip of `meshrec evaluate` and `meshrec predict`."
)
"""End of an error message about damaged rows: the user's next step."""
REMEDY_OF_COLUMNS = (
    ". Every row of this part has it: give the column what the recipe expects, or change the recipe."
)
"""End of an error message if all rows are damaged, so skipping would leave none."""


# Shortens values in messages, so that a long list or text does not fill the screen.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxlong = 3, 4, 4, 60, 40


class DataError(ValueError):
    """Error for data that cannot be read as configured. The message names file, location and column."""


class NoRowsError(DataError):
    """Error for data that has no rows, or none that can be read."""


class Faults:
    """Handler of damaged data: raises, or skips and counts it with a warning per location.

    Args:
        on_error: "raise" or "skip".
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
        # All sources in a dataset share this object.
        self.skipping = on_error == "skip"
        self.skipped: dict[str, int] = {}
        """Number of omitted rows, by a message with location and reason. Later epochs are not counted again.

        Only grows, as data is read; readers and datasets keep a reference to show the current counts.
        """
        self.by_file: dict[str, dict[str, int]] = {}
        """The same counts by file name, then by message."""

    def report(
        self, message: str, rows: int, file: str = "", *, is_allowed: bool = False, every_row: bool = False
    ) -> None:
        """Raise an error for omitted rows, or count them and log a warning.

        Args:
            message: problem and location.
            rows: omitted row count.
            file: file name.
            is_allowed: whether the configuration omits these rows. They are not damage, and are counted even
                with on_error "raise".
            every_row: whether all rows of the file or block are damaged, so skipping would leave none.
                Changes only the advice in the error message.

        Raises:
            DataError: the rows are damaged, and on_error is "raise".
        """
        message = message.rstrip(".")
        if not self.skipping and not is_allowed:
            raise DataError(message + (REMEDY_OF_COLUMNS if every_row else REMEDY))
        # Data is read every epoch. Count and warn the first time only.
        if message not in self.skipped:
            _log.warning("skipped %s: %s", rows_text(rows), message)
            self.skipped[message] = rows
            self.by_file.setdefault(file, {})[message] = rows

    def check(
        self,
        valid: Bools,
        good: Any,
        message: str,
        first_row: int | Ints = 0,
        file: str = "",
        *,
        is_allowed: bool = False,
    ) -> None:
        """Mark the rows that fail a check as invalid, and `report` them.

        Rows that are invalid already are not reported again.

        Args:
            valid: whether a row is valid so far, bool [n]; modified in place.
            good: whether a row passes this check, bool [n].
            message: problem and location; ``{row}`` is replaced by the number of the first failing row.
            first_row: row number in the file for the first row; or all row numbers, int64 [n].
            file: file name.
            is_allowed: whether the configuration omits failing rows, so they are not damage.

        Raises:
            DataError: rows are damaged, and on_error is "raise".
        """
        bad = valid & ~np.asarray(good, dtype=np.bool_)
        num = int(bad.sum())
        if num:
            index = int(bad.argmax())
            row = int(first_row[index]) if isinstance(first_row, np.ndarray) else first_row + index
            # Not str.format: names of files and columns may hold braces.
            text = message.replace("{row}", str(row)) + f" ({rows_text(num)} of {len(bad):,})"
            self.report(text, num, file, is_allowed=is_allowed, every_row=num == len(bad) > 1)
            valid &= ~bad


def append_json_lines(path: Path, items: list[dict[str, Any]]) -> None:
    """Append items to a file as JSON lines. Values that JSON does not have are written as strings."""
    with path.open("a", encoding="utf-8") as output:
        output.writelines(json.dumps(item, default=str) + "\n" for item in items)


_MAX_REASONS = 1000
"""Maximum number of reasons that are counted apart, because messages may contain values of records."""


class Names(Protocol):
    """Names by number, such as a list."""

    def __getitem__(self, number: int, /) -> str:
        """Return a name."""


class RecordFaults(Faults):
    """Handler of damaged records in a stream without end: counts them by reason, in bounded memory.

    Warns of a reason once, with the first record.

    Args:
        on_error: "raise" or "skip".
    """

    def __init__(self, on_error: OnError) -> None:
        super().__init__(on_error)
        self.names: Names = ()
        """Names of the records that are checked next. `check` takes them instead of row numbers."""

    @override
    def report(
        self, message: str, rows: int, file: str = "", *, is_allowed: bool = False, every_row: bool = False
    ) -> None:
        self.report_record(message, message, rows, is_allowed=is_allowed)

    def report_record(self, reason: str, message: str, rows: int, *, is_allowed: bool = False) -> None:
        """Raise an error for omitted records, or count them by reason.

        Args:
            reason: the problem, without the record.
            message: the problem with the record.
            rows: omitted row count.
            is_allowed: as for `report`.

        Raises:
            DataError: the records are damaged, and on_error is "raise".
        """
        if not self.skipping and not is_allowed:
            raise DataError(message.rstrip(".") + REMEDY)
        if reason not in self.skipped and len(self.skipped) >= _MAX_REASONS:
            reason = "further reasons"
        if reason not in self.skipped:
            _log.warning("skipped %s: %s", rows_text(rows), message)
        self.skipped[reason] = self.skipped.get(reason, 0) + rows
        self.by_file.setdefault("", {})[reason] = self.skipped[reason]

    @override
    def check(
        self,
        valid: Bools,
        good: Any,
        message: str,
        first_row: int | Ints = 0,
        file: str = "",
        *,
        is_allowed: bool = False,
    ) -> None:
        bad = valid & ~np.asarray(good, dtype=np.bool_)
        if num := int(bad.sum()):
            named = message.replace("row {row}", self.names[int(bad.argmax())])
            reason = message.replace("row {row} ", "")
            self.report_record(
                reason, f"{named} ({rows_text(num)} of {len(bad):,})", num, is_allowed=is_allowed
            )
            valid &= ~bad


def rows_text(num: int) -> str:
    """Format a row count, such as "1 row" or "1,000 rows"."""
    return f"{num:,} row{'' if num == 1 else 's'}"


def shown(value: Any) -> str:
    """Return the ``repr`` of a value for messages, abbreviated if it is long."""
    return _SHORT.repr(value)


def needs(module: str, extra: str) -> ModuleType:
    """Import a module that an optional dependency of MeshRec installs.

    Args:
        module: module name, such as "pyarrow.csv".
        extra: extra of the package ``meshrec`` that installs the module, such as "data".

    Raises:
        ModuleNotFoundError: the module is missing. The message names the extra, and the exception's
            attribute ``name`` is None.
    """
    try:
        with warnings.catch_warnings():
            # Packages warn about their own deprecated imports, such as setuptools. Users cannot fix these.
            for kind in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", kind)
            warnings.filterwarnings("ignore", "pkg_resources is deprecated")
            with nullcontext() if module in sys.modules else without_gc():
                return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'this needs {module.split(".")[0]}: pip install "meshrec[{extra}]"'
        ) from error


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to a mistyped ``word``; None without a similar name."""
    # Compared without case, but suggested with it.
    lower = {name.lower(): name for name in names}
    matches = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.7)
    return lower[matches[0]] if matches else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return `` Did you mean NAME?``, the end of an error message; empty if no name is similar to it."""
    name = nearest(word, names)
    return "" if name is None else f" Did you mean {name}?"


def missing_column(location: str, name: str, names: Iterable[str]) -> DataError:
    """Create the error for a missing column; the message suggests a similar name.

    Args:
        location: file or table with the missing column.
        name: missing column.
        names: all columns of the file or table.
    """
    return DataError(
        f"{location}: there is no column {name!r} among {list(names)}.{did_you_mean(name, names)}"
    )
