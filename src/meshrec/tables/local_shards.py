"""Table shards on a rank: one parameter per table, which stands for any number of rectangles.

A rectangle is a row interval times a column interval of a table.
"""

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
    """Gradient that the backward pass collects for a table rectangle with rows outside the table's parameter.

    Such a parameter has no rows, and torch requires that ``parameter.grad`` has the shape of the parameter.
    The gradient values ``[U, D]`` are therefore the ``grad`` of a second parameter. It is in the optimizer's
    group, too, so a GradScaler unscales the gradient and ``zero_grad`` drops it as usual.

    Args:
        width: column count in the rectangle.

    Attributes:
        parameter: the second parameter. The values in its ``grad`` are for U touched rows. Its data is
            meaningless.
        pins: pins that keep the touched slots (row positions) from getting other rows. They are held from
            ``collect`` until the next gradient replaces them.
    """

    def __init__(self, width: int) -> None:
        self.parameter = nn.Parameter(torch.empty(0, width))
        # Touched slots, int64 [U], for the rows of ``parameter.grad``.
        self._rows = torch.empty(0, dtype=torch.int64)
        self.pins: list[object] = []

    def __getstate__(self) -> dict[str, Any]:
        # torch copies a parameter without ``grad``, so copied slots and pins would belong to no values.
        return {**vars(self), "_rows": self._rows[:0], "pins": []}

    def collect(self, new: RowGradients, pins: Sequence[object]) -> bool:
        """Add a gradient to the collected gradient.

        Args:
            new: gradient by slot.
            pins: pins on these slots, held until the gradient is applied.

        Returns:
            Whether the accumulated gradient is finite.
        """
        rows, grads = new
        # After ``zero_grad`` there is no ``grad``, and this gradient replaces the old slots.
        if self.parameter.grad is not None:
            # Merge with the gradient from earlier backward passes: sum the values of slots in both.
            both = torch.cat([self._rows, rows])
            rows, inverse = torch.unique(both, return_inverse=True)
            values = torch.cat([self.parameter.grad, grads])
            grads = torch.zeros(len(rows), values.shape[1]).index_add_(0, inverse, values)
            pins = [*self.pins, *pins]
        self._rows, self.pins = rows, list(pins)
        # torch checks that ``grad`` has the shape of the parameter, so resize the parameter first.
        self.parameter.grad = None
        self.parameter.data = torch.empty_like(grads)
        self.parameter.grad = grads
        return bool(grads.isfinite().all())

    def collected(self) -> RowGradients | None:
        """Return the gradient collected since ``zero_grad``; None if there is none."""
        grad = self.parameter.grad
        return None if grad is None else RowGradients(self._rows, grad)


class LocalShard(NamedTuple):
    """The shard of a table on this rank: a parameter, and the rectangles it stands for."""

    parameter: nn.Parameter
    """Parameter with the rows of all rectangles, or a placeholder if the rows are outside the parameter."""
    packing: Packing
    """The rectangles, and where they are in the parameter."""
    tables: Sequence[Table]
    """One ``Table`` object per rectangle."""
    gradient_buffers: Sequence[GradientBuffer] = ()
    """One gradient buffer per rectangle if the rows are outside the parameter; otherwise empty."""

    @property
    def is_fixed(self) -> bool:
        """Whether the rows are in the parameter."""
        return isinstance(self.tables[0], FixedTable)

    def rows(self) -> Sequence[Tensor]:
        """Return the memory read by kernels, one tensor per rectangle."""
        # Views share the parameter's memory, and kernels must not record autograd history.
        if self.is_fixed:
            return self.packing.views(self.parameter.detach())
        return [table.rows for table in self.tables]


