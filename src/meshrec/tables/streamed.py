"""State dict tensors for tables that have no single tensor with all rows: they read and write on demand."""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor

from meshrec.tables.table import ExternalTable, RowBlock, RowPart, Span, TableSnapshot

_aten = torch.ops.aten

saves_key_ordered: ContextVar[bool] = ContextVar("saves_key_ordered", default=False)
"""Whether the running save can load growable tables again. ``meshrec.checkpoint`` sets it while it saves."""


@final
class StreamedPart(Tensor):
    """A state dict tensor that stands for a row part of a table, and reads the values on demand.

    The table's rows are in a file or scattered in memory, so no tensor holds them all. This tensor has the
    shape, dtype and device that such a tensor would have. A slice is a ``StreamedPart`` for fewer rows or
    columns. ``clone()`` reads the values. ``copy_`` from or to this tensor reads or writes the table block by
    block. Other operations raise an error, because they would need all rows in memory.

    Args:
        table: the table, in which every key in ``keys`` has a row.
        part: row part.
        keys: interval of row keys.
        columns: interval of columns.
        source: table or snapshot from which to read the values; None: ``table``.
    """

    # Set by ``__new__`` and not changed.
    table: ExternalTable
    part: RowPart
    keys: Span
    columns: Span
    source: ExternalTable | TableSnapshot
    """Table or snapshot from which the values are read."""

    @staticmethod
    def __new__(
        cls,
        table: ExternalTable,
        part: RowPart,
        *,
        keys: Span,
        columns: Span,
        source: ExternalTable | TableSnapshot | None = None,
    ) -> "StreamedPart":
        height, width = keys[1] - keys[0], columns[1] - columns[0]
        # A wrapper subclass has shape, dtype and device, but no memory.
        tensor: StreamedPart = Tensor._make_wrapper_subclass(
            cls, (height,) if part.per_row else (height, width), dtype=part.dtype, device=table.rows.device
        )
        tensor.table, tensor.part, tensor.keys, tensor.columns = table, part, keys, columns
        tensor.source = table if source is None else source
        return tensor

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def blocks(self) -> Iterator[tuple[Span, Tensor]]:
        """Read the values in blocks of consecutive rows.

        Yields:
            The interval of positions in this tensor, and the values there.
        """
        position = 0
        for block in self.source.stream(self.columns, keys=self.keys):
            assert isinstance(block.keys, range), "a table without a row for every key has no such tensor"
            start, end = block.keys.start - self.keys[0], block.keys.stop - self.keys[0]
            assert start == position, "blocks follow each other"
            yield (start, end), block.parts[self.part.name]
            position = end
        assert position == self.keys[1] - self.keys[0]

    def read(self) -> Tensor:
        """Return all values as an ordinary tensor in memory."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for (start, end), rows in self.blocks():
            values[start:end] = rows
        return values

    def frozen(self, snapshot: TableSnapshot) -> "StreamedPart":
        """Return a tensor for the same rows and columns that reads from a table snapshot."""
        return StreamedPart(self.table, self.part, keys=self.keys, columns=self.columns, source=snapshot)

    def is_same(self, other: object) -> bool:
        """Return whether another object reads the same rows and columns of the same table or snapshot."""
        return isinstance(other, StreamedPart) and other._identity() == self._identity()

    def _identity(self) -> tuple[object, ...]:
        """Return a tuple that is equal for tensors that read the same values."""
        return id(self.source), self.part.name, self.keys, self.columns

    def _slice(
        self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> "StreamedPart":
        """Implement ``tensor[start:end]`` along a dimension, with the arguments of ``aten.slice``."""
        if step != 1:
            raise _unsupported("a slice with a step")
        span = self.columns if dim else self.keys
        first, last, _ = slice(start, end).indices(span[1] - span[0])
        selected = span[0] + first, span[0] + max(first, last)
        keys, columns = (self.keys, selected) if dim else (selected, self.columns)
        return StreamedPart(self.table, self.part, keys=keys, columns=columns, source=self.source)

    def _load(self, source: Tensor) -> None:
        """Implement ``self.copy_(source)``: write the values to the table, block by block."""
        # Loading a table's present values into the same table changes nothing.
        if self.is_same(source):
            return
        assert self.source is self.table, "a snapshot stays as it is"
        # Lazily, so only a single block is in memory at a time.
        if isinstance(source, StreamedPart):
            assert source.shape == self.shape
            pieces = source.blocks()
        else:
            pieces = iter([((0, len(self)), source.expand(self.shape))])
        self.table.load(
            RowBlock(
                range(self.keys[0] + start, self.keys[0] + end),
                self.columns,
                {self.part.name: values.detach()},
            )
            for (start, end), values in pieces
        )

    def check_saver(self, name: str) -> None:
        """Refuse to save a growable table with torch.distributed.checkpoint (DCP) directly.

        DCP loads into the tensors of a state dict, which must have the saved size. The size of a growable
        table changes when rows are admitted or evicted. ``meshrec.checkpoint`` can load such tables.

        Args:
            name: tensor name in messages.

        Raises:
            ValueError: the table is growable, and ``meshrec.checkpoint`` is not saving.
        """
        if getattr(self.table, "is_growable", False) and not saves_key_ordered.get():
            raise ValueError(
                f"torch.distributed.checkpoint cannot load {name!r}: the rows of a hashed table come "
                "and go, so their number differs. Save the model with meshrec.checkpoint.save, or in one "
                "process with torch.save(model.state_dict(), path)."
            )

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return what DCP writes for this tensor: a single item with the whole tensor. DCP calls this."""
        # Imported here, because the module is slow to import and only DCP needs it.
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self.check_saver(fqn)
        origin = torch.Size([0] * self.dim())
        chunk = ChunkStorageMetadata(origin, self.shape)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self), self.shape)
        return [WriteItem(MetadataIndex(fqn, origin), WriteItemType.TENSOR, tensor_data=data)]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"StreamedPart({self.part.name!r}, {list(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle stores the values, because the reading process has no access to this table.
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        # A copy must keep its values when the table changes.
        return self.read()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0]
        # Either the target, the source, or both of a copy may be streamed.
        if func is _aten.copy_.default:
            if isinstance(first, StreamedPart):
                first._load(args[1])
            else:
                for (start, end), values in args[1].blocks():
                    first[start:end].copy_(values)
            return first
        if func is _aten.is_pinned.default:
            return False
        if func in (_aten.detach.default, _aten.alias.default):
            # torch detaches the tensors in a state dict. The result must still read on demand.
            return first.frozen(first.source)
        if func is _aten.slice.Tensor:
            return first._slice(*args[1:], **kwargs)
        if func in _READING:
            return func(*map(values_of, args), **kwargs)
        raise _unsupported(str(func))


