"""Tables and rectangles of them: rows, optimizer state and updates, unsharded and sharded."""

from meshrec.tables.fixed import FixedTable
from meshrec.tables.fused import TrainedTable, WholeTables
from meshrec.tables.growing import GrowingRows
from meshrec.tables.hashed import HashedTable
from meshrec.tables.hashed_books import TableCounts
from meshrec.tables.hashed_keys import (
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
from meshrec.tables.holdings import Held, Holdings, allocate
from meshrec.tables.initial import init_table
from meshrec.tables.optimizer import FusedOptimizer, FusedTable, UpdateMode
from meshrec.tables.packing import Packing, RowGradients
from meshrec.tables.row_updates import rows_as_lookups, update_rows
from meshrec.tables.rule import UpdateRule, rules_of
from meshrec.tables.storage import DenseRows, QuantisedRows, RowStorage
from meshrec.tables.streamed import StreamedPart
from meshrec.tables.table import Rectangle, RowBlock, RowPart, TableRows
from meshrec.tables.turnover import set_event_time
from meshrec.tables.updates import TableGradient, TableUpdates

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
    "Held",
    "Holdings",
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
    "TableCounts",
    "TableGradient",
    "TableRows",
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
