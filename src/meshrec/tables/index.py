"""Index protocol: finds slots (memory rows) for keys, where a slot is not simply ``key - r0``."""

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
    """Slots for a key batch, and the pin keeping them valid."""

    slots: Tensor
    """int64, one slot per key."""
    pin: object = None
    """A ``Pin`` keeping the slots valid; None if slots never change.

    ``release_pins`` ends the pin after the batch's update. Without an update, the pin lives as long as the
    batch. The pin is an ``ArrivingRows`` if rows may still be being read from a file into the slots.
    """


class Pin:
    """Keeps slots used by a batch from being given to other keys."""

    is_released = False

    def release(self) -> None:
        """Release the slots. Calls after the first do nothing."""
        raise NotImplementedError


@runtime_checkable
class ArrivingRows(Protocol):
    """Rows on their way from a file to memory."""

    band: tuple[int, int, int]
    """Table number, first row that may arrive, and end row."""
    trace: int
    """Fingerprint of the slots assigned so far, to compare ranks."""

    def wait(self) -> None:
        """Wait until the rows are in memory. Calls after the first return at once.

        Raises:
            Exception: the rows cannot arrive.
        """


class Index(Protocol):
    """Map from a rectangle's keys to slots.

    The same calls in the same order must assign the same slots: column shards are looked up and compared by
    slot, on the same rank and across ranks.

    An index may have an attribute ``slot_keys``, int64, one key per slot: stochastic rounding for 16-bit
    rows then depends on the key instead of the slot.
    """

    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Return a slot per key, and start to bring the rows there.

        Args:
            keys: int64 [N], whole-table keys within the rectangle's rows; they may repeat.
            train: whether the rows will be updated.
        """

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the keys with rows in these slots now, int64 [N]."""


class SearchableIndex(Protocol):
    """An index based on a `HashIndex`. One kernel call searches several such indexes."""

    slots: HashIndex

    def release(self, *more: Self) -> None:
        """Free slots no longer used by any batch, in this index and in ``more``.

        Called before a search.
        """

    def pin_slots(
        self,
        parts: Sequence[Tensor],
        *,
        train: bool,
        fills: Fills,
        fresh: AssignedSlots | None = None,
        num_absent: int = 0,
    ) -> object:
        """Pin slots for a batch, and return the pin.

        Args:
            parts: slots used by the batch.
            train: whether the rows will be updated.
            fills: queue for writes to the slots.
            fresh: keys just assigned slots, with rows to initialize.
            num_absent: entries in ``parts`` for such keys.
        """


class KeyReader(NamedTuple):
    """Rectangles read by a feature: column shards with the same rows."""

    indexes: Sequence[Index]
    first_row: int
    mix_seed: int | None = None
    """Seed for mixing IDs into keys; None: IDs are keys.

    Either all readers in a call have one, or none.
    """


