"""Columns of a request, some with a single row for all samples."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from meshrec.data.faults import DataError
from meshrec.data.features.join import Join

_MAX_REPEATED_BYTES = 1 << 28
"""Maximum bytes of a shared column repeated for samples."""


class RequestColumns:
    """Per-sample columns, and columns with a single row shared by all samples.

    Args:
        table: per-sample columns.
        shared: a single row; may have no columns.
        joins: tables whose columns are added.
    """

    def __init__(self, table: pa.Table, shared: pa.Table, joins: Sequence[Join]) -> None:
        for join in joins:
            if join.key in shared.column_names:
                shared = join.joined(shared)
            else:
                table = join.joined(table)
        self.table, self.shared = table, shared

    def table_of(self, columns: Sequence[str]) -> pa.Table:
        """Return a table with some columns: the shared table if it has all of them.

        Raises:
            DataError: too many bytes would be repeated for the samples.
        """
        shared_names = [name for name in columns if name in self.shared.column_names]
        if len(shared_names) == len(columns):
            return self.shared
        table, zeros = self.table, pa.array(np.zeros(self.table.num_rows, np.int64))
        for name in shared_names:
            if self.shared[name].nbytes * table.num_rows > _MAX_REPEATED_BYTES:
                raise DataError(
                    f"column {name!r} is crossed with those of samples, and has too many bytes to repeat "
                    f"them for {table.num_rows} samples. Send fewer samples at once"
                )
            table = table.append_column(name, self.shared[name].take(zeros))
        return table
