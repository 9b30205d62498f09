"""Storage layer for torch.distributed.checkpoint (DCP) that reads and writes MeshRec's file format.

DCP plans which rank writes a tensor piece if several ranks have it, and which pieces every rank must read.
DCP's own storage pickles metadata. MeshRec writes a manifest instead, so loading cannot execute code.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from meshrec.checkpoint.snapshot import Snapshot


class SavePaths(NamedTuple):
    """Paths of the files that a save writes.

    Attributes:
        folder: checkpoint folder.
        nonce: random ID of the save, part of every file name. No file of an earlier save is overwritten.
    """

    folder: Path
    nonce: str

    def data(self, rank: int) -> Path:
        """Return the path of a rank's data file."""
        return self.folder / f"data-{self.nonce}-{rank:05d}.safetensors"

    def completion_note(self, rank: int) -> Path:
        """Return the path of the file that a rank's background writer creates once its data is on disk."""
        return self.folder / f"note-{self.nonce}-{rank:05d}.json"


class Writer(StorageWriter):
    """DCP storage writer that writes this rank's data file.

    After the save, `records` returns the files and tensors of all ranks on rank 0.

    Args:
        files: paths of the save's files.
        background: whether a forked process writes the file while training continues.

    Attributes:
        snapshot: forked process, set by `write_data`. None without ``background``, or if this rank writes
            nothing.
        written: written data file by rank. Set on rank 0 by `finish`. With ``background``, set on rank 0 by
            ``PendingSave`` instead, from the completion notes.
        items: ``items[rank]`` lists DCP's indices (tensor name and offset) for the pieces in the rank's file,
            in file order. Set on rank 0 by `prepare_global_plan`.
        metadata: DCP's metadata by tensor name. Set on rank 0 by `finish`.
    """

    def __init__(self, files: SavePaths, *, background: bool) -> None:
        # The rank is set by `set_up_storage_writer`, which DCP calls before `write_data`.
        self._files, self._background, self._rank = files, background, 0
        self.snapshot: Snapshot | None = None
        self.written: dict[int, Written] = {}
        self.items: list[list[MetadataIndex]] = []
        self.metadata: dict[str, TensorStorageMetadata] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a writer is used for a single save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Record this process's rank, which DCP passes as ``rank``."""
        self._rank = kwargs.get("rank", 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Record which pieces every rank writes. DCP calls this method on rank 0."""
        # Used by `records`, to match pieces with the files of the ranks.
        self.items = [[item.index for item in plan.items] for plan in plans]
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data file, or start a process that writes it. DCP calls this on every rank."""
        parts = []
        for item in plan.items:
            assert item.tensor_data is not None
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            # Shape of the whole tensor, although `tensor` is only a piece.
            size = tuple(item.tensor_data.size)
            parts.append(TensorPart(item.index.fqn, tuple(item.index.offset or ()), size, tensor.detach()))
        # A background save reports through its note, so DCP gets a completed future.
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        # A rank without pieces writes no file.
        if not parts:
            return future
        path = self._files.data(self._rank)
        if self._background:
            from meshrec.checkpoint.snapshot import Snapshot

            note = self._files.completion_note(self._rank)
            self.snapshot = Snapshot.start(path, parts, note)
            return future
        with ThreadPoolExecutor(1) as pool:
            written = write_data_file(path, parts, pool)
        future = Future()
        future.set_result([WriteResult(MetadataIndex(""), written.file.num_bytes, (self._rank, written))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Record DCP's metadata and the files written by all ranks. DCP calls this on rank 0."""
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
        """Ranks that write a data file; ranks without pieces do not. Known only on rank 0."""
        return [rank for rank, items in enumerate(self.items) if items]

    def records(self, entries: Mapping[str, str]) -> tuple[list[Written], dict[str, TensorRecord]]:
        """Return the files and tensors to list in the manifest. Call it on rank 0 only.

        Args:
            entries: name of the state entry to which a tensor belongs, by tensor name.

        Returns:
            Written files in rank order, and tensor records by tensor name.
        """
        pieces: dict[str, list[StoredPiece]] = {name: [] for name in self.metadata}
        order = sorted(self.written)
        for number, rank in enumerate(order):
            for index, piece in zip(self.items[rank], self.written[rank].pieces, strict=True):
                # Files are numbered in rank order, without ranks that wrote no file.
                pieces[index.fqn].append(piece._replace(file=number))
        records = {
            name: TensorRecord(
                entries[name], stored.properties.dtype, tuple(stored.size), tuple(pieces[name])
            )
            for name, stored in self.metadata.items()
        }
        return [self.written[rank] for rank in order], records


class CheckpointReader(StorageReader):
    """DCP storage reader that reads the tensor pieces this rank needs, and verifies every block.

    Args:
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        sizes: shapes of the tensors to fill, by name. A tensor that is larger than in the checkpoint keeps
            its values outside the saved shape.
    """

    def __init__(self, folder: Path, manifest: Manifest, sizes: Mapping[str, tuple[int, ...]]) -> None:
        self._folder, self._manifest, self._sizes = folder, manifest, sizes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, because a reader is used for a single load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert the manifest to DCP metadata."""
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=record.dtype),
                    torch.Size(self._sizes.get(name, record.shape)),
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
        """Do nothing, because the manifest has been read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned pieces, file by file and in byte order."""
        work: list[tuple[int, int, Any, TensorRecord, StoredPiece]] = []
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            record = self._manifest.tensors[item.storage_index.fqn]
            piece = _piece_at(record, tuple(item.storage_index.offset or ()))
            work.append((piece.file, piece.start, item, record, piece))
        # Sequential reads are faster, and every file is opened (and its header verified) only once.
        work.sort(key=lambda request: request[:2])
        for number in sorted({request[0] for request in work}):
            with open_data(self._folder, self._manifest, number) as descriptor:
                for _, _, item, record, piece in (request for request in work if request[0] == number):
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
    """Return the piece that starts at an offset.

    An empty piece may start at the same offset as another one, so the largest is returned.
    """
    pieces = [piece for piece in record.pieces if piece.offset == offset]
    return max(pieces, key=lambda piece: prod(piece.shape))
