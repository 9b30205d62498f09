"""Placeholder parameters without rows, for tables that keep their rows outside the parameter."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)  # these return a placeholder for the same table
_NEW = (_aten.new_empty.default, _aten.new_empty_strided.default)  # these return ordinary tensors


class PlaceholderTensor(Tensor):
    """A tensor ``[0, columns]`` that stands for the rows of a table, and raises errors on arithmetic.

    A module needs a parameter with the table's name, for optimizers and hooks. With an ordinary empty tensor,
    arithmetic would succeed and do nothing: ``p.zero_()``, model averaging and ``nn.init`` would silently
    skip the table. This tensor raises ValueError instead, and names the table.

    Args:
        table: table name.
        like: tensor with the number of columns, dtype and device to use.
        owner: object by which aliases of the same parameter are recognized; None: a new object.
    """

    table: str
    owner: object
    """Shared by a parameter and its aliases, such as ``detach()``. Copies have another owner."""

    @staticmethod
    def __new__(cls, table: str, like: Tensor, owner: object = None) -> "PlaceholderTensor":
        tensor: PlaceholderTensor = Tensor._make_wrapper_subclass(
            cls, (0, like.shape[1]), dtype=like.dtype, device=like.device
        )
        tensor.table, tensor.owner = table, object() if owner is None else owner
        return tensor

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PlaceholderTensor({self.table!r}, {list(self.shape)}, {self.dtype})"

    def share_memory_(self) -> "PlaceholderTensor":
        """Raise ValueError, because the rows are in this process's memory or in a file of this process."""
        raise _unsupported(self.table, "share_memory_")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = placeholder(self, self.table, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes = {name: value for name, value in vars(self).items() if name not in ("table", "owner")}
        like = torch.empty(0, self.shape[1], dtype=self.dtype, device=self.device)
        return _rebuild, (like, self.table, self.requires_grad, attributes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0]
        if isinstance(first, PlaceholderTensor):
            if func in _ALIASES:
                return PlaceholderTensor(first.table, first, first.owner)
            options = {name: kwargs.get(name) or getattr(first, name) for name in ("dtype", "device")}
            if func in _NEW:
                return torch.empty(args[1], **options)
            is_same = (options["dtype"], options["device"]) == (first.dtype, first.device)
            if func is _aten.empty_like.default or (func is _aten._to_copy.default and is_same):
                return PlaceholderTensor(first.table, torch.empty(0, first.shape[1], **options))
            if func is _aten.copy_.default and getattr(args[1], "owner", None) is first.owner:
                # torch loads a state dict, and copies the parameter to itself. The table has loaded its rows
                # already.
                return first
        table = next(tensor.table for tensor in _flatten(args) if isinstance(tensor, PlaceholderTensor))
        raise _unsupported(table, func.name().removeprefix("aten::"))


def placeholder(rows: Tensor, table: str, requires_grad: bool) -> nn.Parameter:
    """Create the placeholder parameter of a table.

    Args:
        rows: tensor with the number of columns, dtype and device to use.
        table: table name.
        requires_grad: whether the table is trained.
    """
    return nn.Parameter(PlaceholderTensor(table, rows), requires_grad)


def _rebuild(rows: Tensor, table: str, requires_grad: bool, attributes: dict[str, Any]) -> nn.Parameter:
    """Create a placeholder from its pickled form; see ``PlaceholderTensor.__reduce_ex__``."""
    parameter = placeholder(rows, table, requires_grad)
    vars(parameter).update(attributes)
    return parameter


def _flatten(values: Sequence[Any]) -> Iterator[Any]:
    """Yield all elements of nested lists and tuples that are not lists or tuples."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flatten(value)
        else:
            yield value


def _unsupported(table: str, call: str) -> ValueError:
    """Return the exception for an operation on the placeholder that would need rows."""
    return ValueError(
        f"{call} is not for the parameter of table {table!r}, which has no rows: an index finds them, or "
        "they are in a file. Read and replace rows with state_dict() and load_state_dict(), choose first "
        "values in the table's configuration, and copy models with checkpoints."
    )
