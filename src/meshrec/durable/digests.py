"""``digests.txt``: size and checksums of every file in a folder, in a format that C++ code also reads.

    meshrec-digests 1
    file 4194305 <sha256> <crc32 per 4 MiB block, 8 hexadecimal digits each> weights.bin
    end <crc32 of everything before this line>

An empty file has "-" instead of CRC-32s. The two kinds of checksum serve two purposes:

- CRC-32s detect accidental damage. Several threads compute them, so they are fast. On two cores, verifying a
  1 GiB package by CRC-32 took 1.2 times as long as reading it from disk with a single thread, and 2.7 times
  as long as reading it from the page cache. SHA-256 took 2.9 and 11.7 times as long.
- SHA-256s also detect forgery, if ``digests.txt`` itself is trusted. `tree_hash_of` is a multi-threaded
  alternative.
"""

import hashlib
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshrec.durable.files import DamageError, open_regular, read_regular, write_durably
from meshrec.ops.checksums import crc32_of_file

_log = logging.getLogger(__name__)

DIGESTS = "digests.txt"
BLOCK = 1 << 22
"""Bytes per block. Every block has a CRC-32."""
_FIRST_LINE = "meshrec-digests 1"
_FILE_LINE = re.compile(r"file (0|[1-9]\d{0,18}) ([0-9a-f]{64}) (-|(?:[0-9a-f]{8})+) (.+)")
_READ_SIZE = 1 << 24  # bytes per read for SHA-256
# Largest digests file accepted. It lists 2**25 blocks (8 digits each), that is, 128 TiB.
_MAX_BYTES = 1 << 28
_LOG_SECONDS = 5.0  # time between progress messages
_MAX_THREADS = 8  # threads for the checksums of a file
_Result = TypeVar("_Result")


class FileDigest(NamedTuple):
    """A file's entry in ``digests.txt``: size, SHA-256, and CRC-32s."""

    num_bytes: int
    """File size."""
    sha256: str
    """SHA-256 as 64 hexadecimal digits."""
    checksums: tuple[int, ...]
    """CRC-32 per block; a block has `BLOCK` bytes, and the last may be shorter."""


def sha256_of(path: Path, *, max_bytes: int | None = None) -> str:
    """Compute the SHA-256 of a regular file.

    Args:
        path: the file.
        max_bytes: maximum file size; None: unlimited.

    Returns:
        64 hexadecimal digits.

    Raises:
        DamageError: the path is not a regular file, or the file is larger than ``max_bytes``.
    """
    with open_regular(path) as descriptor:
        # The size of the open file: the path may be replaced meanwhile.
        num_bytes = os.fstat(descriptor).st_size
        if max_bytes is not None and num_bytes > max_bytes:
            raise DamageError(f"{path} has {num_bytes:,} bytes; at most {max_bytes:,} were expected")
        return _sha256(descriptor)


def checksums_of(descriptor: int, num_bytes: int, name: str) -> tuple[int, ...]:
    """Compute the CRC-32 of each block in an open file, with several threads.

    A block has `BLOCK` bytes. Logs the progress every 5 seconds.

    Args:
        descriptor: open file.
        num_bytes: file size.
        name: file name in messages.

    Returns:
        CRC-32 per block.

    Raises:
        DamageError: the file ends early.
    """

    def block_checksum(start: int) -> int | None:
        """Return the CRC-32 of the block at byte ``start``; None if the file ends inside the block."""
        return crc32_of_file(descriptor, start, min(BLOCK, num_bytes - start))

    starts = range(0, num_bytes, BLOCK)
    # In the order of the blocks, although threads finish in any order.
    checksums = []
    for number, checksum in enumerate(_map_in_threads(block_checksum, starts, name)):
        if checksum is None:
            raise DamageError(f"{name}: the file ends in block {number}, before its {num_bytes:,} bytes")
        checksums.append(checksum)
    return tuple(checksums)


