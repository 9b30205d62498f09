"""A table's rows, state and update, whole or a rectangle of it, for unsharded and sharded modules alike."""

from meshrec.tables.fused import FusedOptimizer, TrainedTable, UpdateMode
from meshrec.tables.holdings import Holdings, allocate
from meshrec.tables.initial import init_rectangle
from meshrec.tables.packing import Packing, Rectangle, RowGradients
from meshrec.tables.row_updates import rows_as_lookups, update_rows
from meshrec.tables.rule import UpdateRule, rules_of
from meshrec.tables.storage import DenseRows, QuantisedRows, RowStorage

__all__ = [
    "DenseRows",
    "FusedOptimizer",
    "Holdings",
    "Packing",
    "QuantisedRows",
    "Rectangle",
    "RowGradients",
    "RowStorage",
    "TrainedTable",
    "UpdateMode",
    "UpdateRule",
    "allocate",
    "init_rectangle",
    "rows_as_lookups",
    "rules_of",
    "update_rows",
]
