"""What a process holds of tables: a parameter for each table, whatever the number of its rectangles."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.packing import Packing, Rectangle, RowGradients, sum_of_rows
from meshrec.tables.storage import RowStorage


class Held(NamedTuple):
    """The rectangles of one table that are here."""

    parameter: nn.Parameter
    packing: Packing


class Holdings:
    """Tables that a rank looks up together: a parameter and its packing for each, and the optimizer state of
    each rectangle, counted through all tables.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        packings: Sequence[Packing],
        state: Sequence[Sequence[Tensor]],
    ) -> None:
        self.parameters, self.packings, self.state = parameters, packings, state
        self.rectangles = [rectangle for packing in packings for rectangle in packing.rectangles]
        self._owners = [table for table, packing in enumerate(packings) for _ in packing.rectangles]

        found = [packing.storage.index(r.r0, r.r1 - r.r0) for packing in packings for r in packing.rectangles]
        self.indexes = {i: index for i, index in enumerate(found) if index is not None}
        """The indexes of the rectangles that have one, by number."""

    @property
    def storages(self) -> list[RowStorage]:
        """How the rows of each rectangle lie."""
        return [packing.storage for packing in self.packings for _ in packing.rectangles]

    @property
    def is_packed(self) -> bool:
        """Whether some parameter holds several rectangles."""
        return len(self.state) > len(self.parameters)

    @property
    def weights(self) -> Sequence[Tensor]:
        """The rectangles. Taken anew from parameters that hold several: their memory may be exchanged."""
        if not self.is_packed:
            return self.parameters
        return [
            view
            for parameter, packing in zip(self.parameters, self.packings, strict=True)
            for view in packing.views(parameter.detach())
        ]

    def of_table(self, table: int) -> "Held | None":
        """A table's parameter, None where nothing of it is here."""
        for parameter, packing in zip(self.parameters, self.packings, strict=True):
            if packing.table == table:
                return Held(parameter, packing)
        return None

    def state_of_table(self, table: int) -> list[Sequence[Tensor]]:
        """For each of its rectangles here the optimizer state."""
        pairs = zip(self.rectangles, self.state, strict=True)
        return [state for rectangle, state in pairs if rectangle.table == table]

    def gradient(self, rectangle: int) -> Tensor | None:
        """``grad`` of the parameter that holds it."""
        return self.parameters[self._owners[rectangle]].grad

    def is_trained(self, rectangle: int) -> bool:
        """Whether its table requires a gradient now."""
        return self.parameters[self._owners[rectangle]].requires_grad

    def gradients(self, parts: Mapping[int, Tensor]) -> list[Tensor | None]:
        """For each parameter its gradient from those of its rectangles; None where there is none."""
        return [
            packing.pack([parts[i] for i in own]) if own[0] in parts else None
            for own, packing in zip(self._rectangles(), self.packings, strict=True)
        ]

    def collect(self, parts: Mapping[int, RowGradients]) -> bool:
        """Adds sparse gradients to ``parameter.grad``; whether all that is there now is finite."""
        finite = True
        for own, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            if own[0] in parts:
                new = packing.pack_rows([parts[i] for i in own], parameter.dtype)
                parameter.grad = new if parameter.grad is None else sum_of_rows(parameter.grad, new)
                finite &= bool(parameter.grad._values().isfinite().all())
        return finite

    def collected(self, names: Mapping[int, str]) -> dict[int, RowGradients]:
        """The sparse gradients that ``collect`` gathered, by rectangle, for the tables in ``names``,
        which is what messages call them.

        Raises:
            ValueError: where somebody put a dense gradient in the place of a collected one.
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

    def _rectangles(self) -> list[list[int]]:
        """For each parameter the numbers of its rectangles."""
        ends = list(accumulate((len(packing.rectangles) for packing in self.packings), initial=0))
        return [list(range(begin, end)) for begin, end in pairwise(ends)]


def allocate(
    rectangles: Sequence[Rectangle],
    storages: Sequence[RowStorage],
    specs: Sequence[OptimizerSpec | None],
    trained: Sequence[bool],
    device: torch.device,
) -> Holdings:
    """Room for some rectangles, table by table, and their optimizer state before its first update.

    ``storages``, ``specs`` and ``trained`` (whether its parameter requires a gradient): for each table of the
    module.
    """
    parameters: list[nn.Parameter] = []
    packings: list[Packing] = []
    state: list[list[Tensor]] = []
    for table, own in groupby(rectangles, key=lambda rectangle: rectangle.table):
        packing = Packing(list(own), storages[table])
        parameters.append(nn.Parameter(storages[table].allocate(*packing.shape, device), trained[table]))
        packings.append(packing)
        state += [
            storages[table].new_state(specs[table], r.r1 - r.r0, r.c1 - r.c0, device)
            for r in packing.rectangles
        ]
    return Holdings(parameters, packings, state)
