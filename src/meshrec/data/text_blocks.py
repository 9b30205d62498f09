"""Large text files as blocks of whole lines. A file that is not gzipped can be read from any block on."""

import gzip
import math
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from meshrec.data.faults import Faults

# ASCII code of a line break, to count lines in arrays of bytes.
_NEWLINE = 10


class TextBlock(NamedTuple):
    """Position of consecutive whole lines in a file."""

    file: Path
    start: int
    """Offset of the first byte in the file; 0 for a gzipped file."""
    first_line: int
    """Number of the first line in the file, from 0."""
    lines: int
    """Line count."""
    num_bytes: int
    """Length of the lines in bytes, after decompression."""


class WholeLines(NamedTuple):
    """Text of consecutive whole lines."""

    text: bytes
    first_line: int
    """Number of the first line in the file, from 0."""
    lines: int
    """Line count."""


def find_blocks(file: Path, faults: Faults, *, size: int) -> list[TextBlock]:
    """Divide lines in a file into blocks with about ``size`` bytes. Reads the whole file to count the lines.

    Args:
        file: text file, gzipped if its name ends in ``.gz``.
        faults: raises for a damaged or empty file, or counts it.
        size: approximate bytes per block.

    Returns:
        The blocks in order. A gzipped file has a single block, and an empty file has none.
    """
    blocks, byte, line = [], 0, 0
    try:
        with _open(file, 0) as stream:
            for text in _whole_lines(stream, size):
                num = _count_lines(text)
                blocks.append(TextBlock(file, byte, line, num, len(text)))
                byte, line = byte + len(text), line + num
    except (OSError, EOFError, zlib.error) as error:
        faults.report(f"{file} is damaged after line {line}: {error}", 0, str(file))
    if line == 0:
        faults.report(f"{file} has no lines", 0, str(file))
        return []
    # Gzip cannot be entered in the middle.
    return [TextBlock(file, 0, 0, line, byte)] if _is_gzip(file) else blocks


def read_pieces(block: TextBlock, *, size: int) -> Generator[WholeLines, None, None]:
    """Yield a block's lines, about ``size`` bytes at a time.

    Args:
        block: block from `find_blocks`.
        size: approximate bytes per piece.
    """
    line = block.first_line
    with _open(block.file, block.start) as stream:
        for text in _whole_lines(stream, size, block.num_bytes):
            num = _count_lines(text)
            yield WholeLines(text, line, num)
            line += num


def _whole_lines(stream: IO[bytes], size: int, limit: float = math.inf) -> Generator[bytes, None, None]:
    """Yield a stream's text in pieces of whole lines, about ``size`` bytes each, up to ``limit`` bytes."""
    partial_line = b""
    while chunk := stream.read(int(min(size, limit))):
        limit -= len(chunk)
        # Keep the text after the last newline for the next piece.
        end = chunk.rfind(b"\n") + 1
        if end:
            yield partial_line + chunk[:end]
            partial_line = chunk[end:]
        else:
            partial_line += chunk
    if partial_line:
        yield partial_line


def _count_lines(text: bytes) -> int:
    """Return the line count in non-empty text. The last line needs no newline."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == _NEWLINE)) + (text[-1] != _NEWLINE)


def _open(file: Path, start: int) -> IO[bytes]:
    """Open a file for reading from byte ``start`` on. A gzipped file is decompressed, from the first byte."""
    if _is_gzip(file):
        # The only block starts at 0, see `find_blocks`.
        return gzip.open(file, "rb")  # type: ignore[return-value]
    stream = file.open("rb")
    stream.seek(start)
    return stream


def _is_gzip(file: Path) -> bool:
    return file.suffix == ".gz"
