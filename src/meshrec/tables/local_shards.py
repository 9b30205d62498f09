"""Table shards held by a rank: one parameter per table, with any number of rectangles."""

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.dense.table import FixedTable
from meshrec.tables.packing import Packing, RowGradients, add_sparse
from meshrec.tables.placeholder import placeholder
from meshrec.tables.storage import ExternalRows, RowStorage
from meshrec.tables.table import Rectangle, Table


class GradientBuffer:
    """Gradient collected in the backward pass for a rectangle with rows outside the parameter.

    ``parameter.grad`` must have the parameter's shape, and such a table's parameter has no rows. The
    gradient values are therefore the ``grad`` in another parameter, ``[U, D]``, in the optimizer's group: a
    GradScaler unscales it and ``zero_grad`` drops it, like any other gradient. The touched slots are stored
    here, with the pins keeping them valid.
    """

    def __init__(self, width: int) -> None:
        self.parameter = nn.Parameter(torch.empty(0, width))
        self._rows = torch.empty(0, dtype=torch.int64)
        self.pins: list[object] = []

    def __getstate__(self) -> dict[str, Any]:
        # torch copies a parameter without ``grad``, so copied slots and pins would have no values.
        return {**vars(self), "_rows": self._rows[:0], "pins": []}

    def collect(self, new: RowGradients, pins: Sequence[object]) -> bool:
        """Add a gradient. Returns whether the accumulated gradient is finite.

        Args:
            new: gradient by slot.
            pins: slot pins, kept until the gradient is applied.
        """
        rows, grads = new
        if self.parameter.grad is not None:
            both = torch.cat([self._rows, rows])
            rows, inverse = torch.unique(both, return_inverse=True)
            values = torch.cat([self.parameter.grad, grads])
            grads = torch.zeros(len(rows), values.shape[1]).index_add_(0, inverse, values)
            pins = [*self.pins, *pins]
        self._rows, self.pins = rows, list(pins)
        # ``grad`` must match the parameter's shape, so the parameter is resized first.
        self.parameter.grad = None
        self.parameter.data = torch.empty_like(grads)
        self.parameter.grad = grads
        return bool(grads.isfinite().all())

    def collected(self) -> RowGradients | None:
        """Return the gradient collected since ``zero_grad``, or None."""
        grad = self.parameter.grad
        return None if grad is None else RowGradients(self._rows, grad)


class LocalShard(NamedTuple):
    """A table's part on this rank: parameter and rectangles."""

    parameter: nn.Parameter
    packing: Packing  # where the rectangles are in the parameter
    tables: Sequence[Table]
    """One table per rectangle."""
    gradient_buffers: Sequence[GradientBuffer] = ()
    """One gradient buffer per rectangle, for rows outside the parameter."""

    @property
    def is_fixed(self) -> bool:
        """Whether the rows are in the parameter."""
        return isinstance(self.tables[0], FixedTable)

    def rows(self) -> Sequence[Tensor]:
        """Return the memory read by kernels, one tensor per rectangle."""
        if self.is_fixed:
            return self.packing.views(self.parameter.detach())
        return [table.rows for table in self.tables]