class LocalShards:
    """The local shards of all tables looked up by a module.

    A shard has a parameter and a packing (the layout of rectangles in the parameter). Every rectangle has a
    ``Table`` object. Rectangles are numbered across all shards, in order.

    Args:
        shards: one shard per table.
    """

    def __init__(self, shards: Sequence[LocalShard]) -> None:
        self.shards = list(shards)
        # The lists below are ordered by shard, or by rectangle number.
        self.parameters = [shard.parameter for shard in shards]
        self.packings = [shard.packing for shard in shards]
        self.rectangles = [rectangle for packing in self.packings for rectangle in packing.rectangles]
        # Index of the shard that a rectangle belongs to.
        self._owners = [i for i, shard in enumerate(shards) for _ in shard.tables]

        tables = [table for shard in shards for table in shard.tables]
        self.state = [table.state for table in tables]
        self.is_packed = len(tables) > len(self.shards)
        """Whether any parameter holds several rectangles."""
        # Cached for tables that are not packed, whose memory objects never change.
        self._rows = [table.rows for table in tables]
        self.indexes = {i: table.index for i, table in enumerate(tables) if table.index is not None}
        """Index from keys to slots by rectangle number, for rectangles that have one."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Only the shards are copied: the lists above must refer to the memory of the copied tables.
        return LocalShards, (self.shards,)

    @property
    def storages(self) -> list[RowStorage]:
        """Row storage per rectangle."""
        return [packing.storage for packing in self.packings for _ in packing.rectangles]

    @property
    def weights(self) -> Sequence[Tensor]:
        """Row memory per rectangle: the tables' memory, or views into packed parameters."""
        if not self.is_packed:
            return self._rows
        # Make new views in every call, because the memory of a packed parameter may change.
        return [rows for shard in self.shards for rows in shard.rows()]

    def of_table(self, table: int) -> "LocalShard | None":
        """Return the shard of a table, by table number; None if this rank has none."""
        return next((shard for shard in self.shards if shard.packing.table == table), None)

    def gradient(self, rectangle: int) -> Tensor | None:
        """Return the ``grad`` of the parameter to which a rectangle belongs."""
        return self.parameters[self._owners[rectangle]].grad

    def is_trained(self, rectangle: int) -> bool:
        """Return whether a rectangle's parameter requires a gradient now, that is, is not frozen."""
        return self.parameters[self._owners[rectangle]].requires_grad

    def gradients(self, parts: Mapping[int, Tensor]) -> list[Tensor | None]:
        """Return a dense gradient per parameter, merged from the rectangles' gradients.

        Args:
            parts: dense gradients by rectangle number.

        Returns:
            One gradient per parameter; None for a parameter whose rectangles have no gradient.
        """
        return [
            packing.pack([parts[i] for i in group]) if group[0] in parts else None
            for group, packing in zip(self._rectangles(), self.packings, strict=True)
        ]

    def collect(self, parts: Mapping[int, RowGradients]) -> bool:
        """Add sparse gradients to ``parameter.grad``.

        Args:
            parts: gradients by rectangle number. All rectangles of a parameter have one, or none has.

        Returns:
            Whether all accumulated gradients are finite.
        """
        finite = True
        for group, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            # The parameter gets a sparse gradient with parameter rows, not table rows; see ``Packing``.
            if group[0] in parts:
                new = packing.pack_rows([parts[i] for i in group], parameter.dtype)
                parameter.grad = new if parameter.grad is None else add_sparse(parameter.grad, new)
                finite &= bool(parameter.grad._values().isfinite().all())
        return finite

    def collected(self, names: Mapping[int, str]) -> dict[int, RowGradients]:
        """Return the sparse gradients accumulated by ``collect``, by rectangle number.

        Args:
            names: tables to return: their names in messages, by table number.

        Raises:
            ValueError: a collected gradient was replaced by a dense gradient.
        """
        gradients: dict[int, RowGradients] = {}
        for group, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            if parameter.grad is not None and packing.table in names:
                # User code may have replaced the gradient.
                if not parameter.grad.is_sparse:
                    raise ValueError(
                        f"the gradient of {names[packing.table]} is dense; a fused optimizer applies the "
                        "sparse gradients that its backward pass collected. Leave parameter.grad to it."
                    )
                gradients.update(zip(group, packing.unpack_rows(parameter.grad.coalesce()), strict=True))
        return gradients

    def gradient_buffers(self) -> dict[int, GradientBuffer]:
        """Return the gradient buffers by rectangle number. Only rectangles with external rows have one."""
        return {
            i: gradient_buffer
            for group, shards in zip(self._rectangles(), self.shards, strict=True)
            # ``zip`` may stop early: shards with rows in the parameter have no buffers.
            for i, gradient_buffer in zip(group, shards.gradient_buffers, strict=False)
        }

    def _rectangles(self) -> list[list[int]]:
        """Return the numbers of the rectangles in each parameter."""
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
        parameter: parameter with the rows of all rectangles.
        packing: the rectangles, and where they are in the parameter.
        state: optimizer state per rectangle, one tensor per state slot.
        spec: fused optimizer; None: ordinary gradients.
    """
    tables = [FixedTable(parameter, packing, i, slots, spec) for i, slots in enumerate(state)]
    return LocalShard(parameter, packing, tables)


def table_shard(parameter: nn.Parameter, packing: Packing, tables: Sequence[Table]) -> LocalShard:
    """Create a shard with rows outside the parameter.

    Args:
        parameter: placeholder without rows.
        packing: the rectangles.
        tables: one ``Table`` object per rectangle, with the rows.
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
    """Create the parameters and rectangles of a rank, with initial optimizer state. Rows are not initialized.

    Args:
        rectangles: rectangles on this rank, those of a table next to each other.
        names: table names, indexed by table number.
        storages: row storages, indexed by table number.
        specs: fused optimizers, indexed by table number; None: ordinary gradients.
        trained: whether the table's parameter requires a gradient, indexed by table number.
        device: memory device.
    """
    shards = []
    for table, group in groupby(rectangles, key=lambda rectangle: rectangle.table):
        parts, storage, spec = list(group), storages[table], specs[table]
        packing = Packing(parts, storage)
        height, width = packing.shape
        # ``external_storage``: the storage if it keeps rows outside the parameter.
        external_storage = storage if isinstance(storage, ExternalRows) else None
        # External rows get an empty parameter, with only columns and dtype.
        rows = storage.allocate(height if external_storage is None else 0, width, device)
        if external_storage is not None:
            parameter = placeholder(rows, names[table], trained[table])
            shards.append(
                table_shard(parameter, packing, [external_storage.table(r, spec, device) for r in parts])
            )
            continue
        parameter = nn.Parameter(rows, trained[table])
        state = [storage.new_state(spec, r.r1 - r.r0, r.c1 - r.c0, device) for r in parts]
        shards.append(parameter_shard(parameter, packing, state, spec))
    return LocalShards(shards)
