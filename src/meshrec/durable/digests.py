"""``digests.txt``: what every file of a folder must hold, in lines that C++ reads as well.

    meshrec-digests 1
    file 4194305 <sha256> <crc32 of each block of 4 MiB, 8 hexadecimal digits each> weights.bin
    end <crc32 of all that stands before this line>

Several threads compare the CRC-32s, to find accidents; an empty file has "-" in place of them. On two cores,
a package of 1 GiB took 1.2 times as long as one thread takes to read it from the disk, and 2.7 times as long
from the page cache; SHA-256 in one thread took 2.9 and 11.7 times as long. The SHA-256s tell what a forger
changed, if this file itself can be trusted; see `tree_hash_of` for a hash that several threads compute.
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
_FIRST_LINE = "meshrec-digests 1"
_FILE_LINE = re.compile(r"file (0|[1-9]\d{0,18}) ([0-9a-f]{64}) (-|(?:[0-9a-f]{8})+) (.+)")
_READ_AT_A_TIME = 1 << 24
_MOST_BYTES = 1 << 28
_SECONDS_BETWEEN_LINES = 5.0
_MOST_THREADS = 8
_Result = TypeVar("_Result")


class FileDigest(NamedTuple):
    """The expected content of a file: size, SHA-256, and the CRC-32 of each block of `BLOCK` bytes."""

    num_bytes: int
    sha256: str
    checksums: tuple[int, ...]


def sha256_of(path: Path, *, most: int | None = None) -> str:
    """Compute the SHA-256 of a regular file, of at most ``most`` bytes.

    Raises:
        DamageError: for anything but a regular file, and a longer one.
    """
    with open_regular(path) as descriptor:
        num_bytes = os.fstat(descriptor).st_size
        if most is not None and num_bytes > most:
            raise DamageError(f"{path} has {num_bytes:,} bytes; at most {most:,} were expected")
        return _sha256(descriptor)


def checksums_of(descriptor: int, num_bytes: int, what: str) -> tuple[int, ...]:
    """Compute the CRC-32 of each block of an open file with several threads; log the progress if it takes
    seconds.

    Raises:
        DamageError: when the file ends too early.
    """

    def one(start: int) -> int | None:
        return crc32_of_file(descriptor, start, min(BLOCK, num_bytes - start))

    starts = range(0, num_bytes, BLOCK)
    found = []
    for number, checksum in enumerate(_by_threads(one, starts, what)):
        if checksum is None:
            raise DamageError(f"{what}: the file ends in block {number}, before its {num_bytes:,} bytes")
        found.append(checksum)
    return tuple(found)


def tree_hash_of(descriptor: int, num_bytes: int, what: str) -> str:
    """Compute the SHA-256 of the SHA-256s of a file's blocks of `BLOCK` bytes, by several threads.

    A forger who wants another file with the same hash must forge SHA-256 itself. The file's size must be
    compared, too.

    Args:
        descriptor: the open file.
        num_bytes: its size.
        what: how errors and the log call it.

    Raises:
        DamageError: the file ends too early.
    """

    def one(start: int) -> bytes | None:
        length = min(BLOCK, num_bytes - start)
        block = os.pread(descriptor, length, start)
        return hashlib.sha256(block).digest() if len(block) == length else None

    tree = hashlib.sha256()
    for number, digest in enumerate(_by_threads(one, range(0, num_bytes, BLOCK), what)):
        if digest is None:
            raise DamageError(f"{what}: the file ends in block {number}, before its {num_bytes:,} bytes")
        tree.update(digest)
    return tree.hexdigest()


def write_digests(folder: Path, *, known: Mapping[str, str] | None = None) -> None:
    """Write `DIGESTS` for all files of a folder.

    Args:
        folder: the folder.
        known: SHA-256s that were computed before, by the file's name.

    Raises:
        ValueError: for a name with a line break in it.
    """
    lines = [_FIRST_LINE]
    for path in sorted(folder.iterdir()):
        if path.name == DIGESTS:
            continue
        if "\n" in path.name or "\r" in path.name:
            raise ValueError(f"{path.name!r} has a line break in it. Rename the file.")
        with open_regular(path) as descriptor:
            num_bytes = os.fstat(descriptor).st_size
            checksums = checksums_of(descriptor, num_bytes, path.name)
            sha256 = (known or {}).get(path.name) or _sha256(descriptor)
            digest = FileDigest(num_bytes, sha256, checksums)
        hexadecimal = "".join(f"{checksum:08x}" for checksum in digest.checksums) or "-"
        lines.append(f"file {digest.num_bytes} {digest.sha256} {hexadecimal} {path.name}")
    content = ("\n".join(lines) + "\n").encode()
    write_durably(folder / DIGESTS, content + f"end {zlib.crc32(content):08x}\n".encode())


def read_digests(folder: Path) -> dict[str, FileDigest]:
    """Read what `write_digests` wrote, by the file's name.

    Raises:
        DamageError: for a file that is missing, damaged, or names a file outside of the folder.
    """
    path = folder / DIGESTS
    try:
        content = read_regular(path, _MOST_BYTES)
    except OSError as error:
        raise DamageError(f"{path} cannot be read ({error.strerror})") from error
    return parse_digests(content, str(path))


def parse_digests(content: bytes, what: str) -> dict[str, FileDigest]:
    """Parse the content of `DIGESTS`; see `read_digests`."""
    body, end = content[:-13], content[-13:]
    if end != f"end {zlib.crc32(body):08x}\n".encode():
        raise DamageError(f"{what} does not have the checksum that it was written with")
    try:
        first, *lines = body.decode().split("\n")
    except UnicodeDecodeError as error:
        raise DamageError(f"{what} is not text ({error})") from error
    if first != _FIRST_LINE or not lines or lines.pop() != "":
        raise DamageError(f"{what} does not begin with {_FIRST_LINE!r}")
    found: dict[str, FileDigest] = {}
    for line in lines:
        match = _FILE_LINE.fullmatch(line)
        name = match[4] if match else ""
        if match is None or name in found or Path(name).name != name or name in (".", "..") or "\0" in name:
            raise DamageError(f"{what} has the line {line[:100]!r}, which names no file of the folder")
        num_bytes, written = int(match[1]), "" if match[3] == "-" else match[3]
        if len(written) != 8 * -(-num_bytes // BLOCK):
            raise DamageError(f"{what} lacks checksums of {name!r}")
        checksums = tuple(int(written[at : at + 8], 16) for at in range(0, len(written), 8))
        found[name] = FileDigest(num_bytes, match[2], checksums)
    return found


def verify_file(descriptor: int, digest: FileDigest, path: Path, *, sha256: bool = False) -> None:
    """Compare an open file with its digest.

    Args:
        descriptor: the file.
        digest: what it must hold.
        path: how errors call it.
        sha256: compare the SHA-256 as well, which a forger cannot meet; it takes several times as long.

    Raises:
        DamageError: names the first block that differs.
    """
    num_bytes = os.fstat(descriptor).st_size
    if num_bytes != digest.num_bytes:
        raise DamageError(f"{path} has {num_bytes:,} bytes instead of {digest.num_bytes:,}")
    for number, found in enumerate(checksums_of(descriptor, num_bytes, str(path))):
        if found != digest.checksums[number]:
            raise DamageError(
                f"{path} is not what was written: bytes {number * BLOCK:,} to "
                f"{min(num_bytes, (number + 1) * BLOCK):,} have another checksum"
            )
    if sha256 and _sha256(descriptor) != digest.sha256:
        raise DamageError(f"{path} is not what was written: its SHA-256 is another")


def verify_folder(folder: Path, digests: Mapping[str, FileDigest], *, sha256: bool = False) -> None:
    """Compare the files of a folder with their digests; see `verify_file`.

    Raises:
        DamageError: for the first file that is missing or differs.
    """
    for name, digest in digests.items():
        try:
            with open_regular(folder / name) as descriptor:
                verify_file(descriptor, digest, folder / name, sha256=sha256)
        except OSError as error:
            raise DamageError(f"{folder / name} cannot be read ({error.strerror})") from error


def _sha256(descriptor: int) -> str:
    digest, offset = hashlib.sha256(), 0
    while block := os.pread(descriptor, _READ_AT_A_TIME, offset):
        digest.update(block)
        offset += len(block)
    return digest.hexdigest()


def _by_threads(function: Callable[[int], _Result], starts: Iterable[int], what: str) -> Iterator[_Result]:
    all_starts = list(starts)
    num_threads = min(len(all_starts), len(os.sched_getaffinity(0)), _MOST_THREADS)
    if num_threads < 2:
        yield from map(function, all_starts)
        return
    began = said = time.monotonic()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checksums") as pool:
        for number, result in enumerate(pool.map(function, all_starts)):
            if (now := time.monotonic()) - said > _SECONDS_BETWEEN_LINES:
                said = now
                _log.info(
                    "verifying %s: %.1f of %.1f GB after %.0f s",
                    what,
                    number * BLOCK / 1e9,
                    len(all_starts) * BLOCK / 1e9,
                    now - began,
                )
            yield result
