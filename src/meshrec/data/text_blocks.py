"""Large text files in pieces of whole lines, from any piece on. Gzipped files are read from their start
only.
"""

import gzip
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from meshrec.data.faults import Faults

_NEWLINE = 10


class TextBlock(NamedTuple):
    """``lines`` lines of a file, from line ``first_line`` (counted from 0) at byte ``start`` on."""

    file: Path
    start: int
    first_line: int
    lines: int


class WholeLines(NamedTuple):
    """A piece of text that consists of whole lines."""

    text: bytes
    first_line: int
    lines: int


def find_blocks(file: Path, faults: Faults, *, size: int) -> list[TextBlock]:
    """Read a file once to count its lines; return blocks of about ``size`` bytes, or one block if it is
    gzipped.
    """
    blocks, byte, line = [], 0, 0
    try:
        with _open(file, 0) as stream:
            for text in _whole_lines(stream, size):
                num = _count_lines(text)
                blocks.append(TextBlock(file, byte, line, num))
                byte, line = byte + len(text), line + num
    except (OSError, EOFError, zlib.error) as error:
        faults.found(f"{file} is damaged after line {line}: {error}", 0, str(file))
    if line == 0:
        faults.found(f"{file} has no lines", 0, str(file))
        return []
    return [TextBlock(file, 0, 0, line)] if _is_gzip(file) else blocks


def read_pieces(block: TextBlock, *, size: int) -> Generator[WholeLines, None, None]:
    """Yield the lines of a block, about ``size`` bytes at a time. ``size`` must be that of `find_blocks`."""
    line, last = block.first_line, block.first_line + block.lines
    with _open(block.file, block.start) as stream:
        for text in _whole_lines(stream, size):
            num = _count_lines(text)
            yield WholeLines(text, line, num)
            line += num
            if line >= last:
                return


def _whole_lines(stream: IO[bytes], size: int) -> Generator[bytes, None, None]:
    rest = b""
    while chunk := stream.read(size):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield rest + chunk[:end]
            rest = chunk[end:]
        else:
            rest += chunk
    if rest:
        yield rest


def _count_lines(text: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _NEWLINE)) + (text[-1] != _NEWLINE)


def _open(file: Path, start: int) -> IO[bytes]:
    if _is_gzip(file):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    stream = file.open("rb")
    stream.seek(start)
    return stream


def _is_gzip(file: Path) -> bool:
    return file.suffix == ".gz"
