"""Read and verify checkpoint manifests and data files."""

import errno
import os
import zlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import REMEDY, CheckpointError, DamagedCheckpointError
from meshrec.checkpoint.blocks import StoredRows, read_region, verify_rows
from meshrec.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    StoredPiece,
    TensorRecord,
    entry_name,
    piece_identity,
    tensor_label,
)
from meshrec.checkpoint.safetensors import entries_of
from meshrec.durable import DamageError, open_regular, read_regular
from meshrec.durable.files import read_into
from meshrec.durable.sealed import parse_json

_LOST = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG)
"""Values of ``OSError.errno`` for a missing file. After other errors, the file exists, but cannot be read."""


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest, and compare it with the sizes and headers of the data files.

    If this succeeds, the data files contain every tensor completely, under the listed names, dtypes, shapes
    and positions. The tensor values are not read here. They are verified when a load reads them.

    Args:
        folder: checkpoint folder.

    Raises:
        DamagedCheckpointError: a file is missing or damaged; the message names file and tensor.
        CheckpointError: the version is not supported, or a file cannot be read.
    """
    # The file being read, which an OSError below is about.
    name = MANIFEST
    try:
        manifest = Manifest.from_bytes(read_regular(folder / MANIFEST, MAX_MANIFEST_BYTES))
        for number, file in enumerate(manifest.files):
            name = file.name
            with open_data(folder, manifest, number) as descriptor:
                _check_header(descriptor, manifest, number)
    except OSError as error:
        raise _read_error(folder, name, error) from error
    except (DamageError, DamagedCheckpointError) as error:
        raise _damaged_error(folder, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {folder}: {error}") from error
    return manifest


@contextmanager
def open_data(folder: Path, manifest: Manifest, number: int) -> Iterator[int]:
    """Open a data file for reading, and verify size and header checksum.

    Args:
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        number: index of the file in ``manifest.files``.

    Yields:
        File descriptor, which is closed at the end of the ``with`` block.

    Raises:
        DamagedCheckpointError: the file is missing, or the size or header differs.
        CheckpointError: the file cannot be read.
    """
    file = manifest.files[number]
    # The stack also closes the file if a check below fails.
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(open_regular(folder / file.name))
            size = os.fstat(descriptor).st_size
            if size != file.num_bytes:
                raise DamageError(f"{file.name} has {size:,} bytes instead of {file.num_bytes:,}")
            if zlib.crc32(_header(descriptor, file.header_bytes, file.name)) != file.header_checksum:
                raise DamageError(f"the header of {file.name} does not match its checksum")
        except OSError as error:
            raise _read_error(folder, file.name, error) from error
        except DamageError as error:
            raise _damaged_error(folder, error) from error
        # Outside the ``try``: errors in the caller's block are not about this file.
        yield descriptor


def verify_data(
    folder: Path,
    manifest: Manifest,
    *,
    names: Collection[str] | None = None,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Read all blocks of the data files, and compare their checksums. Ranks can share the work.

    Args:
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        names: names of tensors to verify; None: all.
        rank: this rank, which verifies every ``world_size``-th block.
        world_size: number of ranks sharing the work.

    Raises:
        DamagedCheckpointError: a block differs from the bytes written; the message names tensor and rows.
        CheckpointError: a file cannot be read.
    """
    # Blocks of the selected pieces so far.
    num_blocks = 0
    for number, contents in enumerate(manifest.contents):
        # A file without selected tensors is not opened.
        selected = [part for part in contents if names is None or part[0] in names]
        if not selected:
            continue
        with open_data(folder, manifest, number) as descriptor:
            buffer = torch.empty(0, dtype=torch.uint8)
            for name, record, piece in selected:
                stored = stored_rows(folder, manifest, descriptor, name, record=record, piece=piece)
                if stored.grid.block_bytes > buffer.numel():
                    buffer = torch.empty(stored.grid.block_bytes, dtype=torch.uint8)
                # Blocks are numbered across pieces, because otherwise rank 0 would get all single-block
                # pieces.
                verify_rows(stored, buffer, slice((rank - num_blocks) % world_size, None, world_size))
                num_blocks += len(stored.grid.blocks())


