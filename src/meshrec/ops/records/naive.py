"""Table rows in fixed-size file records, and cache replacement, in plain Python.

The reference for the kernels, and the fallback without them. A row consists of parts: the weight and the
optimizer state tensors. A record holds the bytes from all parts of a row, followed by a CRC-32 over the row
key and these bytes. Records are grouped into blocks: a block has ``block_bytes`` bytes, with ``per_block``
records and zero padding. Reads and writes transfer whole blocks, because a disk transfers whole sectors.
"""

import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import dynamic_size, implement, register_fakes

# Shape legend: N keys.

DAMAGED = -1
"""Failure cause: the checksum does not match."""
END_OF_FILE = -2
"""Failure cause: the file ends before the record."""


class RecordLayout(NamedTuple):
    """Positions and sizes of the records in a file.

    A record holds a table row and a checksum. A block holds ``per_block`` records, followed by padding.
    """

    first_key: int
    """Key of the first record. Record i is for key ``first_key + i``."""
    per_block: int
    """Number of records in a block."""
    block_bytes: int
    """Bytes per block, including the padding."""
    record_bytes: int
    """Bytes per record, including the 4 checksum bytes at the end."""
    salt: int
    """Initial CRC value. Cached tables draw it at random per file, to detect records from another file."""

    def position(self, key: int) -> int:
        """Return the file offset of the block that contains the record for a key."""
        return (key - self.first_key) // self.per_block * self.block_bytes

    def offset(self, key: int) -> int:
        """Return the offset, within the block, of the record for a key."""
        return (key - self.first_key) % self.per_block * self.record_bytes

    def checksum(self, key: int, content: bytes) -> int:
        """Return the CRC-32 over a row key and the row bytes."""
        return zlib.crc32(content, zlib.crc32(key.to_bytes(8, "little", signed=True), self.salt))


def records_read(
    file: int,
    layout: Sequence[int],
    keys: Tensor,
    parts: Sequence[Tensor],
    slots: Tensor,
    in_flight: int,
    ring: bool,
) -> Tensor:
    """Read the rows for some keys from a file into memory.

    Args:
        keys: int64 [N], ascending.
        parts: memory for the rows, a tensor ``[height, ...]`` per row part. Modified in place.
        slots: row index in ``parts`` that each key is read to, int64 [N].
        in_flight: number of concurrent disk requests; 0: the calling thread reads sequentially.

    Returns:
        Failures, int64 [number of failures, 2]. A row has the index in ``keys``, and the cause: ``DAMAGED``,
            ``END_OF_FILE`` or the errno. If a request for several keys fails, only the first key may be
            listed.
    """
    geometry, failures = RecordLayout(*layout), list[tuple[int, int]]()
    # Byte views, because records hold raw bytes whatever the dtype.
    memory = [_as_bytes(part) for part in parts]
    for position, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        try:
            # A block per key. The kernels join requests for blocks close together in the file.
            block = os.pread(file, geometry.block_bytes, geometry.position(key))
        except OSError as error:
            # Report it, and continue with the next key.
            failures.append((position, error.errno or 0))
            continue
        if len(block) < geometry.block_bytes:
            failures.append((position, END_OF_FILE))
            continue
        record = block[geometry.offset(key) :][: geometry.record_bytes]
        # The last 4 bytes are the checksum.
        content = record[:-4]
        # The key is part of the checksum, so a record at a wrong position is detected.
        if geometry.checksum(key, content) != int.from_bytes(record[-4:], "little"):
            failures.append((position, DAMAGED))
            continue
        # The record has the row parts in this order.
        for part in memory:
            width = part.shape[1]
            # bytearray, because frombuffer wants writable memory.
            part[slot] = torch.frombuffer(bytearray(content[:width]), dtype=torch.uint8)
            content = content[width:]
    return torch.tensor(failures, dtype=torch.int64).view(-1, 2)


