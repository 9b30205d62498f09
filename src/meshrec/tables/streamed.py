"""State dict tensors for tables without a single backing tensor: they read and write values on request."""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, final

import torch
from torch import Tensor

from meshrec.tables.table import ExternalTable, RowBlock, RowPart, Span, TableSnapshot

_aten = torch.ops.aten

saves_key_ordered: ContextVar[bool] = ContextVar("saves_key_ordered", default=False)
"""Whether the present save can also load growable tables; ``meshrec.checkpoint`` sets it while it saves."""


@final
class StreamedPart(Tensor):
    """A row part in a table without a single tensor for all rows.

    It has the shape, dtype and device of such a tensor. Slices select rows and columns from the
    same table. ``clone()`` reads the values; ``copy_`` in either direction reads or writes them block by
    block. Other operations raise an error, because they would need all rows in memory.
    """

    table: ExternalTable
    part: RowPart
    keys: Span
    columns: Span
    source: ExternalTable | TableSnapshot
    """Table or snapshot to read the values from."""

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
        tensor: StreamedPart = Tensor._make_wrapper_subclass(
            cls, (height,) if part.per_row else (height, width), dtype=part.dtype, device=table.rows.device
        )
        tensor.table, tensor.part, tensor.keys, tensor.columns = table, part, keys, columns
        tensor.source = table if source is None else source
        return tensor

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def blocks(self) -> Iterator[tuple[Span, Tensor]]:
        """Yield ((first row, end row), values) for one row block after another."""
        position = 0
        for block in self.source.stream(self.columns, keys=self.keys):
            assert isinstance(block.keys, range), "a table without a row for every key has no such tensor"
            start, end = block.keys.start - self.keys[0], block.keys.stop - self.keys[0]
            assert start == position, "blocks follow each other"
            yield (start, end), block.parts[self.part.name]
            position = end
        assert position == self.keys[1] - self.keys[0]

    def read(self) -> Tensor:
        """Return the values as an ordinary tensor."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for (start, end), rows in self.blocks():
            values[start:end] = rows
        return values

    def frozen(self, snapshot: TableSnapshot) -> "StreamedPart":
        """Return the same part of a table snapshot."""
        return StreamedPart(self.table, self.part, keys=self.keys, columns=self.columns, source=snapshot)

    def is_same(self, other: object) -> bool:
        """Return whether both tensors stand for the same values in the same table."""
        return isinstance(other, StreamedPart) and other._identity() == self._identity()

    def _identity(self) -> tuple[object, ...]:
        """Return the key shared by tensors with the same values."""
        return id(self.source), self.part.name, self.keys, self.columns

    def _slice(
        self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
    ) -> "StreamedPart":
        """Implement ``tensor[start:end]`` along a dimension."""
        if step != 1:
            raise _unsupported("a slice with a step")
        span = self.columns if dim else self.keys
        first, last, _ = slice(start, end).indices(span[1] - span[0])
        selected = span[0] + first, span[0] + max(first, last)
        keys, columns = (self.keys, selected) if dim else (selected, self.columns)
        return StreamedPart(self.table, self.part, keys=keys, columns=columns, source=self.source)

    def _load(self, source: Tensor) -> None:
        """Implement ``self.copy_(source)``: write the values to the table, block by block."""
        # Loading a table's own stream is a no-op.
        if self.is_same(source):
            return
        assert self.source is self.table, "a snapshot stays as it is"
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
        """Raise an error if torch.distributed.checkpoint (DCP) saves a growable table.

        DCP loads into state dict tensors, and sizes differ once rows were admitted or evicted.

        Raises:
            ValueError: DCP saves the tensor, and the table is growable.
        """
        if getattr(self.table, "is_growable", False) and not saves_key_ordered.get():
            raise ValueError(
                f"torch.distributed.checkpoint cannot load {name!r}: the rows of a hashed table come "
                "and go, so their number differs. Save the model with meshrec.checkpoint.save, or in one "
                "process with torch.save(model.state_dict(), path)."
            )

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        """Return this tensor's write items for DCP: a single item with the whole tensor."""
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
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.read()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, args[0]
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
            # torch detaches parameters in state dicts; the copy must stay a stream.
            return first.frozen(first.source)
        if func is _aten.slice.Tensor:
            return first._slice(*args[1:], **kwargs)
        if func in _READING:
            return func(*map(values_of, args), **kwargs)
        raise _unsupported(str(func))


_READING = (_aten.clone.default, _aten._to_copy.default, _aten.equal.default)  # run on the values


def streamed_parts(table: ExternalTable) -> dict[str, Tensor]:
    """Return table parts by name, as streamed tensors. All keys must have a row."""
    r = table.rectangle
    return {
        part.name: StreamedPart(table, part, keys=(r.r0, r.r1), columns=r.columns) for part in table.parts
    }


def values_of(value: Any) -> Any:
    """Return a streamed tensor as an ordinary one; any other object unchanged."""
    return value.read() if isinstance(value, StreamedPart) else value


def is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether both are the same memory, or the same values in the same table."""
    if isinstance(one, StreamedPart) or isinstance(other, StreamedPart):
        return isinstance(one, StreamedPart) and one.is_same(other)
    return one.data_ptr() == other.data_ptr()


def _unsupported(call: str) -> ValueError:
    """Return the exception for an operation that needs all rows in memory."""
    return ValueError(
        f"{call} is not for a table whose rows are not in one tensor. Read the rows that are wanted first: "
        "part[first:end].clone()."
    )
