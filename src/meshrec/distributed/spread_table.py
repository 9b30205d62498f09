"""A table whose rectangles lie on several devices of one process, under the name of the whole table."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshrec.distributed.routing import RoutedTable
from meshrec.tables.holder import TableHolder
from meshrec.tables.holdings import Held
from meshrec.tables.packing import Rectangle
from meshrec.tables.storage import RowStorage, check_loadable, copy_rectangle


class SpreadTable(TableHolder):
    """A table for inference with the parameters ``part0``, ``part1``, ..., one for each device that holds
    some of it.

    ``state_dict`` returns the whole table, like the unsharded module, copied to the CPU.

    Args:
        table: the table.
        storage: its row storage.
        held: the part of each device.
    """

    def __init__(self, table: RoutedTable, storage: RowStorage, held: Sequence[Held]) -> None:
        super().__init__()
        self._table, self.storage, self.held = table, storage, list(held)
        for number, each in enumerate(held):
            self.register_parameter(f"part{number}", each.parameter)

    def parts(self) -> list[tuple[Rectangle, Tensor]]:
        """Return every rectangle with its rows."""
        return [
            pair
            for each in self.held
            for pair in zip(each.packing.rectangles, each.packing.views(each.parameter.detach()), strict=True)
        ]

    def part_names(self) -> list[str]:
        """Return the names of the parts of a row."""
        return [part.name for part in self.storage.row_parts]

    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the whole table's rows by name, copied to the CPU."""
        rows = self._allocated()
        wholes = self.storage.parts(rows, self._table.dim)
        for rectangle, own in self.parts():
            first, last = map(self.storage.part_column, (rectangle.c0, rectangle.c1))
            found = self.storage.parts(own, rectangle.c1 - rectangle.c0)
            for part, whole, piece in zip(self.storage.row_parts, wholes, found, strict=True):
                target = whole[rectangle.r0 : rectangle.r1]
                (target if part.per_row else target[:, first:last]).copy_(piece)
        return {part.name: whole for part, whole in zip(self.storage.row_parts, wholes, strict=True)}

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Copy the parts of the whole table's rows to their devices.

        Raises:
            ValueError: a value is missing, or its size or type differs. Nothing is copied then.
        """
        check_loadable(values["weight"], prefix + "weight", self.storage)
        rows = self._allocated()
        for part, whole in zip(
            self.storage.row_parts, self.storage.parts(rows, self._table.dim), strict=True
        ):
            value = values.get(part.name)
            if value is None or value.shape != whole.shape:
                there = "nothing" if value is None else f"the shape {list(value.shape)}"
                raise ValueError(
                    f"{prefix}{part.name} must have the shape {list(whole.shape)}, the state dict has "
                    f"{there}. Load it into a model with the same tables, quantised alike."
                )
            whole.copy_(value)
        for rectangle, own in self.parts():
            r, c = (rectangle.r0, rectangle.r1), (rectangle.c0, rectangle.c1)
            copy_rectangle(self.storage, own, rows, self._table.dim, rows=r, columns=c)

    def _allocated(self) -> Tensor:
        columns = self.storage.columns(self._table.dim)
        return self.storage.allocate(self._table.num_rows, columns, torch.device("cpu")).zero_()
