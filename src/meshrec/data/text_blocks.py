"""Large text files in pieces of whole lines, readable from any piece if not gzipped."""

import gzip
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from meshrec.data.faults import Faults

_NEWLINE = 10


class TextBlock(NamedTuple):
    """Block of whole lines within a file."""

    file: Path
    start: int
    """First byte."""
    first_line: int
    """First line number, from 0."""
    lines: int
    """Line count."""


class WholeLines(NamedTuple):
    """Piece of text with whole lines."""

    text: bytes
    first_line: int
    lines: int


def find_blocks(file: Path, faults: Faults, *, size: int) -> list[TextBlock]:
    """Count a file's lines; return blocks of about ``size`` bytes, or a single block if gzipped.

    Args:
        file: text file.
        faults: handles damage.
        size: bytes per block.
    """
    blocks, byte, line = [], 0, 0
    try:
        with _open(file, 0) as stream:
            for text in _whole_lines(stream, size):
                num = _count_lines(text)
                blocks.append(TextBlock(file, byte, line, num))
                byte, line = byte + len(text), line + num
    except (OSError, EOFError, zlib.error) as error:
        faults.report(f"{file} is damaged after line {line}: {error}", 0, str(file))
    if line == 0:
        faults.report(f"{file} has no lines", 0, str(file))
        return []
    # Gzip cannot be entered in the middle.
    return [TextBlock(file, 0, 0, line)] if _is_gzip(file) else blocks


def read_pieces(block: TextBlock, *, size: int) -> Generator[WholeLines, None, None]:
    """Yield a block's lines, about ``size`` bytes at a time. ``size`` must equal that of `find_blocks`."""
    line, last = block.first_line, block.first_line + block.lines
    with _open(block.file, block.start) as stream:
        for text in _whole_lines(stream, size):
            num = _count_lines(text)
            yield WholeLines(text, line, num)
            line += num
            if line >= last:
                return


def _whole_lines(stream: IO[bytes], size: int) -> Generator[bytes, None, None]:
    partial_line = b""
    while chunk := stream.read(size):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield partial_line + chunk[:end]
            partial_line = chunk[end:]
        else:
            partial_line += chunk
    if partial_line:
        yield partial_line


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
