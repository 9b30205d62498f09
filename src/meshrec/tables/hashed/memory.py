"""Memory for tables without a known row count.

[Note: memory that grows]

Address space is reserved for the maximum row count, and the operating system supplies a memory page only on
the first write to it. So rows never move, and a table takes memory only for rows that exist. If the system
refuses to reserve that much (because of an address space limit, strict overcommit, or GPU memory), the rows
are copied to memory of twice the size whenever the memory is full, and the log reports this.

In both cases the tensor objects stay the same and grow in place (``tensor.data``), so all code that holds a
tensor sees all rows. The height of the tensors is a power of two, not the reserved height, because kernels
divide a table's rows among threads by height.
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
    """Tensors for rows and optimizer state, indexed by slot, to which rows can be added.

    See [Note: memory that grows].

    Args:
        row: a single row: one tensor ``[1, ...]`` per row part, with the initial values of new rows.
        max_rows: greatest number of rows the memory will ever hold.
        name: table name in messages.
        other_regions: other memory that grows with the rows and is prefaulted with them (pages are
            requested from the system ahead of the first write).

    Attributes:
        initial_row: copies of the tensors in ``row``.
        tensors: the memory: one tensor per tensor in ``row``, with at least ``num_rows`` rows.
        num_rows: rows in use. Later rows in ``tensors`` are undefined.
    """

    def __init__(
        self, row: Sequence[Tensor], *, max_rows: int, name: str, other_regions: Sequence[GrowingRegion] = ()
    ) -> None:
        self.initial_row, self._max_rows, self._name = [part.detach().clone() for part in row], max_rows, name
        reserved = [reserve_pages((max_rows, *part.shape[1:]), part.dtype, part.device) for part in row]
        # Reserved memory for ``max_rows`` rows, one tensor per part, for the table's whole life; or empty.
        self._reserved = [part for part in reserved if part is not None]
        # All or none: ``_make_room`` either takes all tensors from reserved memory or copies all.
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
        self._bits = [bits_of(part) for part in self.initial_row]
        """Bits of the initial value per tensor in ``row``, as ``Fills.add`` takes them."""
        regions = [GrowingRegion(part, part[:1].nbytes) for part in self._reserved]
        self._pages = PagePrefaulter([*regions, *other_regions])
        self.num_rows = 0
        # These tensor objects stay. ``_make_room`` gives them more memory.
        self.tensors = [part.new_empty(0, *part.shape[1:]) for part in self.initial_row]

    @property
    def is_reserved(self) -> bool:
        """Whether address space is reserved for all rows, so rows never move."""
        return bool(self._reserved)

    @torch.no_grad()
    def grow(self, num_rows: int, *, num_written: int = 0) -> None:
        """Add rows with initial values until there are ``num_rows``. Does nothing if there are that many.

        Args:
            num_rows: row count afterward.
            num_written: number of tensors, from the first, in which the caller itself writes the new rows.

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
        # The next power of two, see the note; at most the reserved height.
        if num_rows > len(self.tensors[0]):
            self._make_room(min(self._max_rows, max(_LEAST_ROWS, 1 << (num_rows - 1).bit_length())))
        rows = zip(self.tensors, self.initial_row, self._bits, strict=True)
        for part, initial, bits in islice(rows, num_written, None):
            if bits or not self.is_reserved:  # fresh reserved pages hold zeros
                part.data[self.num_rows : num_rows] = initial  # not counted as a write: see ``WriteCounter``
        self.num_rows = num_rows
        self._pages.grow(num_rows)

    def start_rows(
        self, slots: Tensor, end: int, fills: Fills, *, num_written: int, unchanged: Collection[int]
    ) -> None:
        """Write initial values to some slots, for new rows. Grows the memory to at least ``end`` rows.

        Args:
            slots: slots of the new rows, int64 [N], at least one, all below ``end``. Evicted rows may have
                used them before (reused slots).
            end: minimum number of rows afterward.
            fills: queue for writes to reused slots.
            num_written: see ``grow``.
            unchanged: indices of the tensors in which reused slots keep their values.
        """
        num_rows = self.num_rows
        self.grow(end, num_written=num_written)
        # ``grow`` has initialized the slots from ``num_rows`` on. Lower slots held other rows before.
        if int(slots.min()) < num_rows:
            for number, (part, value) in enumerate(zip(self.tensors, self._bits, strict=True)):
                if number not in unchanged:
                    fills.add(part, slots, value)

    def _make_room(self, height: int) -> None:
        """Make the tensors ``height`` rows high. Existing rows keep their values."""
        # Everything that can fail comes first, before a tensor changes.
        # The same addresses as before, only higher: reserved rows are never copied.
        room = [part[:height] for part in self._reserved]
        if not room:
            room = [
                empty_pages((height, *part.shape[1:]), part.dtype, part.device) for part in self.initial_row
            ]
            for new, old in zip(room, self.tensors, strict=True):
                new[: self.num_rows] = old[: self.num_rows]
        for part, new in zip(self.tensors, room, strict=True):
            # In place, because other code holds these tensors.
            part.data = new


def install_copy_hooks(owner: Any, memory: Mapping[str, Tensor]) -> None:
    """Make ``copy.deepcopy`` and ``pickle`` copy the whole table when they meet one of its memory tensors.

    The copy of a tensor is then the tensor of the same name in the copied table. Without this hook, each
    tensor would be copied alone. Updates and lookups in a copied module would then not share tensors with
    the copied table, and the copies would fill all reserved memory.
    """
    # Weak, because the tensors belong to the owner: a strong reference would be a cycle.
    reference = ref(owner)
    for name, tensor in memory.items():
        copied = _CopiedMemory(reference, name)
        tensor.__deepcopy__ = copied.deep_copied  # type: ignore[method-assign]
        tensor.__reduce_ex__ = copied.reduced  # type: ignore[method-assign]


class _CopiedMemory:
    """Hooks with which ``copy`` and ``pickle`` replace a tensor by a tensor in the copied owner.

    The owner is the table with this tensor in its memory.
    """

    def __init__(self, owner: Callable[[], Any], name: str) -> None:
        self._owner, self._name = owner, name

    def deep_copied(self, memo: dict[int, Any]) -> Tensor:
        return _memory_of(copy.deepcopy(self._owner(), memo), self._name)

    def reduced(self, protocol: Any) -> tuple[Any, ...]:
        return _memory_of, (self._owner(), self._name)


def _memory_of(owner: Any, name: str) -> Tensor:
    """Return the tensor called ``name`` in the attribute ``memory`` of an object."""
    assert owner is not None, "whoever keeps the memory of a table keeps the table"
    tensor: Tensor = owner.memory[name]
    return tensor
