"""A hashed table whose rectangles lie on several devices of one process, under the whole table's name."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshrec.tables.at_rest import IDS
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_loading import WAITING, load_whole, whole_names
from meshrec.tables.holder import TableHolder
from meshrec.tables.holdings import Held
from meshrec.tables.waiting import parts_of


class SpreadHashed(TableHolder):
    """A table for inference with the parameters ``part0``, ``part1``, ..., one for each device.

    ``state_dict`` returns the whole table at rest, like the unsharded module: a copy.

    Args:
        storage: how the rows lie, and the table's choices.
        held: the part of each device.
    """

    def __init__(self, storage: HashedRows, held: Sequence[Held]) -> None:
        super().__init__()
        self.storage = storage
        self.tables = [table for each in held for table in each.tables if isinstance(table, HashedTable)]
        for number, each in enumerate(held):
            self.register_parameter(f"part{number}", each.parameter)

    def part_names(self) -> list[str]:
        """Return the names of all parts that a state dict has of the table: of rows, IDs and waiting IDs."""
        return whole_names(self.storage)

    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the whole table's rows by name, in the order of their keys."""
        first = [table for table in self.tables if table.rectangle.c0 == 0]
        nothing = torch.empty(0, dtype=torch.int64)
        keys = torch.cat([nothing, *(table.listed()[0] for table in first)]).sort().values
        columns = self.storage.part_column(self.storage.dim)
        found = {
            part.name: torch.empty([len(keys)] if part.per_row else [len(keys), columns], dtype=part.dtype)
            for part in self.storage.row_parts
        }
        for table in self.tables:
            begin, end = table.places(table.rectangle.columns)
            for block in table.stream():
                assert isinstance(block.keys, Tensor)
                for name, values in block.parts.items():
                    if name in found:
                        rows = torch.searchsorted(keys, block.keys)
                        target = found[name]
                        (target if values.dim() == 1 else target[:, begin:end])[rows] = values
        found[IDS] = self.tables[0].ids_of(keys)
        if self.storage.counts:
            waiting = [parts_of(table.waiting) for table in first]
            order = torch.cat([each[WAITING[0]] for each in waiting]).argsort()
            found |= {name: torch.cat([each[name] for each in waiting])[order] for name in WAITING}
        return found

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Replace the rows: all of them, or nothing.

        Raises:
            ValueError: a part does not fit, or there are more rows than the table may have.
        """
        load_whole(self.tables, values, prefix)
