"""Read and write tensors in blocks. A block is a run of whole rows, about 4 MiB, with a CRC-32 checksum.

Files are read block by block, and a block is verified before use. Reading and writing need additional memory
for a single block only, whatever the tensor's size: contiguous CPU memory is read and written in place, and
tables whose rows are in files are streamed (see ``tables/streamed.py``).

A sharded tensor is saved as several pieces. A piece is a rectangle of the tensor, saved by one rank, and has
blocks of its rows.
"""

import ctypes
import os
import zlib
from collections.abc import Sequence
from concurrent.futures import Executor
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import REMEDY, DamagedCheckpointError
from meshrec.tables.streamed import StreamedPart, values_of

# Part of the file format: the manifest check requires blocks of this many bytes, rounded down to whole rows.
BLOCK_BYTES = 1 << 22
# Start writeback after 64 MiB, so the final fsync has little left to write.
_FLUSH_BYTES = 1 << 26


class Grid(NamedTuple):
    """Partition of a tensor's rows into blocks.

    Attributes:
        num_rows: row count of the tensor.
        row_bytes: bytes per row.
        rows_per_block: rows in every block but the last, which may have fewer.
    """

    num_rows: int
    row_bytes: int
    rows_per_block: int

    @property
    def block_bytes(self) -> int:
        """Size of the largest block, in bytes."""
        return min(self.rows_per_block, self.num_rows) * self.row_bytes

    def blocks(self, first: int = 0, end: int | None = None) -> range:
        """Return the first row of every block overlapping the rows [first, end).

        Example: with 10 rows per block, ``blocks(15, 35)`` is ``range(10, 35, 10)``: blocks 10, 20 and 30.
        """
        # Rows without elements have no bytes to read or verify.
        if self.row_bytes == 0:
            return range(0)
        step = self.rows_per_block
        return range(first // step * step, self.num_rows if end is None else end, step)


def grid_of(shape: Sequence[int], dtype: torch.dtype, rows_per_block: int | None = None) -> Grid:
    """Return how a tensor's rows are partitioned into blocks. A 0-d tensor counts as one row.

    Args:
        shape: tensor shape.
        dtype: tensor dtype.
        rows_per_block: rows per block; None: as many as fit into `BLOCK_BYTES`, at least 1.
    """
    rows, row_bytes = (shape[0], prod(shape[1:]) * dtype.itemsize) if shape else (1, dtype.itemsize)
    return Grid(rows, row_bytes, rows_per_block or max(1, BLOCK_BYTES // max(1, row_bytes)))


def memory_of(tensor: Tensor) -> memoryview:
    """Return a writable byte view of a contiguous CPU tensor, without copying.

    The view is valid only while the tensor exists: it does not keep the memory alive.
    """
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    # ctypes works for every dtype; Tensor.numpy() supports neither bfloat16 nor float8.
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class FileWriter:
    """Writer that appends to an open file, and starts writeback of the page cache every 64 MiB.

    Args:
        descriptor: file open for writing; the caller closes it.

    Attributes:
        position: bytes written so far.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.position = 0
        # Bytes whose writeback has been started.
        self._flushed = 0

    def write(self, content: memoryview | bytes) -> None:
        """Append all bytes of ``content``."""
        # os.write may write fewer bytes than requested, so loop until none is left.
        unwritten = memoryview(content)
        while unwritten:
            written = os.write(self._descriptor, unwritten)
            self.position += written
            unwritten = unwritten[written:]
        if self.position - self._flushed >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            length = self.position - self._flushed
            # DONTNEED starts writeback for dirty pages. It also drops them from the page cache afterward, so
            # a large save does not evict other files from the cache.
            os.posix_fadvise(self._descriptor, self._flushed, length, os.POSIX_FADV_DONTNEED)
            self._flushed = self.position


def checksum_of(content: memoryview, identity: bytes, first: int) -> int:
    """Return the CRC-32 of a block's bytes, combined with the block's identity and position.

    Args:
        content: the block's bytes.
        identity: result of `piece_identity`. Because the checksum covers it, intact bytes at a wrong position
            are detected. Empty for checkpoints of format version 1, whose checksums cover only ``content``.
        first: index of the block's first row within the piece.
    """
    start = zlib.crc32(b"%s%d" % (identity, first)) if identity else 0
    return zlib.crc32(content, start)


def write_rows(file: FileWriter, tensor: Tensor, pool: Executor, identity: bytes) -> tuple[int, ...]:
    """Append a tensor to a file, block by block.

    Args:
        file: target file.
        tensor: tensor on any device.
        pool: thread pool that computes a block's checksum while the block is written.
        identity: see `checksum_of`.

    Returns:
        CRC-32 checksums in block order.
    """
    grid = grid_of(tensor.shape, tensor.dtype)
    # A 0-d tensor is written as a tensor with one row.
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    checksums = []
    for first in grid.blocks():
        # Device tensors and rows in files are copied to the CPU a block at a time.
        block = values_of(rows[first : first + grid.rows_per_block]).cpu().contiguous()
        content = memory_of(block)
        # Compute the checksum in a thread, while this thread writes the same bytes.
        checksum = pool.submit(checksum_of, content, identity, first)
        try:
            file.write(content)
        finally:
            # Wait for the thread also after a failed write, because it reads the block's memory.
            checksums.append(checksum.result())
    return tuple(checksums)


class StoredRows(NamedTuple):
    """Piece (a rectangle) of a tensor in an open data file, with everything needed to read and verify it.

    Attributes:
        descriptor: open file; the caller keeps it open.
        start: file offset of the piece's first row, in bytes.
        shape: piece shape.
        dtype: tensor dtype.
        rows_per_block: rows in every block but the last.
        checksums: CRC-32 per block.
        label: piece name in error messages.
        identity: see `checksum_of`.
    """

    descriptor: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows_per_block: int
    checksums: Sequence[int]
    label: str
    identity: bytes

    @property
    def grid(self) -> Grid:
        """Partition of the piece's rows into blocks."""
        return grid_of(self.shape, self.dtype, self.rows_per_block)

    def read_block(self, first: int, target: memoryview) -> None:
        """Read a block into memory, and compare the checksum.

        Raises:
            DamagedCheckpointError: the block differs from the bytes written.
        """
        grid = self.grid
        position = self.start + first * grid.row_bytes
        num_read = 0
        # preadv may read fewer bytes than requested. It does not move the file position, so threads can share
        # the file.
        while num_read < len(target):
            count = os.preadv(self.descriptor, [target[num_read:]], position + num_read)
            if count == 0:
                raise DamagedCheckpointError(f"{self.label}: the file ends too early. {REMEDY}")
            num_read += count
        if checksum_of(target, self.identity, first) != self.checksums[first // grid.rows_per_block]:
            raise DamagedCheckpointError(
                f"{self.label}: rows from {first} on are not what was written (checksums differ). {REMEDY}"
            )


def read_region(stored: StoredRows, offsets: Sequence[int], target: Tensor) -> None:
    """Read a rectangular region of a piece into a tensor, and verify every block overlapping the region.

    Args:
        stored: piece to read from.
        offsets: region start within the piece, per dimension.
        target: tensor to fill, on any device. Its shape is the region's shape.

    Raises:
        DamagedCheckpointError: a block differs from the bytes written; ``target`` is then partly filled.
    """
    grid = stored.grid
    if target.numel() == 0:
        return
    # Treat a 0-d tensor as a tensor with one row.
    if not stored.shape:
        target, offsets, stored = target.reshape(1), (0,), stored._replace(shape=(1,))
    first, end = offsets[0], offsets[0] + target.shape[0]
    # Direct reads need the same bytes in file and memory: whole rows, the same dtype, and contiguous CPU
    # memory.
    whole_rows = tuple(target.shape[1:]) == stored.shape[1:]
    is_plain = target.device.type == "cpu" and target.is_contiguous() and not isinstance(target, StreamedPart)
    is_direct = whole_rows and target.dtype is stored.dtype and is_plain
    # Memory for one block, allocated for the first block that cannot be read in place.
    buffer = None
    for row in grid.blocks(first, end):
        last = min(row + grid.rows_per_block, grid.num_rows)
        # A block inside the target is read in place. Any other block is read to a buffer, because
        # the checksum needs the whole block, and the overlap is then copied.
        if is_direct and first <= row and last <= end:
            stored.read_block(row, memory_of(target[row - first : last - first]))
            continue
        if buffer is None:
            rows = min(grid.rows_per_block, grid.num_rows)
            buffer = torch.empty((rows, *stored.shape[1:]), dtype=stored.dtype)
        block = buffer[: last - row]
        stored.read_block(row, memory_of(block))
        low, high = max(row, first), min(last, end)
        part = block[low - row : high - row]
        for dim in range(1, len(offsets)):
            # The target may have only some columns of the piece.
            part = part.narrow(dim, offsets[dim], target.shape[dim])
        target[low - first : high - first].copy_(part)


def verify_rows(stored: StoredRows, buffer: Tensor, share: slice = slice(None)) -> None:
    """Read blocks from a piece only to compare their checksums.

    Args:
        stored: piece to verify.
        buffer: scratch memory, uint8, at least as large as the largest block.
        share: which blocks to verify, as a slice of the block list. ``slice(rank, None, world_size)`` selects
            a rank's share.

    Raises:
        DamagedCheckpointError: a block differs from the bytes written.
    """
    grid = stored.grid
    memory = memory_of(buffer)
    for row in grid.blocks()[share]:
        last = min(row + grid.rows_per_block, grid.num_rows)
        stored.read_block(row, memory[: (last - row) * grid.row_bytes])
