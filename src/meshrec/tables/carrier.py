"""Collected gradients of rows that are not the memory of a parameter, until the optimizer's step."""

from collections.abc import Sequence

import torch
from torch import nn

from meshrec.tables.packing import RowGradients


class Carrier:
    """The collected gradient of one rectangle of a table that keeps its rows itself.

    The gradient of a parameter has the parameter's shape, and such a table's parameter has no rows. So the
    values are the ``grad`` of another parameter, ``[U, D]``, which the optimizer's group has: a GradScaler
    unscales it and ``zero_grad`` drops it, like any other gradient. The slots are kept here, with the pins
    that keep them valid.
    """

    def __init__(self, width: int) -> None:
        self.parameter = nn.Parameter(torch.empty(0, width))
        self._rows = torch.empty(0, dtype=torch.int64)
        self.pins: list[object] = []

    def collect(self, new: RowGradients, pins: Sequence[object]) -> bool:
        """Add a gradient; return whether all that is there is finite."""
        rows, grads = new
        if self.parameter.grad is not None:
            both = torch.cat([self._rows, rows])
            rows, inverse = torch.unique(both, return_inverse=True)
            values = torch.cat([self.parameter.grad, grads])
            grads = torch.zeros(len(rows), values.shape[1]).index_add_(0, inverse, values)
            pins = [*self.pins, *pins]
        self._rows, self.pins = rows, list(pins)
        self.parameter.grad = None
        self.parameter.data = torch.empty_like(grads)
        self.parameter.grad = grads
        return bool(grads.isfinite().all())

    def collected(self) -> RowGradients | None:
        """Return what was collected since ``zero_grad``."""
        grad = self.parameter.grad
        return None if grad is None else RowGradients(self._rows, grad)
