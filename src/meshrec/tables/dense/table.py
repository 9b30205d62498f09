"""Fixed tables: every key is a row number and has a row, at slot ``key - r0`` in the parameter's memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.packing import Packing
from meshrec.tables.storage import RowStorage, slice_parts
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span


@final
class FixedTable:
    """The rows of a table rectangle (a row interval times a column interval) in a parameter's memory.

    Args:
        parameter: parameter, which may also hold other rectangles of the table.
        packing: the rectangles, and where they are in the parameter.
        number: index of this rectangle in ``packing``.
        state: optimizer state of the rectangle, one tensor per state slot.
        spec: optimizer; None: no optimizer state.
    """

    is_growable = False

    def __init__(
        self,
        parameter: nn.Parameter,
        packing: Packing,
        number: int,
        state: Sequence[Tensor],
        spec: OptimizerSpec | None,
    ) -> None:
        # Views are made per call, because ``parameter.data`` may be replaced by other memory.
        self._parameter, self._packing, self._number = parameter, packing, number
        self.rectangle: Rectangle = packing.rectangles[number]
        self.state = state
        self.parts = parts_of(packing.storage, spec)
        self.index = packing.storage.index(self.rectangle.r0, self.rectangle.r1 - self.rectangle.r0)

    @property
    def rows(self) -> Tensor:
        """Row memory: the parameter, or a view into it if it holds several rectangles."""
        if len(self._packing.rectangles) == 1:
            return self._parameter
        return self._packing.views(self._parameter.detach())[self._number]

    def tensors(self) -> Mapping[str, Tensor]:
        """Return views of the row parts and optimizer state by name, without a copy."""
        c0, c1 = self.rectangle.columns
        tensors = [*self._packing.storage.parts(self.rows.detach(), c1 - c0), *self.state]
        return {part.name: tensor for part, tensor in zip(self.parts, tensors, strict=True)}

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows as a single block of views, without a copy; see ``Table.stream``.

        Args:
            columns: table columns to return; None: all in the rectangle.
            keys: rows to return; None: all in the rectangle.
        """
        r, (c0, c1) = self.rectangle, columns or self.rectangle.columns
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        # A rectangle may be empty, or lie outside the requested rows.
        if first < end and c0 < c1:
            yield RowBlock(
                range(first, end), (c0, c1), self._slice(slice(first - r.r0, end - r.r0), (c0, c1))
            )

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Copy the values in the blocks to the row memory and optimizer state."""
        r0, everything = self.rectangle.r0, slice(None)
        for block in blocks:
            if isinstance(block.keys, range):
                targets = self._slice(slice(block.keys.start - r0, block.keys.stop - r0), block.columns)
                for name, values in block.parts.items():
                    targets[name].copy_(values)
            else:
                # The keys are not consecutive, so write by index into the whole rectangle.
                targets = self._slice(everything, block.columns)
                for name, values in block.parts.items():
                    # Assignment by index does not convert, unlike copy_.
                    targets[name][block.keys - r0] = values.to(targets[name].dtype)

    def _slice(self, rows: slice, columns: Span) -> dict[str, Tensor]:
        """Return views of some rows (positions in the rectangle) and table columns of all parts, by name."""
        r = self.rectangle
        return slice_parts(self._packing.storage, self.tensors(), rows, columns, first_column=r.c0)


def parts_of(storage: RowStorage, spec: OptimizerSpec | None) -> list[RowPart]:
    """Return the parts of a table: the storage's row parts, followed by the optimizer state."""
    slots = spec.state_slots() if spec is not None else ()
    return [*storage.row_parts, *(RowPart(slot.name, torch.float32, slot.per_row) for slot in slots)]
