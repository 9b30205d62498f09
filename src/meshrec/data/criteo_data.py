"""Criteo display advertising data: a click label, 13 counts and 26 categories, in text files or Parquet.

Text files have a file per day, a line per sample, and tabs between fields. Counts are converted to
log(1 + count), with 0 for missing and negative counts. Categories are hashed to table rows; row 0 is for
missing values.
"""

import gzip
import math
import zlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import Unpack, override

from meshrec.data.arrow import pa
from meshrec.data.dataset import Dataset, Paths
from meshrec.data.delimited import parse
from meshrec.data.encoding import Encoding, RowOrigin
from meshrec.data.faults import DataError, Faults, missing_column, needs
from meshrec.data.locations import as_local, expand, is_address, suffix_of
from meshrec.data.parquet import ParquetSource
from meshrec.data.samples import Samples, void_samples
from meshrec.data.streaming import Source
from meshrec.data.tables import EncodedRows, ReadOptions, table_dataset

if TYPE_CHECKING:
    from meshrec.data.features import Features

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
    """Yield a block's lines, about ``size`` bytes at a time."""
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


_PIECE = 1 << 24
"""Bytes of text parsed at a time."""
# Columns of Criteo's files after the label: integer counts, and categories.
_NUM_DENSE, _NUM_IDS = 13, 26


def criteo_features(num_embeddings: int | Sequence[int]) -> "Features":
    """Return the features of Criteo data: a label, 13 dense values and 26 hashed categories.

    The columns are ``label``, ``I1`` to ``I13`` and ``C1`` to ``C26``.

    Args:
        num_embeddings: rows of every embedding table, or a list with the rows of the 26 tables.
    """
    sizes = [num_embeddings] * _NUM_IDS if isinstance(num_embeddings, int) else list(num_embeddings)
    if len(sizes) != _NUM_IDS:
        raise ValueError(f"num_embeddings must be one number or {_NUM_IDS}, got {len(sizes)}.")
    needs("pyarrow", "data")  # or the next import fails without naming the extra
    from meshrec.data.features import Features, Hashed, Label, Number

    return Features(
        labels=(Label(column="label"),),
        features=(
            *(Number(name=f"I{number + 1}", log=True, missing=0.0) for number in range(_NUM_DENSE)),
            *(Hashed(name=f"C{number + 1}", num_embeddings=rows) for number, rows in enumerate(sizes)),
        ),
    )


class CriteoText(EncodedRows, Source):
    """Source of samples from Criteo text files, plain or gzipped.

    Creating it reads all files once to count their lines. A gzipped file can be read only from the start, so
    convert the data to Parquet to train more than a few epochs.

    Args:
        files: text files, in file order.
        features: features from `criteo_features`.
        faults: raises for damaged lines, or counts them.

    Raises:
        DataError: no file has lines, or a file is damaged.
    """

    def __init__(self, files: Sequence[Path], features: Encoding, faults: Faults) -> None:
        super().__init__(features, faults)
        # Positions of the blocks in the files, by block number.
        self._blocks = [block for file in files for block in find_blocks(file, faults, size=_PIECE)]
        if not self._blocks:
            raise DataError(f"none of {len(files)} files has lines: {[str(file) for file in files[:5]]}.")
        self.blocks = [(str(block.file), block.lines) for block in self._blocks]

    def column(self, block: int, name: str) -> Any:
        """Return a block's column as Arrow strings; the empty string for a line that cannot be parsed."""
        text_block = self._blocks[block]
        # Lines that cannot be parsed keep the empty string.
        texts = np.full(text_block.lines, "", dtype=object)
        names = self._schema.columns()
        if name not in names:
            raise missing_column(str(text_block.file), name, names)
        for piece in read_pieces(text_block, size=_PIECE):
            table, lines = parse(
                piece.text,
                str(text_block.file),
                Faults("skip"),
                columns=names,
                types={name: "string"},
                delimiter="\t",
                first_line=piece.first_line,
            )
            # Rows have no entry for a damaged line, so the line number gives the position.
            texts[piece.first_line - text_block.first_line + lines] = table[name].to_pylist()
        return pa.array(texts, pa.large_string())

    @override
    def pieces(self, block: int, skip: int, size: int) -> Generator[Samples, None, None]:
        """Yield all samples in a block, parsed from about 16 MiB of text at a time, whatever ``size`` is."""
        text_block = self._blocks[block]
        for piece in read_pieces(text_block, size=_PIECE):
            if piece.first_line + piece.lines <= text_block.first_line + skip:
                yield void_samples(piece.lines, self.shape)  # skipped, but counted
            else:
                yield self._parsed(text_block.file, piece)

    def _parsed(self, file: Path, piece: WholeLines) -> Samples:
        """Return a sample per line; the sample of a damaged line is invalid."""
        names = self._schema.columns()
        kinds = {name: "string" if name.startswith("C") else "float32" for name in names}
        table, lines = parse(
            piece.text,
            str(file),
            self._faults,
            columns=names,
            types=kinds,
            delimiter="\t",
            first_line=piece.first_line,
        )
        samples = self._schema.encode(table, RowOrigin(str(file), piece.first_line, str(file)), self._faults)
        if len(lines) == piece.lines:
            return samples
        # Unparsable lines become invalid samples, so the positions of later samples do not shift.
        valid = np.zeros(piece.lines, np.bool_)
        valid[lines] = True if samples.is_valid is None else samples.is_valid
        # Invalid lines repeat the sample before them. Their values are never read.
        source = np.clip(np.cumsum(np.isin(np.arange(piece.lines), lines)) - 1, 0, None)
        if len(lines) == 0:
            return void_samples(piece.lines, self.shape)
        return samples.take(source)._replace(is_valid=valid)


def criteo(
    *,
    train: Paths,
    num_embeddings: int | Sequence[int] = 100_000,
    **options: Unpack[ReadOptions],
) -> Dataset:
    """Create a dataset from Criteo data.

    ``.parquet`` files must have the columns of `criteo_features`. All other files are read as text.

    Args:
        train: files, folders (all files in them) or patterns.
        num_embeddings: rows of every embedding table, or a list with the rows of the 26 tables.
        options: as for `meshrec.data.parquet`. Criteo data has no time column, so ``Split(by="time")``
            assumes that rows are in time order, as they are in Criteo's files ``day_0`` to ``day_23``.

    Raises:
        DataError: damaged data; names the file, the line or row group, and the column.
    """
    return table_dataset(
        _source, train=train, schema=criteo_features(num_embeddings), name="criteo", **options
    )


def _source(paths: Paths, features: Encoding, faults: Faults) -> ParquetSource | CriteoText:
    """Open text files or Parquet files as a source; an ``open_source`` function for `table_dataset`."""
    # A folder may have subfolders, which are not data.
    files = [file for file in expand(paths, "*") if is_address(file) or not Path(file).is_dir()]
    kinds = {suffix_of(file) == ".parquet" for file in files}
    if len(kinds) > 1:
        raise DataError(f"{paths} has Parquet and text files. Give one kind, or a pattern.")
    if kinds.pop():
        return ParquetSource(files, features, faults)
    return CriteoText(as_local(files, "Criteo's day files"), features, faults)
