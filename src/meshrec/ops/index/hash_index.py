"""Hash index that maps arbitrary 64-bit IDs to slots."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.index import compiled, naive
from meshrec.ops.index.compiled import CompiledIndex, assign, is_compiled
from meshrec.ops.index.naive import NaiveIndex, Status
from meshrec.ops.prefault import GrowingRegion

# Must differ from a plan's shard seed. All IDs on a rank hash into a narrow interval under the shard seed,
# and buckets are in hash order, so with the same seed most buckets would stay empty.
_SEED = 0x51ED270B7F4A9E3D


class HashIndex:
    """Map from IDs to slots, for tables without a fixed vocabulary. A slot is a row number in a table.

    IDs are int64, and all 2^64 values are valid. Equal sequences of calls give equal slots, whatever the
    thread count. The read-only methods ``find`` and ``ids_of`` may run concurrently; no other methods may. A
    forked process gets an independent copy.

    Args:
        max_slots: maximum slot count, below 2^32.
        seed: seed for the hash that spreads IDs over buckets.
        name: name of the index in error messages.

    Example::

        index = HashIndex(max_slots=1000)
        slots = index.insert(torch.tensor([7, 1 << 40]))
        assert index.find(torch.tensor([1 << 40, 3])).tolist() == [int(slots[1]), -1]
        index.remove(torch.tensor([7]))
    """

    def __init__(self, max_slots: int, *, seed: int = 0, name: str = "the index") -> None:
        if not 0 < max_slots < 1 << 32:
            raise ValueError(f"{name}: max_slots is {max_slots:,}; it must lie in [1, 2^32).")
        # Set once. The index itself holds all state that changes.
        self.max_slots, self.seed, self.name = max_slots, seed, name
        # As a signed integer, because operators take int64 seeds.
        index_seed = ((seed ^ _SEED) & ((1 << 63) - 1)) - (seed & 1 << 63)
        self._index = CompiledIndex(max_slots, index_seed) if is_compiled else NaiveIndex(max_slots)

    @property
    def num_live(self) -> int:
        """Number of IDs with a slot."""
        return self._index.num_live

    @property
    def num_slots(self) -> int:
        """Highest slot ever assigned, plus 1. Some slots below it may be free again."""
        return self._index.num_slots

    @property
    def num_bytes(self) -> int:
        """Memory in bytes: at most 16 per ID, counting the most IDs ever present at once."""
        return self._index.num_bytes

    @property
    def growing_regions(self) -> list[GrowingRegion]:
        """Memory regions that grow in place as slots are assigned; empty if growth may copy the index."""
        return self._index.growing_regions if isinstance(self._index, CompiledIndex) else []

    @property
    def kernel_tensors(self) -> tuple[list[Tensor], int] | None:
        """Memory tensors and seed for operators such as ``index_find``; None without compiled kernels."""
        index = self._index
        return (index.memory, index.seed) if isinstance(index, CompiledIndex) else None

    def find(self, ids_N: Tensor) -> Tensor:
        """Return the slot for each ID, or -1 for an ID without a slot: int64 [N]. IDs may repeat."""
        return self._index.find(self._validated(ids_N))

    def insert(self, ids_N: Tensor) -> Tensor:
        """Assign free slots to new IDs. The lowest ID gets the lowest free slot, and so on.

        Args:
            ids_N: int64, distinct and ascending. None of them may be in the index.

        Returns:
            Slots, int64 [N].

        Raises:
            ValueError: the IDs are not ascending, an ID is already in the index, or there are fewer free
                slots than IDs. Nothing changed.
        """
        ids_N = self._validated(ids_N)
        result = self._index.insert(ids_N)
        return result if isinstance(result, Tensor) else self._raise_for_status(result, ids_N)

    def remove(self, ids_N: Tensor) -> Tensor:
        """Remove IDs, which frees their slots.

        Args:
            ids_N: int64, distinct. All of them must be in the index.

        Returns:
            Freed slots, int64 [N].

        Raises:
            ValueError: an ID is not in the index, or repeats. Nothing changed.
        """
        ids_N = self._validated(ids_N)
        result = self._index.remove(ids_N)
        return result if isinstance(result, Tensor) else self._raise_for_status(result, ids_N)

    def free(self, slots_N: Tensor) -> Tensor:
        """Free slots: remove the IDs that have these slots.

        Args:
            slots_N: int64, distinct. All of them must be in use.

        Returns:
            Removed IDs, int64 [N].

        Raises:
            ValueError: a slot is already free, or repeats. Nothing changed.
        """
        return free_slots([(self, slots_N)])[0]

    def ids_of(self, slots_N: Tensor) -> Tensor:
        """Return the ID stored in each slot, int64 [N]. Slots may repeat.

        Raises:
            ValueError: a slot is free.
        """
        slots_N = self._validated(slots_N)
        result = self._index.ids_of(slots_N)
        return result if isinstance(result, Tensor) else self._raise_for_status(result, slots_N)

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all IDs in ascending order, and their slots: both int64 [num_live]."""
        return self._index.items()

    def marked(self, marks: Tensor, max_id: int = (1 << 63) - 1) -> tuple[Tensor, Tensor]:
        """Return the IDs that have a marked slot, and these slots, in any order: both int64 [M].

        The call scans the whole index in memory order. If most slots are marked, this is much faster than
        ``ids_of``.

        Args:
            marks: for each slot, whether to return its ID: bool on the CPU, at least ``num_slots`` entries.
            max_id: IDs greater than this are left out.

        Raises:
            ValueError: the marks have another type or shape, or are too few.
        """
        # The kernel reads a mark for every slot up to the highest ever assigned.
        num = self.num_slots
        if marks.dtype != torch.bool or marks.dim() != 1 or not marks.is_cpu or len(marks) < num:
            raise ValueError(
                f"{self.name} takes a bool tensor of {num:,} marks or more on the CPU; this one is "
                f"{marks.dtype} {list(marks.shape)} on {marks.device}."
            )
        return self._index.marked(marks.contiguous(), max_id)

    def _validated(self, integers_N: Tensor) -> Tensor:
        """Return a contiguous tensor. Raises ValueError unless the input is an int64 vector on the CPU."""
        if integers_N.dtype != torch.int64 or integers_N.dim() != 1 or not integers_N.is_cpu:
            raise ValueError(
                f"{self.name} takes int64 tensors [N] on the CPU; this one is {integers_N.dtype} "
                f"{list(integers_N.shape)} on {integers_N.device}."
            )
        return integers_N.contiguous()

    def _raise_for_status(self, status: Status, given_N: Tensor) -> Tensor:
        """Raise the exception for a failed call. Never returns."""
        if status is Status.NO_MEMORY:
            raise MemoryError(f"{self.name}: there is no memory for {len(given_N):,} IDs.")
        if status is Status.NOT_ASCENDING:
            reason = "the IDs to insert must be distinct and ascending; use unique()."
        elif status is Status.PRESENT:
            # Searched again just for the message, because failures are rare.
            present = given_N[self.find(given_N) >= 0]
            reason = f"ID {int(present[0])} has a slot already; insert only IDs that find() misses."
        elif status is Status.FULL:
            reason = (
                f"there would be {self.num_live + len(given_N):,} IDs, and there is room for "
                f"{self.max_slots:,}. Raise the greatest number of rows, or let rows be evicted."
            )
        elif status is Status.CROWDED:
            reason = "too many IDs have hashes close to each other; choose another seed."
        elif status is Status.ABSENT:
            # The first missing ID, to name it.
            absent = given_N[self.find(given_N) < 0]
            reason = f"there is no ID {int(absent[0])}, so it cannot be removed."
        elif status is Status.REPEATS:
            reason = "the IDs or slots to remove must be distinct; use unique()."
        else:
            free = set(given_N.tolist()) - set(self.items()[1].tolist())
            reason = f"slot {min(free)} is free."
        raise ValueError(f"{self.name}: {reason}")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the IDs and slots instead of the memory, most of which may be reserved but unused."""
        # Addresses and reserved memory are meaningless in another process.
        return HashIndex.of, (self.max_slots, *self.items(), self.seed, self.name)

    @staticmethod
    def of(max_slots: int, ids_N: Tensor, slots_N: Tensor, seed: int = 0, name: str = "") -> "HashIndex":
        """Build an index in which the given IDs have the given slots. Inverse of ``items``.

        Args:
            max_slots: maximum slot count, below 2^32.
            ids_N: int64, distinct and ascending.
            slots_N: slot for each ID, int64, distinct.
            seed: seed for the hash that spreads IDs over buckets.
            name: name of the index in error messages.

        Raises:
            ValueError: the IDs are not ascending, or a slot is out of range.
        """
        index = HashIndex(max_slots, seed=seed, name=name or "the index")
        # Bypasses HashIndex.insert, which would assign the lowest free slots.
        result = index._index.insert(index._validated(ids_N), index._validated(slots_N))
        if not isinstance(result, Tensor):
            index._raise_for_status(result, ids_N)
        return index


class IdSpan(NamedTuple):
    """A range of positions in an ID batch, to be looked up in a single index."""

    start: int
    """First position."""
    end: int
    """End position, exclusive."""
    owner: HashIndex
    """The index to search."""
    id_offset: int = 0
    """Number added to each ID (after the mix) before the search."""
    mix_seed: int | None = None
    """Seed to `mix` the IDs before the search; None: no mix.

    Either all spans in a call have a seed, or none.
    """


def find_spans(ids_N: Tensor, spans: Sequence[IdSpan]) -> tuple[Tensor, list[int]]:
    """Replace the IDs inside some spans by their slots, with a single kernel call for all spans.

    Args:
        ids_N: int64, contiguous.
        spans: spans to replace, ascending. IDs outside the spans are copied.

    Returns:
        Slots inside spans (-1 for an ID without a slot) and unchanged IDs elsewhere, int64 [N]; and per span
            the number of IDs without a slot.
    """
    # Distinct indexes, by identity.
    indexes = list({id(span.owner): span.owner for span in spans}.values())
    compiled_indexes = [index._index for index in indexes if isinstance(index._index, CompiledIndex)]
    # The kernel only searches compiled indexes. Python indexes are searched span by span.
    if len(compiled_indexes) < len(indexes):
        slots = ids_N.clone()
        for span in spans:
            ids = ids_N[span.start : span.end]
            keys = ids if span.mix_seed is None else naive.mix(ids, span.mix_seed)
            slots[span.start : span.end] = span.owner.find(keys + span.id_offset)
        return slots, [int((slots[span.start : span.end] < 0).sum()) for span in spans]
    # Several spans may share an index, so the kernel gets each index once and an index number per span.
    index_of = {id(index): number for number, index in enumerate(indexes)}
    mixes = [span.mix_seed for span in spans if span.mix_seed is not None]
    slots, absent = operators.index_find_parts(
        [tensor for index in compiled_indexes for tensor in index.memory],
        [index.seed for index in compiled_indexes],
        ids_N,
        [span.start for span in spans],
        [span.end for span in spans],
        [index_of[id(span.owner)] for span in spans],
        [span.id_offset for span in spans],
        mixes,
    )
    return slots, absent.tolist()


def free_slots(slots: Sequence[tuple[HashIndex, Tensor]]) -> list[Tensor]:
    """Free slots in several indexes in a single call; see ``HashIndex.free``.

    Args:
        slots: pairs of an index and the slots to free in it: int64, distinct, all in use. No index may occur
            twice.

    Returns:
        Removed IDs per index, int64 [freed slots].

    Raises:
        ValueError: a slot is already free, or repeats. No index changed.
    """
    # All arguments are checked before any index changes.
    slots_by_index = [index._validated(index_slots) for index, index_slots in slots]
    implementations = [index._index for index, _ in slots]
    assert len({id(index) for index in implementations}) == len(implementations)
    compiled_indexes = [index for index in implementations if isinstance(index, CompiledIndex)]
    naive_indexes = [index for index in implementations if isinstance(index, NaiveIndex)]
    # The library decides, so all indexes are compiled or none is.
    assert not (compiled_indexes and naive_indexes)
    results = (
        compiled.free(compiled_indexes, slots_by_index)
        if compiled_indexes
        else naive.free(naive_indexes, slots_by_index)
    )
    for (index, _), index_slots, ids in zip(slots, slots_by_index, results, strict=True):
        if isinstance(ids, Status) and ids is not Status.SUCCESS:
            index._raise_for_status(ids, index_slots)
    return [ids for ids in results if isinstance(ids, Tensor)]


class UnassignedIds(NamedTuple):
    """IDs of a batch in a single index, some of which have no slot yet: the input to `assign_slots`."""

    owner: HashIndex
    """The index to insert into."""
    ids: Tensor
    """int64 [N], contiguous."""
    slots: Tensor
    """Slot for each ID, -1 if it has none, int64 [N], contiguous. `assign_slots` replaces every -1."""
    num_absent: int
    """How many entries in ``slots`` are -1."""
    id_offset: int = 0
    """Number added to each ID (after the mix) before insertion, see ``IdSpan``."""
    mix_seed: int | None = None
    """Seed to `mix` the IDs before insertion; None: no mix."""


class AssignedSlots(NamedTuple):
    """Slots that `assign_slots` assigned in an index, for U distinct IDs."""

    slots: Tensor
    """New slots, in ascending order of the IDs, int64 [U]."""
    ids: Tensor
    """IDs as inserted (after mix and offset), distinct and ascending, int64 [U]."""
    counts: Tensor
    """How often each ID occurs in the batch, int64 [U]."""


def assign_slots(requests: Sequence[UnassignedIds]) -> list[AssignedSlots]:
    """Insert the IDs without a slot into their indexes, and write the new slots to the requests.

    Args:
        requests: a request per index; no index may occur twice. ``slots`` are modified in place.

    Returns:
        The newly assigned slots for each request.

    Raises:
        ValueError: an index has fewer free slots than new IDs. No index changed.
    """
    if not requests:
        return []
    assert len({id(request.owner) for request in requests}) == len(requests)
    for request in requests:  # the kernel gets addresses
        assert request.ids.dtype == request.slots.dtype == torch.int64
        assert len(request.ids) == len(request.slots)
        assert request.ids.is_contiguous()
        assert request.slots.is_contiguous()
    # Absent ID occurrences: an upper bound for the distinct count.
    buffers = [torch.empty(3, request.num_absent, dtype=torch.int64) for request in requests]
    compiled = [
        request.owner._index for request in requests if isinstance(request.owner._index, CompiledIndex)
    ]
    # -1: not inserted by the kernel.
    counts_inserted = [-1] * len(requests)
    # The kernel reports -1 for an index which must grow first. The step-by-step path below grows it.
    if len(compiled) == len(requests):
        counts_inserted = assign(
            [
                index.assign_args(request.ids, request.slots, buffer, request.mix_seed, request.id_offset)
                for index, request, buffer in zip(compiled, requests, buffers, strict=True)
            ]
        )
    results: list[AssignedSlots | None] = []
    for buffer, num_inserted in zip(buffers, counts_inserted, strict=True):
        ids, slots, counts = buffer[:, : max(0, num_inserted)].unbind()
        results.append(None if num_inserted < 0 else AssignedSlots(slots, ids, counts))
    assigned: list[AssignedSlots] = []
    try:
        for result, request in zip(results, requests, strict=True):
            assigned.append(result or _assign_one(request))
    except Exception:
        # All or nothing: also remove the IDs inserted in later indexes.
        for result, request in zip([*assigned, *results[len(assigned) :]], requests, strict=True):
            if result is not None:
                request.owner.free(result.slots)
        raise
    return assigned


def _assign_one(request: UnassignedIds) -> AssignedSlots:
    """Insert the IDs of a single request step by step, with plain torch and `HashIndex.insert`."""
    # Also used without compiled kernels, where assign() cannot run.
    absent = request.slots < 0
    ids = request.ids[absent]
    keys = (ids if request.mix_seed is None else naive.mix(ids, request.mix_seed)) + request.id_offset
    distinct, inverse = operators.index_unique(keys)
    slots = request.owner.insert(distinct)
    # In place: the caller reads the slots from its request.
    request.slots[absent] = slots[inverse]
    return AssignedSlots(slots, distinct, torch.bincount(inverse, minlength=len(slots)))
