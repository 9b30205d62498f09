"""Index protocol: slot lookup for keys whose slot is not simply ``key - r0``."""

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
    """Slots for a batch of keys."""

    slots: Tensor
    """int64, a slot per key."""
    pin: object = None
    """A ``Pin`` that keeps the slots valid; None if slots never change.

    ``release_pins`` ends the pin after the batch's update. Without an update, the pin lives as long as the
    batch. It is an ``ArrivingRows`` if rows may still be in flight to the slots.
    """


class Pin:
    """Slots in use by a batch."""

    is_released = False

    def release(self) -> None:
        """Release the slots, which other keys may then get. Later calls do nothing."""
        raise NotImplementedError


@runtime_checkable
class ArrivingRows(Protocol):
    """Rows in flight to memory."""

    band: tuple[int, int, int]
    """Table, first row that may arrive, and end row."""
    trace: int
    """Fingerprint over the slots assigned by the index so far."""

    def wait(self) -> None:
        """Wait until the rows are in memory. Later calls return at once.

        Raises:
            Exception: the rows cannot arrive.
        """


class Index(Protocol):
    """Slots for a rectangle's keys.

    The same calls in the same order must assign the same slots: column shards are looked up and compared by
    slot, on the same rank and across ranks.

    An index may have ``slot_keys``, the key by slot, int64: 16-bit rows are then rounded by key.
    """

    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Return a slot per key, in [0, rows in memory), and start bringing the rows there.

        Args:
            keys: int64 [N], whole-table keys within the rectangle's rows; they may repeat.
            train: whether the rows will be updated.
        """

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the keys whose rows occupy these slots now, int64 [N]."""


class SearchableIndex(Protocol):
    """An index on a hash index. A single call searches several such indexes."""

    slots: HashIndex

    def release(self, *more: Self) -> None:
        """Free slots no batch needs any more, here and in ``more``; called before a search."""

    def hold(
        self,
        parts: Sequence[Tensor],
        *,
        train: bool,
        fills: Fills,
        fresh: AssignedSlots | None = None,
        num_absent: int = 0,
    ) -> object:
        """Pin a batch's slots and return the pin.

        Args:
            parts: the slots.
            train: whether the rows will be updated.
            fills: collects writes to the slots.
            fresh: keys with newly assigned slots, whose rows start now.
            num_absent: entries in ``parts`` with new keys.
        """


class KeyReader(NamedTuple):
    """Rectangles with the same rows that a feature reads."""

    indexes: Sequence[Index]
    first_row: int
    mix_seed: int | None = None
    """Seed for the mix from IDs to keys; None: IDs are keys. Set for all readers or none."""


def slots_of(
    values: Tensor,
    bounds: Sequence[int],
    readers: Mapping[int, KeyReader],
    *,
    num_keys: int,
    train: bool,
    at_once: bool = False,
) -> tuple[Tensor, list[object]]:
    """Replace some features' keys by slots, with a single call per index.

    Args:
        values: int [N], block-major: IDs for feature 0 in block 0, for feature 1, and so on; counted from the
            first row in the rectangle.
        bounds: start offset by block and feature, followed by N.
        readers: rectangles by feature.
        num_keys: features per block.
        train: whether the rows will be updated.
        at_once: whether the slots are used before any other call; existing keys then need no pins.

    Returns:
        The values [N], in the same dtype, and the pins (see ``Resolved``).
    """
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    replaced, missing = _searched(values, bounds, readers, num_keys)
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
                    pins += [index.hold(parts, train=train, fills=fills) for index in indexes]
                continue
            ids, slots = (_joined(x, bounds, segments).long().contiguous() for x in (values, memory))
            # Every column shard's index assigns its own copy; equal call order gives equal slots.
            slots_by_index = [slots, *(slots.clone() for _ in indexes[1:])]
            jobs = [
                UnassignedIds(index.slots, ids, slots, num_missing, reader.first_row, reader.mix_seed)
                for index, slots in zip(indexes, slots_by_index, strict=True)
            ]
            unseen.append((parts, indexes, jobs))
            continue
        given = _joined(values, bounds, segments).long()
        if reader.mix_seed is not None:
            given = mix(given, reader.mix_seed)
        resolved = [index.resolve(given + reader.first_row, train=train) for index in reader.indexes]
        pins += [result.pin for result in resolved]
        _write(resolved[0].slots, parts)
    # New keys from all tables get slots in a single call.
    fresh = iter(assign_slots([job for _, _, jobs in unseen for job in jobs]))
    for parts, indexes, jobs in unseen:
        for index, job in zip(indexes, jobs, strict=True):
            pins.append(
                index.hold(
                    [job.slots], train=train, fills=fills, fresh=next(fresh), num_absent=job.num_absent
                )
            )
        _write(jobs[0].slots, parts)
    # Fills from all tables are written together.
    fills.run()
    return replaced, pins


def _joined(values: Tensor, bounds: Sequence[int], segments: Sequence[int]) -> Tensor:
    """Return the values at some positions: a view for a single position, else a copy."""
    parts = [values[bounds[segment] : bounds[segment + 1]] for segment in segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _write(slots: Tensor, parts: Sequence[Tensor]) -> None:
    """Write slots to their positions, unless they already share memory."""
    if slots.data_ptr() == parts[0].data_ptr():
        return
    for part, part_slots in zip(parts, slots.split([len(part) for part in parts]), strict=True):
        part.copy_(part_slots)


def _searched(
    values: Tensor, bounds: Sequence[int], readers: Mapping[int, KeyReader], num_keys: int
) -> tuple[Tensor, dict[int, int]]:
    """Replace keys by slots in all hash indexes with a single call; other keys stay.

    Returns:
        The values, and the number of keys without a slot, by searched position.
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
    # Not isinstance, which takes 10 us on a protocol: every lookup asks this for every table.
    return isinstance(getattr(index, "slots", None), HashIndex)


def arriving_rows(pins: Sequence[object]) -> list[ArrivingRows]:
    """Return the rows that may still be in flight to pinned slots."""
    arriving = [getattr(pin, "arriving", pin) for pin in pins]  # rows in hashed tables are pinned twice
    return [rows for rows in arriving if isinstance(rows, ArrivingRows)]


def release_pins(pins: Sequence[object]) -> None:
    """Release a batch's slots at the batch's end, after the update."""
    for pin in pins:
        if isinstance(pin, Pin):
            pin.release()


def check_pinned(pins: Sequence[object]) -> None:
    """Check that a backward pass still owns its batch's slots.

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
    """Store pins in the slot tensor, so they live as long as the tensor."""
    vars(slots)["_pins"] = pins


def pins_of(slots: Tensor) -> Sequence[object]:
    """Return the pins stored in a slot tensor."""
    pins: Sequence[object] = vars(slots).get("_pins", ())
    return pins
