"""Damaged data handling: raise an error, or skip and count."""

import importlib
import logging
import reprlib
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType
from typing import Any, Literal

import numpy as np

from meshrec.data.samples import Bools
from meshrec.lazy import without_gc

OnError = Literal["raise", "skip"]

_log = logging.getLogger(__name__)


REMEDY = (
    ". Repair the data, or leave such rows out: on_error='skip', which is --data.on-error skip of "
    "`meshrec train` and --on-error skip of `meshrec evaluate` and `meshrec predict`."
)
"""Next step for damage in files, appended to messages."""
REMEDY_OF_COLUMNS = (
    ". Every row of this part has it: give the column what the recipe expects, or change the recipe."
)
"""Next step for damage in all rows, of which skipping would leave none."""


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxlong = 3, 4, 4, 60, 40


class DataError(ValueError):
    """Data that cannot be read as configured. The message names file, location and column."""


class Faults:
    """Raises on damaged data, or skips and counts it with a warning per location.

    Args:
        on_error: "raise" or "skip".
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
        self.skipping = on_error == "skip"
        self.skipped: dict[str, int] = {}
        """Omitted rows by location and reason. Rows are counted once, however often they are read."""
        self.by_file: dict[str, dict[str, int]] = {}
        """Omitted rows by file, then by location and reason."""

    def report(
        self, message: str, rows: int, file: str = "", *, is_allowed: bool = False, every_row: bool = False
    ) -> None:
        """Report damaged or intentionally omitted rows.

        Args:
            message: problem and location.
            rows: row count.
            file: file name.
            is_allowed: rows are omitted by configuration, and are not damage.
            every_row: all rows are damaged, so that skipping would leave none.

        Raises:
            DataError: damaged data is not skipped.
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
        first_row: int = 0,
        file: str = "",
        *,
        is_allowed: bool = False,
    ) -> None:
        """Remove invalid samples from ``valid``.

        Args:
            valid: whether a sample is valid so far; modified in place.
            good: whether a sample passes this check.
            message: problem and location; ``{row}`` is replaced by the first bad row.
            first_row: first sample's row number in the file.
            file: file name.
            is_allowed: bad samples are omitted by configuration, and are not damage.

        Raises:
            DataError: damaged data is not skipped.
        """
        bad = valid & ~np.asarray(good, dtype=np.bool_)
        num = int(bad.sum())
        if num:
            row = first_row + int(bad.argmax())
            # Not str.format: names of files and columns may hold braces.
            text = message.replace("{row}", str(row)) + f" ({rows_text(num)} of {len(bad)})"
            self.report(text, num, file, is_allowed=is_allowed, every_row=num == len(bad) > 1)
            valid &= ~bad


def rows_text(num: int) -> str:
    """Format a number of rows, such as "1 row" or "1,000 rows"."""
    return f"{num:,} row{'' if num == 1 else 's'}"


def shown(value: Any) -> str:
    """Return an abbreviated representation of a value for messages."""
    return _SHORT.repr(value)


def needs(module: str, extra: str) -> ModuleType:
    """Import a module installed by an extra.

    Raises:
        ModuleNotFoundError: the module is missing; the message names the extra, and ``name`` is None.
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
