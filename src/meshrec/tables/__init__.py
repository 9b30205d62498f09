"""A table's rows, state and update, whole or a rectangle of it, for unsharded and sharded modules alike."""

from meshrec.tables.fused import TrainedTable, WholeTables
from meshrec.tables.holdings import Holdings, allocate
from meshrec.tables.initial import init_rectangle
from meshrec.tables.optimizer import FusedOptimizer, FusedTable, UpdateMode
from meshrec.tables.packing import Packing, Rectangle, RowGradients
from meshrec.tables.row_updates import rows_as_lookups, update_rows
from meshrec.tables.rule import UpdateRule, rules_of
from meshrec.tables.storage import DenseRows, QuantisedRows, RowStorage
from meshrec.tables.updates import TableGradient, TableUpdates

__all__ = [
    "DenseRows",
    "FusedOptimizer",
    "FusedTable",
    "Holdings",
    "Packing",
    "QuantisedRows",
    "Rectangle",
    "RowGradients",
    "RowStorage",
    "TableGradient",
    "TableUpdates",
    "TrainedTable",
    "UpdateMode",
    "UpdateRule",
    "WholeTables",
    "allocate",
    "init_rectangle",
    "rows_as_lookups",
    "rules_of",
    "update_rows",
]
