"""The protocol of an index, which finds the slot of a key where it is not simply ``key - r0``."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from meshrec.ops.index import HashIndex, SearchedPart, find_parts, mix


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

    def release(self) -> None:
        """Free the slots that no batch needs any more; called before a search."""

    def hold(self, parts: Sequence[Tensor], *, train: bool) -> object:
        """Pin slots that were found, and return the pin."""

    def give(self, slots: Tensor, keys: Tensor, *, train: bool) -> Resolved:
        """Give a slot to each key without one, whose ``slots`` is -1, and pin all of them."""


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
    for keys in by_indexes.values():
        reader = readers[keys[0]]
        places = [block * num_keys + key for key in keys for block in range(num_blocks)]
        is_known = not any(missing.get(place, 1) for place in places)
        if is_known and at_once:
            continue
        parts = [memory[bounds[place] : bounds[place + 1]] for place in places]
        if is_known:
            pins += [index.hold(parts, train=train) for index in reader.indexes]  # type: ignore[attr-defined]
            continue
        given = torch.cat([values[bounds[place] : bounds[place + 1]] for place in places]).long()
        if reader.mix_seed is not None:
            given = mix(given, reader.mix_seed)
        wanted = given + reader.first_row
        if places[0] in missing:
            slots = torch.cat(parts)
            resolved = [index.give(slots.clone(), wanted, train=train) for index in reader.indexes]  # type: ignore[attr-defined]
        else:
            resolved = [index.resolve(wanted, train=train) for index in reader.indexes]
        pins += [each.pin for each in resolved]
        slots = resolved[0].slots
        for part, own in zip(parts, slots.split([len(part) for part in parts]), strict=True):
            part.copy_(own)
    return found, pins


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
    for index in {id(each): each for _, indexes in searched.values() for each in indexes}.values():
        index.release()
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
