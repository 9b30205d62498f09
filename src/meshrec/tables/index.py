"""The protocol of an index, which finds the slot of a key where it is not simply ``key - r0``."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self

from meshrec.ops.index import (
    Fills,
    GivenSlots,
    HashIndex,
    SearchedPart,
    UnseenIds,
    find_parts,
    give_slots,
    mix,
)


class Resolved(NamedTuple):
    """The slots of some keys."""

    slots: Tensor
    """int64, one for each key."""
    pin: object = None
    """An object that keeps the slots valid as long as it is alive; None if slots never change.

    A batch keeps the pin for its own lifetime, even if its backward pass never comes. The pin is an
    ``ArrivingRows`` if rows may still be on their way to the slots."""


@runtime_checkable
class ArrivingRows(Protocol):
    """Rows on their way to memory."""

    band: tuple[int, int, int]
    """The table, the first of its rows that may come, and the end of these."""
    trace: int
    """A fingerprint of the slots that the index has given out so far."""

    def wait(self) -> None:
        """Wait until the rows are in memory. Later calls return at once.

        Raises:
            Exception: the rows cannot come.
        """


class Index(Protocol):
    """The slots of the keys of one rectangle.

    The same calls in the same order must give the same slots: rectangles with other columns of the same rows
    are looked up and compared by the same slots, on one rank and on several.

    An index may have ``slot_keys``, the key of each slot, int64: 16-bit rows are then rounded by their keys.
    """

    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Return the slot of each key, in [0, rows in memory), and bring the rows there, or begin to.

        Args:
            keys: int64 [N], keys of the whole table within the rectangle's rows; they may repeat.
            train: whether the rows will be updated.
        """

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the key whose row each of these slots has now, int64 [N]."""


class SearchableIndex(Protocol):
    """An index on a hash index. One call searches several such indexes."""

    slots: HashIndex

    def release(self, *others: Self) -> None:
        """Free the slots of this index and others that no batch needs any more; called before a search."""

    def hold(
        self,
        parts: Sequence[Tensor],
        *,
        train: bool,
        fills: Fills,
        fresh: GivenSlots | None = None,
        num_absent: int = 0,
    ) -> object:
        """Pin the slots of a batch's keys, and return the pin.

        Args:
            parts: the slots.
            train: whether the rows will be updated.
            fills: gets what to write to the slots.
            fresh: the keys that have just got a slot, whose rows begin now.
            num_absent: how many of ``parts`` are theirs.
        """


class KeyReader(NamedTuple):
    """The rectangles of the same rows that a feature reads."""

    indexes: Sequence[Index]
    first_row: int
    mix_seed: int | None = None
    """The seed of the mix that makes keys of the feature's IDs; None: they are keys. The same for all or
    none."""


def slots_of(
    values: Tensor,
    bounds: Sequence[int],
    readers: Mapping[int, KeyReader],
    *,
    num_keys: int,
    train: bool,
    at_once: bool = False,
) -> tuple[Tensor, list[object]]:
    """Replace the keys of some features by slots; each index is asked once.

    Args:
        values: int [N], block-major: the IDs of feature 0 of block 0, of feature 1, and so on; each counted
            from the first row of its rectangle.
        bounds: where the IDs of each feature of each block begin, and N.
        readers: by feature, who reads it.
        num_keys: the number of features of a block.
        train: whether the rows will be updated.
        at_once: whether the slots are used before any other call: then known keys need no pins.

    Returns: the values [N], of the same type, and the pins (see ``Resolved``).
    """
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    found, missing = _searched(values, bounds, readers, num_keys)
    # Another tensor on the same memory, and no view: slots keep the pins, and pins must not keep the slots.
    memory = found.new_empty(0).set_(found.untyped_storage(), 0, found.shape, found.stride())
    pins: list[object] = []
    by_indexes: dict[tuple[int, ...], list[int]] = {}
    for key, reader in readers.items():
        by_indexes.setdefault(tuple(map(id, reader.indexes)), []).append(key)
    unseen: list[tuple[list[Tensor], list[SearchableIndex], list[UnseenIds]]] = []
    fills = Fills()
    for keys in by_indexes.values():
        reader = readers[keys[0]]
        places = [block * num_keys + key for key in keys for block in range(num_blocks)]
        parts = [memory[bounds[place] : bounds[place + 1]] for place in places]
        if places[0] in missing:
            num_missing = sum(missing[place] for place in places)
            indexes: list[SearchableIndex] = list(reader.indexes)  # type: ignore[arg-type]
            if num_missing == 0:
                if not at_once:
                    pins += [index.hold(parts, train=train, fills=fills) for index in indexes]
                continue
            ids, slots = (_joined(each, bounds, places).long().contiguous() for each in (values, memory))
            own = [slots, *(slots.clone() for _ in indexes[1:])]
            jobs = [
                UnseenIds(index.slots, ids, each, num_missing, reader.first_row, reader.mix_seed)
                for index, each in zip(indexes, own, strict=True)
            ]
            unseen.append((parts, indexes, jobs))
            continue
        given = _joined(values, bounds, places).long()
        if reader.mix_seed is not None:
            given = mix(given, reader.mix_seed)
        resolved = [index.resolve(given + reader.first_row, train=train) for index in reader.indexes]
        pins += [each.pin for each in resolved]
        _write(resolved[0].slots, parts)
    fresh = iter(give_slots([job for _, _, jobs in unseen for job in jobs]))
    for parts, indexes, jobs in unseen:
        for index, job in zip(indexes, jobs, strict=True):
            pins.append(
                index.hold(
                    [job.slots], train=train, fills=fills, fresh=next(fresh), num_absent=job.num_absent
                )
            )
        _write(jobs[0].slots, parts)
    fills.run()
    return found, pins


def _joined(values: Tensor, bounds: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return the values at some places: a view of a single place, or a copy."""
    parts = [values[bounds[place] : bounds[place + 1]] for place in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _write(slots: Tensor, parts: Sequence[Tensor]) -> None:
    """Write slots to their places, unless they are there."""
    if slots.data_ptr() == parts[0].data_ptr():
        return
    for part, own in zip(parts, slots.split([len(part) for part in parts]), strict=True):
        part.copy_(own)


def _searched(
    values: Tensor, bounds: Sequence[int], readers: Mapping[int, KeyReader], num_keys: int
) -> tuple[Tensor, dict[int, int]]:
    """Replace the keys that hash indexes have by slots, all in one call; others stay as they are.

    Returns: the values, and the number of keys without a slot for each place that was searched.
    """
    searched: dict[int, tuple[KeyReader, list[SearchableIndex]]] = {}
    for key, reader in sorted(readers.items()):
        indexes = [index for index in reader.indexes if _is_searchable(index)]
        if len(indexes) == len(reader.indexes):
            searched[key] = reader, indexes
    if not searched:
        return values.clone(), {}
    parts: dict[int, SearchedPart] = {}
    for block in range((len(bounds) - 1) // max(1, num_keys)):
        for key, (reader, indexes) in searched.items():
            place = block * num_keys + key
            parts[place] = SearchedPart(
                bounds[place], bounds[place + 1], indexes[0].slots, reader.first_row, reader.mix_seed
            )
    first, *others = {id(each): each for _, indexes in searched.values() for each in indexes}.values()
    first.release(*others)
    found, missing = find_parts(values.long().contiguous(), list(parts.values()))
    return found.to(values.dtype), dict(zip(parts, missing, strict=True))


def _is_searchable(index: Index) -> TypeGuard[SearchableIndex]:
    # Not isinstance, which takes 10 us for a protocol: every lookup asks this for every table.
    return isinstance(getattr(index, "slots", None), HashIndex)


def pin(slots: Tensor, pins: Sequence[object]) -> None:
    """Store the pins of slots in their tensor: whoever has the tensor has them."""
    vars(slots)["_pins"] = pins


def pins_of(slots: Tensor) -> Sequence[object]:
    """Return the pins that slots keep."""
    found: Sequence[object] = vars(slots).get("_pins", ())
    return found
