"""Reading and writing of tensors in blocks of whole rows, each with a checksum.

A block is the smallest unit of reading, and is verified before anybody sees it. Memory stays within one
block, whatever the size of a tensor: contiguous CPU memory is written and read in place. Tables that keep
their rows elsewhere stream them, see ``tables/streamed.py``.
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

BLOCK_BYTES = 1 << 22
# After this many bytes the kernel is told to start writing, so that the final fsync finds little left.
_FLUSH_BYTES = 1 << 26


class Grid(NamedTuple):
    """A tensor as rows of bytes, with ``rows_per_block`` of them in every block but the last."""

    num_rows: int
    row_bytes: int
    rows_per_block: int

    @property
    def block_bytes(self) -> int:
        """Bytes of the largest block."""
        return min(self.rows_per_block, self.num_rows) * self.row_bytes

    def blocks(self, first: int = 0, end: int | None = None) -> range:
        """Return the first rows of the blocks that contain rows [first, end)."""
        if self.row_bytes == 0:
            return range(0)
        step = self.rows_per_block
        return range(first // step * step, self.num_rows if end is None else end, step)


def grid_of(shape: Sequence[int], dtype: torch.dtype, rows_per_block: int | None = None) -> Grid:
    """Return the grid of a tensor of this shape. A tensor without dimensions is one row."""
    rows, row_bytes = (shape[0], prod(shape[1:]) * dtype.itemsize) if shape else (1, dtype.itemsize)
    return Grid(rows, row_bytes, rows_per_block or max(1, BLOCK_BYTES // max(1, row_bytes)))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. They are valid as long as the tensor exists."""
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class FileWriter:
    """Appends to a file, and makes the kernel start writing it to disk early."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.position = 0
        self._flushed = 0

    def write(self, content: memoryview | bytes) -> None:
        """Write all bytes at the end of the file."""
        rest = memoryview(content)
        while rest:
            written = os.write(self._descriptor, rest)
            self.position += written
            rest = rest[written:]
        if self.position - self._flushed >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            length = self.position - self._flushed
            os.posix_fadvise(self._descriptor, self._flushed, length, os.POSIX_FADV_DONTNEED)
            self._flushed = self.position


def checksum_of(content: memoryview, place: bytes, first: int) -> int:
    """Return the CRC-32 of a block.

    Args:
        content: the bytes of its rows.
        place: a text that identifies the piece and the tensor of the block. The checksum covers it, so the
            right bytes in a wrong place are noticed. It is empty in checkpoints of earlier releases, whose
            checksums cover the bytes alone.
        first: the first row of the block in its piece.
    """
    start = zlib.crc32(b"%s%d" % (place, first)) if place else 0
    return zlib.crc32(content, start)


def write_rows(file: FileWriter, tensor: Tensor, pool: Executor, place: bytes) -> tuple[int, ...]:
    """Append a tensor, and return the checksum of each block. ``pool`` computes them during the writing."""
    grid = grid_of(tensor.shape, tensor.dtype)
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    checksums = []
    for first in grid.blocks():
        block = values_of(rows[first : first + grid.rows_per_block]).cpu().contiguous()
        content = memory_of(block)
        checksum = pool.submit(checksum_of, content, place, first)
        try:
            file.write(content)
        finally:
            checksums.append(checksum.result())
    return tuple(checksums)


class StoredRows(NamedTuple):
    """A piece in an open file.

    ``what`` is its name in errors. For ``place``, see `checksum_of`.
    """

    descriptor: int
    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows_per_block: int
    checksums: Sequence[int]
    what: str
    place: bytes

    @property
    def grid(self) -> Grid:
        """The division of the piece into blocks."""
        return grid_of(self.shape, self.dtype, self.rows_per_block)

    def read_block(self, first: int, target: memoryview) -> None:
        """Read the block that starts at row ``first`` into memory of its size, and verify it."""
        grid = self.grid
        position = self.begin + first * grid.row_bytes
        done = 0
        while done < len(target):
            count = os.preadv(self.descriptor, [target[done:]], position + done)
            if count == 0:
                raise DamagedCheckpointError(f"{self.what}: the file ends too early. {REMEDY}")
            done += count
        if checksum_of(target, self.place, first) != self.checksums[first // grid.rows_per_block]:
            raise DamagedCheckpointError(
                f"{self.what}: rows from {first} on are not what was written (checksums differ). {REMEDY}"
            )


def read_region(stored: StoredRows, offsets: Sequence[int], target: Tensor) -> None:
    """Fill ``target`` with the part of a piece that starts at ``offsets``. Every block it needs is verified.

    Raises:
        DamagedCheckpointError: a block is not what was written. ``target`` is partly filled then.
    """
    grid = stored.grid
    if target.numel() == 0:
        return
    if not stored.shape:
        target, offsets, stored = target.reshape(1), (0,), stored._replace(shape=(1,))
    first, end = offsets[0], offsets[0] + target.shape[0]
    whole_rows = tuple(target.shape[1:]) == stored.shape[1:]
    is_plain = target.device.type == "cpu" and target.is_contiguous() and not isinstance(target, StreamedPart)
    in_place = whole_rows and target.dtype is stored.dtype and is_plain
    buffer = None
    for row in grid.blocks(first, end):
        last = min(row + grid.rows_per_block, grid.num_rows)
        if in_place and first <= row and last <= end:
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


def verify_rows(stored: StoredRows, buffer: Tensor) -> None:
    """Read and verify every block of a piece. ``buffer`` is uint8 with the size of a block at least."""
    grid = stored.grid
    memory = memory_of(buffer)
    for row in grid.blocks():
        last = min(row + grid.rows_per_block, grid.num_rows)
        stored.read_block(row, memory[: (last - row) * grid.row_bytes])
