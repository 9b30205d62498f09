"""Rows of Parquet files as tables of equal size, which several processes can divide among them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshrec.data.exact_columns import plain_schema, plain_table
from meshrec.data.faults import DataError
from meshrec.data.locations import File
from meshrec.data.parquet import open_parquet_file
from meshrec.data.partitions import partition_keys, with_keys
from meshrec.data.shares import cut_rows

TABLE_ROWS = 1 << 16
"""Rows per table."""


class _Run(NamedTuple):
    """Consecutive row groups of a file that are divided into tables: as few as fill a table."""

    file: File
    groups: range
    """Row group numbers in the file."""
    num_rows: int
    first_table: int
    """Table number in all files for the run's first table."""
    first_row: int
    """Number of selected rows in all runs before this run."""


@dataclass(frozen=True, kw_only=True)
class ParquetTables:
    """Rows of Parquet files, or a part of them that is spread over the files. Can be pickled.

    The tables do not depend on the number of processes that read them. A table has ``table_rows`` rows, or
    fewer at the end of a run.

    Attributes:
        files: all files.
        runs: runs of row groups with selected tables, in file order.
        stride: every table whose number is a multiple of it is selected.
        num_rows: number of selected rows.
        schema: Arrow schema of the first file, with partition columns.
        table_rows: maximum number of rows per table.
    """

    files: Sequence[File]
    runs: Sequence[_Run]
    stride: int
    num_rows: int
    schema: pa.Schema
    table_rows: int

    @staticmethod
    def open(files: Sequence[File], rows: int | None = None, table_rows: int = TABLE_ROWS) -> "ParquetTables":
        """Open Parquet files.

        Args:
            files: paths and URIs.
            rows: approximate number of rows to select, spread over the files; None: all rows.
            table_rows: maximum number of rows per table.

        Raises:
            DataError: a file cannot be read, or has other columns than the first file.
        """
        keys = partition_keys(files)
        sizes: dict[File, list[int]] = {}
        first: pa.Schema | None = None
        for file in files:
            try:
                with open_parquet_file(file) as opened:
                    metadata, schema = opened.metadata, plain_schema(opened.schema_arrow)
            except (pa.ArrowException, OSError) as error:
                raise _not_readable(file, error) from error
            sizes[file] = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            # Partition columns stand in a file's path, and not in its schema.
            for name, value in keys[file].items():
                if name not in schema.names:
                    schema = schema.append(pa.field(name, value.type))
            first = schema if first is None else first
            if differ := sorted(set(first.names) ^ set(schema.names)):
                raise DataError(f"{file} and {files[0]} differ in {differ}. Give files of one form.")
        total = sum(map(sum, sizes.values()))
        # Tables from everywhere, because the first rows may be from a single day or user.
        stride = 1 if rows is None else max(1, math.ceil(total / rows))
        runs, num_rows = _selected_runs(sizes, stride, table_rows)
        assert first is not None
        return ParquetTables(
            files=files, runs=runs, stride=stride, num_rows=num_rows, schema=first, table_rows=table_rows
        )

    def shares(self, num: int) -> list[range]:
        """Divide the runs into consecutive shares with about as many selected rows; return run numbers."""
        starts = np.array([run.first_row for run in self.runs] + [self.num_rows])
        cuts = np.unique(np.searchsorted(starts, cut_rows(self.num_rows, num)))
        return [range(start, stop) for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)]

    def tables(self, runs: range) -> Iterator[tuple[int, pa.Table]]:
        """Yield the selected tables of some runs, each after the number of selected rows before it.

        Raises:
            DataError: a file cannot be read.
        """
        keys = partition_keys(self.files)
        for number in runs:
            run = self.runs[number]
            try:
                with open_parquet_file(run.file) as opened:
                    row, first_row = 0, run.first_row
                    for batch in opened.iter_batches(self.table_rows, [*run.groups], use_threads=False):
                        # Batches may be smaller than requested, so a table may come in several parts.
                        if (run.first_table + row // self.table_rows) % self.stride == 0:
                            table = plain_table(pa.Table.from_batches([batch]))
                            yield first_row, with_keys(table, keys[run.file]).select(self.schema.names)
                            first_row += batch.num_rows
                        row += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise _not_readable(run.file, error) from error


def _selected_runs(sizes: dict[File, list[int]], stride: int, table_rows: int) -> tuple[list[_Run], int]:
    """Divide row groups into runs."""
    runs, table, selected = list[_Run](), 0, 0
    for file, rows_of_groups in sizes.items():
        start = num_rows = 0
        for number, rows in enumerate(rows_of_groups):
            num_rows += rows
            if not num_rows or (num_rows < table_rows and number + 1 < len(rows_of_groups)):
                continue
            num_tables = -(-num_rows // table_rows)
            # Numbers in the run of the selected tables. Only the last table of a run may be smaller.
            numbers = range(-table % stride, num_tables, stride)
            if numbers:
                runs.append(_Run(file, range(start, number + 1), num_rows, table, selected))
                selected += sum(min(table_rows, num_rows - table_rows * of_run) for of_run in numbers)
            table += num_tables
            start, num_rows = number + 1, 0
    return runs, selected


def _not_readable(file: File, error: Any) -> DataError:
    return DataError(
        f"{file} cannot be read as Parquet: {str(error).rstrip('.')}. Name Parquet files, or CSV files that "
        "end in .csv."
    )
