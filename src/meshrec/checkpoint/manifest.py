"""Checkpoint manifest: a JSON file with a checksum, which lists all files and tensors in a checkpoint.

The manifest is written last. A checkpoint is complete if and only if the manifest exists and is intact, and
all listed files have the listed sizes. Nothing in the manifest is executed, and no name in it can refer to a
file outside the folder.

A training state has named entries, such as "model" and "optimizer". An entry's tensors are stored in the
ranks' data files, split into pieces (rectangles of a tensor). All other values are in the manifest as JSON.

A valid checksum does not prove valid content, because a manifest may come from another program or checkpoint.
Every value is therefore validated before it is used for an allocation or a read. Version 2 differs from
version 1 in two ways: block checksums also cover the position (see `piece_identity`), and every tensor is
named after its position in the entry's values (``model.weight`` is at key "weight" of entry "model").

[Note: file format versions] A release reads the format versions listed here. It rejects later versions with
an error that says what to do. A format gets a new version if readers of the current version would misread a
file. Checkpoint, delta and package readers also reject unknown fields, so a new field needs a new version as
well.

- Checkpoints: writes version 2, reads 1 and 2.
- Deltas (publishing.py): writes format 3, reads 1 to 3.
- Packages (export/manifest.py): reads format 2 only. A package is compiled for one machine and one torch
  version; ``meshrec export PACKAGE`` compiles it again.
- Plans (plan/sharding_plan.py) and features (data/features/features.py): version 1. Fields missing from an
  old plan have defaults.
- A run's config.json and summary.json are unversioned: missing fields get defaults, and an unparsable value
  is an error (runs/saved_recipe.py).

tests/checkpoint/format1 has version 1 files, which every later release must read.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import CheckpointError, DamagedCheckpointError
from meshrec.checkpoint.blocks import BLOCK_BYTES, grid_of
from meshrec.checkpoint.coverage import find_tiling_error
from meshrec.checkpoint.values import decode, encode
from meshrec.durable import DamageError
from meshrec.durable.sealed import (
    check_fields,
    check_integer,
    check_integers,
    check_list,
    check_object,
    check_string,
    parse_json,
)

MANIFEST = "manifest.json"
FORMAT = "meshrec.checkpoint"
VERSION = 2
RANDOM = "random"
"""Name of a state entry, reserved for random number generator states and error feedback residuals."""
KINDS = ("module", "optimizer", "stateful", "plain")
"""Kinds of state entries: `nn.Module`, optimizer, other object with ``state_dict()``, and plain value."""
MAX_MANIFEST_BYTES = 1 << 28
"""Maximum manifest size, 256 MiB. A 100 TB checkpoint needs about a tenth."""

_FIELDS = ("format", "version", "step", "world_size", "files", "tensors", "values", "plans")
# No slash and no leading dot, so that a name cannot refer to another folder or to a hidden file.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
# A CRC-32 takes 8 hexadecimal digits.
_CHECKSUMS = re.compile(r"(?:[0-9a-f]{8})*")
# Sizes and offsets must fit into int64, which torch and the C++ readers use.
_MAX_INT64 = (1 << 63) - 1
_MAX_DIMS = 64

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Supported dtypes by safetensors name."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class DataFile(NamedTuple):
    """Data file of a rank, as listed in the manifest.

    Attributes:
        name: file name.
        num_bytes: file size in bytes.
        header_bytes: header size in bytes; the first tensor follows the header.
        header_checksum: CRC-32 of the header.
    """

    name: str
    num_bytes: int
    header_bytes: int
    header_checksum: int


class StoredPiece(NamedTuple):
    """Piece (a rectangle) of a tensor in a data file.

    Attributes:
        offset: start of the piece within the tensor, per dimension.
        shape: shape of the piece.
        file: index of the data file in ``Manifest.files``.
        start: offset of the piece in the data file, in bytes.
        rows_per_block: rows in every checksummed block but the last; see ``blocks.py``.
        checksums: CRC-32 per block; see ``blocks.checksum_of``.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    start: int
    rows_per_block: int
    checksums: tuple[int, ...]


