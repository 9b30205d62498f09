"""Table-batched embedding (TBE): lookups in many tables, and their update, in a single kernel."""

from meshrec.ops.tbe.layout import Lookups
from meshrec.ops.tbe.lookup import (
    LookupOptions,
    Updater,
    dense_grad,
    forward,
    fused_forward,
    row_squares,
    sample_weight_grad,
    sparse_grad,
    update,
)

__all__ = [
    "LookupOptions",
    "Lookups",
    "Updater",
    "dense_grad",
    "forward",
    "fused_forward",
    "row_squares",
    "sample_weight_grad",
    "sparse_grad",
    "update",
]
