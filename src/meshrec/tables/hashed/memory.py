"""Memory for tables without a known row count.

[Note: memory that grows]

Kernels read a table at a fixed address. So address space is reserved for the maximum row count, and the
system supplies a memory page on the first write to a row in it: rows never move, and a table takes memory
only for existing rows. If the system refuses to reserve that much (an address space limit, strict overcommit,
GPU memory), rows are moved to twice the room whenever the room is full, and the log reports this.

Either way the tensor objects stay the same and grow in place (``tensor.data``), so all holders see all
rows. Their height is a power of two, not the reserved height: kernels divide a table's rows among threads by
height.
"""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from meshrec.ops.index import Fills, bits_of
from meshrec.ops.memory import empty_pages, reserve_pages
from meshrec.ops.prefault import GrowingRegion, PagePrefaulter

_log = logging.getLogger(__name__)
_LEAST_ROWS = 64  # smallest height of the tensors


class GrowingRows:
    """Memory for rows and optimizer state, indexed by slot; see [Note: memory that grows].

    Args:
        row: tensors ``[1, ...]`` for a row, with a new row's initial values.
        max_rows: maximum row count, for the table's whole life.
        name: table name in messages.
        other_regions: further memory growing together with the rows, for prefaulting.

    Attributes:
        first: copies of the tensors in ``row``.
        tensors: memory for all rows: one tensor per tensor in ``row``, with at least ``num_rows`` rows.
        num_rows: row count so far.
    """

    def __init__(
        self, row: Sequence[Tensor], *, max_rows: int, name: str, other_regions: Sequence[GrowingRegion] = ()
    ) -> None:
        self.first, self._max_rows, self._name = [part.detach().clone() for part in row], max_rows, name
        reserved = [reserve_pages((max_rows, *part.shape[1:]), part.dtype, part.device) for part in row]
        self._reserved = [part for part in reserved if part is not None]
        if len(self._reserved) < len(reserved):
            self._reserved = []
            num_bytes = max_rows * sum(part.nbytes for part in row)
            _log.warning(
                "%s: the system does not reserve %s bytes of address space for %s rows on %s; rows are moved "
                "to twice the room whenever the room is full",
                name,
                f"{num_bytes:,}",
                f"{max_rows:,}",
                row[0].device,
            )
        self._bits = [bits_of(part) for part in self.first]
        """Initial value bits, per tensor in ``row``."""
        regions = [GrowingRegion(part, part[:1].nbytes) for part in self._reserved]
        self._pages = PagePrefaulter([*regions, *other_regions])
        self.num_rows = 0
        self.tensors = [part.new_empty(0, *part.shape[1:]) for part in self.first]

    @property
    def is_reserved(self) -> bool:
        """Whether the rows never move, because address space is reserved for all of them."""
        return bool(self._reserved)

    @torch.no_grad()
    def grow(self, num_rows: int, *, num_written: int = 0) -> None:
        """Add rows with initial values, until there are ``num_rows``.

        Args:
            num_rows: row count afterward.
            num_written: tensors, counted from the first, with new rows written by the caller.

        Raises:
            ValueError: ``num_rows`` exceeds ``max_rows``. Nothing has changed then.
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
        for part, initial, bits in islice(rows, num_written, None):
            if bits or not self.is_reserved:  # fresh reserved pages hold zeros
                part.data[self.num_rows : num_rows] = initial  # not counted as a write: see ``WriteCounter``
        self.num_rows = num_rows
        self._pages.grow(num_rows)

    def start_rows(
        self, slots: Tensor, end: int, fills: Fills, *, num_written: int, unchanged: Collection[int]
    ) -> None:
        """Add rows up to ``end``, and reset reused slots to initial values.

        Args:
            slots: slots for new rows, int64 [N], at least one, all below ``end``.
            end: row count afterward, at least.
            fills: queue for the writes.
            num_written: see ``grow``.
            unchanged: numbers of the tensors in which reused slots are not reset.
        """
        num_rows = self.num_rows
        self.grow(end, num_written=num_written)
        if int(slots.min()) < num_rows:
            for number, (part, value) in enumerate(zip(self.tensors, self._bits, strict=True)):
                if number not in unchanged:
                    fills.add(part, slots, value)

    def _make_room(self, height: int) -> None:
        """Give the tensors ``height`` rows."""
        # Everything that can fail comes first, before a tensor changes.
        room = [part[:height] for part in self._reserved]
        if not room:
            room = [empty_pages((height, *part.shape[1:]), part.dtype, part.device) for part in self.first]
            for new, old in zip(room, self.tensors, strict=True):
                new[: self.num_rows] = old[: self.num_rows]
        for part, new in zip(self.tensors, room, strict=True):
            part.data = new


def copy_with_owner(owner: Any, memory: Mapping[str, Tensor]) -> None:
    """Make copies and pickles of an object's tensors return the copied object's tensors.

    Updates and lookups also hold these tensors. Copied on their own, they would include the reserved memory.

    Args:
        owner: object with an attribute ``memory``.
        memory: that attribute: tensors by name.
    """
    reference = ref(owner)
    for name, tensor in memory.items():
        copied = _CopiedMemory(reference, name)
        tensor.__deepcopy__ = copied.deep_copied  # type: ignore[method-assign]
        tensor.__reduce_ex__ = copied.reduced  # type: ignore[method-assign]


class _CopiedMemory:
    """Copy and pickle hooks for a tensor: they return the copied owner's tensor."""

    def __init__(self, owner: Callable[[], Any], name: str) -> None:
        self._owner, self._name = owner, name

    def deep_copied(self, memo: dict[int, Any]) -> Tensor:
        return _memory_of(copy.deepcopy(self._owner(), memo), self._name)

    def reduced(self, protocol: Any) -> tuple[Any, ...]:
        return _memory_of, (self._owner(), self._name)


def _memory_of(owner: Any, name: str) -> Tensor:
    """Return a tensor from an object's ``memory``."""
    assert owner is not None, "whoever keeps the memory of a table keeps the table"
    tensor: Tensor = owner.memory[name]
    return tensor