class TensorRecord(NamedTuple):
    """Tensor in a checkpoint.

    Attributes:
        entry: name of the state entry to which the tensor belongs.
        dtype: tensor dtype.
        shape: shape of the whole tensor.
        pieces: stored pieces, which together cover every element exactly once.
    """

    entry: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class TensorPiece(NamedTuple):
    """Stored piece together with the tensor to which it belongs.

    Attributes:
        name: tensor name.
        record: tensor record.
        piece: one of the record's pieces.
    """

    name: str
    record: TensorRecord
    piece: StoredPiece

    @property
    def num_bytes(self) -> int:
        """Size of the piece in bytes."""
        return prod(self.piece.shape) * self.record.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a checkpoint manifest.

    Attributes:
        step: training step; None if ``save`` was called without a step.
        world_size: number of ranks at the save.
        files: data files.
        tensors: tensor records by tensor name.
        values: by entry name, a dict with the entry's "kind" (one of `KINDS`) and its "content", encoded by
            ``values.encode``.
        plans: sharding plan (JSON) by entry name, for DistributedModelParallel entries.
        version: format version.
    """

    step: int | None
    world_size: int
    files: tuple[DataFile, ...]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    @cached_property
    def contents(self) -> list[list["TensorPiece"]]:
        """Pieces by data file: for every entry in ``files``, a list of the file's pieces in byte order."""
        by_file: list[list[TensorPiece]] = [[] for _ in self.files]
        for name, record in self.tensors.items():
            for piece in record.pieces:
                by_file[piece.file].append(TensorPiece(name, record, piece))
        for pieces in by_file:
            # An empty piece starts at the same byte as the next piece, and must come first.
            pieces.sort(key=lambda placed: (placed.piece.start, placed.num_bytes))
        return by_file

    @property
    def num_bytes(self) -> int:
        """Total data file size in bytes."""
        return sum(file.num_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """Serialize to two lines: the JSON, and the CRC-32 of the JSON.

        Raises:
            ValueError: the result would exceed `MAX_MANIFEST_BYTES`.
        """
        body = json.dumps(
            {
                "format": FORMAT,
                "version": self.version,
                "step": self.step,
                "world_size": self.world_size,
                "files": [list(file) for file in self.files],
                "tensors": {name: _record_to_json(record) for name, record in self.tensors.items()},
                "values": self.values,
                "plans": self.plans,
            }
        ).encode()
        # The checksum line takes less than 100 bytes.
        if len(body) + 100 > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"the state's plain values take {len(body):,} bytes of JSON; the limit is "
                f"{MAX_MANIFEST_BYTES:,}. Save large lists of numbers as tensors."
            )
        return body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest":
        """Parse the output of `to_bytes`, and check everything that can be checked without the data files.

        Raises:
            DamagedCheckpointError: the checksum or the content is invalid. Callers put the checkpoint's name
                before the message.
            CheckpointError: the version is not supported.
        """
        # JSON from json.dumps has no line breaks, so the first line is the body.
        body, _, trailer = content.partition(b"\n")
        if trailer != f'{{"crc32": {zlib.crc32(body)}}}\n'.encode():
            raise DamagedCheckpointError("the manifest's checksum does not match its content")
        try:
            return _parse_manifest(body)
        except DamageError as error:
            raise DamagedCheckpointError(str(error)) from error


def piece_identity(name: str, dtype: torch.dtype, shape: Sequence[int], piece: StoredPiece) -> bytes:
    """Return bytes that identify a piece by tensor name, dtype, shape and position.

    Since format version 2, block checksums cover these bytes (see ``blocks.checksum_of``). A reader therefore
    detects intact values stored under another name, dtype, shape or offset.

    Args:
        name: tensor name.
        dtype: tensor dtype.
        shape: tensor shape.
        piece: the piece; ``file`` and ``checksums`` are ignored.
    """
    # Without the file name, which changes with every save, so equal states have equal checksums.
    where = [piece.offset, piece.shape, piece.rows_per_block, piece.start]
    return json.dumps([name, DTYPE_NAMES[dtype], shape, *where]).encode()


def entry_name(name: str, offset: Sequence[int], shape: Sequence[int], size: Sequence[int]) -> str:
    """Return the name of a piece in a data file: ``name[0:5, 0:8]``, or ``name`` for a whole tensor.

    Args:
        name: tensor name.
        offset: start of the piece within the tensor, per dimension.
        shape: shape of the piece.
        size: shape of the whole tensor.
    """
    if tuple(shape) == tuple(size):
        return name
    return f"{name}[{', '.join(f'{o}:{o + n}' for o, n in zip(offset, shape, strict=True))}]"


def tensor_label(name: str) -> str:
    """Return a description of a tensor for error messages, such as ``tensor 'model.weight'``.

    The name is cut to 200 characters, because a hostile manifest may contain very long names.
    """
    return f"tensor {name[:200]!r}"


