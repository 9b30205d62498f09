"""The hash index: slots of any 64-bit IDs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.index import compiled, naive
from meshrec.ops.index.compiled import CompiledIndex, give, is_compiled
from meshrec.ops.index.naive import NaiveIndex, Status
from meshrec.ops.pages_ahead import GrowingPart

# Set apart from the seeds of a plan: hashes of IDs that fall to one rank lie in one interval, and the index
# has its buckets in the order of its own hashes.
_SEED = 0x51ED270B7F4A9E3D


class HashIndex:
    """The slots of IDs, for tables whose IDs nobody can number.

    IDs are int64, and all 2^64 values are valid: none is reserved. The same calls in the same order give the
    same slots, whatever the number of threads. Calls may not overlap, but for those of ``find`` and
    ``ids_of``, which change nothing. A forked process has the index as it was.

    Args:
        max_slots: the number of slots that there may ever be, below 2^32.
        seed: the seed of the mix that spreads the IDs.
        name: what messages call the index.
    """

    def __init__(self, max_slots: int, *, seed: int = 0, name: str = "the index") -> None:
        if not 0 < max_slots < 1 << 32:
            raise ValueError(f"{name}: max_slots is {max_slots:,}; it must lie in [1, 2^32).")
        self.max_slots, self.seed, self.name = max_slots, seed, name
        own_seed = ((seed ^ _SEED) & ((1 << 63) - 1)) - (seed & 1 << 63)
        self._rows = CompiledIndex(max_slots, own_seed) if is_compiled else NaiveIndex(max_slots)

    @property
    def num_live(self) -> int:
        """The number of IDs that have a slot."""
        return self._rows.num_live

    @property
    def num_slots(self) -> int:
        """The number of slots from 0 to the greatest that an ID has had."""
        return self._rows.num_slots

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that the index takes: at most 16 for each ID that it has had at once."""
        return self._rows.num_bytes

    @property
    def parts(self) -> list[GrowingPart]:
        """The memory that grows with the slots, if it stays where it is."""
        return self._rows.parts if isinstance(self._rows, CompiledIndex) else []

    @property
    def kernel_parts(self) -> tuple[list[Tensor], int] | None:
        """The tensors and the seed by which kernels find slots; None if there are no kernels."""
        rows = self._rows
        return (rows.memory, rows.seed) if isinstance(rows, CompiledIndex) else None

    def find(self, ids_N: Tensor) -> Tensor:
        """Return the slot of each ID, -1 where it has none: int64 [N]. IDs may repeat."""
        return self._rows.find(self._checked(ids_N))

    def insert(self, ids_N: Tensor) -> Tensor:
        """Give new IDs the lowest free slots, in the order of the IDs.

        Args:
            ids_N: int64, distinct and ascending, none of them in the index.

        Returns:
            The slots, int64 [N].

        Raises:
            ValueError: the IDs are not ascending, one is in the index, or there are fewer free slots than
                IDs. Nothing has changed then.
        """
        ids_N = self._checked(ids_N)
        found = self._rows.insert(ids_N)
        return found if isinstance(found, Tensor) else self._refuse(found, ids_N)

    def remove(self, ids_N: Tensor) -> Tensor:
        """Take IDs out of the index and free their slots.

        Args:
            ids_N: int64, distinct, each of them in the index.

        Returns:
            The slots that they had, int64 [N].

        Raises:
            ValueError: an ID is not in the index, or repeats. Nothing has changed then.
        """
        ids_N = self._checked(ids_N)
        found = self._rows.remove(ids_N)
        return found if isinstance(found, Tensor) else self._refuse(found, ids_N)

    def free(self, slots_N: Tensor) -> Tensor:
        """Remove the IDs of some slots, which are free then.

        Args:
            slots_N: int64, distinct, each with an ID.

        Returns:
            The IDs, int64 [N].

        Raises:
            ValueError: a slot is free already, or repeats. Nothing has changed then.
        """
        return free_slots([(self, slots_N)])[0]

    def ids_of(self, slots_N: Tensor) -> Tensor:
        """Return the ID that has each slot, int64 [N]. Slots may repeat.

        Raises:
            ValueError: a slot is free.
        """
        slots_N = self._checked(slots_N)
        found = self._rows.ids_of(slots_N)
        return found if isinstance(found, Tensor) else self._refuse(found, slots_N)

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all IDs in ascending order, and their slots: int64 [num_live] each."""
        return self._rows.items()

    def marked(self, marks: Tensor, most: int = (1 << 63) - 1) -> tuple[Tensor, Tensor]:
        """Return the IDs whose slots are marked, in any order, and these slots: int64 [M] each.

        Much faster than ``ids_of`` if most slots are marked: the index is read from beginning to end.

        Args:
            marks: bool, one for each slot from 0 to the greatest that an ID has had; there may be more.
            most: the greatest ID that is wanted.

        Raises:
            ValueError: the marks have another type or shape, or are too few.
        """
        num = self.num_slots
        if marks.dtype != torch.bool or marks.dim() != 1 or not marks.is_cpu or len(marks) < num:
            raise ValueError(
                f"{self.name} takes a bool tensor of {num:,} marks or more on the CPU; this one is "
                f"{marks.dtype} {list(marks.shape)} on {marks.device}."
            )
        return self._rows.marked(marks.contiguous(), most)

    def _checked(self, integers_N: Tensor) -> Tensor:
        if integers_N.dtype != torch.int64 or integers_N.dim() != 1 or not integers_N.is_cpu:
            raise ValueError(
                f"{self.name} takes int64 tensors [N] on the CPU; this one is {integers_N.dtype} "
                f"{list(integers_N.shape)} on {integers_N.device}."
            )
        return integers_N.contiguous()

    def _refuse(self, status: Status, given_N: Tensor) -> Tensor:
        """Raise the error that a status stands for."""
        if status is Status.NO_MEMORY:
            raise MemoryError(f"{self.name}: there is no memory for {len(given_N):,} IDs.")
        if status is Status.NOT_ASCENDING:
            what = "the IDs to insert must be distinct and ascending; use unique()."
        elif status is Status.PRESENT:
            present = given_N[self.find(given_N) >= 0]
            what = f"ID {int(present[0])} has a slot already; insert only IDs that find() misses."
        elif status is Status.FULL:
            what = (
                f"there would be {self.num_live + len(given_N):,} IDs, and there is room for "
                f"{self.max_slots:,}. Raise the greatest number of rows, or let rows be evicted."
            )
        elif status is Status.CROWDED:
            what = "too many IDs have hashes close to each other; choose another seed."
        elif status is Status.ABSENT:
            absent = given_N[self.find(given_N) < 0]
            what = f"there is no ID {int(absent[0])}, so it cannot be removed."
        elif status is Status.REPEATS:
            what = "the IDs or slots to remove must be distinct; use unique()."
        else:
            free = set(given_N.tolist()) - set(self.items()[1].tolist())
            what = f"slot {min(free)} is free."
        raise ValueError(f"{self.name}: {what}")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copy and pickle the IDs and their slots, not the memory."""
        return HashIndex.of, (self.max_slots, *self.items(), self.seed, self.name)

    @staticmethod
    def of(max_slots: int, ids_N: Tensor, slots_N: Tensor, seed: int = 0, name: str = "") -> "HashIndex":
        """Make an index of IDs, distinct and ascending, that have these slots."""
        index = HashIndex(max_slots, seed=seed, name=name or "the index")
        found = index._rows.insert(index._checked(ids_N), index._checked(slots_N))
        if not isinstance(found, Tensor):
            index._refuse(found, ids_N)
        return index


