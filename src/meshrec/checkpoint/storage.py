"""The storage layer for torch.distributed.checkpoint (DCP): our own file formats, without pickle.

DCP plans which rank writes which piece (pieces that several ranks hold are written once), and which pieces a
rank must read. DCP's own formats store their table of contents as a pickle; ours is the manifest.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from meshrec.checkpoint.blocks import read_region
from meshrec.checkpoint.data_file import TensorPart, Written, write_data_file
from meshrec.checkpoint.manifest import Manifest, StoredPiece, TensorRecord
from meshrec.checkpoint.reading import open_data, stored_rows
from meshrec.checkpoint.snapshot import Snapshot


class RankFiles(NamedTuple):
    """The names of the files of one save. Every save has a new ``nonce``, so no file is overwritten."""

    folder: Path
    nonce: str

    def data(self, rank: int) -> Path:
        """Return the path of a rank's data file."""
        return self.folder / f"data-{self.nonce}-{rank:05d}.safetensors"

    def note(self, rank: int) -> Path:
        """Return the path of the file that a rank's background writer leaves when its data file is on
        disk.
        """
        return self.folder / f"note-{self.nonce}-{rank:05d}.json"


class Writer(StorageWriter):
    """Writes this rank's part of a save. Afterwards ``records`` returns the table of contents on the first
    rank.

    With ``background``, a snapshot of this process writes the data while training continues; ``snapshot``
    observes it.
    """

    def __init__(self, files: RankFiles, *, background: bool) -> None:
        self._files, self._background, self._rank = files, background, 0
        self.snapshot: Snapshot | None = None
        self.written: dict[int, Written] = {}
        """The finished files by rank; on the first rank, and only if the save is not in the background."""
        self.items: list[list[MetadataIndex]] = []
        """The items that each rank writes, in order; on the first rank."""
        self.metadata: dict[str, TensorStorageMetadata] = {}
        """The metadata of the tensors, by name; on the first rank."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Store which rank writes which items."""
        self.items = [[item.index for item in plan.items] for plan in plans]
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, or start to write it in the background."""
        parts = []
        for item in plan.items:
            assert item.tensor_data is not None
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            size = tuple(item.tensor_data.size)
            parts.append(TensorPart(item.index.fqn, tuple(item.index.offset or ()), size, tensor.detach()))
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        if not parts:
            return future
        path = self._files.data(self._rank)
        if self._background:
            note = self._files.note(self._rank)
            self.snapshot = Snapshot.start(path, parts, note)
            return future
        with ThreadPoolExecutor(1) as pool:
            written = write_data_file(path, parts, pool)
        future = Future()
        future.set_result([WriteResult(MetadataIndex(""), written.file.num_bytes, (self._rank, written))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Store the results of all ranks for the manifest."""
        self.metadata = {
            name: record
            for name, record in metadata.state_dict_metadata.items()
            if isinstance(record, TensorStorageMetadata)
        }
        self.written = dict(result.storage_data for of_rank in results for result in of_rank)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    @property
    def writing_ranks(self) -> list[int]:
        """The ranks that have something to write; known on the first rank."""
        return [rank for rank, items in enumerate(self.items) if items]

    def records(
        self, written: Mapping[int, Written], entries: Mapping[str, str]
    ) -> tuple[list[Written], dict[str, TensorRecord]]:
        """Return the files in the order of ranks, and the record of every tensor. ``entries`` maps tensors to
        entries.
        """
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in self.metadata}
        order = sorted(written)
        for number, rank in enumerate(order):
            for index, piece in zip(self.items[rank], written[rank].pieces, strict=True):
                pieces[index.fqn].append(piece._replace(file=number))
        records = {
            name: TensorRecord(
                entries[name], stored.properties.dtype, tuple(stored.size), tuple(pieces[name])
            )
            for name, stored in self.metadata.items()
        }
        return [written[rank] for rank in order], records


class CheckpointReader(StorageReader):
    """Reads the pieces that this rank needs, and verifies every block of them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the manifest as DCP's metadata."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=record.dtype),
                    torch.Size(record.shape),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape))
                        for piece in record.pieces
                    ],
                )
                for name, record in self._manifest.tensors.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because the manifest was read before."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, in the order of the bytes."""
        work: list[tuple[int, int, Any, TensorRecord, StoredPiece]] = []
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            record = self._manifest.tensors[item.storage_index.fqn]
            piece = _piece_at(record, tuple(item.storage_index.offset or ()))
            work.append((piece.file, piece.begin, item, record, piece))
        work.sort(key=lambda each: each[:2])
        for number in sorted({each[0] for each in work}):
            with open_data(self._folder, self._manifest, number) as descriptor:
                for _, _, item, record, piece in (each for each in work if each[0] == number):
                    target = planner.resolve_tensor(item).detach()
                    stored = stored_rows(
                        self._folder,
                        self._manifest,
                        descriptor,
                        item.storage_index.fqn,
                        record=record,
                        piece=piece,
                    )
                    read_region(stored, tuple(item.storage_offsets), target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _piece_at(record: TensorRecord, offset: tuple[int, ...]) -> StoredPiece:
    """Return the piece at an offset. Empty pieces may have the same offset, so it is the largest one."""
    found = [piece for piece in record.pieces if piece.offset == offset]
    return max(found, key=lambda piece: prod(piece.shape))
