"""Rows in records of a file, in plain Python: the reference, and what runs without compiled kernels.

A record is the parts of a row, one after the other, and the CRC-32 of the row's key and of these bytes.
Blocks of ``block_bytes`` hold ``per_block`` records each, and zeros behind them. A block is the unit of
reading and
writing: a disk transfers whole sectors.
"""

import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import implement

# N keys

DAMAGED = -1
"""The cause of a failure: a record is not what was written."""
END_OF_FILE = -2
"""The cause of a failure: the file ends before the record."""


class RecordLayout(NamedTuple):
    """The layout of the records of a file."""

    first_key: int
    """The key of the first record."""
    per_block: int
    block_bytes: int
    record_bytes: int
    """Bytes of a record with its checksum, which takes the last 4."""
    salt: int
    """A number that all checksums of the file begin with."""

    def position(self, key: int) -> int:
        """Return the position of the block of a key."""
        return (key - self.first_key) // self.per_block * self.block_bytes

    def offset(self, key: int) -> int:
        """Return where in its block a record begins."""
        return (key - self.first_key) % self.per_block * self.record_bytes

    def checksum(self, key: int, content: bytes) -> int:
        """Return the checksum of the parts of a row."""
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
    """Read the rows of some keys into memory.

    Args:
        file: an open file.
        layout: a ``RecordLayout``.
        keys: int64 [N], ascending.
        parts: the memory of the parts of rows, each ``[height, ...]``.
        slots: int64 [N], where in ``parts`` the row of each key goes.
        in_flight: requests that the disk has at a time; 0: the caller makes one after the other.
        ring: let the kernel keep the requests (io_uring) where it can; otherwise threads wait for them.

    Returns:
        int64 [failures, 2]: the number of a key, and ``DAMAGED``, ``END_OF_FILE`` or the system's error
        number. A failure may stand for all keys that were read in one go.
    """
    found, failures = RecordLayout(*layout), list[tuple[int, int]]()
    memory = [_bytes(part) for part in parts]
    for number, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        try:
            block = os.pread(file, found.block_bytes, found.position(key))
        except OSError as error:
            failures.append((number, error.errno or 0))
            continue
        if len(block) < found.block_bytes:
            failures.append((number, END_OF_FILE))
            continue
        record = block[found.offset(key) :][: found.record_bytes]
        content = record[:-4]
        if found.checksum(key, content) != int.from_bytes(record[-4:], "little"):
            failures.append((number, DAMAGED))
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
    """Write the rows of some keys from memory; see ``records_read``. Other records of their blocks stay."""
    found, failures = RecordLayout(*layout), list[tuple[int, int]]()
    memory = [_bytes(part) for part in parts]
    for number, (key, slot) in enumerate(zip(keys.tolist(), slots.tolist(), strict=True)):
        content = b"".join(bytes(part[slot].tolist()) for part in memory)
        record = content + found.checksum(key, content).to_bytes(4, "little")
        try:
            begin = found.position(key)
            block = bytearray(os.pread(file, found.block_bytes, begin).ljust(found.block_bytes, b"\0"))
            block[found.offset(key) : found.offset(key) + len(record)] = record
            os.pwrite(file, block, begin)
        except OSError as error:
            failures.append((number, error.errno or 0))
    return torch.tensor(failures, dtype=torch.int64).view(-1, 2)


def cache_used(slots: Tensor, stamps: Tensor, batch: int) -> Tensor:
    """Return the slots that a batch uses for the first time, and stamp them with the batch.

    The result has each slot once, in order of first use.

    Args:
        slots: int64 [N]; -1: no slot.
        stamps: int64, for each slot of the cache the last batch that used it.
        batch: the number of this batch.
    """
    found = list(dict.fromkeys(slot for slot in slots.tolist() if slot >= 0 and stamps[slot] != batch))
    used = torch.tensor(found, dtype=torch.int64)
    stamps[used] = batch
    return used


def cache_victims(counts: Tensor, pins: Tensor, hand: int, number: int) -> tuple[Tensor, int]:
    """Choose slots to evict, as a clock with several chances per slot does.

    The hand goes round. It passes over pinned slots, takes one from the count of a slot that has one, and
    chooses a slot whose count is 0.

    Args:
        counts: uint8 [slots], which change.
        pins: int32 [slots]; what is above 0 stays.
        hand: where the hand stands.
        number: how many slots are wanted.

    Returns:
        The slots in the order of the hand, fewer than ``number`` if all others are pinned, and the hand.
    """
    size, found, chosen = len(counts), list[int](), set[int]()
    free = int((pins == 0).sum())
    while len(found) < min(number, free):
        slot, hand = hand, (hand + 1) % size
        if pins[slot] != 0 or slot in chosen:
            continue
        if counts[slot] != 0:
            counts[slot] -= 1
            continue
        chosen.add(slot)
        found.append(slot)
    return torch.tensor(found, dtype=torch.int64), hand


def _bytes(part: Tensor) -> Tensor:
    """Return the memory of a part, a row of bytes for each slot."""
    assert part.is_contiguous()
    height = part.shape[0]
    return part.detach().view(-1).view(torch.uint8).view(height, -1 if height else 0)


implement([records_read, records_write, cache_used, cache_victims])
