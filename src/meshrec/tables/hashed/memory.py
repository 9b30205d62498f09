"""Memory for tables with an initially unknown number of rows.

[Note: memory that grows]

Kernels read a table at a fixed address. So address space is reserved for the maximum number of rows, and the
system supplies a memory page on the first write to a row in it: rows never move, and a table takes memory
only for existing rows. If the system refuses to reserve that much (an address space limit, strict overcommit,
GPU memory), rows are moved to twice the room whenever the room is full, and the log reports this.

Either way the tensor objects stay the same and grow in place (``tensor.data``), so all holders see all
rows. Their height is a power of two, not the reserved height: kernels divide a table's rows among threads by
height.
"""

import logging
from collections.abc import Collection, Sequence
from itertools import islice

import torch
from torch import Tensor

from meshrec.ops.index import Fills, bits_of
from meshrec.ops.memory import empty_pages, reserve_pages
from meshrec.ops.prefault import GrowingRegion, PagePrefaulter

_log = logging.getLogger(__name__)
_LEAST_ROWS = 64


class GrowingRows:
    """Memory for rows and optimizer state, indexed by slot; see [Note: memory that grows].

    Args:
        row: tensors in a row, each ``[1, ...]``, filled with the new-row value.
        max_rows: maximum rows the table may ever have.
        name: table name in messages.
        beside: other memory that grows with the rows.

    Attributes:
        first: the tensors in ``row``.
        tensors: row memory by tensor in ``row``, with at least ``num_rows`` rows.
        num_rows: rows so far.
    """

    def __init__(
        self, row: Sequence[Tensor], *, max_rows: int, name: str, beside: Sequence[GrowingRegion] = ()
    ) -> None:
        self.first, self._max_rows, self._name = [each.detach().clone() for each in row], max_rows, name
        found = [reserve_pages((max_rows, *each.shape[1:]), each.dtype, each.device) for each in row]
        self._reserved = [each for each in found if each is not None]
        if len(self._reserved) < len(found):
            self._reserved = []
            num_bytes = max_rows * sum(each.nbytes for each in row)
            _log.warning(
                "%s: the system does not reserve %s bytes of address space for %s rows on %s; rows are moved "
                "to twice the room whenever the room is full",
                name,
                f"{num_bytes:,}",
                f"{max_rows:,}",
                row[0].device,
            )
        self._bits = [bits_of(each) for each in self.first]
        """Fill value by tensor in ``row``, as bits."""
        own = [GrowingRegion(each, each[:1].nbytes) for each in self._reserved]
        self._pages = PagePrefaulter([*own, *beside])
        self.num_rows = 0
        self.tensors = [each.new_empty(0, *each.shape[1:]) for each in self.first]

    @property
    def is_reserved(self) -> bool:
        """Whether the rows never move."""
        return bool(self._reserved)

    @torch.no_grad()
    def grow(self, num_rows: int, *, num_written: int = 0) -> None:
        """Add rows with initial values until there are ``num_rows``.

        The caller writes the new rows in the first ``num_written`` tensors.

        Raises:
            ValueError: there would be more than ``max_rows``; nothing has changed then.
        """
        if num_rows > self._max_rows:
            raise ValueError(
                f"{self._name} would have {num_rows:,} rows, and there is room for {self._max_rows:,}. Raise "
                "the greatest number of rows, or let rows be evicted."
            )
        if num_rows <= self.num_rows:
            return
        if num_rows > len(self.tensors[0]):
            self._make_room(min(self._max_rows, max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length())))
        rows = zip(self.tensors, self.first, self._bits, strict=True)
        for tensor, begin, bits in islice(rows, num_written, None):
            if bits or not self.is_reserved:  # fresh reserved pages hold zeros
                tensor.data[self.num_rows : num_rows] = begin  # not counted as a write: see ``WriteCounter``
        self.num_rows = num_rows
        self._pages.grow(num_rows)

    def begin(
        self, slots: Tensor, end: int, fills: Fills, *, num_written: int, kept: Collection[int]
    ) -> None:
        """Add rows up to ``end``, and reset reused slots.

        Args:
            slots: int64 [N], at least one, all below ``end``.
            end: minimum number of rows afterward.
            fills: collects the writes.
            num_written: see ``grow``.
            kept: tensor numbers whose reused rows stay unchanged.
        """
        num_rows = self.num_rows
        self.grow(end, num_written=num_written)
        if int(slots.min()) < num_rows:
            for number, (tensor, value) in enumerate(zip(self.tensors, self._bits, strict=True)):
                if number not in kept:
                    fills.add(tensor, slots, value)

    def _make_room(self, height: int) -> None:
        # Everything that can fail comes first, before a tensor changes.
        room = [each[:height] for each in self._reserved]
        if not room:
            room = [empty_pages((height, *each.shape[1:]), each.dtype, each.device) for each in self.first]
            for new, old in zip(room, self.tensors, strict=True):
                new[: self.num_rows] = old[: self.num_rows]
        for tensor, new in zip(self.tensors, room, strict=True):
            tensor.data = new
