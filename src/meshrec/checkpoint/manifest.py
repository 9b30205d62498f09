"""The table of contents of a checkpoint: JSON, written last, with a checksum of itself.

A checkpoint is complete exactly when its manifest is there, whole, and every file that it names has its size.
Nothing in it is ever executed, and no name in it leads out of the folder.

A right checksum does not mean right content: a manifest may come from another program, or from another
checkpoint. So every number in it is checked before anything is allocated or read by it. Version 2 differs
from version 1 in what the checksum of a block covers, see `place_of`, and in that every tensor has the name
of its place in the values.

[Note: what a version of a file format promises]

A release reads the versions of its own format and those before it, as listed here, and refuses a later one
with an error that says what to do. It never guesses. A format gets a new version when a reader of the present
one would misread a file. Readers of checkpoints, deltas and packages also refuse unknown fields, so a new
field takes a new version as well.

- Checkpoints: this release writes version 2, and reads 1 and 2.
- Deltas (publishing.py): it writes format 2, and reads 1 and 2.
- Packages (export/manifest.py): it reads format 2 only. A package is compiled for one machine and one version
  of torch; ``meshrec export PACKAGE`` compiles it again.
- Plans (plan/sharding_plan.py) and features (data/features/features.py): version 1. Fields that an old plan
  lacks have defaults.
- A run's config.json and summary.json have no version: a field that is missing has its default, and a value
  that cannot be read back is an error (runs/saved_recipe.py).

The files of version 1 in tests/checkpoint/format1 hold later releases to this.
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
from meshrec.checkpoint.coverage import flaw_of_cover
from meshrec.checkpoint.values import decode, encode
from meshrec.durable import DamageError
from meshrec.durable.sealed import fields, integer, integers, items, mapping, parse, text

MANIFEST = "manifest.json"
FORMAT = "meshrec.checkpoint"
VERSION = 2
RANDOM = "random"
"""Entry of the random number generators. A state may not use the name."""
KINDS = ("module", "optimizer", "stateful", "plain")
"""Kinds of entries of a state."""
MOST_BYTES = 1 << 28
"""Largest size of a manifest, in bytes. A checkpoint of 100 TB has a manifest of a tenth of it."""

_FIELDS = ("format", "version", "step", "world_size", "files", "tensors", "values", "plans")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_CHECKSUMS = re.compile(r"(?:[0-9a-f]{8})*")
_LARGEST = (1 << 63) - 1
_MOST_DIMS = 64

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
"""Types by their names in safetensors files."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class DataFile(NamedTuple):
    """A data file: its size, and the size and CRC-32 of its header, which precedes the first tensor."""

    name: str
    num_bytes: int
    header_bytes: int
    header_checksum: int


class StoredPiece(NamedTuple):
    """A rectangle of a tensor: its place in the tensor, and the place of its bytes.

    ``file`` is an index into the manifest's files. ``checksums`` has the CRC-32 of each block of
    ``rows_per_block`` rows.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    begin: int
    rows_per_block: int
    checksums: tuple[int, ...]


class TensorRecord(NamedTuple):
    """A whole tensor. ``entry`` is the entry of the saved state that it belongs to."""

    entry: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


class PlacedPiece(NamedTuple):
    """A piece, with the name and the record of its tensor."""

    name: str
    record: TensorRecord
    piece: StoredPiece

    @property
    def num_bytes(self) -> int:
        """Bytes of the piece."""
        return prod(self.piece.shape) * self.record.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The table of contents of a checkpoint.

    ``values`` has the plain values of each entry, as ``values.encode`` returns them. ``plans`` has the
    sharding plan of every DistributedModelParallel in the state.
    """

    step: int | None
    world_size: int
    files: tuple[DataFile, ...]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    @cached_property
    def contents(self) -> list[list["PlacedPiece"]]:
        """The pieces in each file, in the order of their bytes."""
        found: list[list[PlacedPiece]] = [[] for _ in self.files]
        for name, record in self.tensors.items():
            for piece in record.pieces:
                found[piece.file].append(PlacedPiece(name, record, piece))
        for each in found:
            each.sort(key=lambda placed: (placed.piece.begin, placed.num_bytes))
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.num_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """Return one line of JSON, and a line with its checksum."""
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
        if len(body) + 100 > MOST_BYTES:
            raise ValueError(
                f"the plain values of the state take {len(body):,} bytes of JSON, and {MOST_BYTES:,} is the "
                "most. Save large lists of numbers as tensors."
            )
        return body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest":
        """Read the result of `to_bytes`, and check everything that can be checked without the data files.

        Raises:
            DamagedCheckpointError: the checksum differs, or the contents are not those of a whole checkpoint.
                The message can follow the name of the checkpoint.
            CheckpointError: the manifest has another version.
        """
        body, _, trailer = content.partition(b"\n")
        if trailer != f'{{"crc32": {zlib.crc32(body)}}}\n'.encode():
            raise DamagedCheckpointError("the manifest does not have the checksum that it was written with")
        try:
            return _parsed(body)
        except DamageError as error:
            raise DamagedCheckpointError(str(error)) from error


