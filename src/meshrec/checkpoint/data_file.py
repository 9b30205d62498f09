"""Data file of a rank, in safetensors format.

A whole tensor is stored under its name. A piece's name also has the range: ``name[0:5, 0:8]``.
"""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.blocks import FileWriter, grid_of, write_rows
from meshrec.checkpoint.manifest import DTYPE_NAMES, DataFile, StoredPiece, entry_name, piece_identity
from meshrec.durable import Created

# Tensor data offset: a multiple of the cache line size, so mapped tensors are aligned for every dtype.
_ALIGNMENT = 64


class TensorPart(NamedTuple):
    """Piece of a tensor to write.

    Attributes:
        name: tensor name.
        offset: piece start in the tensor, per dimension.
        size: tensor shape.
        tensor: piece values, on any device.
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    tensor: Tensor


class Written(NamedTuple):
    """A finished data file, with the pieces in order. ``StoredPiece.file`` is not set yet."""

    file: DataFile
    pieces: list[StoredPiece]

    def to_json(self) -> list[Any]:
        """Convert to JSON types, for the note left by a background writer."""
        return [list(self.file), [list(piece) for piece in self.pieces]]

    @classmethod
    def from_json(cls, data: list[Any]) -> "Written":
        """Parse `to_json` output."""
        file, pieces = data
        return cls(
            DataFile(*file),
            [
                StoredPiece(tuple(offset), tuple(shape), number, start, rows_per_block, tuple(checksums))
                for offset, shape, number, start, rows_per_block, checksums in pieces
            ],
        )


def write_data_file(path: Path, parts: Sequence[TensorPart], pool: Executor) -> Written:
    """Write pieces to a new file, and flush it to disk. If writing fails, the file is removed.

    Args:
        path: new file.
        parts: pieces to write.
        pool: computes checksums.
    """
    head = header(parts)
    descriptor, created = Created.file(path)
    try:
        writer = FileWriter(descriptor)
        writer.write(head)
        pieces = []
        for part in parts:
            shape, dtype = tuple(part.tensor.shape), part.tensor.dtype
            rows_per_block = grid_of(shape, dtype).rows_per_block
            # File number -1, because the manifest numbers files after all ranks have written theirs.
            piece = StoredPiece(part.offset, shape, -1, writer.position, rows_per_block, ())
            identity = piece_identity(part.name, dtype, part.size, piece)
            checksums = write_rows(writer, part.tensor, pool, identity)
            pieces.append(piece._replace(checksums=checksums))
        os.fsync(descriptor)
    except BaseException:
        created.remove()
        raise
    finally:
        os.close(descriptor)
    return Written(DataFile(path.name, writer.position, len(head), zlib.crc32(head)), pieces)


def header(parts: Sequence[TensorPart]) -> bytes:
    """Return the safetensors header for a file with these pieces.

    Raises:
        ValueError: unsupported dtype, or two pieces with equal names.
    """
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for part in parts:
        dtype, shape = part.tensor.dtype, tuple(part.tensor.shape)
        if dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{part.name} has type {dtype}, which a checkpoint does not hold; it takes "
                f"{list(DTYPE_NAMES)}."
            )
        entry = entry_name(part.name, part.offset, shape, part.size)
        if entry in shapes:
            raise ValueError(f"two tensors of the state would be called {entry!r} in one file. Rename one.")
        shapes[entry] = (dtype, shape)
    return header_of(shapes)


def header_of(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return the safetensors header for tensors with these dtypes and shapes, in this order.

    It has the JSON length (8 bytes), then JSON with names, dtypes, shapes and byte ranges.
    """
    entries: dict[str, Any] = {}
    start = 0
    for name, (dtype, shape) in shapes.items():
        end = start + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
