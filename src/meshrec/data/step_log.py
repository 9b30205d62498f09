"""Log of the steps of a stream, so that a run which was killed repeats them with the same records."""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshrec.data.faults import DataError
from meshrec.data.streams import Position
from meshrec.durable import durable_file

_log = logging.getLogger(__name__)


class StepLog:
    """File with the position after each step since the last checkpoint, as JSON lines.

    The first line has the rows per step, and the second the position before the first step.

    Args:
        path: the file. Its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Rows per step, and the positions in the file: that before the first step, then one per step.
        self._step_rows, self._positions = 0, list[Position]()

    def resume(self, position: Position, step_rows: int) -> list[Position]:
        """Start to log the steps after a position, and return the positions of those that are logged already.

        Steps before the position are removed. If the steps after it cannot be repeated, all are removed, and
        a warning is logged.

        Args:
            position: position after which the run continues.
            step_rows: rows per step, over all ranks.

        Raises:
            DataError: the file is not a step log.
        """
        logged_rows, positions = self._read()
        if position in positions:
            positions = positions[positions.index(position) :]
        else:
            if positions:
                _log.warning(
                    "%s does not have the position at which the run continues. No record is lost or "
                    "repeated, but later steps may consist of other records than before.",
                    self._path,
                )
            positions = [position]
        if logged_rows not in (0, step_rows) and len(positions) > 1:
            _log.warning(
                "%s has steps of %s rows, and a step now has %s. No record is lost or repeated, but steps "
                "consist of other records than before.",
                *(self._path, logged_rows, step_rows),
            )
            positions = [position]
        self._step_rows, self._positions = step_rows, positions
        self._rewrite()
        return positions[1:]

    def append(self, positions: Sequence[Position]) -> None:
        """Add steps. When the call returns, they are on disk."""
        self._positions += positions
        with self._path.open("ab") as file:
            file.writelines(_lines(positions))
            file.flush()
            os.fsync(file.fileno())

    def prune(self, position: Position) -> None:
        """Remove the steps up to a position. If no step has the position, keep all."""
        if position in self._positions:
            self._positions = self._positions[self._positions.index(position) :]
            self._rewrite()

    def _rewrite(self) -> None:
        with durable_file(self._path) as file:
            file.writelines(_lines([{"step_rows": self._step_rows}, *self._positions]))

    def _read(self) -> tuple[int, list[Position]]:
        """Return the rows per step, and the positions; 0 and no positions without a file."""
        try:
            # The last line is incomplete if the process was killed; its step was not handed out.
            *lines, _ = self._path.read_bytes().split(b"\n")
            values: list[Any] = [json.loads(line) for line in lines]
            return (int(values[0]["step_rows"]), values[1:]) if values else (0, [])
        except FileNotFoundError:
            return 0, []
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self._path} is no step log: {error}. Name another file, or remove it."
            ) from error


def _lines(values: Sequence[dict[str, Any]]) -> Iterator[bytes]:
    """Yield JSON lines."""
    for value in values:
        yield json.dumps(value).encode() + b"\n"
