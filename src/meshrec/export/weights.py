"""The weights of a package in memory, and the watch over the file that they are mapped from."""

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
    """The weights of a package, mapped from ``weights.bin`` or copied into memory.

    A mapped page shows what the file holds when the page is first read. So the file may only change by being
    replaced: a file that is written to or cut short damages the weights. `check` and `look_again` detect
    that.

    Args:
        path: ``weights.bin``.
        records: the tensors in it.
        private: copy the file into memory of this process instead of mapping it.
        larger_than_memory: whether lookups will miss pages; see ``ops.mapping.expect_misses``. None: if the
            file has more bytes than this process may use.
        digest: what the file must hold, if that is known.

    Attributes:
        tensors: the weights, in the order of ``records``.

    Raises:
        PackageError: the file is too short, cannot be read, or its copy differs from the digest.
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
            # Kept open: another file may get the path, and what is mapped is this one.
            self._descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = _stamp(self._descriptor)
        self._num_bytes = self._stamp[0]
        memory = torch.empty(0, dtype=torch.uint8)
        if private:
            memory = self._copied()
        elif self._num_bytes:
            if not has_kernels:
                _log.info("%s is mapped without the kernels: do not cut it short while it is in use", path)
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
        """Check that the file still has all its bytes; takes a microsecond.

        Call it after computing: what was computed from lost pages is wrong.

        Raises:
            PackageError: the file was cut short.
        """
        if self._mapping is None:
            return
        size = os.fstat(self._descriptor).st_size
        if size < self._num_bytes or lost_pages(self._mapping):
            raise PackageError(
                f"{self._path} was cut short while it was in use: it had {self._num_bytes:,} bytes and has "
                f"{size:,}. Copy the package again, and load it; never write into a package that is served."
            )

    def look_again(self) -> None:
        """Check the file as `check` does, and compare its content with the digest if it was written to.

        Raises:
            PackageError: the file was cut short, or holds something else than before.
        """
        self.check()
        stamp = _stamp(self._descriptor)
        if self._mapping is None or stamp == self._stamp:
            return
        if self._digest is not None:
            try:
                verify_file(self._descriptor, self._digest, self._path)
            except DamageError as error:
                raise PackageError(
                    f"{error}: it was written to while it was in use. Copy the package again, and load it; "
                    "never write into a package that is served."
                ) from error
        else:
            _log.warning("%s was written to while it was in use: scores may be wrong", self._path)
        self._stamp = stamp

    def _copied(self) -> Tensor:
        """Read the file into memory, and compare the copy itself with the digest."""
        memory = torch.empty(self._num_bytes, dtype=torch.uint8)
        view = memory.numpy().data
        try:
            for number, start in enumerate(range(0, self._num_bytes, BLOCK)):
                block = view[start : start + BLOCK]
                read_into(self._descriptor, block, start, str(self._path))
                if self._digest is not None and crc32(block) != self._digest.checksums[number]:
                    raise DamageError(f"{self._path} changed while it was read")
        except (DamageError, IndexError) as error:
            raise PackageError(f"{error}. Copy the package again from where it was exported.") from error
        return memory


def _stamp(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _tensor(memory: Tensor, record: WeightRecord, path: Path) -> Tensor:
    end = record.offset + record.num_bytes
    if end > len(memory):
        raise PackageError(f"{path} is too short for {record.name!r}. Export the model again.")
    try:
        return memory[record.offset : end].view(getattr(torch, record.dtype)).view(record.shape)
    except RuntimeError as error:  # sizes whose product is 0, or too large for torch
        raise PackageError(
            f"{record.name!r} cannot have the shape {record.shape} ({error}). Export the model again."
        ) from error