def place_of(name: str, dtype: torch.dtype, shape: Sequence[int], piece: StoredPiece) -> bytes:
    """Return the text that identifies the place of a piece's bytes.

    From version 2 on, the checksum of every block covers it. So the same bytes under another name, as another
    type, in another shape, or at another offset are noticed. The name of the file is left out because it
    differs from save to save: equal states have equal checksums.
    """
    where = [piece.offset, piece.shape, piece.rows_per_block, piece.begin]
    return json.dumps([name, DTYPE_NAMES[dtype], shape, *where]).encode()


def entry_name(name: str, offset: Sequence[int], shape: Sequence[int], size: Sequence[int]) -> str:
    """Return the name of a piece in its data file."""
    if tuple(shape) == tuple(size):
        return name
    return f"{name}[{', '.join(f'{o}:{o + n}' for o, n in zip(offset, shape, strict=True))}]"


def called(name: str) -> str:
    """Return a tensor's name for errors. It is cut short, because a name may be as long as its file."""
    return f"tensor {name[:200]!r}"


def _parsed(body: bytes) -> Manifest:
    said = mapping(parse(body, MANIFEST), MANIFEST)
    form, version = said.get("format"), said.get("version")
    if form != FORMAT or type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{MANIFEST} is {str(form)[:40]!r} of version {str(version)[:40]!r}, and this release reads "
            f"{FORMAT!r} of versions 1 to {VERSION}. Read it with the release that wrote it."
        )
    fields(said, MANIFEST, _FIELDS)
    step = said["step"]
    manifest = Manifest(
        step=None if step is None else integer(step, "the step", -_LARGEST - 1),
        world_size=integer(said["world_size"], "world_size", 1),
        files=tuple(_file_from_json(file) for file in items(said["files"], "the list of files")),
        tensors={
            name: _record_from_json(name, record)
            for name, record in mapping(said["tensors"], "the list of tensors").items()
        },
        values=mapping(said["values"], "values"),
        plans={entry: text(plan, "a plan") for entry, plan in mapping(said["plans"], "plans").items()},
        version=version,
    )
    _check_files(manifest)
    for name, record in manifest.tensors.items():
        _check_tensor(name, record, manifest)
    _check_contents(manifest)
    _check_values(manifest)
    return manifest


def _check_files(manifest: Manifest) -> None:
    for file in manifest.files:
        if not _FILE_NAME.fullmatch(file.name) or file.name == MANIFEST:
            raise DamageError(f"the manifest names a file that cannot be of this folder: {file.name[:100]!r}")
        if not 8 < file.header_bytes <= file.num_bytes:
            raise DamageError(f"{file.name} would have a header of {file.header_bytes:,} bytes")
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise DamageError("the manifest names a file twice")


