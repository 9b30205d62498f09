"""A table as a sharded module holds it: the rectangles that are here, under the name of the whole table."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshrec.distributed.routing import Rectangle, Table
from meshrec.distributed.state_dict import copy_into, split_tensor


class TableShards(nn.Module):
    """``weight`` is the first rectangle of the table on this rank, ``weight_1`` the next, if there are
    several.

    ``state_dict`` has one entry ``weight`` for the whole table, on every rank: a DTensor for a split table,
    which torch.distributed.checkpoint saves and loads in place under any plan; the plain tensor for a
    data-parallel one.
    """

    def __init__(
        self,
        table: Table,
        rectangles: Sequence[Rectangle],
        weights: Sequence[nn.Parameter],
        mesh: DeviceMesh | None,
    ) -> None:
        super().__init__()
        self._table, self.rectangles, self._mesh = table, list(rectangles), mesh
        for position, weight in enumerate(weights):
            self.register_parameter(_name(position), weight)
        self.register_state_dict_post_hook(_put_whole)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_take_whole)  # type: ignore[no-untyped-call]

    def shards(self) -> list[nn.Parameter]:
        """The rectangles that are here."""
        return list(self.parameters(recurse=False))

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


def _name(position: int) -> str:
    return "weight" if position == 0 else f"weight_{position}"


def _put_whole(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    assert isinstance(module, TableShards)
    shards = module.shards()
    for position in range(len(shards)):
        state_dict.pop(prefix + _name(position), None)
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
    for position, shard in enumerate(shards):
        state_dict[prefix + _name(position)] = shard.detach()
