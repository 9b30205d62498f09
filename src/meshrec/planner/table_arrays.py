"""Table attributes as arrays, for the cost model."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshrec.comms.wire import WireFormats
from meshrec.planner.types import Bools, Floats, Ints, Table

ID_BYTES, WIDE_ID_BYTES = 4, 8
"""Bytes per ID on the wire, and for tables with 64-bit keys or too many rows for 32 bits."""
# Row count above which all IDs of a module are sent as 64-bit integers.
_WIDE_ROWS = 1 << 31
# Per-sample weights are fp32, and are sent with the IDs.
SAMPLE_WEIGHT_BYTES = 4
STATISTIC_BYTES = 4
"""Bytes per row statistic, an fp32 value such as the sum of squared gradients of row-wise Adagrad."""


class TableArrays(NamedTuple):
    """Attributes of T tables as arrays, so that the cost model can price many rectangles at once.

    Fields without a docstring are the `Table` attributes with the same name. ``rows_T`` and ``columns_T`` are
    ``num_embeddings`` and ``embedding_dim``.
    """

    rows_T: Ints
    columns_T: Ints
    ids_T: Floats
    """Mean ID count in the batch of a rank."""
    bags_T: Floats
    """Mean number of bags in the batch of a rank."""
    outputs_T: Floats
    """Mean row count returned by a lookup for the batch of a rank: a row per bag (pooled) or per ID."""
    pooled_T: Bools
    weight_bytes_T: Floats
    row_bytes_T: Floats
    in_memory_T: Floats
    index_bytes_T: Floats
    trained_T: Bools
    id_bytes_T: Floats
    """Bytes per ID when sent between ranks, including the per-sample weight of weighted tables."""
    bare_id_bytes: int
    """Bytes per ID when sent between ranks, without per-sample weight. Equal for all tables in a module."""
    state_per_column_T: Floats
    """Optimizer state values (fp32) per row and column."""
    state_per_row_T: Floats
    """Optimizer state values (fp32) per row, independent of the column count."""
    wires_T: Ints
    """Index in ``wires`` of the table's wire formats."""
    wires: list[WireFormats]
    """Distinct wire formats used by the tables."""
    row_statistics_bytes_T: Floats
    """Bytes per distinct row which column shards all-reduce before the update, because the optimizer needs a
    statistic of the whole row's gradient. 0 for optimizers without such a statistic.
    """
    effective_rows_T: Floats


def arrays_of(tables: Sequence[Table], batch_size: int) -> TableArrays:
    """Convert tables to arrays. `batch_size` is the sample count per rank for tables that set none."""
    batch = np.array([table.batch_size or batch_size for table in tables], np.float64)
    ids = batch * [table.ids_per_sample for table in tables]
    bags = batch * [table.bags_per_sample for table in tables]
    rows = np.array([table.num_embeddings for table in tables], np.int64)
    hashed = any(table.index_bytes for table in tables)  # keys have 64 bits
    id_bytes = WIDE_ID_BYTES if hashed or (rows >= _WIDE_ROWS).any() else ID_BYTES
    # Sorted, because set iteration has no fixed order.
    wires = sorted({table.wire for table in tables}, key=str)
    hot = np.array([table.effective_rows or table.num_embeddings for table in tables], np.float64)
    return TableArrays(
        rows_T=rows,
        columns_T=np.array([table.embedding_dim for table in tables], np.int64),
        ids_T=ids,
        bags_T=bags,
        outputs_T=np.where([table.pooled for table in tables], bags, ids),
        pooled_T=np.array([table.pooled for table in tables], bool),
        weight_bytes_T=np.array([table.weight_bytes for table in tables], np.float64),
        row_bytes_T=np.array([table.row_bytes for table in tables], np.float64),
        in_memory_T=np.array([table.in_memory for table in tables], np.float64),
        index_bytes_T=np.array([table.index_bytes for table in tables], np.float64),
        trained_T=np.array([table.trained for table in tables], bool),
        id_bytes_T=np.array(
            [id_bytes + SAMPLE_WEIGHT_BYTES * table.weighted for table in tables], np.float64
        ),
        bare_id_bytes=id_bytes,
        state_per_column_T=np.array([table.optimizer.state_per_row[0] for table in tables], np.float64),
        state_per_row_T=np.array([table.optimizer.state_per_row[1] for table in tables], np.float64),
        wires_T=np.array([wires.index(table.wire) for table in tables], np.int64),
        wires=wires,
        row_statistics_bytes_T=np.array(
            [STATISTIC_BYTES * table.optimizer.row_statistics for table in tables], np.float64
        ),
        effective_rows_T=np.minimum(hot, rows),
    )
