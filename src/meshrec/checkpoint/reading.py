"""The manifest of a checkpoint, and the rows of its tensors: how its files are read."""

import errno
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path

import torch

from meshrec.checkpoint.agreement import REMEDY, CheckpointError, DamagedCheckpointError
from meshrec.checkpoint.blocks import StoredRows, verify_rows
from meshrec.checkpoint.manifest import (
    MANIFEST,
    MOST_BYTES,
    Manifest,
    StoredPiece,
    TensorRecord,
    called,
    entry_name,
    place_of,
)
from meshrec.checkpoint.safetensors import entries_of
from meshrec.durable import DamageError, open_regular, read_regular
from meshrec.durable.files import read_into
from meshrec.durable.sealed import parse

_LOST = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)
"""System errors which mean that a file does not exist. Others mean that it cannot be read."""


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint, and check it against the sizes and headers of the data files.

    Afterwards it is certain that pieces cover every tensor exactly, and that every piece lies where the
    manifest says, with that name, type and shape. The contents of pieces are verified when they are read.

    Raises:
        DamagedCheckpointError: a file is missing or damaged; the error names it, and the tensor.
        CheckpointError: the checkpoint has a later version, or the system cannot read it.
    """
    name = MANIFEST
    try:
        manifest = Manifest.from_bytes(read_regular(folder / MANIFEST, MOST_BYTES))
        for number, file in enumerate(manifest.files):
            name = file.name
            with open_data(folder, manifest, number) as descriptor:
                _check_header(descriptor, manifest, number)
    except OSError as error:
        raise _unreadable(folder, name, error) from error
    except (DamageError, DamagedCheckpointError) as error:
        raise _damaged(folder, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    return manifest


@contextmanager
def open_data(folder: Path, manifest: Manifest, number: int) -> Iterator[int]:
    """Open a data file for reading, after verifying its size and header.

    Raises:
        DamagedCheckpointError: the file is missing, too short or too long, or has another header.
        CheckpointError: the system cannot read it.
    """
    file = manifest.files[number]
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(open_regular(folder / file.name))
            size = os.fstat(descriptor).st_size
            if size != file.num_bytes:
                raise DamageError(f"{file.name} has {size:,} bytes instead of {file.num_bytes:,}")
            if zlib.crc32(_header(descriptor, file.header_bytes, file.name)) != file.header_checksum:
                raise DamageError(f"the header of {file.name} is not what was written")
        except OSError as error:
            raise _unreadable(folder, file.name, error) from error
        except DamageError as error:
            raise _damaged(folder, error) from error
        yield descriptor


def verify_data(folder: Path, manifest: Manifest) -> None:
    """Read every data file to its end, and compare the checksums.

    Raises:
        DamagedCheckpointError: rows of a tensor are not what was written; the error names both.
        CheckpointError: the system cannot read a file.
    """
    for number, contents in enumerate(manifest.contents):
        with open_data(folder, manifest, number) as descriptor:
            buffer = torch.empty(0, dtype=torch.uint8)
            for name, record, piece in contents:
                stored = stored_rows(folder, manifest, descriptor, name, record=record, piece=piece)
                if stored.grid.block_bytes > buffer.numel():
                    buffer = torch.empty(stored.grid.block_bytes, dtype=torch.uint8)
                verify_rows(stored, buffer)


def _check_header(descriptor: int, manifest: Manifest, number: int) -> None:
    """Compare the header of a data file, which lists its tensors as well, with the manifest."""
    file = manifest.files[number]
    head = _header(descriptor, file.header_bytes, file.name)
    if int.from_bytes(head[:8], "little") != len(head) - 8:
        raise DamageError(f"the header of {file.name} does not have {len(head):,} bytes")
    header = parse(bytes(head[8:]), f"the header of {file.name}")
    found = entries_of(header, file.num_bytes - file.header_bytes, file.name)
    for name, record, piece in manifest.contents[number]:
        begin = piece.begin - file.header_bytes
        end = begin + prod(piece.shape) * record.dtype.itemsize
        entry = entry_name(name, piece.offset, piece.shape, record.shape)
        if found.pop(entry, None) != (record.dtype, piece.shape, begin, end):
            raise DamageError(
                f"{file.name}, {called(name)}: the piece of type {record.dtype} and shape "
                f"{list(piece.shape)} at {list(piece.offset)} is not what the file's header says"
            )
    if found:
        raise DamageError(f"{file.name} has {called(min(found))}, and the manifest does not")


def _header(descriptor: int, num_bytes: int, name: str) -> bytearray:
    head = bytearray(num_bytes)
    read_into(descriptor, memoryview(head), 0, name)
    return head


def _damaged(folder: Path, error: Exception) -> DamagedCheckpointError:
    if isinstance(error, DamagedCheckpointError) and str(error).endswith(REMEDY):
        return error
    return DamagedCheckpointError(f"checkpoint {folder} is damaged: {error}. {REMEDY}")


def _unreadable(folder: Path, name: str, error: OSError) -> CheckpointError:
    if error.errno in _LOST:
        return DamagedCheckpointError(
            f"checkpoint {folder}: {name} is missing: it was not finished, or lost a file "
            f"({error.strerror}). {REMEDY}"
        )
    return CheckpointError(f"checkpoint {folder}: {name} cannot be read: {error.strerror}.")


def stored_rows(
    folder: Path, manifest: Manifest, descriptor: int, name: str, *, record: TensorRecord, piece: StoredPiece
) -> StoredRows:
    """Return a piece in its open file."""
    file = manifest.files[piece.file].name
    return StoredRows(
        descriptor,
        piece.begin,
        piece.shape,
        record.dtype,
        piece.rows_per_block,
        piece.checksums,
        what=f"checkpoint {folder} is damaged: {file}, {called(name)}",
        place=place_of(name, record.dtype, record.shape, piece) if manifest.version > 1 else b"",
    )
