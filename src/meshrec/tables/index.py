"""Index protocol: maps keys to slots, in tables in which rows can be anywhere in memory.

A *key* identifies a row: its number in the table, or in a hashed table the hash of its ID. A *slot* is a row
position in the memory read by kernels. A fixed table needs no index, because the slot is ``key - r0``.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self

from meshrec.ops.index import (
    AssignedSlots,
    Fills,
    HashIndex,
    IdSpan,
    UnassignedIds,
    assign_slots,
    find_spans,
    mix,
)


class Resolved(NamedTuple):
    """The slots for a batch of keys, and the pin that keeps these slots from getting other rows."""

    slots: Tensor
    """One slot per key, int64 [N]."""
    pin: object = None
    """A ``Pin`` on the slots; None if slots never change.

    ``release_pins`` ends the pin after the batch's update. Without an update, the pin lives as long as the
    batch. The pin is an ``ArrivingRows`` if rows may still be being read from a file into the slots.
    """


class Pin:
    """Base class for pins. A pin keeps the slots used by a batch from being given to other keys."""

    is_released = False

    def release(self) -> None:
        """End the pin, so the slots may be given to other keys. Calls after the first do nothing."""
        raise NotImplementedError


@runtime_checkable
class ArrivingRows(Protocol):
    """Rows of a batch that a background thread reads from a file into memory."""

    band: tuple[int, int, int]
    """The rectangle's table number, first row, and end row."""
    trace: int
    """Fingerprint of the slots assigned so far. Ranks compare it, to check that they assign equal slots."""

    def wait(self) -> None:
        """Wait until the rows are in memory. Calls after the first return at once.

        Raises:
            Exception: the rows cannot arrive.
        """


