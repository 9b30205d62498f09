"""Embedding tables in memory, whole or sharded: rows, optimizer state, and updates.

A rectangle has rows [r0, r1) and columns [c0, c1) from a table; a shard consists of rectangles.
"""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.tables.dense.rows import DenseRows, QuantisedRows
    from meshrec.tables.dense.table import FixedTable
    from meshrec.tables.fused import TrainedTable, WholeTables
    from meshrec.tables.hashed.accounting import TableCounts
    from meshrec.tables.hashed.admission_eviction import set_event_time
    from meshrec.tables.hashed.keys import (
        LFU,
        LRU,
        TTL,
        Hashed,
        LowestNorm,
        MinCount,
        MinCountSketch,
        Probability,
        RowsToJudge,
        Score,
    )
    from meshrec.tables.hashed.memory import GrowingRows
    from meshrec.tables.hashed.table import HashedTable
    from meshrec.tables.initial import init_table
    from meshrec.tables.local_shards import LocalShard, LocalShards, allocate
    from meshrec.tables.optimizer import FusedOptimizer, FusedTable, UpdateMode, UpdateRule, rules_of
    from meshrec.tables.packing import Packing, RowGradients
    from meshrec.tables.storage import RowStorage
    from meshrec.tables.streamed import StreamedPart
    from meshrec.tables.table import Rectangle, RowBlock, RowPart, Table
    from meshrec.tables.updates import TableGradient, TableUpdates, rows_as_lookups, update_rows

__all__ = [
    "LFU",
    "LRU",
    "TTL",
    "DenseRows",
    "FixedTable",
    "FusedOptimizer",
    "FusedTable",
    "GrowingRows",
    "Hashed",
    "HashedTable",
    "LocalShard",
    "LocalShards",
    "LowestNorm",
    "MinCount",
    "MinCountSketch",
    "Packing",
    "Probability",
    "QuantisedRows",
    "Rectangle",
    "RowBlock",
    "RowGradients",
    "RowPart",
    "RowStorage",
    "RowsToJudge",
    "Score",
    "StreamedPart",
    "Table",
    "TableCounts",
    "TableGradient",
    "TableUpdates",
    "TrainedTable",
    "UpdateMode",
    "UpdateRule",
    "WholeTables",
    "allocate",
    "init_table",
    "rows_as_lookups",
    "rules_of",
    "set_event_time",
    "update_rows",
]

import_on_use(__name__)
