"""The data file of one rank: safetensors, which any reader of that format can open.

A whole tensor has its name as the key. The key of a piece also has its place: ``name[0:5, 0:8]``.
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
from meshrec.checkpoint.manifest import DTYPE_NAMES, DataFile, StoredPiece, entry_name, place_of

_ALIGNMENT = 64


class TensorPart(NamedTuple):
    """A tensor to write (on any device), and its offset in the whole tensor of shape ``size``."""

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    tensor: Tensor


class Written(NamedTuple):
    """A finished file, and the place of each part in it. ``StoredPiece.file`` is not set yet."""

    file: DataFile
    pieces: list[StoredPiece]

    def to_json(self) -> list[Any]:
        """Return plain JSON types, for another process."""
        return [list(self.file), [list(piece) for piece in self.pieces]]

    @classmethod
    def from_json(cls, data: list[Any]) -> "Written":
        """Read the result of ``to_json``."""
        file, pieces = data
        return cls(
            DataFile(*file),
            [
                StoredPiece(tuple(offset), tuple(shape), number, begin, rows_per_block, tuple(checksums))
                for offset, shape, number, begin, rows_per_block, checksums in pieces
            ],
        )


def write_data_file(path: Path, parts: Sequence[TensorPart], pool: Executor) -> Written:
    """Write a file, and wait until it is on disk. A failure leaves no file behind."""
    head = header(parts)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        writer = FileWriter(descriptor)
        writer.write(head)
        pieces = []
        for part in parts:
            shape, dtype = tuple(part.tensor.shape), part.tensor.dtype
            rows_per_block = grid_of(shape, dtype).rows_per_block
            piece = StoredPiece(part.offset, shape, -1, writer.position, rows_per_block, ())
            place = place_of(part.name, dtype, part.size, piece)
            checksums = write_rows(writer, part.tensor, pool, place)
            pieces.append(piece._replace(checksums=checksums))
        os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return Written(DataFile(path.name, writer.position, len(head), zlib.crc32(head)), pieces)


def header(parts: Sequence[TensorPart]) -> bytes:
    """Return the header of a file of these parts."""
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
    """Return a safetensors header: the length of the JSON, then names, types, shapes and places as JSON."""
    entries: dict[str, Any] = {}
    begin = 0
    for name, (dtype, shape) in shapes.items():
        end = begin + prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
