"""A table in a sharded module: the rectangles of this rank, under the name of the whole table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from meshrec.distributed.routing import RoutedTable
from meshrec.optim.optimizers import StateSlot
from meshrec.tables.holder import TableHolder
from meshrec.tables.holdings import Held
from meshrec.tables.storage import RowStorage, check_loadable
from meshrec.tables.streamed import is_same
from meshrec.tables.table import Rectangle, TableRows


class PartsAtRest(Protocol):
    """The entry of a state dict for a table whose rows come and go; see ``TableShards``."""

    def part_names(self) -> list[str]:
        """Return the names of the parts."""

    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the whole table by name."""

    def whole_state(self, slot: StateSlot) -> Tensor:
        """Return a state of the whole table."""

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Copy the parts of a whole table to the rows that are here."""


class TableShards(TableHolder):
    """The part of a table that this rank holds, as the parameter ``weight``.

    ``weight`` has no rows, or is a rectangle, or holds several (see ``Packing``). So every rank has one
    parameter, with the name of the whole table.

    ``state_dict`` has one entry ``weight`` for the whole table, on every rank. A quantised table has further
    entries for scales and biases, see ``QuantisedRows``. The entry of a split table is a ``SplitTensor``,
    which torch.distributed.checkpoint saves, and loads in place, under any plan; ``full_tensor()`` returns
    the whole. The entry of a data-parallel table, and in one process, is the plain tensor.

    Args:
        table: the table.
        storage: its row storage.
        held: the part on this rank; None if there is none.
        empty: the parameter of a rank that holds nothing.
        holders: the rectangles on every rank of ``mesh``.
        mesh: the ranks that the table is split over; None if each holds the whole.
    """

    def __init__(
        self,
        table: RoutedTable,
        storage: RowStorage,
        held: Held | None,
        *,
        empty: nn.Parameter,
        holders: Sequence[Sequence[Rectangle]],
        mesh: DeviceMesh | None,
    ) -> None:
        super().__init__()
        self.table, self.held, self.mesh = table, held, mesh
        self.hashed: PartsAtRest | None = None
        """The interface of the parts of a table with hashed keys."""
        self.storage = storage
        self.holders = [list(rectangles) for rectangles in holders]
        self.rectangles: list[Rectangle] = held.packing.rectangles if held else []
        self.weight = held.parameter if held else empty

    @property
    def is_split(self) -> bool:
        """Whether this rank may hold only a part of the table."""
        return self.mesh is not None

    @property
    def tables(self) -> Sequence[TableRows]:
        """The rectangles that are here."""
        return self.held.tables if self.held is not None else []

    def shards(self) -> list[Tensor]:
        """Return the rows of the rectangles of this rank: ``weight``, or views of it if there are several."""
        return [table.rows for table in self.tables]

    def whole_state(self, slot: StateSlot) -> Tensor:
        """Return a state of the table, fp32 whatever its rows are, from this rank's parts, without a copy."""
        if self.hashed is not None:
            return self.hashed.whole_state(slot)
        like = torch.empty(0, device=self.weight.device)  # gives the type if the rank holds nothing
        size = slot.shape(self.table.num_rows, self.table.dim)
        parts = [table.tensors()[slot.name].detach() for table in self.tables]
        return self._joined(parts, like, size, lambda column: column)

    def part_names(self) -> list[str]:
        """Return the names of the parts of a row."""
        if self.hashed is not None:
            return self.hashed.part_names()
        return [part.name for part in self.storage.row_parts]

    def whole_parts(self) -> dict[str, Tensor]:
        """Return the parts of the whole table's rows by name, without a copy."""
        if self.hashed is not None:
            return self.hashed.whole_parts()
        own = [table.tensors() for table in self.tables]
        size = (self.table.num_rows, self.storage.part_column(self.table.dim))
        return {
            part.name: self._joined(
                [parts[part.name] for parts in own],
                torch.empty(0, dtype=part.dtype, device=self.weight.device),
                size[:1] if part.per_row else size,
                self.storage.part_column,
            )
            for part in self.storage.row_parts
        }

    def load(self, values: Mapping[str, Tensor], prefix: str) -> None:
        """Copy the values of a whole table, or of one that the same plan has split, to this rank's part.

        Either everything is copied or, if something does not fit, nothing.

        Raises:
            ValueError: a size or a type differs, or a value holds other rectangles.
        """
        if self.hashed is not None:
            self.hashed.load(values, prefix)
            return
        check_loadable(values["weight"], prefix + "weight", self.storage)
        wholes = self.whole_parts()
        for name, whole in wholes.items():
            value = values.get(name)
            if value is None:
                raise ValueError(
                    f"{prefix}{name} is missing. Load what the quantised model's state_dict gave."
                )
            if value.shape != whole.shape:
                raise ValueError(
                    f"{prefix}{name}: the state dict has shape {list(value.shape)}, the table "
                    f"{list(whole.shape)}. Load it into a model with the same tables."
                )
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, whole in wholes.items():
            try:
                pairs += _pairs(whole, values[name])
            except ValueError as error:
                error.args = (f"{prefix}{name}: {error}",)
                raise
        with torch.no_grad():
            for part, found in pairs:
                if not is_same(part, found):
                    part.detach().copy_(found)
        if self.held is not None and not self.held.is_fixed:
            # Its rows are elsewhere, and a batch in flight must see the change.
            increment_version(self.weight)

    def _joined(
        self, parts: Sequence[Tensor], like: Tensor, size: Sequence[int], place: Callable[[int], int]
    ) -> Tensor:
        """Join parts to a split tensor. ``place`` returns the position of a column of the table in a part."""
        if self.mesh is None:
            return parts[0]
        # Imported here, because torch's DTensor is slow to import.
        from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor

        def placed(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
            return [each._replace(c0=place(each.c0), c1=place(each.c1)) for each in rectangles]

        local = LocalRectangles(parts, placed(self.rectangles), like, size)
        return SplitTensor.of(local, [placed(each) for each in self.holders], self.mesh)

    def extra_repr(self) -> str:
        parts = [f"[{r.r0}:{r.r1}, {r.c0}:{r.c1}]" for r in self.rectangles]
        return f"{' '.join(parts) or 'nothing'} of {self.table.num_rows} x {self.table.dim}"


def _pairs(whole: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of this rank's memory of a table, and the values to copy there.

    Raises:
        ValueError: the value holds other rectangles.
    """
    # A SplitTensor has ``local``; its class is slow to import.
    local: Any = getattr(whole, "local", None)
    if local is not None and hasattr(value, "local"):
        value = value.local
    elif hasattr(value, "full_tensor"):
        value = value.full_tensor()
    if local is None:
        return [(whole, value)]
    return list(zip(local.local_shards(), local.parts_of(value), strict=True))