class Index(Protocol):
    """Map from the keys in a table rectangle to slots.

    The same calls in the same order must assign the same slots. Rectangles with other columns in the same
    rows rely on this: they are looked up and compared by slot, on the same rank and on other ranks.

    An index may have an attribute ``slot_keys``, the key per slot, int64. Stochastic rounding in 16-bit rows
    then depends on the key instead of the slot.
    """

    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Return the slot for each key of a batch, pin the slots, and start to bring the rows there.

        Args:
            keys: keys within the rectangle, int64 [N]; may repeat.
            train: whether the rows will be updated.
        """

    def keys_at(self, slots: Tensor) -> Tensor:
        """Return the keys of the rows that are in these slots now, int64 [N]."""


class SearchableIndex(Protocol):
    """An index based on a `HashIndex`. A single kernel call can search several such indexes."""

    key_index: HashIndex
    """Map from keys to slots."""

    def release(self, *more: Self) -> None:
        """Free the slots that no batch uses any longer. Called before a search."""

    def pin_slots(
        self,
        parts: Sequence[Tensor],
        *,
        train: bool,
        fills: Fills,
        fresh: AssignedSlots | None = None,
        num_absent: int = 0,
    ) -> object:
        """Pin the slots used by a batch, and return the pin.

        Args:
            parts: slots used by the batch, in one or more int64 tensors.
            train: whether the rows will be updated.
            fills: queue for writes to the slots.
            fresh: slots just assigned for the batch, in which to write initial rows; None: none.
            num_absent: number of entries in ``parts`` with slots just assigned.
        """


class FeatureRows(NamedTuple):
    """Where a feature finds its rows: the rectangles to read, and how its IDs become keys.

    A rectangle is a row interval times a column interval of a table. The rectangles here are column shards,
    with different columns of the same rows.
    """

    indexes: Sequence[Index]
    """One index per rectangle."""
    first_row: int
    """Number to add to an ID, or to its hash if there is a ``mix_seed``, to get the key."""
    mix_seed: int | None = None
    """Seed of the hash from IDs to keys. None: IDs are not hashed, as in a fixed table.

    All features in a call to ``replace_ids_by_slots`` must have a seed, or none.
    """


def replace_ids_by_slots(
    values: Tensor,
    bounds: Sequence[int],
    rows_by_feature: Mapping[int, FeatureRows],
    *,
    num_keys: int,
    train: bool,
    used_immediately: bool = False,
) -> tuple[Tensor, list[object]]:
    """Replace the IDs of some features by slots. Each index is called once, for all features that share it.

    The values are blocks (such as one per sending rank). A block has a segment of IDs per feature. An index
    is a hash index or a row cache.

    Args:
        values: IDs, int [N], ordered by block, then by feature.
        bounds: positions in ``values`` at which the segments start, followed by N.
        rows_by_feature: indexes to search, by feature number. The key is the feature's ID, hashed if there is
            a ``mix_seed``, plus ``first_row``. Values of features that are not listed are copied unchanged.
        num_keys: number of features (keys in the batch) per block.
        train: whether the rows will be updated.
        used_immediately: whether the caller uses the slots before any other call to these indexes. A
            searchable index then does not pin its slots, unless it has to assign new ones.

    Returns:
        A copy of ``values`` with slots in place of these features' IDs, and the pins on the slots. A pin
            keeps a slot from being reused for another key while it exists.
    """
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    # One kernel call for all hash indexes. New IDs get slots further below.
    replaced, missing = _find_slots(values, bounds, rows_by_feature, num_keys)
    # A second tensor on the same memory, not a view: slots hold the pins, and pins must not hold the slots.
    memory = replaced.new_empty(0).set_(replaced.untyped_storage(), 0, replaced.shape, replaced.stride())
    pins: list[object] = []
    by_indexes: dict[tuple[int, ...], list[int]] = {}
    for key, rows in rows_by_feature.items():
        # Group features with the same indexes: an index is called once per batch.
        by_indexes.setdefault(tuple(map(id, rows.indexes)), []).append(key)
    # Features with new IDs: their segments, indexes, and requests to assign slots.
    unseen: list[tuple[list[Tensor], list[SearchableIndex], list[UnassignedIds]]] = []
    fills = Fills()
    for keys in by_indexes.values():
        rows = rows_by_feature[keys[0]]
        segments = [block * num_keys + key for key in keys for block in range(num_blocks)]
        parts = [memory[bounds[segment] : bounds[segment + 1]] for segment in segments]
        # ``_find_slots`` has searched these indexes already. Only IDs without a slot are left.
        if segments[0] in missing:
            num_missing = sum(missing[segment] for segment in segments)
            indexes: list[SearchableIndex] = list(rows.indexes)  # type: ignore[arg-type]
            if num_missing == 0:
                # Slots used before any other call cannot be reassigned, so they need no pin.
                if not used_immediately:
                    pins += [index.pin_slots(parts, train=train, fills=fills) for index in indexes]
                continue
            ids, slots = (_concatenate(x, bounds, segments).long().contiguous() for x in (values, memory))
            # Every column shard's index assigns its own copy; equal call order gives equal slots.
            slots_by_index = [slots, *(slots.clone() for _ in indexes[1:])]
            jobs = [
                UnassignedIds(index.key_index, ids, slots, num_missing, rows.first_row, rows.mix_seed)
                for index, slots in zip(indexes, slots_by_index, strict=True)
            ]
            unseen.append((parts, indexes, jobs))
            continue
        # An index that is not searchable, such as a cache: it finds slots itself.
        given = _concatenate(values, bounds, segments).long()
        if rows.mix_seed is not None:
            given = mix(given, rows.mix_seed)
        resolved = [index.resolve(given + rows.first_row, train=train) for index in rows.indexes]
        pins += [result.pin for result in resolved]
        _copy_slots(resolved[0].slots, parts)
    # New keys from all tables get slots in a single call.
    fresh = iter(assign_slots([job for _, _, jobs in unseen for job in jobs]))
    for parts, indexes, jobs in unseen:
        for index, job in zip(indexes, jobs, strict=True):
            pins.append(
                index.pin_slots(
                    [job.slots], train=train, fills=fills, fresh=next(fresh), num_absent=job.num_absent
                )
            )
        _copy_slots(jobs[0].slots, parts)
    # Fills from all tables are written together.
    fills.run()
    return replaced, pins


def _concatenate(values: Tensor, bounds: Sequence[int], segments: Sequence[int]) -> Tensor:
    """Return the values in some segments, concatenated. The result is a view if there is a single segment."""
    parts = [values[bounds[segment] : bounds[segment + 1]] for segment in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _copy_slots(slots: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy concatenated slots back to the segments from which they come.

    Does nothing if ``slots`` is a view of the only segment, because the slots are then there already.
    """
    if slots.data_ptr() == parts[0].data_ptr():
        return
    for part, part_slots in zip(parts, slots.split([len(part) for part in parts]), strict=True):
        part.copy_(part_slots)


