"""Read and write tensors in checksummed blocks of whole rows.

Files are read block by block, and a block is verified before use. Reading and writing need memory for a
single block, whatever the tensor's size: contiguous CPU memory is read and written in place, and tables with
rows in files are streamed (see ``tables/streamed.py``).
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
    """Partition of tensor rows into blocks with ``rows_per_block`` rows; the last block may be smaller."""

    num_rows: int
    row_bytes: int
    rows_per_block: int

    @property
    def block_bytes(self) -> int:
        """Largest block size in bytes."""
        return min(self.rows_per_block, self.num_rows) * self.row_bytes

    def blocks(self, first: int = 0, end: int | None = None) -> range:
        """Return the first row in every block overlapping rows [first, end)."""
        if self.row_bytes == 0:
            return range(0)
        step = self.rows_per_block
        return range(first // step * step, self.num_rows if end is None else end, step)


def grid_of(shape: Sequence[int], dtype: torch.dtype, rows_per_block: int | None = None) -> Grid:
    """Return the block partition for a tensor. A 0-d tensor has one row.

    Args:
        shape: tensor shape.
        dtype: tensor dtype.
        rows_per_block: rows per block; None: as many as fit into `BLOCK_BYTES`, at least 1.
    """
    rows, row_bytes = (shape[0], prod(shape[1:]) * dtype.itemsize) if shape else (1, dtype.itemsize)
    return Grid(rows, row_bytes, rows_per_block or max(1, BLOCK_BYTES // max(1, row_bytes)))


def memory_of(tensor: Tensor) -> memoryview:
    """Return a writable byte view of a contiguous CPU tensor. It is valid while the tensor exists."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class FileWriter:
    """Appends to an open file, and starts to write pages to disk every 64 MiB.

    Attributes:
        position: bytes written so far.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.position = 0
        self._flushed = 0

    def write(self, content: memoryview | bytes) -> None:
        """Append all bytes."""
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
    """Return the CRC-32 of a block and its position.

    Args:
        content: the block's bytes.
        identity: result of `piece_identity`. The checksum covers it, which detects bytes at a wrong
            position. Empty for checkpoints of format version 1, whose checksums cover only ``content``.
        first: first block row within the piece.
    """
    start = zlib.crc32(b"%s%d" % (identity, first)) if identity else 0
    return zlib.crc32(content, start)


def write_rows(file: FileWriter, tensor: Tensor, pool: Executor, identity: bytes) -> tuple[int, ...]:
    """Append a tensor to a file, block by block.

    Args:
        file: target file.
        tensor: tensor on any device.
        pool: computes checksums while blocks are written.
        identity: see `checksum_of`.

    Returns:
        CRC-32 per block.
    """
    grid = grid_of(tensor.shape, tensor.dtype)
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    checksums = []
    for first in grid.blocks():
        block = values_of(rows[first : first + grid.rows_per_block]).cpu().contiguous()
        content = memory_of(block)
        checksum = pool.submit(checksum_of, content, identity, first)
        try:
            file.write(content)
        finally:
            # Wait for the thread also after a failed write, because it reads the block's memory.
            checksums.append(checksum.result())
    return tuple(checksums)


class StoredRows(NamedTuple):
    """Piece (a rectangle) of a tensor in an open file.

    Attributes:
        descriptor: open file; the caller keeps it open.
        start: first row's file offset, in bytes.
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
        """Block partition for the piece."""
        return grid_of(self.shape, self.dtype, self.rows_per_block)

    def read_block(self, first: int, target: memoryview) -> None:
        """Read and verify a block.

        Args:
            first: first row in the block.
            target: memory to fill, with the block size.

        Raises:
            DamagedCheckpointError: the block differs from the bytes written.
        """
        grid = self.grid
        position = self.start + first * grid.row_bytes
        num_read = 0
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
    """Read a region of a piece, and verify every block overlapping it.

    Args:
        stored: piece to read from.
        offsets: region start within the piece, per dimension.
        target: tensor to fill; it has the region's shape.

    Raises:
        DamagedCheckpointError: a block differs from the bytes written; ``target`` is then partly filled.
    """
    grid = stored.grid
    if target.numel() == 0:
        return
    if not stored.shape:
        target, offsets, stored = target.reshape(1), (0,), stored._replace(shape=(1,))
    first, end = offsets[0], offsets[0] + target.shape[0]
    whole_rows = tuple(target.shape[1:]) == stored.shape[1:]
    is_plain = target.device.type == "cpu" and target.is_contiguous() and not isinstance(target, StreamedPart)
    is_direct = whole_rows and target.dtype is stored.dtype and is_plain
    buffer = None
    for row in grid.blocks(first, end):
        last = min(row + grid.rows_per_block, grid.num_rows)
        # A block inside the target is read in place. Other blocks are read to a buffer, and then
        # copied.
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
            part = part.narrow(dim, offsets[dim], target.shape[dim])
        target[low - first : high - first].copy_(part)


def verify_rows(stored: StoredRows, buffer: Tensor, share: slice = slice(None)) -> None:
    """Read blocks from a piece, and compare their checksums.

    Args:
        stored: piece to verify.
        buffer: scratch memory, uint8, with at least the largest block size.
        share: which blocks to verify, as a slice into the block list.

    Raises:
        DamagedCheckpointError: a block differs from the bytes written.
    """
    grid = stored.grid
    memory = memory_of(buffer)
    for row in grid.blocks()[share]:
        last = min(row + grid.rows_per_block, grid.num_rows)
        stored.read_block(row, memory[: (last - row) * grid.row_bytes])
