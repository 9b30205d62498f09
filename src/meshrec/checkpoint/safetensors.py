"""Strict reading of safetensors files: no header can point outside its file."""

import hashlib
import os
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrec.checkpoint.blocks import memory_of
from meshrec.checkpoint.manifest import DTYPES
from meshrec.durable import DamageError, open_regular
from meshrec.durable.files import read_into
from meshrec.durable.sealed import fields, integer, integers, mapping, parse, text

METADATA = "__metadata__"
"""The key of free text in a header, which no tensor may have as its name."""
_MOST_HEADER_BYTES = 100_000_000  # as in the format's own library
_MOST_DIMS = 64

Entry = tuple[torch.dtype, tuple[int, ...], int, int]
"""The type, the shape, the first byte and the end of a tensor in a file."""


def read_whole(path: Path, sha256: str) -> dict[str, Tensor]:
    """Read a file into memory, and return its tensors.

    Raises:
        DamageError: the file has another SHA-256, or is not of this format.
        OSError: the file cannot be read.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        _check_before_reading(descriptor, size, str(path))
        try:
            content = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise DamageError(f"{path} has {size:,} bytes, for which there is no memory") from error
        memory = memory_of(content)
        read_into(descriptor, memory, 0, str(path))
    if hashlib.sha256(memory).hexdigest() != sha256:
        raise DamageError(f"{path} is not what was written")
    return tensors_of(content, str(path))


def read_mapped(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a file into memory.

    Raises:
        DamageError: the file is not of this format.
        OSError: the file cannot be read.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
    if size < 8:
        raise DamageError(f"{path} is no safetensors file: it has {size} bytes")
    return tensors_of(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8), str(path))


def tensors_of(content: Tensor, path: str) -> dict[str, Tensor]:
    """Return the tensors of a file, uint8 [bytes], as views of it.

    Raises:
        DamageError: the tensors do not cover the file exactly, from the header to its end.
    """
    length = _header_length(content[:8].numpy().tobytes(), len(content), path)
    entries = _entries(content[8 : 8 + length].numpy().tobytes(), len(content), path)
    found = {}
    for name, (dtype, shape, begin, end) in entries.items():
        part = content[8 + length + begin : 8 + length + end]
        if part.storage_offset() % 8:
            part = part.clone()  # a number must start at a multiple of its size
        found[name] = part.view(dtype).view(shape)
    return found


def _check_before_reading(descriptor: int, size: int, path: str) -> None:
    """Check the header of an open file before memory is allocated for the sizes that it states."""
    first = bytearray(min(8, size))
    read_into(descriptor, memoryview(first), 0, path)
    header = bytearray(_header_length(first, size, path))
    read_into(descriptor, memoryview(header), 8, path)
    _entries(bytes(header), size, path)


def _header_length(first: bytes | bytearray, size: int, path: str) -> int:
    """Return the number of bytes of the header's JSON, which the first 8 bytes of the file state."""
    length = int.from_bytes(first, "little") if size >= 8 else 0
    if length + 8 > size or not 2 <= length <= _MOST_HEADER_BYTES:
        raise DamageError(f"{path} is no safetensors file: its header would be longer than the file")
    return length


def _entries(header: bytes, size: int, path: str) -> dict[str, Entry]:
    found = parse(header, f"{path} is no safetensors file: its header")
    return entries_of(found, size - 8 - len(header), path)


def entries_of(header: Any, num_bytes: int, path: str) -> dict[str, Entry]:
    """Return the type, the shape, the first byte and the end of each tensor of a header.

    Args:
        header: the JSON.
        num_bytes: number of bytes behind the header.
        path: name of the file in errors.

    Raises:
        DamageError: the tensors do not cover these bytes, one after the other.
    """
    entries: dict[str, Entry] = {}
    for name, record in mapping(header, f"{path}: the header").items():
        if name == METADATA:
            continue
        what = f"{path}: {name!r}"
        said = fields(record, what, ["dtype", "shape", "data_offsets"])
        dtype = DTYPES[text(said["dtype"], f"{what} has a type that", allowed=list(DTYPES))]
        shape = integers(said["shape"], f"the shape of {what}")
        begin, end = integers(said["data_offsets"], f"the place of {what}", 2)
        integer(len(shape), f"the number of dimensions of {what}", 0, _MOST_DIMS)
        if not begin <= end <= num_bytes or prod(shape) * dtype.itemsize != end - begin:
            raise DamageError(f"{what} has shape {list(shape)} and bytes [{begin}, {end}) of {num_bytes}")
        entries[name] = dtype, shape, begin, end
    position = 0
    for _, _, begin, end in sorted(entries.values(), key=lambda entry: entry[2:]):
        if begin != position:
            raise DamageError(f"{path}: bytes from {min(begin, position)} on are of no tensor, or of two")
        position = end
    if position != num_bytes:
        raise DamageError(f"{path}: bytes from {position} on are of no tensor")
    return entries
