"""Rows of a growing folder as Arrow tables, for readers that do not encode them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from meshrec.data.faults import DataError, Faults
from meshrec.data.follow import FilePlanner, FilePosition, FollowedFiles, check_version, is_parquet, read_ipc
from meshrec.data.locations import without_secrets
from meshrec.data.parquet_tables import TABLE_ROWS, ParquetTables
from meshrec.data.stores import StoreError
from meshrec.data.table_stream import TableStream


class _TableFiles(FollowedFiles):
    """Followed folder with tables, of which all columns are read."""

    @override
    def num_rows(self, name: str, faults: Faults) -> int:
        file = self.file(name)
        if not is_parquet(file):
            return int(read_ipc(file, faults).num_rows)
        try:
            return ParquetTables.open([file]).num_rows
        except DataError as error:
            faults.report(str(error), 0, str(file))
            return 0

    def tables(self, start: FilePosition) -> Iterator[Any]:
        """Yield the rows of a file from a position on, in tables that end at the same rows wherever it is."""
        file = self.file(start.file)
        check_version(file, start.version)
        if is_parquet(file):
            parts = ParquetTables.open([file])
            first_run = [run.first_row <= start.row for run in parts.runs].count(True) - 1
            tables = parts.tables(range(first_run, len(parts.runs)))
        else:
            whole = read_ipc(file, self.faults)
            cuts = range(0, whole.num_rows, TABLE_ROWS)
            tables = ((first, whole.slice(first, TABLE_ROWS)) for first in cuts)
        for first, table in tables:
            if first + table.num_rows > start.row:
                yield table.slice(max(0, start.row - first))


class FolderTables(TableStream):
    """Rows of a growing folder as Arrow tables with all columns, in the order of `Follow`.

    Args:
        folder: folder, or its address in a store.
        faults: raises for damaged files, or counts them and skips their rows.
        position: first row to read.
        broken_seconds: as for `Follow`.

    Attributes:
        position: first row that is not read.
    """

    def __init__(
        self,
        folder: str | Path,
        faults: Faults,
        *,
        position: FilePosition = FilePosition(),  # noqa: B008 - immutable
        broken_seconds: float = 300.0,
    ) -> None:
        self.name = without_secrets(str(folder))
        self.position, self._faults = position, faults
        self._files = _TableFiles(folder, faults)
        self._planner = FilePlanner(self._files, position, broken_seconds, None)
        # Tables of the file of `position`, from there on; None before it is opened.
        self._tables: Iterator[Any] | None = None

    @override
    def read(self, logged: Any = None) -> Any:
        # The position alone tells which rows come next.
        while True:
            while self.position.row >= self.position.num_rows:
                start = self._planner.next_file()
                if start is None:
                    return None
                self.position, self._tables = start, None
            self._tables = self._tables or self._files.tables(self.position)
            position = self.position
            try:
                table = next(self._tables, None)
                if table is None:
                    raise DataError(f"{position.file} has fewer rows than it says. Write it anew.")
                self.position = position._replace(row=position.row + table.num_rows)
                return table
            except StoreError:
                # The rows are not damaged: the store is away.
                raise
            except DataError as error:
                self._faults.report(str(error), position.num_rows - position.row, position.file)
                self.position = position._replace(row=position.num_rows)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.position._asdict()

    @override
    def close(self) -> None:
        self._tables = None