def tree_hash_of(descriptor: int, num_bytes: int, name: str) -> str:
    """Compute a hash of a file's content, as hard to forge as a SHA-256 but computed by several threads.

    Every thread computes the SHA-256s of whole blocks (`BLOCK` bytes; the last block may be shorter). The
    result is the SHA-256 of these SHA-256s, concatenated in file order. The caller must also compare the file
    size.

    Args:
        descriptor: open file.
        num_bytes: file size.
        name: file name in messages.

    Returns:
        64 hexadecimal digits.

    Raises:
        DamageError: the file ends early.
    """

    def block_digest(start: int) -> bytes | None:
        """Return the SHA-256 of the block at byte ``start``; None if the file ends inside the block."""
        # ``pread`` takes a position, so threads can share the descriptor.
        length = min(BLOCK, num_bytes - start)
        block = os.pread(descriptor, length, start)
        return hashlib.sha256(block).digest() if len(block) == length else None

    # Digests have a fixed length, so their concatenation is unambiguous.
    tree = hashlib.sha256()
    for number, digest in enumerate(_map_in_threads(block_digest, range(0, num_bytes, BLOCK), name)):
        if digest is None:
            raise DamageError(f"{name}: the file ends in block {number}, before its {num_bytes:,} bytes")
        tree.update(digest)
    return tree.hexdigest()


def write_digests(folder: Path, *, sha256s: Mapping[str, str] | None = None) -> None:
    """Compute size and checksums for all files in a folder, and write them to ``digests.txt`` in the folder.

    Args:
        folder: folder without subfolders.
        sha256s: SHA-256s by file name, if already known; missing ones are computed.

    Raises:
        ValueError: a file name contains a line break.
    """
    lines = [_FIRST_LINE]
    # Sorted, so that equal folders have equal digests files.
    for path in sorted(folder.iterdir()):
        if path.name == DIGESTS:
            continue
        if "\n" in path.name or "\r" in path.name:
            raise ValueError(f"{path.name!r} has a line break in it. Rename the file.")
        with open_regular(path) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            # Two passes over the file; the second usually reads from the page cache.
            checksums = checksums_of(descriptor, num_bytes, path.name)
            sha256 = (sha256s or {}).get(path.name) or _sha256(descriptor)
            digest = FileDigest(num_bytes, sha256, checksums)
        hexadecimal = "".join(f"{checksum:08x}" for checksum in digest.checksums) or "-"
        lines.append(f"file {digest.num_bytes} {digest.sha256} {hexadecimal} {path.name}")
    content = ("\n".join(lines) + "\n").encode()
    # The last line detects damage to the digests themselves.
    write_durably(folder / DIGESTS, content + f"end {zlib.crc32(content):08x}\n".encode())


def read_digests(folder: Path) -> dict[str, FileDigest]:
    """Read ``digests.txt`` in a folder, and return the entries by file name. Does not check the files.

    Raises:
        DamageError: ``digests.txt`` is missing, damaged, or names a file outside the folder.
    """
    path = folder / DIGESTS
    try:
        content = read_regular(path, _MAX_BYTES)
    except OSError as error:
        raise DamageError(f"{path} cannot be read ({error.strerror})") from error
    return parse_digests(content, str(path))


