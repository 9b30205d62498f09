"""The table of contents of a checkpoint: JSON, written last, with a checksum of itself.

A checkpoint is complete exactly when its manifest is there, whole, and every file that it names has its size.
Nothing in it is ever executed, and no name in it leads out of the folder.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshrec.checkpoint.agreement import DamagedCheckpointError
from meshrec.checkpoint.blocks import grid_of

MANIFEST = "manifest.json"
FORMAT = "meshrec.checkpoint"
VERSION = 1

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
"""Names of types, as safetensors files have them."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class DataFile(NamedTuple):
    """A data file: its size, and the bytes and checksum (CRC-32) of what stands before the first tensor."""

    name: str
    num_bytes: int
    header_bytes: int
    header_checksum: int


class StoredPiece(NamedTuple):
    """A rectangle of a tensor: where it is in the tensor, and where its bytes are.

    ``file``: position among the manifest's files. ``checksums``: CRC-32 of each block of ``rows_per_block``
    rows.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: int
    begin: int
    rows_per_block: int
    checksums: tuple[int, ...]


class TensorRecord(NamedTuple):
    """A whole tensor. ``entry``: the name in the saved state that it belongs to."""

    entry: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is in a checkpoint.

    ``values``: per entry of the state, what is not a tensor, as ``values.encode`` gives it. ``plans``: the
    sharding plan of every DistributedModelParallel in it.
    """

    step: int | None
    world_size: int
    files: tuple[DataFile, ...]
    tensors: Mapping[str, TensorRecord]
    values: Mapping[str, Any] = field(default_factory=dict)
    plans: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.num_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """One line of JSON, and one with its checksum."""
        body = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "step": self.step,
                "world_size": self.world_size,
                "files": [list(file) for file in self.files],
                "tensors": {name: _record_to_json(record) for name, record in self.tensors.items()},
                "values": self.values,
                "plans": self.plans,
            }
        ).encode()
        return body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "Manifest":
        """The inverse of ``to_bytes``.

        Raises:
            DamagedCheckpointError: unless this is exactly what ``to_bytes`` gave.
            ValueError: for a manifest of another version.
        """
        body, _, trailer = text.partition(b"\n")
        if trailer != f'{{"crc32": {zlib.crc32(body)}}}\n'.encode():
            raise DamagedCheckpointError("the manifest does not have the checksum that it was written with")
        data = json.loads(body)
        if data.get("format") != FORMAT or data.get("version") != VERSION:
            raise ValueError(
                f"this is {data.get('format')!r} of version {data.get('version')!r}, and {FORMAT!r} of "
                f"version {VERSION} was expected. Read it with the release that wrote it."
            )
        files = tuple(DataFile(*file) for file in data["files"])
        manifest = cls(
            step=data["step"],
            world_size=data["world_size"],
            files=files,
            tensors={name: _record_from_json(record) for name, record in data["tensors"].items()},
            values=data["values"],
            plans=data["plans"],
        )
        _check_places(manifest)
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, after a look at the sizes of its files.

    Raises:
        DamagedCheckpointError: names the file that is missing, cut, or not what was written.
    """
    try:
        manifest = Manifest.from_bytes((folder / MANIFEST).read_bytes())
        for file in manifest.files:
            size = (folder / file.name).stat().st_size
            if size != file.num_bytes:
                raise DamagedCheckpointError(f"{file.name} has {size} bytes instead of {file.num_bytes}")
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise DamagedCheckpointError(
            f"checkpoint {folder}: {name} is missing: it was not finished, or lost a file."
        ) from error
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {error}.") from error
    return manifest


def _check_places(manifest: Manifest) -> None:
    for file in manifest.files:
        if Path(file.name).name != file.name or file.name in ("", ".", ".."):
            raise DamagedCheckpointError(f"the manifest names a file outside of its folder: {file.name!r}")
    for name, record in manifest.tensors.items():
        for piece in record.pieces:
            end = piece.begin + prod(piece.shape) * record.dtype.itemsize
            inside = len(piece.offset) == len(piece.shape) == len(record.shape) and all(
                o >= 0 and n >= 0 and o + n <= total
                for o, n, total in zip(piece.offset, piece.shape, record.shape, strict=True)
            )
            blocks = grid_of(piece.shape, record.dtype, piece.rows_per_block).blocks()
            if piece.rows_per_block < 1 or len(blocks) != len(piece.checksums):
                raise DamagedCheckpointError(f"the manifest lacks checksums of {name!r}")
            in_file = 0 <= piece.file < len(manifest.files) and 0 <= piece.begin <= end
            if not inside or not in_file or end > manifest.files[piece.file].num_bytes:
                raise DamagedCheckpointError(f"the manifest places {name!r} outside of its file or tensor")


def _record_to_json(record: TensorRecord) -> list[Any]:
    pieces = [
        [*piece[:5], "".join(f"{checksum:08x}" for checksum in piece.checksums)] for piece in record.pieces
    ]
    return [record.entry, DTYPE_NAMES[record.dtype], record.shape, pieces]


def _record_from_json(data: list[Any]) -> TensorRecord:
    entry, dtype, shape, pieces = data
    return TensorRecord(
        entry,
        DTYPES[dtype],
        tuple(shape),
        tuple(
            StoredPiece(
                tuple(offset),
                tuple(piece_shape),
                file,
                begin,
                rows_per_block,
                tuple(int(checksums[i : i + 8], 16) for i in range(0, len(checksums), 8)),
            )
            for offset, piece_shape, file, begin, rows_per_block, checksums in pieces
        ),
    )
