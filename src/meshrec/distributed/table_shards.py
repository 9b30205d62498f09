"""A table as a sharded module holds it: the rectangles that are here, under the name of the whole table."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshrec.distributed.holdings import Held
from meshrec.distributed.routing import Rectangle, Table
from meshrec.distributed.state_dict import copy_into, split_tensor


class TableShards(nn.Module):
    """``weight`` is what this rank holds of the table: nothing, a rectangle, or several in one parameter (see
    ``Packing``), so that the name of the whole table is the only one.

    ``state_dict`` has one entry ``weight`` for the whole table, on every rank: a DTensor for a split table,
    which torch.distributed.checkpoint saves and loads in place under any plan; the plain tensor for a
    data-parallel one.
    """

    def __init__(self, table: Table, held: Held | None, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self._table, self._packing, self._mesh = table, held.packing if held else None, mesh
        self.rectangles: list[Rectangle] = held.packing.rectangles if held else []
        if held:
            self.weight = held.parameter
        self.register_state_dict_post_hook(_put_whole)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_whole)  # type: ignore[no-untyped-call]

    @property
    def is_split(self) -> bool:
        """Whether this rank may hold only a part of the table."""
        return self._mesh is not None or len(self.rectangles) != 1

    @property
    def is_joined(self) -> bool:
        """Whether ``whole`` gives a copy: one process without a mesh, with the table in several pieces."""
        return self._mesh is None and len(self.rectangles) > 1

    def shards(self) -> list[Tensor]:
        """The rectangles that are here: ``weight``, or views of it where there are several."""
        if self._packing is None:
            return []
        return [self.weight] if len(self.rectangles) == 1 else self._packing.views(self.weight.detach())

    def whole(self, parts: Sequence[Tensor], *, per_row: bool = False) -> Tensor:
        """The table, or a state of it, from what of it is here."""
        return split_tensor(parts, self.rectangles, self._size(per_row), self._mesh)

    def load(self, parts: Sequence[Tensor], value: Tensor, name: str, *, per_row: bool = False) -> None:
        """Copies a whole table (or a state of it) into what of it is here."""
        copy_into(parts, self.rectangles, value, name, self._size(per_row))

    def _size(self, per_row: bool) -> tuple[int, ...]:
        return (self._table.num_rows,) if per_row else (self._table.num_rows, self._table.dim)

    def extra_repr(self) -> str:
        """The rectangles, for printing."""
        parts = [f"[{r.r0}:{r.r1}, {r.c0}:{r.c1}]" for r in self.rectangles]
        return f"{' '.join(parts) or 'nothing'} of {self._table.num_rows} x {self._table.dim}"


def _put_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    assert isinstance(module, TableShards)
    shards = module.shards()
    if shards or module._mesh is not None:
        state_dict[prefix + "weight"] = module.whole(shards)


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
    value = state_dict.pop(prefix + "weight", None)
    shards = module.shards()
    if value is None:
        if not shards:
            missing_keys.append(prefix + "weight")
        return
    try:
        module.load(shards, value, prefix + "weight")
    except ValueError as error:
        error_msgs.append(str(error))
    if shards:
        state_dict[prefix + "weight"] = module.weight.detach()
