"""Handling of damaged data: raise an error, or skip and count."""

import importlib
import logging
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType
from typing import Any, Literal

import numpy as np

from meshrec.data.samples import Bools
from meshrec.lazy import uncollected

OnError = Literal["raise", "skip"]

_log = logging.getLogger(__name__)


REMEDY = (
    ". Repair the data, or leave such rows out: on_error='skip', which is --data.on-error skip of "
    "`meshrec train` and --on-error skip of `meshrec evaluate` and `meshrec predict`."
)
"""Next step after damage in files, appended to the message."""


class DataError(ValueError):
    """Data that cannot be read as configured. The message names file, place and column."""


class Faults:
    """Raises on damaged data, or skips and counts it with one warning per place.

    Args:
        on_error: "raise" or "skip".
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
        self.skipping = on_error == "skip"
        self.skipped: dict[str, int] = {}
        """Number of rows that were left out, by place and reason. Each row counts once, however often it is
        read.
        """
        self.by_file: dict[str, dict[str, int]] = {}
        """Number of rows that were left out, by file, and by place and reason."""

    def found(self, message: str, rows: int, file: str = "") -> None:
        """Report that ``rows`` rows of ``file`` are damaged.

        Raises:
            DataError: damaged data is not skipped.
        """
        message = message.rstrip(".")
        if not self.skipping:
            raise DataError(message + REMEDY)
        if message not in self.skipped:
            _log.warning("skipped %s: %s", rows_text(rows), message)
            self.skipped[message] = rows
            self.by_file.setdefault(file, {})[message] = rows

    def check(self, kept: Bools, good: Any, message: str, first_row: int = 0, file: str = "") -> None:
        """Remove samples that are not ``good`` from ``kept``. ``{row}`` in the message is the first bad
        row.
        """
        bad = kept & ~np.asarray(good, dtype=np.bool_)
        num = int(bad.sum())
        if num:
            row = first_row + int(bad.argmax())
            self.found(f"{message.format(row=row)} ({rows_text(num)} of {len(bad)})", num, file)
            kept &= ~bad


def rows_text(num: int) -> str:
    """Write a number of rows, such as "1 row" or "1,000 rows"."""
    return f"{num:,} row{'' if num == 1 else 's'}"


def needs(module: str, extra: str) -> ModuleType:
    """Load a module that an extra installs.

    Raises:
        ModuleNotFoundError: the module is missing; the message names the extra, and ``name`` is None.
    """
    try:
        with warnings.catch_warnings():
            # What a package warns its developers of, as torchmetrics 1.0 does of its setuptools.
            for kind in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", kind)
            warnings.filterwarnings("ignore", "pkg_resources is deprecated")
            with nullcontext() if module in sys.modules else uncollected():
                return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'this needs {module.split(".")[0]}: pip install "meshrec[{extra}]"'
        ) from error