def replace_ids_by_slots(
    values: Tensor,
    bounds: Sequence[int],
    readers: Mapping[int, KeyReader],
    *,
    num_keys: int,
    train: bool,
    at_once: bool = False,
) -> tuple[Tensor, list[object]]:
    """Replace IDs in some features by slots, with one call per index.

    Args:
        values: int [N], ordered by block, then by feature. IDs are relative to the reader's first row
            (``first_row``).
        bounds: index of the first ID per block and feature, followed by N.
        readers: rectangles to search, by feature.
        num_keys: features per block.
        train: whether the rows will be updated.
        at_once: whether the slots are used before any other call. Existing keys' slots are then not pinned.

    Returns:
        A copy with IDs replaced by slots for features in ``readers``; and the pins.
    """
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    replaced, missing = _find_slots(values, bounds, readers, num_keys)
    # A second tensor on the same memory, not a view: slots hold the pins, and pins must not hold the slots.
    memory = replaced.new_empty(0).set_(replaced.untyped_storage(), 0, replaced.shape, replaced.stride())
    pins: list[object] = []
    by_indexes: dict[tuple[int, ...], list[int]] = {}
    for key, reader in readers.items():
        # Group features with the same indexes: an index is called once per batch.
        by_indexes.setdefault(tuple(map(id, reader.indexes)), []).append(key)
    unseen: list[tuple[list[Tensor], list[SearchableIndex], list[UnassignedIds]]] = []
    fills = Fills()
    for keys in by_indexes.values():
        reader = readers[keys[0]]
        segments = [block * num_keys + key for key in keys for block in range(num_blocks)]
        parts = [memory[bounds[segment] : bounds[segment + 1]] for segment in segments]
        if segments[0] in missing:
            num_missing = sum(missing[segment] for segment in segments)
            indexes: list[SearchableIndex] = list(reader.indexes)  # type: ignore[arg-type]
            if num_missing == 0:
                if not at_once:
                    pins += [index.pin_slots(parts, train=train, fills=fills) for index in indexes]
                continue
            ids, slots = (_concatenate(x, bounds, segments).long().contiguous() for x in (values, memory))
            # Every column shard's index assigns its own copy; equal call order gives equal slots.
            slots_by_index = [slots, *(slots.clone() for _ in indexes[1:])]
            jobs = [
                UnassignedIds(index.slots, ids, slots, num_missing, reader.first_row, reader.mix_seed)
                for index, slots in zip(indexes, slots_by_index, strict=True)
            ]
            unseen.append((parts, indexes, jobs))
            continue
        given = _concatenate(values, bounds, segments).long()
        if reader.mix_seed is not None:
            given = mix(given, reader.mix_seed)
        resolved = [index.resolve(given + reader.first_row, train=train) for index in reader.indexes]
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
    """Return values from some segments: a view for a single segment, else a copy."""
    parts = [values[bounds[segment] : bounds[segment + 1]] for segment in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _copy_slots(slots: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy concatenated slots to their segments, unless they share memory."""
    if slots.data_ptr() == parts[0].data_ptr():
        return
    for part, part_slots in zip(parts, slots.split([len(part) for part in parts]), strict=True):
        part.copy_(part_slots)


def _find_slots(
    values: Tensor, bounds: Sequence[int], readers: Mapping[int, KeyReader], num_keys: int
) -> tuple[Tensor, dict[int, int]]:
    """Replace IDs by slots for all hash indexes, in one kernel call. Other IDs are copied.

    Returns:
        The values, and the count of IDs without a slot by searched segment.
    """
    searched: dict[int, tuple[KeyReader, list[SearchableIndex]]] = {}
    for key, reader in sorted(readers.items()):
        indexes = [index for index in reader.indexes if _is_searchable(index)]
        if len(indexes) == len(reader.indexes):
            searched[key] = reader, indexes
    if not searched:
        return values.clone(), {}
    parts: dict[int, IdSpan] = {}
    for block in range((len(bounds) - 1) // max(1, num_keys)):
        for key, (reader, indexes) in searched.items():
            segment = block * num_keys + key
            # Searching the first index is enough: column shards have equal slots.
            parts[segment] = IdSpan(
                bounds[segment], bounds[segment + 1], indexes[0].slots, reader.first_row, reader.mix_seed
            )
    distinct = {id(index): index for _, indexes in searched.values() for index in indexes}
    first, *more = distinct.values()
    first.release(*more)
    slots, missing = find_spans(values.long().contiguous(), list(parts.values()))
    return slots.to(values.dtype), dict(zip(parts, missing, strict=True))


def _is_searchable(index: Index) -> TypeGuard[SearchableIndex]:
    """Return whether the index is based on a `HashIndex`."""
    # Not isinstance, which takes 10 us on a protocol: every lookup asks this for every table.
    return isinstance(getattr(index, "slots", None), HashIndex)


def arriving_rows(pins: Sequence[object]) -> list[ArrivingRows]:
    """Return rows possibly still on their way to pinned slots."""
    arriving = [getattr(pin, "arriving", pin) for pin in pins]  # rows in hashed tables are pinned twice
    return [rows for rows in arriving if isinstance(rows, ArrivingRows)]


def release_pins(pins: Sequence[object]) -> None:
    """Release a batch's slots. Called when the batch ends, after the update."""
    for pin in pins:
        if isinstance(pin, Pin):
            pin.release()


def check_pinned(pins: Sequence[object]) -> None:
    """Check that a batch's slots are still pinned when the backward pass starts.

    Raises:
        ValueError: the batch has ended, so this is a second backward pass.
    """
    if any(isinstance(pin, Pin) and pin.is_released for pin in pins):
        raise ValueError(
            "a second backward pass of one lookup (retain_graph=True): rows of hashed tables and of tables "
            "in files are released after the update, and may belong to other IDs by now. Add the losses and "
            "call backward once, or look the batch up again."
        )


def pin(slots: Tensor, pins: Sequence[object]) -> None:
    """Attach pins to a slot tensor, so that they live as long as the tensor."""
    vars(slots)["_pins"] = pins


def pins_of(slots: Tensor) -> Sequence[object]:
    """Return the pins attached to a slot tensor by ``pin``."""
    pins: Sequence[object] = vars(slots).get("_pins", ())
    return pins
