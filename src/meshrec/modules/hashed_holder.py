"""Module that holds a hashed table, as nn.EmbeddingBag and nn.Embedding hold other rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_loading import is_own, load_whole, whole_names
from meshrec.tables.holder import TableHolder
from meshrec.tables.key_space import ALL_KEYS
from meshrec.tables.table import Rectangle
from meshrec.tables.waiting import parts_of


class HashedHolder(TableHolder):
    """A whole table with hashed keys. ``weight`` is a parameter without rows; the rows are in ``table``.

    Args:
        storage: how the rows lie, and the table's choices.
        device: of the parameter; on ``meta`` there is no table yet.
    """

    def __init__(self, storage: HashedRows, device: torch.device | None) -> None:
        super().__init__()
        self.storage = storage
        rows = storage.allocate(0, storage.columns(storage.dim), device)
        self.weight = nn.Parameter(rows, requires_grad=storage.is_trainable)
        self.table = _made(storage, None)

    def train_with(self, spec: OptimizerSpec | None) -> HashedTable:
        """Allocate an optimizer's state for the rows, and return the table."""
        before = self.table
        self.table = _made(self.storage, spec)
        self.table.load(before.stream())
        return self.table

    def share(self, table: HashedTable) -> None:
        """Read the rows of another module's table, on the CPU. Here they are not trained."""
        self.to_empty(device="cpu")
        self.table = table
        self.weight.requires_grad_(False)

    def reset_parameters(self) -> None:
        """Remove all rows."""
        self.table.clear()

    def part_names(self) -> list[str]:
        """Return the names of all parts that a state dict has of the table: of rows, IDs and waiting IDs."""
        return whole_names(self.storage)

    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the rows by name, in the order of their keys."""
        found = self.table.tensors()
        waiting = parts_of(self.table.waiting)
        return {name: found[name] if name in found else waiting[name] for name in self.part_names()}

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Replace the rows: all of them, or nothing.

        Raises:
            ValueError: a part does not fit, or there are more rows than the table may have.
        """
        if not is_own(values, [self.table]):
            load_whole([self.table], values, prefix)
            increment_version(self.weight)

    def extra_repr(self) -> str:
        """Return sizes for printing."""
        return f"{self.table.num_alive} of at most {self.storage.max_rows}, {self.storage.dim}, hashed"

    def __deepcopy__(self, memo: dict[int, Any]) -> "HashedHolder":
        copied = type(self)(self.storage, self.weight.device)
        memo[id(self)] = copied
        copied.weight.requires_grad_(self.weight.requires_grad)
        copied.train(self.training)
        copied.table.load(self.table.stream())
        return copied


def _made(storage: HashedRows, spec: OptimizerSpec | None) -> HashedTable:
    return storage.table(Rectangle(0, *ALL_KEYS, 0, storage.dim), spec, None)