class LocalShards:
    """All tables on a rank that are looked up together.

    A table has a parameter and a packing; a rectangle has a ``Table``. Rectangles are numbered across
    all tables.
    """

    def __init__(self, held: Sequence[LocalShard]) -> None:
        self.held = list(held)
        self.parameters = [shard.parameter for shard in held]
        self.packings = [shard.packing for shard in held]
        self.rectangles = [rectangle for packing in self.packings for rectangle in packing.rectangles]
        self._owners = [i for i, shard in enumerate(held) for _ in shard.tables]  # shard by rectangle

        tables = [table for shard in held for table in shard.tables]
        self.state = [table.state for table in tables]
        self.is_packed = len(tables) > len(self.held)
        """Whether a parameter holds several rectangles."""
        self._rows = [table.rows for table in tables]
        self.indexes = {i: table.index for i, table in enumerate(tables) if table.index is not None}
        """Indexes by rectangle number, where present."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Row memory belongs to the tables, so a copy takes the copied tables' memory and not a second copy.
        return LocalShards, (self.held,)

    @property
    def storages(self) -> list[RowStorage]:
        """Storage per rectangle."""
        return [packing.storage for packing in self.packings for _ in packing.rectangles]

    @property
    def weights(self) -> Sequence[Tensor]:
        """Row memory per rectangle. Packed parameters give new views, because their memory may change."""
        if not self.is_packed:
            return self._rows
        return [rows for shard in self.held for rows in shard.rows()]

    def of_table(self, table: int) -> "LocalShard | None":
        """Return a table's local shard; None if this rank has none."""
        return next((shard for shard in self.held if shard.packing.table == table), None)

    def gradient(self, rectangle: int) -> Tensor | None:
        """Return the ``grad`` of a rectangle's parameter."""
        return self.parameters[self._owners[rectangle]].grad

    def is_trained(self, rectangle: int) -> bool:
        """Return whether a rectangle's parameter requires a gradient now."""
        return self.parameters[self._owners[rectangle]].requires_grad

    def gradients(self, parts: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Merge rectangle gradients into one per parameter; None for a parameter without gradient.

        Args:
            parts: dense gradients by rectangle.
        """
        return [
            packing.pack([parts[i] for i in group]) if group[0] in parts else None
            for group, packing in zip(self._rectangles(), self.packings, strict=True)
        ]

    def collect(self, parts: Mapping[int, RowGradients]) -> bool:
        """Add sparse gradients to ``parameter.grad``. Returns whether all accumulated gradients are finite.

        Args:
            parts: gradients by rectangle.
        """
        finite = True
        for group, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            if group[0] in parts:
                new = packing.pack_rows([parts[i] for i in group], parameter.dtype)
                parameter.grad = new if parameter.grad is None else add_sparse(parameter.grad, new)
                finite &= bool(parameter.grad._values().isfinite().all())
        return finite

    def collected(self, names: Mapping[int, str]) -> dict[int, RowGradients]:
        """Return sparse gradients added by ``collect``, by rectangle.

        Args:
            names: names of the tables to return, by table number, for messages.

        Raises:
            ValueError: a collected gradient was replaced by a dense gradient.
        """
        gradients: dict[int, RowGradients] = {}
        for group, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            if parameter.grad is not None and packing.table in names:
                if not parameter.grad.is_sparse:
                    raise ValueError(
                        f"the gradient of {names[packing.table]} is dense; a fused optimizer applies the "
                        "sparse gradients that its backward pass collected. Leave parameter.grad to it."
                    )
                gradients.update(zip(group, packing.unpack_rows(parameter.grad.coalesce()), strict=True))
        return gradients

    def gradient_buffers(self) -> dict[int, GradientBuffer]:
        """Return the gradient buffers by rectangle number. Only rows outside a parameter have one."""
        return {
            i: gradient_buffer
            for group, held in zip(self._rectangles(), self.held, strict=True)
            for i, gradient_buffer in zip(group, held.gradient_buffers, strict=False)
        }

    def _rectangles(self) -> list[list[int]]:
        """Return rectangle numbers per parameter."""
        ends = list(accumulate((len(packing.rectangles) for packing in self.packings), initial=0))
        return [list(range(start, end)) for start, end in pairwise(ends)]


def parameter_shard(
    parameter: nn.Parameter,
    packing: Packing,
    state: Sequence[Sequence[Tensor]],
    spec: OptimizerSpec | None,
) -> LocalShard:
    """Create a shard with rows in the parameter.

    Args:
        parameter: tensor with all rectangles.
        packing: where the rectangles are in the parameter.
        state: optimizer state per rectangle.
        spec: the fused optimizer; None: ordinary gradients.
    """
    tables = [FixedTable(parameter, packing, i, slots, spec) for i, slots in enumerate(state)]
    return LocalShard(parameter, packing, tables)


def table_shard(parameter: nn.Parameter, packing: Packing, tables: Sequence[Table]) -> LocalShard:
    """Create a shard with rows outside the parameter.

    Args:
        parameter: placeholder without rows.
        packing: the rectangles.
        tables: table per rectangle.
    """
    gradient_buffers = [GradientBuffer(table.rectangle.c1 - table.rectangle.c0) for table in tables]
    return LocalShard(parameter, packing, tables, gradient_buffers)


def allocate(
    rectangles: Sequence[Rectangle],
    names: Sequence[str],
    storages: Sequence[RowStorage],
    specs: Sequence[OptimizerSpec | None],
    trained: Sequence[bool],
    *,
    device: torch.device,
) -> LocalShards:
    """Allocate a rank's rectangles, with initial optimizer state. Rows are not initialized.

    Args:
        rectangles: rectangles, grouped by table.
        names: table names, indexed by table number.
        storages: row storage, indexed by table number.
        specs: fused optimizer, indexed by table number; None: ordinary gradients.
        trained: whether the parameter requires a gradient, indexed by table number.
        device: memory device.
    """
    held = []
    for table, group in groupby(rectangles, key=lambda rectangle: rectangle.table):
        parts, storage, spec = list(group), storages[table], specs[table]
        packing = Packing(parts, storage)
        height, width = packing.shape
        side = storage if isinstance(storage, ExternalRows) else None
        # External rows get an empty parameter, with only columns and dtype.
        rows = storage.allocate(height if side is None else 0, width, device)
        if side is not None:
            parameter = placeholder(rows, names[table], trained[table])
            held.append(table_shard(parameter, packing, [side.table(r, spec, device) for r in parts]))
            continue
        parameter = nn.Parameter(rows, trained[table])
        state = [storage.new_state(spec, r.r1 - r.r0, r.c1 - r.c0, device) for r in parts]
        held.append(parameter_shard(parameter, packing, state, spec))
    return LocalShards(held)