def _find_slots(
    values: Tensor, bounds: Sequence[int], rows_by_feature: Mapping[int, FeatureRows], num_keys: int
) -> tuple[Tensor, dict[int, int]]:
    """Replace IDs by slots for all features with searchable indexes, in a single kernel call.

    Args:
        num_keys: number of features per block.

    Returns:
        A copy of the values, with -1 for IDs without a slot. The number of these IDs, by number of a searched
            segment.
    """
    # Only features whose indexes are all searchable. Others, such as tables in files, resolve keys later.
    searched: dict[int, tuple[FeatureRows, list[SearchableIndex]]] = {}
    for key, rows in sorted(rows_by_feature.items()):
        indexes = [index for index in rows.indexes if _is_searchable(index)]
        if len(indexes) == len(rows.indexes):
            searched[key] = rows, indexes
    if not searched:
        return values.clone(), {}
    parts: dict[int, IdSpan] = {}
    for block in range((len(bounds) - 1) // max(1, num_keys)):
        for key, (rows, indexes) in searched.items():
            segment = block * num_keys + key
            # Searching the first index is enough: column shards have equal slots.
            parts[segment] = IdSpan(
                bounds[segment], bounds[segment + 1], indexes[0].key_index, rows.first_row, rows.mix_seed
            )
    distinct = {id(index): index for _, indexes in searched.values() for index in indexes}
    first, *more = distinct.values()
    # Free slots before the search, so new keys can get them.
    first.release(*more)
    slots, missing = find_spans(values.long().contiguous(), list(parts.values()))
    return slots.to(values.dtype), dict(zip(parts, missing, strict=True))


def _is_searchable(index: Index) -> TypeGuard[SearchableIndex]:
    """Return whether the index is based on a `HashIndex`."""
    # Not isinstance, which takes 10 us on a protocol: every lookup asks this for every table.
    return isinstance(getattr(index, "key_index", None), HashIndex)


def arriving_rows(pins: Sequence[object]) -> list[ArrivingRows]:
    """Return the pins for rows which a background thread may still be reading from a file.

    The caller must call ``wait`` on all of them before it looks up the rows.
    """
    # In a hashed table with a file, the pin on the index slots holds the pin on the cache slots.
    arriving = [getattr(pin, "arriving", pin) for pin in pins]
    return [rows for rows in arriving if isinstance(rows, ArrivingRows)]


def release_pins(pins: Sequence[object]) -> None:
    """Release all slots of a batch. Called after the batch's update."""
    for pin in pins:
        if isinstance(pin, Pin):
            pin.release()


def check_pinned(pins: Sequence[object]) -> None:
    """Raise ValueError unless a batch's slots are still pinned, as a second backward pass would find them."""
    if any(isinstance(pin, Pin) and pin.is_released for pin in pins):
        raise ValueError(
            "a second backward pass of one lookup (retain_graph=True): rows of hashed tables and of tables "
            "in files are released after the update, and may belong to other IDs by now. Add the losses and "
            "call backward once, or look the batch up again."
        )


def pin(slots: Tensor, pins: Sequence[object]) -> None:
    """Attach pins to a slot tensor, so the pins live as long as the tensor."""
    vars(slots)["_pins"] = pins


def pins_of(slots: Tensor) -> Sequence[object]:
    """Return the pins attached to a slot tensor by ``pin``."""
    pins: Sequence[object] = vars(slots).get("_pins", ())
    return pins