def _parse_manifest(body: bytes) -> Manifest:
    """Parse and validate manifest JSON.

    Raises:
        DamageError: the content is invalid.
        CheckpointError: the version is not supported.
    """
    values = check_object(parse_json(body, MANIFEST), MANIFEST)
    form, version = values.get("format"), values.get("version")
    # Check the version before the fields, because other versions may have other fields.
    # `type`, because True is an instance of int.
    if form != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{MANIFEST} is {str(form)[:40]!r} of version {str(version)[:40]!r}, and this release reads "
            f"{FORMAT!r} of versions 1 to {VERSION}. Read it with the release that wrote it."
        )
    check_fields(values, MANIFEST, _FIELDS)
    step = values["step"]
    manifest = Manifest(
        step=None if step is None else check_integer(step, "the step", -_MAX_INT64 - 1),
        world_size=check_integer(values["world_size"], "world_size", 1),
        files=tuple(_file_from_json(file) for file in check_list(values["files"], "the list of files")),
        tensors={
            name: _record_from_json(name, record)
            for name, record in check_object(values["tensors"], "the list of tensors").items()
        },
        values=check_object(values["values"], "values"),
        plans={
            entry: check_string(plan, "a plan")
            for entry, plan in check_object(values["plans"], "plans").items()
        },
        version=version,
    )
    # In this order: ``contents`` indexes files by numbers which ``_check_tensor`` has checked.
    _check_files(manifest)
    for name, record in manifest.tensors.items():
        _check_tensor(name, record, manifest)
    _check_contents(manifest)
    _check_values(manifest)
    return manifest


def _check_files(manifest: Manifest) -> None:
    """Raise DamageError if a file is outside the folder, listed twice, or has an impossible header size."""
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name) or file.name == MANIFEST:
            raise DamageError(f"the manifest lists a file outside the folder: {file.name[:100]!r}")
        # A safetensors header has 8 bytes for the JSON size, and then the JSON.
        if not 8 < file.header_bytes <= file.num_bytes:
            raise DamageError(f"{file.name} has an impossible header size: {file.header_bytes:,} bytes")
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise DamageError("the manifest lists a file twice")


