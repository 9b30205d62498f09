"""Package weights, mapped from ``weights.bin`` or copied, and detection of changes to the mapped file."""

import logging
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshrec.durable import DamageError, FileDigest, open_regular, verify_file
from meshrec.durable.digests import BLOCK
from meshrec.durable.files import read_into
from meshrec.export.archive import PackageError
from meshrec.export.manifest import WeightRecord
from meshrec.ops.checksums import crc32
from meshrec.ops.library import has_kernels
from meshrec.ops.mapping import expect_misses, lost_pages, map_file, memory_limit

_log = logging.getLogger(__name__)


class Weights:
    """Package weights as tensors, mapped from ``weights.bin`` or copied to memory.

    If another program writes to the mapped file, the weights change. If it truncates the file, weights are
    lost. `check` detects a truncation, and `check_changes` also changed content. Replacing the file by
    renaming another file is safe.

    Args:
        path: ``weights.bin`` in a package.
        records: names, types and positions of the tensors in the file.
        private: whether to copy the file to memory instead of mapping it.
        larger_than_memory: whether lookups must expect rows that are not in memory; see
            ``ops.mapping.expect_misses``. None: True if the file is larger than this process's memory limit.
        digest: checksums of the expected content. None: they are not known, so the content is not verified.

    Attributes:
        tensors: weights, in the same order as ``records``. Writes to them do not change the file.

    Raises:
        PackageError: the file is too short or unreadable, or the copy does not match the digest.
    """

    def __init__(
        self,
        path: Path,
        records: Sequence[WeightRecord],
        *,
        private: bool = False,
        larger_than_memory: bool | None = None,
        digest: FileDigest | None = None,
    ) -> None:
        self._path, self._digest, self._mapping = path, digest, None
        with open_regular(path) as descriptor:
            # Keep the mapped file open, because another file may replace it at the path.
            self._descriptor = os.dup(descriptor)
        # Registered at once, so that the descriptor is closed even if the mapping below fails.
        weakref.finalize(self, os.close, self._descriptor)
        # Size and modification time at the last verification.
        self._stamp = _size_and_time(self._descriptor)
        self._num_bytes = self._stamp[0]
        # An empty file cannot be mapped.
        memory = torch.empty(0, dtype=torch.uint8)
        if private:
            memory = self._copy_file()
        elif self._num_bytes:
            if not has_kernels:
                _log.info("%s is mapped without the kernels: do not truncate it while it is in use", path)
            try:
                self._mapping = map_file(self._descriptor, self._num_bytes)
            except (OSError, RuntimeError) as error:
                raise PackageError(
                    f"{path} cannot be mapped into memory ({error}). Free address space, or use a machine "
                    "with more memory."
                ) from error
            memory = self._mapping.content
            if larger_than_memory or (larger_than_memory is None and self._num_bytes > memory_limit()):
                expect_misses(self._mapping)
        self.tensors = [_tensor(memory, record, path) for record in records]

    def check(self) -> None:
        """Check that the file has not been truncated; takes a microsecond.

        Call this method after a computation, because results from lost pages are wrong.

        Raises:
            PackageError: the file was truncated.
        """
        if self._mapping is None:
            return
        size = os.fstat(self._descriptor).st_size
        # Both tests: a file that was truncated and then extended has its old size, but pages may have been
        # lost.
        if size < self._num_bytes or lost_pages(self._mapping):
            raise PackageError(
                f"{self._path} was truncated while in use: it had {self._num_bytes:,} bytes and has "
                f"{size:,}. Copy the package again, and load it; never write to a served package."
            )

    def check_changes(self) -> None:
        """Check that the file has not been truncated, and verify the content if it was written to.

        If the digest is not known, changed content is only logged as a warning.

        Raises:
            PackageError: the file was truncated or changed.
        """
        self.check()
        stamp = _size_and_time(self._descriptor)
        # A copy in memory does not change with the file.
        if self._mapping is None or stamp == self._stamp:
            return
        if self._digest is not None:
            try:
                verify_file(self._descriptor, self._digest, self._path)
            except DamageError as error:
                raise PackageError(
                    f"{error}: it was written to while in use. Copy the package again, and load it; "
                    "never write to a served package."
                ) from error
        else:
            _log.warning("%s was written to while in use: scores may be wrong", self._path)
        self._stamp = stamp

    def _copy_file(self) -> Tensor:
        """Read the file to memory, and verify the copy block by block if the digest is known."""
        memory = torch.empty(self._num_bytes, dtype=torch.uint8)
        view = memory.numpy().data
        try:
            for number, start in enumerate(range(0, self._num_bytes, BLOCK)):
                block = view[start : start + BLOCK]
                read_into(self._descriptor, block, start, str(self._path))
                if self._digest is not None and crc32(block) != self._digest.checksums[number]:
                    raise DamageError(f"{self._path} changed while it was read")
        # IndexError: the digest has checksums for fewer blocks.
        except (DamageError, IndexError) as error:
            raise PackageError(f"{error}. Copy the package again from where it was exported.") from error
        return memory


def _size_and_time(descriptor: int) -> tuple[int, int]:
    """Return a file's size in bytes and modification time in nanoseconds."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _tensor(memory: Tensor, record: WeightRecord, path: Path) -> Tensor:
    """Return a tensor as a view of the bytes at the record's position."""
    end = record.offset + record.num_bytes
    if end > len(memory):
        raise PackageError(f"{path} is too short for {record.name!r}. Export the model again.")
    try:
        return memory[record.offset : end].view(getattr(torch, record.dtype)).view(record.shape)
    except RuntimeError as error:  # sizes with product 0, or too large for torch
        raise PackageError(
            f"{record.name!r} cannot have the shape {record.shape} ({error}). Export the model again."
        ) from error
