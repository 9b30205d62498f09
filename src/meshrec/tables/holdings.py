"""The parts of tables that a process holds: one parameter per table, for any number of rectangles."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.carrier import Carrier
from meshrec.tables.fixed import FixedTable
from meshrec.tables.packing import Packing, RowGradients, sum_of_rows
from meshrec.tables.storage import RowStorage, SideRows
from meshrec.tables.table import Rectangle, TableRows


class Held(NamedTuple):
    """The rectangles of one table on this rank."""

    parameter: nn.Parameter
    packing: Packing
    tables: Sequence[TableRows]
    """The table of each rectangle."""
    carriers: Sequence[Carrier] = ()
    """The carrier of each rectangle whose rows are not in the parameter."""

    @property
    def is_fixed(self) -> bool:
        """Whether the rows are in the parameter."""
        return isinstance(self.tables[0], FixedTable)

    def rows(self) -> Sequence[Tensor]:
        """Return the memory of each rectangle that the kernels read."""
        if self.is_fixed:
            return self.packing.views(self.parameter.detach())
        return [table.rows for table in self.tables]


class Holdings:
    """Tables that a rank looks up together: a parameter and its packing for each, and for each rectangle a
    ``TableRows``, counted through all of them.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self.held = list(held)
        self.parameters = [each.parameter for each in held]
        self.packings = [each.packing for each in held]
        self.rectangles = [rectangle for packing in self.packings for rectangle in packing.rectangles]
        self._owners = [place for place, each in enumerate(held) for _ in each.tables]

        tables = [table for each in held for table in each.tables]
        self.state = [table.state for table in tables]
        self.is_packed = len(tables) > len(self.held)
        """Whether some parameter holds several rectangles."""
        self._rows = [table.rows for table in tables]
        self.indexes = {i: table.index for i, table in enumerate(tables) if table.index is not None}
        """The indexes of the rectangles that have one, by number."""

    @property
    def storages(self) -> list[RowStorage]:
        """The storage of each rectangle."""
        return [packing.storage for packing in self.packings for _ in packing.rectangles]

    @property
    def weights(self) -> Sequence[Tensor]:
        """The memory of each rectangle. Views of packed parameters are new, as their memory may change."""
        if not self.is_packed:
            return self._rows
        return [rows for each in self.held for rows in each.rows()]

    def of_table(self, table: int) -> "Held | None":
        """Return the part of a table that is here; None if there is none."""
        return next((each for each in self.held if each.packing.table == table), None)

    def gradient(self, rectangle: int) -> Tensor | None:
        """Return ``grad`` of the parameter that holds the rectangle."""
        return self.parameters[self._owners[rectangle]].grad

    def is_trained(self, rectangle: int) -> bool:
        """Return whether the rectangle's table requires a gradient now."""
        return self.parameters[self._owners[rectangle]].requires_grad

    def gradients(self, parts: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Merge the gradients of rectangles into one per parameter; None where a parameter has none."""
        return [
            packing.pack([parts[i] for i in own]) if own[0] in parts else None
            for own, packing in zip(self._rectangles(), self.packings, strict=True)
        ]

    def collect(self, parts: Mapping[int, RowGradients]) -> bool:
        """Add sparse gradients to ``parameter.grad``, and return whether all gradients are finite."""
        finite = True
        for own, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            if own[0] in parts:
                new = packing.pack_rows([parts[i] for i in own], parameter.dtype)
                parameter.grad = new if parameter.grad is None else sum_of_rows(parameter.grad, new)
                finite &= bool(parameter.grad._values().isfinite().all())
        return finite

    def collected(self, names: Mapping[int, str]) -> dict[int, RowGradients]:
        """Return the sparse gradients that ``collect`` gathered, by rectangle.

        Args:
            names: the wanted tables, with their names for messages.

        Raises:
            ValueError: somebody replaced a collected gradient by a dense one.
        """
        found: dict[int, RowGradients] = {}
        for own, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            if parameter.grad is not None and packing.table in names:
                if not parameter.grad.is_sparse:
                    raise ValueError(
                        f"the gradient of {names[packing.table]} is dense; a fused optimizer applies the "
                        "sparse gradients that its backward pass collected. Leave parameter.grad to it."
                    )
                found.update(zip(own, packing.unpack_rows(parameter.grad.coalesce()), strict=True))
        return found

    def carriers(self) -> dict[int, Carrier]:
        """Return the carriers of the rectangles whose rows are not in a parameter, by number."""
        return {
            i: carrier
            for own, held in zip(self._rectangles(), self.held, strict=True)
            for i, carrier in zip(own, held.carriers, strict=False)
        }

    def _rectangles(self) -> list[list[int]]:
        """Return the numbers of each parameter's rectangles."""
        ends = list(accumulate((len(packing.rectangles) for packing in self.packings), initial=0))
        return [list(range(begin, end)) for begin, end in pairwise(ends)]


def in_parameter(
    parameter: nn.Parameter,
    packing: Packing,
    state: Sequence[Sequence[Tensor]],
    spec: OptimizerSpec | None,
) -> Held:
    """Make rectangles whose rows are in a parameter. ``state`` has the optimizer's slots of each of them."""
    tables = [FixedTable(parameter, packing, i, each, spec) for i, each in enumerate(state)]
    return Held(parameter, packing, tables)


def in_table(parameter: nn.Parameter, packing: Packing, tables: Sequence[TableRows]) -> Held:
    """Rectangles that keep their rows themselves."""
    carriers = [Carrier(table.rectangle.c1 - table.rectangle.c0) for table in tables]
    return Held(parameter, packing, tables, carriers)


def allocate(
    rectangles: Sequence[Rectangle],
    storages: Sequence[RowStorage],
    specs: Sequence[OptimizerSpec | None],
    trained: Sequence[bool],
    device: torch.device,
) -> Holdings:
    """Make the memory of rectangles, table by table, and their initial optimizer state.

    Args:
        rectangles: the rectangles, those of a table side by side.
        storages: the storage of each table of the module.
        specs: the fused optimizer of each table; None for ordinary gradients.
        trained: whether the parameter of each table requires a gradient.
        device: the device of the memory.
    """
    held = []
    for table, group in groupby(rectangles, key=lambda rectangle: rectangle.table):
        own, storage, spec = list(group), storages[table], specs[table]
        packing = Packing(own, storage)
        height, width = packing.shape
        side = storage if isinstance(storage, SideRows) else None
        rows = storage.allocate(height if side is None else 0, width, device)
        parameter = nn.Parameter(rows, trained[table])
        if side is not None:
            held.append(in_table(parameter, packing, [side.table(r, spec, device) for r in own]))
            continue
        state = [storage.new_state(spec, r.r1 - r.r0, r.c1 - r.c0, device) for r in own]
        held.append(in_parameter(parameter, packing, state, spec))
    return Holdings(held)
