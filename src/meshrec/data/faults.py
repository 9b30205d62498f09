"""What happens to damaged data: an error, or a count."""

import importlib
import logging
from types import ModuleType
from typing import Any, Literal

import numpy as np

from meshrec.data.samples import Bools

OnError = Literal["raise", "skip"]

_log = logging.getLogger(__name__)


REMEDY = (
    ". Repair the data, or leave such rows out: on_error='skip', which is --data.on-error skip of "
    "`meshrec train` and --on-error skip of `meshrec evaluate` and `meshrec predict`."
)
"""The next step after damage in files, at the end of the message."""


class DataError(ValueError):
    """Data that cannot be read as configured; the message names file, place and column."""


class Faults:
    """Raises on damaged data, or counts what is skipped and warns once about each place.

    Args:
        on_error: "raise" or "skip".
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}.")
        self.skipping = on_error == "skip"
        self.skipped: dict[str, int] = {}
        """Rows that were left out, by place and reason: each once, however often they are read."""
        self.by_file: dict[str, dict[str, int]] = {}
        """The same, by file."""

    def found(self, message: str, rows: int, file: str = "") -> None:
        """Something is wrong with ``rows`` rows of ``file``.

        Raises:
            DataError: unless damaged data is skipped.
        """
        message = message.rstrip(".")
        if not self.skipping:
            raise DataError(message + REMEDY)
        if message not in self.skipped:
            _log.warning("skipped %s: %s", rows_text(rows), message)
            self.skipped[message] = rows
            self.by_file.setdefault(file, {})[message] = rows

    def check(self, kept: Bools, good: Any, message: str, first_row: int = 0, file: str = "") -> None:
        """Takes the samples that are not ``good`` out of ``kept``; ``{row}`` in the message is the first."""
        bad = kept & ~np.asarray(good, dtype=np.bool_)
        num = int(bad.sum())
        if num:
            row = first_row + int(bad.argmax())
            self.found(f"{message.format(row=row)} ({rows_text(num)} of {len(bad)})", num, file)
            kept &= ~bad


def rows_text(num: int) -> str:
    """Such as "1 row", "1,000 rows"."""
    return f"{num:,} row{'' if num == 1 else 's'}"


def needs(module: str, extra: str) -> ModuleType:
    """Imports what an extra installs.

    Raises:
        ModuleNotFoundError: names the extra, and no module as its ``name``.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'this needs {module.split(".")[0]}: pip install "meshrec[{extra}]"'
        ) from error
