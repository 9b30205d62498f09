"""Table rows in fixed-size file records, and cache replacement, in plain Python.

The reference for the kernels, and the fallback without them. A record has the bytes from all row parts
(weights, optimizer state), followed by the CRC-32 over the row key and these bytes. ``block_bytes`` blocks
hold ``per_block`` records and zero padding. Reads and writes transfer whole blocks, because a disk transfers
whole sectors.
"""

import os
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import implement

# N keys

DAMAGED = -1
"""Failure cause: the checksum does not match."""
END_OF_FILE = -2
"""Failure cause: the file ends before the record."""


class RecordLayout(NamedTuple):
    """Where the record for every key is in a file."""

    first_key: int
    """First record key."""
    per_block: int  # records per block
    block_bytes: int  # block size
    record_bytes: int
    """Bytes per record, including the checksum in the last 4."""
    salt: int
    """Initial CRC value for all records, so a record copied from another file is detected."""

    def position(self, key: int) -> int:
        """Return the file offset for the block with the key record."""
        return (key - self.first_key) // self.per_block * self.block_bytes

    def offset(self, key: int) -> int:
        """Return the record offset for a key within the block."""
        return (key - self.first_key) % self.per_block * self.record_bytes

    def checksum(self, key: int, content: bytes) -> int:
        """Return the checksum over a key and the row bytes."""
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
        file: open file descriptor.
        layout: ``RecordLayout`` fields.
        keys: int64 [N], ascending.
        parts: row memory, one tensor ``[height, ...]`` per row part. Modified in place.
        slots: destination row in ``parts`` per key, int64 [N].
        in_flight: concurrent disk requests; 0: sequential reads by the caller.
        ring: use io_uring where available, instead of threads.

    Returns:
        Failures, int64 [failures, 2]: index in ``keys``, and ``DAMAGED``, ``END_OF_FILE`` or the errno. One
            failure may represent all keys read in the same request.
    """
    geometry, failures = RecordLayout(*layout), list[tuple[int, int]]()
    memory = [_as_bytes(part) for part in parts]
    for position, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        try:
            block = os.pread(file, geometry.block_bytes, geometry.position(key))
        except OSError as error:
            failures.append((position, error.errno or 0))
            continue
        if len(block) < geometry.block_bytes:
            failures.append((position, END_OF_FILE))
            continue
        record = block[geometry.offset(key) :][: geometry.record_bytes]
        content = record[:-4]
        # The key is part of the checksum, so a record at a wrong position is detected.
        if geometry.checksum(key, content) != int.from_bytes(record[-4:], "little"):
            failures.append((position, DAMAGED))
            continue
        for part in memory:
            width = part.shape[1]
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
        file: open file descriptor.
        layout: ``RecordLayout`` fields.
        keys: int64 [N], ascending.
        parts: row memory, one tensor ``[height, ...]`` per row part.
        slots: source row in ``parts`` per key, int64 [N].
        in_flight: concurrent disk requests; 0: sequential writes by the caller.
        ring: use io_uring where available, instead of threads.

    Returns:
        Failures, as ``records_read``.
    """
    geometry, failures = RecordLayout(*layout), list[tuple[int, int]]()
    memory = [_as_bytes(part) for part in parts]
    for position, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        content = b"".join(bytes(part[slot].tolist()) for part in memory)
        record = content + geometry.checksum(key, content).to_bytes(4, "little")
        try:
            start = geometry.position(key)
            # Read, modify and write the whole block, to preserve the other records.
            block = bytearray(os.pread(file, geometry.block_bytes, start).ljust(geometry.block_bytes, b"\0"))
            block[geometry.offset(key) : geometry.offset(key) + len(record)] = record
            os.pwrite(file, block, start)
        except OSError as error:
            failures.append((position, error.errno or 0))
    return torch.tensor(failures, dtype=torch.int64).view(-1, 2)


def cache_used(slots: Tensor, stamps: Tensor, batch: int) -> Tensor:
    """Return the cache slots used by a batch for the first time, and stamp them with the batch number.

    A slot already stamped was returned by an earlier call for the same batch. The result has no
    duplicates, and is in first use order.

    Args:
        slots: int64 [N]; -1: no slot.
        stamps: last batch number per cache slot, int64. Modified in place.
        batch: batch number.
    """
    first_uses = list(dict.fromkeys(slot for slot in slots.tolist() if slot >= 0 and stamps[slot] != batch))
    used = torch.tensor(first_uses, dtype=torch.int64)
    stamps[used] = batch
    return used


def cache_victims(counts: Tensor, pins: Tensor, hand: int, num_victims: int) -> tuple[Tensor, int]:
    """Select cache slots to evict with the generalized CLOCK policy.

    The hand circles over the slots. It skips pinned slots, decrements positive reference counts, and selects
    slots with count 0.

    Args:
        counts: reference count per slot, uint8. Modified in place.
        pins: pin count per slot, int32. Slots with pins are not evicted.
        hand: slot at which the hand stands.
        num_victims: slot count to evict.

    Returns:
        Victims in hand order, fewer than ``num_victims`` if the other slots are pinned; and the new hand
            position.
    """
    size, victims, selected = len(counts), list[int](), set[int]()
    free = int((pins == 0).sum())
    while len(victims) < min(num_victims, free):
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
    """View a part's memory as uint8 [height, bytes per row]."""
    assert part.is_contiguous()
    height = part.shape[0]
    return part.detach().view(-1).view(torch.uint8).view(height, -1 if height else 0)


implement([records_read, records_write, cache_used, cache_victims])


# Shapes for tracing.


def _transfer(file: int, layout: list[int], keys: Tensor, *_: Any) -> Tensor:
    """Fake ``records_read`` and ``records_write``: a data-dependent failure count."""
    return keys.new_empty(torch.library.get_ctx().new_dynamic_size(), 2)


def _used(slots: Tensor, stamps: Tensor, batch: int) -> Tensor:
    """Fake ``cache_used``: a data-dependent slot count."""
    return slots.new_empty(torch.library.get_ctx().new_dynamic_size())


def _victims(counts: Tensor, pins: Tensor, hand: int, number: int) -> tuple[Tensor, int]:
    """Fake ``cache_victims``: a data-dependent slot count; the hand does not move."""
    return counts.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64), hand


for _name, _fake in (
    ("records_read", _transfer),
    ("records_write", _transfer),
    ("cache_used", _used),
    ("cache_victims", _victims),
):
    torch.library.register_fake(f"meshrec::{_name}", _fake)
