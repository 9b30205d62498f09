"""Hash index from arbitrary 64-bit IDs to slots."""

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
    """Map from IDs to slots (row numbers), for tables without a fixed vocabulary.

    IDs are int64, and all 2^64 values are valid. The same call sequence gives the same slots with any
    thread count. Only ``find`` and ``ids_of``, which just read, may run concurrently. A forked process
    keeps a copy.

    Args:
        max_slots: maximum slot count, below 2^32.
        seed: ID mix seed, to spread IDs over buckets.
        name: index name in messages.

    Example::

        index = HashIndex(max_slots=1000)
        slots = index.insert(torch.tensor([7, 1 << 40]))
        assert index.find(torch.tensor([1 << 40, 3])).tolist() == [int(slots[1]), -1]
        index.remove(torch.tensor([7]))
    """

    def __init__(self, max_slots: int, *, seed: int = 0, name: str = "the index") -> None:
        if not 0 < max_slots < 1 << 32:
            raise ValueError(f"{name}: max_slots is {max_slots:,}; it must lie in [1, 2^32).")
        self.max_slots, self.seed, self.name = max_slots, seed, name
        index_seed = ((seed ^ _SEED) & ((1 << 63) - 1)) - (seed & 1 << 63)
        self._index = CompiledIndex(max_slots, index_seed) if is_compiled else NaiveIndex(max_slots)

    @property
    def num_live(self) -> int:
        """Number of IDs with a slot."""
        return self._index.num_live

    @property
    def num_slots(self) -> int:
        """Highest slot ever assigned, plus 1. Some slots may be free."""
        return self._index.num_slots

    @property
    def num_bytes(self) -> int:
        """Memory in bytes: at most 16 per ID, for the maximum ID count ever present at once."""
        return self._index.num_bytes

    @property
    def growing_regions(self) -> list[GrowingRegion]:
        """Memory regions growing in place with the slots; empty if the index may move in memory."""
        return self._index.growing_regions if isinstance(self._index, CompiledIndex) else []

    @property
    def kernel_tensors(self) -> tuple[list[Tensor], int] | None:
        """Tensors and seed searched by operators such as ``index_find``; None without compiled kernels."""
        index = self._index
        return (index.memory, index.seed) if isinstance(index, CompiledIndex) else None

    def find(self, ids_N: Tensor) -> Tensor:
        """Return the slot per ID, -1 where missing: int64 [N]. IDs may repeat."""
        return self._index.find(self._validated(ids_N))

    def insert(self, ids_N: Tensor) -> Tensor:
        """Assign the lowest free slots to new IDs: the lowest slot to the lowest ID.

        Args:
            ids_N: int64, distinct and ascending, none in the index.

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
        """Remove IDs and free their slots.

        Args:
            ids_N: int64, distinct, all in the index.

        Returns:
            Freed slots, int64 [N].

        Raises:
            ValueError: an ID is not in the index, or repeats. Nothing changed.
        """
        ids_N = self._validated(ids_N)
        result = self._index.remove(ids_N)
        return result if isinstance(result, Tensor) else self._raise_for_status(result, ids_N)

    def free(self, slots_N: Tensor) -> Tensor:
        """Remove the IDs stored at some slots, which become free.

        Args:
            slots_N: int64, distinct, all in use.

        Returns:
            Removed IDs, int64 [N].

        Raises:
            ValueError: a slot is already free, or repeats. Nothing changed.
        """
        return free_slots([(self, slots_N)])[0]

    def ids_of(self, slots_N: Tensor) -> Tensor:
        """Return the ID stored per slot, int64 [N]. Slots may repeat.

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
        """Return the IDs stored at marked slots, and these slots, in any order: both int64 [M].

        Scans the whole index sequentially, which is much faster than ``ids_of`` if most slots are marked.

        Args:
            marks: whether to return the ID at a slot: bool on the CPU, at least ``num_slots`` entries.
            max_id: IDs greater than this are left out.

        Raises:
            ValueError: the marks have another type or shape, or are too few.
        """
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
        """Raise the exception for a status. Never returns.

        Args:
            status: why the call changed nothing.
            given_N: IDs or slots passed to the call.
        """
        if status is Status.NO_MEMORY:
            raise MemoryError(f"{self.name}: there is no memory for {len(given_N):,} IDs.")
        if status is Status.NOT_ASCENDING:
            reason = "the IDs to insert must be distinct and ascending; use unique()."
        elif status is Status.PRESENT:
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
            absent = given_N[self.find(given_N) < 0]
            reason = f"there is no ID {int(absent[0])}, so it cannot be removed."
        elif status is Status.REPEATS:
            reason = "the IDs or slots to remove must be distinct; use unique()."
        else:
            free = set(given_N.tolist()) - set(self.items()[1].tolist())
            reason = f"slot {min(free)} is free."
        raise ValueError(f"{self.name}: {reason}")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the IDs and slots, not the memory: pages beyond the used slots are only reserved."""
        # Addresses and reserved memory are meaningless in another process.
        return HashIndex.of, (self.max_slots, *self.items(), self.seed, self.name)

    @staticmethod
    def of(max_slots: int, ids_N: Tensor, slots_N: Tensor, seed: int = 0, name: str = "") -> "HashIndex":
        """Build an index in which the given IDs have the given slots. Inverse of ``items``.

        Args:
            max_slots: maximum slot count, below 2^32.
            ids_N: int64, distinct and ascending.
            slots_N: slot per ID, int64, distinct.
            seed: ID mix seed.
            name: index name in messages.

        Raises:
            ValueError: the IDs are not ascending, or a slot is out of range.
        """
        index = HashIndex(max_slots, seed=seed, name=name or "the index")
        result = index._index.insert(index._validated(ids_N), index._validated(slots_N))
        if not isinstance(result, Tensor):
            index._raise_for_status(result, ids_N)
        return index


class IdSpan(NamedTuple):
    """A position range in a batch, with IDs all looked up in the same index."""

    start: int
    end: int
    owner: HashIndex
    first: int = 0
    """Offset added to the IDs before the search."""
    mix_seed: int | None = None
    """ID mix seed, or None for unmixed IDs. Either all spans in a call have a seed, or none has."""


def find_spans(ids_N: Tensor, spans: Sequence[IdSpan]) -> tuple[Tensor, list[int]]:
    """Replace the IDs inside the spans by their slots, -1 where they have none, in one kernel call.

    Args:
        ids_N: int64, contiguous.
        spans: spans to replace, ascending. IDs outside them are copied.

    Returns:
        Slots inside spans and unchanged IDs elsewhere, int64 [N]; and the unassigned ID count per span.
    """
    indexes = list({id(span.owner): span.owner for span in spans}.values())
    compiled_indexes = [index._index for index in indexes if isinstance(index._index, CompiledIndex)]
    if len(compiled_indexes) < len(indexes):
        slots = ids_N.clone()
        for span in spans:
            ids = ids_N[span.start : span.end]
            keys = ids if span.mix_seed is None else naive.mix(ids, span.mix_seed)
            slots[span.start : span.end] = span.owner.find(keys + span.first)
        return slots, [int((slots[span.start : span.end] < 0).sum()) for span in spans]
    index_of = {id(index): number for number, index in enumerate(indexes)}
    mixes = [span.mix_seed for span in spans if span.mix_seed is not None]
    slots, absent = operators.index_find_parts(
        [tensor for index in compiled_indexes for tensor in index.memory],
        [index.seed for index in compiled_indexes],
        ids_N,
        [span.start for span in spans],
        [span.end for span in spans],
        [index_of[id(span.owner)] for span in spans],
        [span.first for span in spans],
        mixes,
    )
    return slots, absent.tolist()


def free_slots(slots: Sequence[tuple[HashIndex, Tensor]]) -> list[Tensor]:
    """Remove the IDs stored at some slots in several indexes; see ``HashIndex.free``.

    Args:
        slots: distinct indexes with the slots to free: int64, distinct, all in use.

    Returns:
        Removed IDs per index, int64 [freed slots].

    Raises:
        ValueError: a slot is already free, or repeats. No index changed.
    """
    slots_by_index = [index._validated(index_slots) for index, index_slots in slots]
    implementations = [index._index for index, _ in slots]
    assert len({id(index) for index in implementations}) == len(implementations)
    compiled_indexes = [index for index in implementations if isinstance(index, CompiledIndex)]
    naive_indexes = [index for index in implementations if isinstance(index, NaiveIndex)]
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
    """Batch IDs in one index, some of which have no slot: the input to `assign_slots`."""

    owner: HashIndex
    ids: Tensor
    """int64 [N], contiguous."""
    slots: Tensor
    """Slot per ID, -1 where missing, int64 [N], contiguous. `assign_slots` replaces every -1."""
    num_absent: int
    """Number of IDs without a slot."""
    first: int = 0
    """Offset added to the IDs before insertion, see ``IdSpan``."""
    mix_seed: int | None = None
    """ID mix seed applied before the offset, or None for unmixed IDs."""


class AssignedSlots(NamedTuple):
    """Slots assigned by `assign_slots` in one index. U distinct IDs."""

    slots: Tensor
    """Slots in ascending ID order, int64 [U]."""
    ids: Tensor
    """Distinct IDs, ascending, after mix and offset, int64 [U]."""
    counts: Tensor
    """Occurrences per ID in the batch, int64 [U]."""


def assign_slots(requests: Sequence[UnassignedIds]) -> list[AssignedSlots]:
    """Insert IDs without a slot into several distinct indexes, and write the new slots to the requests.

    Args:
        requests: one per index.

    Returns:
        The newly assigned slots per index, in request order.

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
                index.assign_args(request.ids, request.slots, buffer, request.mix_seed, request.first)
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
    """Insert the IDs in one request step by step, with plain torch and `HashIndex.insert`."""
    absent = request.slots < 0
    ids = request.ids[absent]
    keys = (ids if request.mix_seed is None else naive.mix(ids, request.mix_seed)) + request.first
    distinct, inverse = operators.index_unique(keys)
    slots = request.owner.insert(distinct)
    request.slots[absent] = slots[inverse]
    return AssignedSlots(slots, distinct, torch.bincount(inverse, minlength=len(slots)))
