"""What a gradient does to the tables of a rank: a fused update in place, or an ordinary gradient."""

from torch import Tensor

from meshrec.distributed.input_dist import LookupIds
from meshrec.distributed.lookup import LookupTables, UpdateGroup


class TableUpdates:
    """The fused groups of some tables; tables in no group get ordinary gradients."""

    def __init__(self, tables: LookupTables) -> None:
        self._tables = tables
        self.groups: list[UpdateGroup] = []

    def apply(self, grad: Tensor, ids: LookupIds) -> list[Tensor | None]:
        """Updates the fused tables; for each table the gradient to give to autograd, None for the fused ones."""
        tables = self._tables
        grads: list[Tensor | None] = [None] * len(tables.weights)
        if tables.is_empty:
            return grads
        for group in self.groups:
            tables.update(grad, ids, group)
        fused = {i for group in self.groups for i in group.rectangles}
        dense = [
            i for i, weight in enumerate(tables.weights) if i not in fused and weight.requires_grad
        ]
        if dense:
            for i, gradient in zip(dense, tables.dense_grads(grad, ids, dense), strict=True):
                grads[i] = gradient
        return grads
