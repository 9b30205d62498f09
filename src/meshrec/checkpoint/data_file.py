"""Write the data file of a rank, in safetensors format. It contains all tensor pieces saved by the rank.

A whole tensor is stored under its name. A piece's name ends with the index ranges: ``name[0:5, 0:8]``.
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
from meshrec.durable import CreatedPath

# Tensor data offset: a multiple of the cache line size, so mapped tensors are aligned for every dtype.
_ALIGNMENT = 64


class TensorPart(NamedTuple):
    """Piece (a rectangle) of a tensor, to be written.

    Attributes:
        name: name of the whole tensor.
        offset: start of the piece within the tensor, per dimension.
        size: shape of the whole tensor.
        tensor: values of the piece, on any device.
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    tensor: Tensor


class Written(NamedTuple):
    """A finished data file.

    Attributes:
        file: name, size and header checksum.
        pieces: pieces in file order. ``StoredPiece.file`` is -1 until the manifest numbers the files.
    """

    file: DataFile
    pieces: list[StoredPiece]

    def to_json(self) -> list[Any]:
        """Convert to JSON types, for the note file left by a background writer."""
        return [list(self.file), [list(piece) for piece in self.pieces]]

    @classmethod
    def from_json(cls, data: list[Any]) -> "Written":
        """Convert the output of `to_json` back."""
        file, pieces = data
        return cls(
            DataFile(*file),
            [
                StoredPiece(tuple(offset), tuple(shape), number, start, rows_per_block, tuple(checksums))
                for offset, shape, number, start, rows_per_block, checksums in pieces
            ],
        )


def write_data_file(path: Path, parts: Sequence[TensorPart], pool: Executor) -> Written:
    """Write tensor pieces to a new file, and flush the file to disk. If writing fails, remove the file.

    Args:
        path: new file.
        parts: pieces to write.
        pool: thread pool for checksums; see ``blocks.write_rows``.

    Raises:
        ValueError: a piece has an unsupported dtype, or two pieces have the same name.
    """
    # Positions of all tensors are known before the first is written, because they follow from dtypes and
    # shapes.
    head = header(parts)
    # Fails if the file exists: a save never overwrites a file.
    descriptor, created = CreatedPath.create_file(path)
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
        # The manifest is written only after this, so that a complete checkpoint is on disk.
        os.fsync(descriptor)
    # Also after KeyboardInterrupt, so that no partial file remains.
    except BaseException:
        created.remove()
        raise
    finally:
        os.close(descriptor)
    return Written(DataFile(path.name, writer.position, len(head), zlib.crc32(head)), pieces)


def header(parts: Sequence[TensorPart]) -> bytes:
    """Return the safetensors header for a file with these pieces in this order.

    Raises:
        ValueError: a piece has an unsupported dtype, or two pieces have the same name.
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

    The header consists of the JSON size (8 bytes, little endian), and JSON with every tensor's name, dtype,
    shape and byte range.
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
    # The format allows spaces after the JSON. They align the first tensor.
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
