"""A table whose rectangles lie on several devices of one process, under the name of the whole table."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshrec.distributed.routing import RoutedTable
from meshrec.tables.holder import TableHolder
from meshrec.tables.holdings import Held
from meshrec.tables.storage import RowStorage, check_loadable, cut
from meshrec.tables.table import Rectangle, RowBlock


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
        return [pair for each in self.held for pair in zip(each.packing.rectangles, each.rows(), strict=True)]

    def part_names(self) -> list[str]:
        """Return the names of the parts of a row."""
        return [part.name for part in self.storage.row_parts]

    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the whole table's rows by name, copied to the CPU."""
        wholes = self._allocated()
        for each in self.held:
            for table in each.tables:
                for block in table.stream():
                    targets = cut(self.storage, wholes, _slice(block), block.columns)
                    for name, target in targets.items():
                        target.copy_(block.parts[name])
        return wholes

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Copy the parts of the whole table's rows to their devices.

        Raises:
            ValueError: a value is missing, or its size or type differs. Nothing is copied then.
        """
        check_loadable(values["weight"], prefix + "weight", self.storage)
        wholes = self._allocated()
        for name, whole in wholes.items():
            value = values.get(name)
            if value is None or value.shape != whole.shape:
                there = "nothing" if value is None else f"the shape {list(value.shape)}"
                raise ValueError(
                    f"{prefix}{name} must have the shape {list(whole.shape)}, the state dict has "
                    f"{there}. Load it into a model with the same tables, quantised alike."
                )
            whole.copy_(value)
        for each in self.held:
            for table in each.tables:
                _, r0, r1, c0, c1 = table.rectangle
                parts = cut(self.storage, wholes, slice(r0, r1), (c0, c1))
                table.load([RowBlock(range(r0, r1), (c0, c1), parts)])

    def _allocated(self) -> dict[str, Tensor]:
        dim = self._table.dim
        rows = self.storage.allocate(self._table.num_rows, self.storage.columns(dim), torch.device("cpu"))
        return dict(zip(self.part_names(), self.storage.parts(rows.zero_(), dim), strict=True))


def _slice(block: RowBlock) -> slice:
    assert isinstance(block.keys, range)
    return slice(block.keys.start, block.keys.stop)