def records_write(
    file: int,
    layout: Sequence[int],
    keys: Tensor,
    parts: Sequence[Tensor],
    slots: Tensor,
    in_flight: int,
    ring: bool,
) -> Tensor:
    """Write the rows for some keys from memory to a file. Other records in the same blocks are preserved.

    Args:
        keys: int64 [N], ascending.
        parts: memory with the rows, a tensor ``[height, ...]`` per row part.
        slots: row index in ``parts`` that each key is written from, int64 [N].
        in_flight: number of concurrent disk requests; 0: the calling thread writes sequentially.

    Returns:
        Failures, as for ``records_read``.
    """
    geometry, failures = RecordLayout(*layout), list[tuple[int, int]]()
    memory = [_as_bytes(part) for part in parts]
    for position, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        content = b"".join(bytes(part[slot].tolist()) for part in memory)
        # The checksum comes last, as records_read expects.
        record = content + geometry.checksum(key, content).to_bytes(4, "little")
        try:
            start = geometry.position(key)
            # Read, modify and write the whole block, to preserve the other records.
            # A block beyond the end of the file reads short, so fill it with zeros.
            block = bytearray(os.pread(file, geometry.block_bytes, start).ljust(geometry.block_bytes, b"\0"))
            block[geometry.offset(key) : geometry.offset(key) + len(record)] = record
            os.pwrite(file, block, start)
        except OSError as error:
            failures.append((position, error.errno or 0))
    return torch.tensor(failures, dtype=torch.int64).view(-1, 2)


def cache_used(slots: Tensor, stamps: Tensor, batch: int) -> Tensor:
    """Return the cache slots that a batch uses for the first time, and stamp them with the batch number.

    If a batch makes several calls, a slot that an earlier call has stamped is not returned again. The result
    has no duplicates, and lists the slots in the order in which they are first used.

    Args:
        slots: cache slots that the batch reads, int64 [N]; -1: no slot.
        stamps: number of the last batch that used each cache slot, int64. Modified in place.
    """
    # dict.fromkeys removes duplicates and keeps the order.
    first_uses = list(dict.fromkeys(slot for slot in slots.tolist() if slot >= 0 and stamps[slot] != batch))
    used = torch.tensor(first_uses, dtype=torch.int64)
    stamps[used] = batch
    return used


def cache_victims(counts: Tensor, pins: Tensor, hand: int, num_victims: int) -> tuple[Tensor, int]:
    """Select cache slots to evict, with the generalized CLOCK policy.

    A hand moves over the slots in a circle. It skips pinned slots. If a slot's reference count is above 0,
    the hand decrements it and moves on. If the count is 0, the slot is selected.

    Args:
        counts: reference count per slot, uint8. Modified in place.
        pins: pin count per slot, int32. A slot with pins is in use and must not be evicted.

    Returns:
        Selected slots in hand order; fewer than ``num_victims`` if all other slots are pinned; and the new
            hand position.
    """
    # A set next to the list, for fast membership tests.
    size, victims, selected = len(counts), list[int](), set[int]()
    # Without this limit, the hand would circle forever once all unpinned slots are selected.
    free = int((pins == 0).sum())
    while len(victims) < min(num_victims, free):
        # The hand moves on in any case, also past selected slots.
        slot, hand = hand, (hand + 1) % size
        if pins[slot] != 0 or slot in selected:
            continue
        if counts[slot] != 0:
            counts[slot] -= 1
            continue
        selected.add(slot)
        victims.append(slot)
    return torch.tensor(victims, dtype=torch.int64), hand


def _as_bytes(part: Tensor) -> Tensor:
    """View the memory of a row part as uint8 [height, bytes per row]."""
    assert part.is_contiguous()
    # view() cannot infer the row size for a part without rows.
    height = part.shape[0]
    return part.detach().view(-1).view(torch.uint8).view(height, -1 if height else 0)


implement([records_read, records_write, cache_used, cache_victims])
register_fakes(
    records_read=lambda file, layout, keys, *_: keys.new_empty(dynamic_size(), 2),
    records_write=lambda file, layout, keys, *_: keys.new_empty(dynamic_size(), 2),
    cache_used=lambda slots, stamps, batch: slots.new_empty(dynamic_size()),
    # The hand does not move.
    cache_victims=lambda counts, pins, hand, number: (
        counts.new_empty(dynamic_size(), dtype=torch.int64),
        hand,
    ),
)