def parse_digests(content: bytes, source: str) -> dict[str, FileDigest]:
    """Parse the content of a ``digests.txt`` file, and return the entries by file name.

    Raises:
        DamageError: the content is damaged, or names a file outside the folder.
    """
    # The last line has 13 bytes: "end ", 8 digits, "\n".
    # Check it before parsing, so damage is not reported as a format error.
    body, end = content[:-13], content[-13:]
    if end != f"end {zlib.crc32(body):08x}\n".encode():
        raise DamageError(f"{source} does not have the checksum that it was written with")
    try:
        first, *lines = body.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DamageError(f"{source} is not text ({error})") from error
    if first != _FIRST_LINE or not lines or lines.pop() != "":
        raise DamageError(f"{source} does not begin with {_FIRST_LINE!r}")
    digests: dict[str, FileDigest] = {}
    for line in lines:
        # Refuse names that would lead out of the folder, such as "../x": the file may be forged.
        match = _FILE_LINE.fullmatch(line)
        name = match[4] if match else ""
        if match is None or name in digests or Path(name).name != name or name in (".", "..") or "\0" in name:
            raise DamageError(f"{source} has the line {line[:100]!r}, which names no file of the folder")
        num_bytes, written = int(match[1]), "" if match[3] == "-" else match[3]
        # 8 digits per block, and the last block may be shorter.
        if len(written) != 8 * -(-num_bytes // BLOCK):
            raise DamageError(f"{source} lacks checksums of {name!r}")
        checksums = tuple(int(written[at : at + 8], 16) for at in range(0, len(written), 8))
        digests[name] = FileDigest(num_bytes, match[2], checksums)
    return digests


def verify_file(descriptor: int, digest: FileDigest, path: Path, *, sha256: bool = False) -> None:
    """Check that an open file has the expected size and CRC-32s.

    Args:
        descriptor: open file.
        digest: expected size and checksums.
        path: file path in messages.
        sha256: whether to compare the SHA-256, too. It detects forgery, but takes several times as long.

    Raises:
        DamageError: the file differs. The message names the first differing block.
    """
    num_bytes = os.fstat(descriptor).st_size
    # The cheap check first. It also makes the number of blocks equal below.
    if num_bytes != digest.num_bytes:
        raise DamageError(f"{path} has {num_bytes:,} bytes instead of {digest.num_bytes:,}")
    for number, checksum in enumerate(checksums_of(descriptor, num_bytes, str(path))):
        if checksum != digest.checksums[number]:
            raise DamageError(
                f"{path} is not what was written: bytes {number * BLOCK:,} to "
                f"{min(num_bytes, (number + 1) * BLOCK):,} have another checksum"
            )
    if sha256 and _sha256(descriptor) != digest.sha256:
        raise DamageError(f"{path} is not what was written: its SHA-256 is another")


def verify_folder(folder: Path, digests: Mapping[str, FileDigest], *, sha256: bool = False) -> None:
    """Check that all listed files in a folder have the expected size and CRC-32s; see `verify_file`.

    Args:
        folder: the folder. Files without an entry in ``digests`` are ignored.
        digests: expected sizes and checksums by file name.
        sha256: whether to compare SHA-256s, too.

    Raises:
        DamageError: a file is missing or differs. The message names the first such file.
    """
    for name, digest in digests.items():
        try:
            with open_regular(folder / name) as descriptor:
                verify_file(descriptor, digest, folder / name, sha256=sha256)
        except OSError as error:
            raise DamageError(f"{folder / name} cannot be read ({error.strerror})") from error


def _sha256(descriptor: int) -> str:
    """Return the SHA-256 of an open file, as 64 hexadecimal digits. Reads with a single thread."""
    digest, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, _READ_SIZE, offset):
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()


def _map_in_threads(
    function: Callable[[int], _Result], starts: Iterable[int], name: str
) -> Iterator[_Result]:
    """Call a function for every block, with several threads, and yield the results in block order.

    Logs the progress every 5 seconds. If there is a single block or a single processor, uses no threads and
    logs nothing.
    """
    all_starts = list(starts)
    # Only processors that this process may use count, as in a container.
    num_threads = min(len(all_starts), len(os.sched_getaffinity(0)), _MAX_THREADS)
    # Starting threads would take longer for a small file.
    if num_threads < 2:
        yield from map(function, all_starts)
        return
    start_time = last_report = time.monotonic()
    # Reading and hashing release the GIL, so threads run in parallel.
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checksums") as pool:
        for number, result in enumerate(pool.map(function, all_starts)):
            if (now := time.monotonic()) - last_report > _LOG_SECONDS:
                last_report = now
                _log.info(
                    "verifying %s: %.1f of %.1f GB after %.0f s",
                    name,
                    number * BLOCK / 1e9,
                    len(all_starts) * BLOCK / 1e9,
                    now - start_time,
                )
            yield result