def _check_tensor(name: str, record: TensorRecord, manifest: Manifest) -> None:
    """Raise DamageError if a tensor's record is inconsistent.

    The name must start with the entry. All pieces must lie inside their files and have the expected blocks.
    Every tensor element must be in exactly one piece.
    """
    label = tensor_label(name)
    if name != record.entry and not name.startswith(f"{record.entry}."):
        raise DamageError(f"{label} does not belong to the entry {record.entry[:100]!r}")
    # Zeros are left out of the product, to bound the other dimensions of an empty tensor as well.
    if prod(size for size in record.shape if size) * record.dtype.itemsize > _MAX_INT64:
        raise DamageError(f"{label} has an impossible shape: {list(record.shape)}")
    for piece in record.pieces:
        end = piece.start + prod(piece.shape) * record.dtype.itemsize
        if piece.file >= len(manifest.files) or end > manifest.files[piece.file].num_bytes:
            raise DamageError(f"{label} has a piece outside its file")
        grid = grid_of(piece.shape, record.dtype, piece.rows_per_block)
        # Other block sizes would let a hostile manifest choose the memory of a read.
        if piece.rows_per_block != max(1, BLOCK_BYTES // max(1, grid.row_bytes)):
            raise DamageError(f"{label} has a piece with blocks of {piece.rows_per_block} rows")
        if len(grid.blocks()) != len(piece.checksums):
            raise DamageError(f"{label} has a piece with {len(piece.checksums)} checksums")
    # Without this check, a missing piece would leave uninitialized values in a loaded tensor.
    flaw = find_tiling_error(record.shape, [piece[:2] for piece in record.pieces])
    if flaw is not None:
        raise DamageError(f"{label}: {flaw}")


def _check_contents(manifest: Manifest) -> None:
    """Raise DamageError if the pieces in a data file overlap or leave gaps."""
    for file, contents in zip(manifest.files, manifest.contents, strict=True):
        position = file.header_bytes
        for placed in contents:
            if placed.piece.start != position:
                raise DamageError(
                    f"{file.name}, {tensor_label(placed.name)}: a piece starts at byte "
                    f"{placed.piece.start:,} instead of {position:,}"
                )
            position += placed.num_bytes
        if position != file.num_bytes:
            raise DamageError(f"{file.name}: bytes after {position:,} do not belong to a tensor")


def _check_values(manifest: Manifest) -> None:
    """Raise DamageError if an entry's values are invalid, or do not refer to exactly the entry's tensors.

    The values refer to tensors by name. The check decodes the values with an empty placeholder for every
    tensor, and encodes them again. Encoding names a tensor after its position in the values. If a placeholder
    gets another name than before, the manifest has the tensor at a wrong position.
    """
    of_entry: dict[str, set[str]] = {}
    for name, record in manifest.tensors.items():
        of_entry.setdefault(record.entry, set()).add(name)
    for entry, value in manifest.values.items():
        label = f"the entry {entry[:100]!r}"
        encoded = check_fields(value, label, ("kind", "content"))
        check_string(encoded["kind"], f"the kind of {label}", allowed=KINDS)
        named: dict[str, Tensor] = {}
        decoded: dict[str, Tensor] = {}

        # The same stand-in for the same name, so that identity shows which name belongs to a position.
        def tensor(name: Any, named: dict[str, Tensor] = named) -> Tensor:
            """Return the placeholder for the tensor ``name``. Repeated calls return the same object."""
            return named.setdefault(check_string(name, "the name of a tensor"), torch.empty(0))

        try:
            encode(decode(encoded["content"], tensor), entry, decoded)
        except (ValueError, TypeError, RecursionError) as error:
            raise DamageError(f"{label} cannot be read ({error})") from error
        tensor_names = of_entry.pop(entry, set())
        if named.keys() != tensor_names:
            differing = sorted(named.keys() ^ tensor_names)[0]
            raise DamageError(
                f"{label}: {tensor_label(differing)} is missing from either the values or the tensors"
            )
        for name, stand_in in decoded.items():
            # Since version 2, tensors are named by position. Version 1 differs for keys other than strings.
            if manifest.version > 1 and named.get(name) is not stand_in:
                raise DamageError(f"{label}: another tensor is at the position of {tensor_label(name)}")
    # Random number generator states belong to an entry without values.
    of_entry.pop(RANDOM, None)
    if of_entry:
        entry, names = next(iter(of_entry.items()))
        raise DamageError(
            f"{tensor_label(min(names))} belongs to the entry {entry[:100]!r}, which is missing"
        )


def _record_to_json(record: TensorRecord) -> list[Any]:
    """Convert a tensor record to JSON types. Checksums become a single hexadecimal string."""
    pieces = [
        [*piece[:5], "".join(f"{checksum:08x}" for checksum in piece.checksums)] for piece in record.pieces
    ]
    return [record.entry, DTYPE_NAMES[record.dtype], record.shape, pieces]


def _record_from_json(name: str, encoded: Any) -> TensorRecord:
    """Parse and validate a tensor record.

    Raises:
        DamageError: the value is invalid.
    """
    label = tensor_label(name)
    entry, dtype, shape, pieces = check_list(encoded, label, 4)
    return TensorRecord(
        check_string(entry, f"the entry of {label}"),
        DTYPES[check_string(dtype, f"the type of {label}", allowed=list(DTYPES))],
        _shape_from_json(shape, f"the shape of {label}"),
        tuple(
            _piece_from_json(piece, len(shape), label)
            for piece in check_list(pieces, f"the pieces of {label}")
        ),
    )


def _piece_from_json(encoded: Any, num_dims: int, tensor: str) -> StoredPiece:
    """Parse a piece of a tensor. Raise DamageError if the value is invalid."""
    label = f"a piece of {tensor}"
    offset, shape, file, start, rows_per_block, checksums = check_list(encoded, label, 6)
    written = check_string(checksums, f"the checksums of {label}")
    if not _CHECKSUMS.fullmatch(written):
        raise DamageError(f"the checksums of {label} are not hexadecimal")
    return StoredPiece(
        check_integers(offset, f"the offset of {label}", num_dims),
        check_integers(shape, f"the shape of {label}", num_dims),
        check_integer(file, f"the file of {label}"),
        check_integer(start, f"the first byte of {label}"),
        check_integer(rows_per_block, f"the rows per block of {label}", 1),
        tuple(int(written[at : at + 8], 16) for at in range(0, len(written), 8)),
    )


def _file_from_json(encoded: Any) -> DataFile:
    """Parse and validate a data file's entry.

    Raises:
        DamageError: the value is invalid.
    """
    name, num_bytes, header_bytes, header_checksum = check_list(encoded, "a file", 4)
    return DataFile(
        check_string(name, "the name of a file"),
        check_integer(num_bytes, "the size of a file"),
        check_integer(header_bytes, "the size of a header"),
        check_integer(header_checksum, "the checksum of a header"),
    )


def _shape_from_json(encoded: Any, label: str) -> tuple[int, ...]:
    """Parse and validate a tensor shape. ``label`` names the shape in errors."""
    shape = check_integers(encoded, label)
    check_integer(len(shape), f"the number of dimensions in {label}", 0, _MAX_DIMS)
    return shape
