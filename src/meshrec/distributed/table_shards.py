"""A table as a sharded module holds it: the rectangles that are here, under the name of the whole table."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshrec.distributed.routing import Table
from meshrec.tables.holdings import Held
from meshrec.tables.packing import Rectangle


class TableShards(nn.Module):
    """``weight`` is what this rank holds of the table: nothing (a parameter without rows), a rectangle, or
    several in one parameter (see ``Packing``), so that the name of the whole table is the only one, and every
    rank has it.

    ``state_dict`` has one entry ``weight`` for the whole table, on every rank: a ``SplitTensor`` for a split
    table, which torch.distributed.checkpoint saves and loads in place under any plan, and which gives the
    whole by ``full_tensor()``; the plain tensor for a data-parallel one, and in one process.

    Args:
        table: the table.
        held: what of it is here, None for nothing.
        empty: the parameter of a rank that holds nothing.
        holders: the rectangles on every rank of ``mesh``.
        mesh: the ranks that the table is split over; None where each has the whole.
    """

    def __init__(
        self,
        table: Table,
        held: Held | None,
        empty: nn.Parameter,
        holders: Sequence[Sequence[Rectangle]],
        mesh: DeviceMesh | None,
    ) -> None:
        super().__init__()
        self._table, self._packing, self._mesh = table, held.packing if held else None, mesh
        self._holders = [list(rectangles) for rectangles in holders]
        self.rectangles: list[Rectangle] = held.packing.rectangles if held else []
        self.weight = held.parameter if held else empty
        self.register_state_dict_post_hook(_put_whole)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_whole)  # type: ignore[no-untyped-call]

    @property
    def is_split(self) -> bool:
        """Whether this rank may hold only a part of the table."""
        return self._mesh is not None

    def shards(self) -> list[Tensor]:
        """The rectangles that are here: ``weight``, or views of it where there are several."""
        if self._packing is None:
            return []
        return [self.weight] if len(self.rectangles) == 1 else self._packing.views(self.weight.detach())

    def whole(self, parts: Sequence[Tensor], *, per_row: bool = False) -> Tensor:
        """The table, or a state of it, from what of it is here; without a copy."""
        parts = [part.detach() for part in parts]
        if self._mesh is None:
            return parts[0]
        # Imported here: torch's DTensor costs much.
        from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor

        like = parts[0] if parts else self.weight.detach()
        local = LocalRectangles(parts, self.rectangles, like, self._size(per_row))
        return SplitTensor.of(local, self._holders, self._mesh)

    def load(self, value: Tensor, name: str) -> None:
        """Copies a whole table, or one that the same plan has split, into what of it is here.

        Raises:
            ValueError: when the size differs, or the value holds other rectangles.
        """
        size = self._size(per_row=False)
        if tuple(value.shape) != size:
            raise ValueError(
                f"{name}: the state dict has shape {list(value.shape)}, the table {list(size)}. "
                "Load it into a model with the same tables."
            )
        if self._mesh is None and hasattr(value, "full_tensor"):
            value = value.full_tensor()
        with torch.no_grad():
            try:
                self.whole(self.shards()).copy_(value)
            except ValueError as error:
                error.args = (f"{name}: {error}",)
                raise

    def _size(self, per_row: bool) -> tuple[int, ...]:
        return (self._table.num_rows,) if per_row else (self._table.num_rows, self._table.dim)

    def extra_repr(self) -> str:
        """The rectangles, for printing."""
        parts = [f"[{r.r0}:{r.r1}, {r.c0}:{r.c1}]" for r in self.rectangles]
        return f"{' '.join(parts) or 'nothing'} of {self._table.num_rows} x {self._table.dim}"


def _put_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    assert isinstance(module, TableShards)
    state_dict[prefix + "weight"] = module.whole(module.shards())


def _take_whole(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    assert isinstance(module, TableShards)
    name = prefix + "weight"
    if name not in state_dict:
        return  # torch says so
    try:
        module.load(state_dict[name], name)
    except ValueError as error:
        error_msgs.append(str(error))
    state_dict[name] = module.weight.detach()
