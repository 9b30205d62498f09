"""What happens to damaged data: an error, or a count."""

import importlib
import logging
from collections import Counter
from types import ModuleType
from typing import Any, Literal

import numpy as np

from meshrec.data.samples import Bools

OnError = Literal["raise", "skip"]

_log = logging.getLogger(__name__)


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
        self.skipped: Counter[str] = Counter()
        """Rows that were left out, by place and reason."""

    def found(self, message: str, rows: int) -> None:
        """Something is wrong with ``rows`` rows.

        Raises:
            DataError: unless damaged data is skipped.
        """
        if not self.skipping:
            raise DataError(f"{message}. Repair the data, or pass on_error='skip' to leave such rows out.")
        if message not in self.skipped:
            _log.warning("skipped %d rows: %s", rows, message)
        self.skipped[message] += rows

    def check(self, kept: Bools, good: Any, message: str, first_row: int = 0) -> None:
        """Takes the samples that are not ``good`` out of ``kept``; ``{row}`` in the message is the first."""
        bad = kept & ~np.asarray(good, dtype=np.bool_)
        num = int(bad.sum())
        if num:
            self.found(
                message.format(row=first_row + int(bad.argmax())) + f" ({num} rows of {len(bad)})", num
            )
            kept &= ~bad


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