class SearchedPart(NamedTuple):
    """Some of the IDs of a batch, which one index has."""

    begin: int
    end: int
    owner: HashIndex
    first: int = 0
    """The offset that is added to the IDs before the search."""
    mix_seed: int | None = None
    """The seed with which the IDs are mixed before; None: they are not. All parts have one, or none has."""


def find_parts(ids_N: Tensor, parts: Sequence[SearchedPart]) -> tuple[Tensor, list[int]]:
    """Return IDs of which some parts are replaced by their slots, -1 where there is none, in one call.

    Args:
        ids_N: int64, contiguous.
        parts: the parts, ascending.

    Returns:
        The slots, and the other IDs as they are, int64 [N]; and how many IDs of each part have no slot.
    """
    indexes = list({id(part.owner): part.owner for part in parts}.values())
    rows = [index._rows for index in indexes if isinstance(index._rows, CompiledIndex)]
    if len(rows) < len(indexes):
        found = ids_N.clone()
        for part in parts:
            own = ids_N[part.begin : part.end]
            keys = own if part.mix_seed is None else naive.mix(own, part.mix_seed)
            found[part.begin : part.end] = part.owner.find(keys + part.first)
        return found, [int((found[part.begin : part.end] < 0).sum()) for part in parts]
    place = {id(index): number for number, index in enumerate(indexes)}
    mixes = [part.mix_seed for part in parts if part.mix_seed is not None]
    slots, absent = torch.ops.meshrec.index_find_parts.default(
        [tensor for each in rows for tensor in each.memory],
        [each.seed for each in rows],
        ids_N,
        [part.begin for part in parts],
        [part.end for part in parts],
        [place[id(part.owner)] for part in parts],
        [part.first for part in parts],
        mixes,
    )
    return slots, absent.tolist()