# Operations that first read all values, and then run on them.
_READING = (_aten.clone.default, _aten._to_copy.default, _aten.equal.default)


def streamed_parts(table: ExternalTable) -> dict[str, Tensor]:
    """Return the parts of a table by name, as ``StreamedPart`` tensors."""
    r = table.rectangle
    return {
        part.name: StreamedPart(table, part, keys=(r.r0, r.r1), columns=r.columns) for part in table.parts
    }


def values_of(value: Any) -> Any:
    """Return the values of a ``StreamedPart`` as an ordinary tensor. Return any other object unchanged."""
    return value.read() if isinstance(value, StreamedPart) else value


def is_same_data(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same data, so that callers can skip a copy.

    Tensors in memory must have the same data pointer. StreamedParts must read the same rows and columns of
    the same table or snapshot.
    """
    if isinstance(one, StreamedPart) or isinstance(other, StreamedPart):
        return isinstance(one, StreamedPart) and one.is_same(other)
    return one.data_ptr() == other.data_ptr()


def _unsupported(call: str) -> ValueError:
    """Return the exception for an operation (``call``) that would need all rows in memory."""
    return ValueError(
        f"{call} is not for a table whose rows are not in one tensor. Read the rows that are wanted first: "
        "part[first:end].clone()."
    )
