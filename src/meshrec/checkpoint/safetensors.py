"""Read safetensors files. Invalid headers are rejected, such as byte ranges outside the file."""

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
from meshrec.durable.sealed import (
    check_fields,
    check_integer,
    check_integers,
    check_object,
    check_string,
    parse_json,
)

METADATA = "__metadata__"
"""Header key under which the format stores free text. A tensor must not have this name."""
_MAX_HEADER_BYTES = 100_000_000  # as in the format's own library
_MAX_DIMS = 64

Entry = tuple[torch.dtype, tuple[int, ...], int, int]
"""A tensor's dtype, shape, first byte and end byte. Bytes are counted from the end of the header."""


def read_whole(path: Path, sha256: str) -> dict[str, Tensor]:
    """Read a safetensors file into memory, verify the SHA-256, and return the tensors by name.

    Raises:
        DamageError: the SHA-256 differs, or the file is not a safetensors file.
        OSError: the file cannot be read.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        # Check the header first, so memory is allocated only for a safetensors file.
        _check_before_reading(descriptor, size, str(path))
        try:
            content = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise DamageError(f"{path} has {size:,} bytes, more than the available memory") from error
        memory = memory_of(content)
        read_into(descriptor, memory, 0, str(path))
    if hashlib.sha256(memory).hexdigest() != sha256:
        raise DamageError(f"{path} does not match its SHA-256")
    return tensors_of(content, str(path))


def read_mapped(path: Path) -> dict[str, Tensor]:
    """Map a safetensors file into memory, and return the tensors by name. Their values are not verified.

    Raises:
        DamageError: the file is not a safetensors file.
        OSError: the file cannot be read.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
    if size < 8:
        raise DamageError(f"{path} is not a safetensors file: it has only {size} bytes")
    # Not shared, so a write to a tensor does not change the file.
    return tensors_of(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8), str(path))


def tensors_of(content: Tensor, path: str) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file by name, as views of the file's bytes where possible.

    Raises:
        DamageError: the tensors do not tile the file from the header to the file's end.
    """
    length = _header_length(content[:8].numpy().tobytes(), len(content), path)
    entries = _entries(content[8 : 8 + length].numpy().tobytes(), len(content), path)
    tensors = {}
    for name, (dtype, shape, start, end) in entries.items():
        part = content[8 + length + start : 8 + length + end]
        if part.storage_offset() % 8:
            part = part.clone()  # torch needs values at multiples of their size
        tensors[name] = part.view(dtype).view(shape)
    return tensors


def _check_before_reading(descriptor: int, size: int, path: str) -> None:
    """Raise DamageError if an open file does not start with a valid safetensors header."""
    first = bytearray(min(8, size))
    read_into(descriptor, memoryview(first), 0, path)
    header = bytearray(_header_length(first, size, path))
    read_into(descriptor, memoryview(header), 8, path)
    _entries(bytes(header), size, path)


def _header_length(first: bytes | bytearray, size: int, path: str) -> int:
    """Return the size of the JSON header in bytes, which the first 8 bytes of the file contain."""
    length = int.from_bytes(first, "little") if size >= 8 else 0
    # The shortest JSON object, {}, has 2 bytes.
    if length + 8 > size or not 2 <= length <= _MAX_HEADER_BYTES:
        raise DamageError(f"{path} is not a safetensors file: the stated header exceeds the file")
    return length


def _entries(header: bytes, size: int, path: str) -> dict[str, Entry]:
    """Parse and validate a file's JSON header; see `entries_of`."""
    parsed = parse_json(header, f"{path} is not a safetensors file: its header")
    return entries_of(parsed, size - 8 - len(header), path)


def entries_of(header: Any, num_bytes: int, path: str) -> dict[str, Entry]:
    """Validate a parsed safetensors header, and return where each tensor is.

    Args:
        header: parsed JSON.
        num_bytes: number of bytes after the header in the file.
        path: file name for errors.

    Returns:
        Dtype, shape, first byte and end byte by tensor name.

    Raises:
        DamageError: an entry is invalid, or the tensors overlap or leave gaps.
    """
    entries: dict[str, Entry] = {}
    for name, record in check_object(header, f"{path}: the header").items():
        if name == METADATA:
            continue
        label = f"{path}: {name!r}"
        values = check_fields(record, label, ["dtype", "shape", "data_offsets"])
        dtype = DTYPES[check_string(values["dtype"], f"{label} has a type that", allowed=list(DTYPES))]
        shape = check_integers(values["shape"], f"the shape of {label}")
        start, end = check_integers(values["data_offsets"], f"the place of {label}", 2)
        check_integer(len(shape), f"the number of dimensions of {label}", 0, _MAX_DIMS)
        if not start <= end <= num_bytes or prod(shape) * dtype.itemsize != end - start:
            raise DamageError(f"{label} has shape {list(shape)} and bytes [{start}, {end}) of {num_bytes}")
        entries[name] = dtype, shape, start, end
    # Sorted by position, every tensor must start where the previous one ends, and the last end the file.
    position = 0
    for _, _, start, end in sorted(entries.values(), key=lambda entry: entry[2:]):
        if start != position:
            raise DamageError(f"{path}: bytes from {min(start, position)} on belong to no tensor or to two")
        position = end
    if position != num_bytes:
        raise DamageError(f"{path}: bytes from {position} on do not belong to a tensor")
    return entries