def free_slots(slots: Sequence[tuple[HashIndex, Tensor]]) -> list[Tensor]:
    """Remove the IDs of some slots of several indexes, each of which occurs once; see ``HashIndex.free``.

    Args:
        slots: indexes, and the slots of each that are to be free: int64, distinct, each with an ID.

    Returns:
        The IDs of each index, int64 [number of its slots].

    Raises:
        ValueError: a slot is free already, or repeats. Nothing has changed in any index then.
    """
    own_slots = [index._checked(own) for index, own in slots]
    rows = [index._rows for index, _ in slots]
    assert len({id(each) for each in rows}) == len(rows)
    of_kernels = [each for each in rows if isinstance(each, CompiledIndex)]
    of_dicts = [each for each in rows if isinstance(each, NaiveIndex)]
    assert not (of_kernels and of_dicts)
    found = compiled.free(of_kernels, own_slots) if of_kernels else naive.free(of_dicts, own_slots)
    for (index, _), own, ids in zip(slots, own_slots, found, strict=True):
        if isinstance(ids, Status) and ids is not Status.DONE:
            index._refuse(ids, own)
    return [ids for ids in found if isinstance(ids, Tensor)]


class UnseenIds(NamedTuple):
    """IDs of a batch, some of which have no slot in an index."""

    owner: HashIndex
    ids: Tensor
    """int64 [N], contiguous."""
    slots: Tensor
    """The slot of each ID, -1 where there is none, int64 [N], contiguous."""
    num_absent: int
    """The number of IDs without a slot."""
    first: int = 0
    """The number that is added to the IDs before they are inserted, see ``SearchedPart``."""
    mix_seed: int | None = None
    """The seed with which the IDs are mixed before that; None: they are not."""


class GivenSlots(NamedTuple):
    """The IDs that have got a slot."""

    slots: Tensor
    """The slots in ascending order of their IDs, int64 [U]."""
    ids: Tensor
    """The distinct IDs, ascending, mixed and with the offset, int64 [U]."""
    counts: Tensor
    """The number of times that the batch has each ID, int64 [U]."""


def give_slots(unseen: Sequence[UnseenIds]) -> list[GivenSlots]:
    """Insert the IDs that have no slot in several indexes, each of which occurs once, and write their slots.

    Raises:
        ValueError: an index has fewer free slots than IDs. No index has changed then.
    """
    if not unseen:
        return []
    assert len({id(each.owner) for each in unseen}) == len(unseen)
    for each in unseen:  # the kernel gets addresses
        assert each.ids.dtype == each.slots.dtype == torch.int64
        assert len(each.ids) == len(each.slots)
        assert each.ids.is_contiguous()
        assert each.slots.is_contiguous()
    rooms = [torch.empty(3, each.num_absent, dtype=torch.int64) for each in unseen]
    compiled = [each.owner._rows for each in unseen if isinstance(each.owner._rows, CompiledIndex)]
    numbers = [-1] * len(unseen)
    if len(compiled) == len(unseen):
        numbers = give(
            [
                own.give_args(each.ids, each.slots, room, each.mix_seed, each.first)
                for own, each, room in zip(compiled, unseen, rooms, strict=True)
            ]
        )
    found: list[GivenSlots | None] = []
    for room, number in zip(rooms, numbers, strict=True):
        ids, slots, counts = room[:, : max(0, number)].unbind()
        found.append(None if number < 0 else GivenSlots(slots, ids, counts))
    given: list[GivenSlots] = []
    try:
        for own, each in zip(found, unseen, strict=True):
            given.append(own or _given(each))
    except (ValueError, MemoryError):
        for own, each in zip([*given, *found[len(given) :]], unseen, strict=True):
            if own is not None:
                each.owner.free(own.slots)
        raise
    return given


def _given(unseen: UnseenIds) -> GivenSlots:
    """Insert the IDs that have no slot, step by step."""
    absent = unseen.slots < 0
    ids = unseen.ids[absent]
    keys = (ids if unseen.mix_seed is None else naive.mix(ids, unseen.mix_seed)) + unseen.first
    distinct, inverse = torch.ops.meshrec.index_unique.default(keys)
    slots = unseen.owner.insert(distinct)
    unseen.slots[absent] = slots[inverse]
    return GivenSlots(slots, distinct, torch.bincount(inverse, minlength=len(slots)))