def read_rows(
    folder: Path,
    manifest: Manifest,
    name: str,
    rows: tuple[int, int],
    *,
    opened: dict[int, int] | None = None,
) -> Tensor:
    """Read and verify a range of a tensor's rows, whichever pieces contain them.

    Args:
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        name: tensor name; a 0-d tensor has one row.
        rows: first row and end row (exclusive).
        opened: descriptors of open data files by file index, closed by the caller. If None, the files are
            opened and closed here.

    Returns:
        Tensor [rows[1] - rows[0], ...] with the stored dtype.

    Raises:
        DamagedCheckpointError: a block differs from the bytes written.
    """
    record = manifest.tensors[name]
    values = torch.empty((rows[1] - rows[0], *record.shape[1:]), dtype=record.dtype)
    with ExitStack() as stack:
        descriptors = {} if opened is None else opened
        for piece in record.pieces:
            # A 0-d tensor has one row.
            offset, shape = piece.offset or (0,), piece.shape or (1,)
            low, high = max(rows[0], offset[0]), min(rows[1], offset[0] + shape[0])
            # The piece has none of the requested rows.
            if low >= high or 0 in shape:
                continue
            if piece.file not in descriptors:
                descriptors[piece.file] = stack.enter_context(open_data(folder, manifest, piece.file))
            target = values[low - rows[0] : high - rows[0]]
            for dim in range(1, len(shape)):
                # A piece may have only some columns.
                target = target.narrow(dim, offset[dim], shape[dim])
            descriptor = descriptors[piece.file]
            stored = stored_rows(folder, manifest, descriptor, name, record=record, piece=piece)
            read_region(stored, (low - offset[0], *[0] * (len(shape) - 1)), target)
    return values


def _check_header(descriptor: int, manifest: Manifest, number: int) -> None:
    """Raise DamageError if a data file's header and the manifest list different tensors for the file."""
    file = manifest.files[number]
    head = _header(descriptor, file.header_bytes, file.name)
    if int.from_bytes(head[:8], "little") != len(head) - 8:
        raise DamageError(f"the header of {file.name} does not have {len(head):,} bytes")
    header = parse_json(bytes(head[8:]), f"the header of {file.name}")
    entries = entries_of(header, file.num_bytes - file.header_bytes, file.name)
    for name, record, piece in manifest.contents[number]:
        start = piece.start - file.header_bytes
        end = start + prod(piece.shape) * record.dtype.itemsize
        entry = entry_name(name, piece.offset, piece.shape, record.shape)
        if entries.pop(entry, None) != (record.dtype, piece.shape, start, end):
            raise DamageError(
                f"{file.name}, {tensor_label(name)}: the piece of type {record.dtype} and shape "
                f"{list(piece.shape)} at {list(piece.offset)} differs from the file's header"
            )
    # All tensors in the manifest have been removed from `entries`.
    if entries:
        raise DamageError(f"{file.name} has {tensor_label(min(entries))}, which the manifest lacks")


def _header(descriptor: int, num_bytes: int, name: str) -> bytearray:
    """Read the first ``num_bytes`` of an open data file, which are the header."""
    head = bytearray(num_bytes)
    read_into(descriptor, memoryview(head), 0, name)
    return head


def _damaged_error(folder: Path, error: Exception) -> DamagedCheckpointError:
    """Convert an error to a DamagedCheckpointError that names the checkpoint and says how to proceed."""
    # The message is complete already if a nested call has added the checkpoint and the advice.
    if isinstance(error, DamagedCheckpointError) and str(error).endswith(REMEDY):
        return error
    return DamagedCheckpointError(f"checkpoint {folder} is damaged: {error}. {REMEDY}")


def _read_error(folder: Path, name: str, error: OSError) -> CheckpointError:
    """Convert an OSError to a CheckpointError, or to a DamagedCheckpointError if the file is missing."""
    if error.errno in _LOST:
        return DamagedCheckpointError(
            f"checkpoint {folder}: {name} is missing: the save did not finish, or a file was lost "
            f"({error.strerror}). {REMEDY}"
        )
    return CheckpointError(f"checkpoint {folder}: {name} cannot be read: {error.strerror}.")


def stored_rows(
    folder: Path, manifest: Manifest, descriptor: int, name: str, *, record: TensorRecord, piece: StoredPiece
) -> StoredRows:
    """Return a description of a piece in an open data file, as `read_region` and `verify_rows` need it.

    Args:
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        descriptor: open data file.
        name: tensor name.
        record: tensor record.
        piece: tensor piece.
    """
    file = manifest.files[piece.file].name
    return StoredRows(
        descriptor,
        piece.start,
        piece.shape,
        record.dtype,
        piece.rows_per_block,
        piece.checksums,
        label=f"checkpoint {folder} is damaged: {file}, {tensor_label(name)}",
        identity=piece_identity(name, record.dtype, record.shape, piece) if manifest.version > 1 else b"",
    )