def _check_tensor(name: str, record: TensorRecord, manifest: Manifest) -> None:
    what = called(name)
    if name != record.entry and not name.startswith(f"{record.entry}."):
        raise DamageError(f"{what} cannot belong to the entry {record.entry[:100]!r}")
    if prod(size for size in record.shape if size) * record.dtype.itemsize > _LARGEST:
        raise DamageError(f"{what} would have the shape {list(record.shape)}")
    for piece in record.pieces:
        end = piece.begin + prod(piece.shape) * record.dtype.itemsize
        if piece.file >= len(manifest.files) or end > manifest.files[piece.file].num_bytes:
            raise DamageError(f"{what} has a piece outside of its file")
        grid = grid_of(piece.shape, record.dtype, piece.rows_per_block)
        if piece.rows_per_block != max(1, BLOCK_BYTES // max(1, grid.row_bytes)):
            raise DamageError(f"{what} has a piece with blocks of {piece.rows_per_block} rows")
        if len(grid.blocks()) != len(piece.checksums):
            raise DamageError(f"{what} has a piece with {len(piece.checksums)} checksums")
    flaw = flaw_of_cover(record.shape, [piece[:2] for piece in record.pieces])
    if flaw is not None:
        raise DamageError(f"{what}: {flaw}")


def _check_contents(manifest: Manifest) -> None:
    """Check that the pieces in each file follow one another, from its header to its end."""
    for file, contents in zip(manifest.files, manifest.contents, strict=True):
        position = file.header_bytes
        for placed in contents:
            if placed.piece.begin != position:
                raise DamageError(
                    f"{file.name}, {called(placed.name)}: a piece begins at byte {placed.piece.begin:,} "
                    f"instead of {position:,}"
                )
            position += placed.num_bytes
        if position != file.num_bytes:
            raise DamageError(f"{file.name}: bytes from {position:,} on belong to no tensor")


def _check_values(manifest: Manifest) -> None:
    """Check that the values of every entry can be decoded, and hold its tensors, each in its place."""
    of_entry: dict[str, set[str]] = {}
    for name, record in manifest.tensors.items():
        of_entry.setdefault(record.entry, set()).add(name)
    for entry, value in manifest.values.items():
        what = f"the entry {entry[:100]!r}"
        said = fields(value, what, ("kind", "content"))
        text(said["kind"], f"the kind of {what}", allowed=KINDS)
        named: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}

        def tensor(name: Any, named: dict[str, Tensor] = named) -> Tensor:
            return named.setdefault(text(name, "the name of a tensor"), torch.empty(0))

        try:
            encode(decode(said["content"], tensor), entry, found)
        except (ValueError, TypeError, RecursionError) as error:
            raise DamageError(f"{what} cannot be read ({error})") from error
        own = of_entry.pop(entry, set())
        if named.keys() != own:
            differing = sorted(named.keys() ^ own)[0]
            raise DamageError(
                f"{what}: {called(differing)} stands in its values or among the tensors, not in both"
            )
        for name, stand_in in found.items():
            # A tensor has the name of its place. Version 1 wrote other names where a key was no plain value.
            if manifest.version > 1 and named.get(name) is not stand_in:
                raise DamageError(f"{what}: the place of {called(name)} is taken by another tensor")
    of_entry.pop(RANDOM, None)
    if of_entry:
        entry, names = next(iter(of_entry.items()))
        raise DamageError(f"{called(min(names))} belongs to the entry {entry[:100]!r}, which is missing")


def _record_to_json(record: TensorRecord) -> list[Any]:
    pieces = [
        [*piece[:5], "".join(f"{checksum:08x}" for checksum in piece.checksums)] for piece in record.pieces
    ]
    return [record.entry, DTYPE_NAMES[record.dtype], record.shape, pieces]


def _record_from_json(name: str, said: Any) -> TensorRecord:
    what = called(name)
    entry, dtype, shape, pieces = items(said, what, 4)
    return TensorRecord(
        text(entry, f"the entry of {what}"),
        DTYPES[text(dtype, f"the type of {what}", allowed=list(DTYPES))],
        _dims(shape, f"the shape of {what}"),
        tuple(_piece_from_json(piece, len(shape), what) for piece in items(pieces, f"the pieces of {what}")),
    )


def _piece_from_json(said: Any, num_dims: int, tensor: str) -> StoredPiece:
    what = f"a piece of {tensor}"
    offset, shape, file, begin, rows_per_block, checksums = items(said, what, 6)
    written = text(checksums, f"the checksums of {what}")
    if not _CHECKSUMS.fullmatch(written):
        raise DamageError(f"the checksums of {what} are not hexadecimal")
    return StoredPiece(
        integers(offset, f"the offset of {what}", num_dims),
        integers(shape, f"the shape of {what}", num_dims),
        integer(file, f"the file of {what}"),
        integer(begin, f"the first byte of {what}"),
        integer(rows_per_block, f"the rows per block of {what}", 1),
        tuple(int(written[at : at + 8], 16) for at in range(0, len(written), 8)),
    )


def _file_from_json(said: Any) -> DataFile:
    name, num_bytes, header_bytes, header_checksum = items(said, "a file", 4)
    return DataFile(
        text(name, "the name of a file"),
        integer(num_bytes, "the size of a file"),
        integer(header_bytes, "the size of a header"),
        integer(header_checksum, "the checksum of a header"),
    )


def _dims(said: Any, what: str) -> tuple[int, ...]:
    shape = integers(said, what)
    integer(len(shape), f"the number of dimensions in {what}", 0, _MOST_DIMS)
    return shape
