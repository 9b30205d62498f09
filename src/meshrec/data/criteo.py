"""Criteo's display advertising data: a label, 13 counts and 26 categories; day files or Parquet.

Counts become log(1 + count), with 0 for missing and negative ones. Categories are hashed to the rows of their
tables; row 0 of each table is for missing values.
"""

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshrec.data.dataset import Dataset, FileRows, Paths, Reader
from meshrec.data.delimited import parse
from meshrec.data.encoding import Place
from meshrec.data.faults import DataError, Faults, OnError, needs
from meshrec.data.locations import as_local, expand, is_address, suffix_of
from meshrec.data.nearest import did_you_mean
from meshrec.data.order import check_seed
from meshrec.data.parquet import ParquetSource
from meshrec.data.samples import Ints, Samples, Shape, rewindowed, void_samples
from meshrec.data.splitting import Split, part_readers
from meshrec.data.streaming import Source, StreamReader, files_of
from meshrec.data.text_blocks import TextBlock, WholeLines, find_blocks, read_pieces

if TYPE_CHECKING:
    from meshrec.data.features import Features

_PIECE = 1 << 24
_NUM_DENSE, _NUM_IDS = 13, 26


def criteo_features(num_embeddings: int | Sequence[int], *, labelled: bool = True) -> "Features":
    """Return the features of Criteo's data: columns label, I1 .. I13 and C1 .. C26.

    Args:
        num_embeddings: number of rows of each of the 26 tables, or of all.
        labelled: whether there is a label column. Data to be scored has none.
    """
    sizes = [num_embeddings] * _NUM_IDS if isinstance(num_embeddings, int) else list(num_embeddings)
    if len(sizes) != _NUM_IDS:
        raise ValueError(f"num_embeddings must be one number or {_NUM_IDS}, got {len(sizes)}.")
    needs("pyarrow", "data")
    from meshrec.data.features import Features, Hashed, Label, Number

    return Features(
        labels=(Label(column="label"),) if labelled else (),
        features=(
            *(Number(name=f"I{number + 1}", log=True, missing=0.0) for number in range(_NUM_DENSE)),
            *(Hashed(name=f"C{number + 1}", num_embeddings=rows) for number, rows in enumerate(sizes)),
        ),
    )


class CriteoText(Source):
    """Criteo's day files, plain or gzipped.

    A first pass counts the lines. A gzipped file can only be read from its start; use Parquet for more than a
    few epochs.
    """

    def __init__(self, files: Sequence[Path], features: "Features", faults: Faults) -> None:
        self._features = features
        self._faults = faults
        self._blocks = [block for file in files for block in find_blocks(file, faults, size=_PIECE)]
        if not self._blocks:
            raise DataError(f"none of {len(files)} files has lines: {[str(file) for file in files[:5]]}.")

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys C1 .. C26."""
        return self._features.keys

    @property
    def shape(self) -> Shape:
        """Shape of the samples: 13 dense values and 26 IDs."""
        return self._features.shape

    @property
    def files(self) -> Sequence[FileRows]:
        """Files that have lines."""
        return files_of([(str(block.file), block.lines) for block in self._blocks])

    def column(self, block: int, name: str) -> Any:
        """Return a column as strings. Lines that cannot be parsed get the empty string."""
        import pyarrow as pa

        found = self._blocks[block]
        texts = np.full(found.lines, "", dtype=object)
        names = self._features.columns()
        if name not in names:
            raise DataError(
                f"{found.file}: there is no column {name!r} among {names}.{did_you_mean(name, names)}"
            )
        for piece in read_pieces(found, size=_PIECE):
            table, lines = parse(
                piece.text,
                str(found.file),
                Faults("skip"),
                columns=names,
                types={name: "string"},
                delimiter="\t",
                first_line=piece.first_line,
            )
            texts[piece.first_line - found.first_line + lines] = table[name].to_pylist()
        return pa.array(texts, pa.large_string())

    @property
    def block_sizes(self) -> Ints:
        """Number of lines of each block."""
        return np.array([block.lines for block in self._blocks], dtype=np.int64)

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Parse some megabytes of lines at a time."""
        yield from rewindowed(self._samples(self._blocks[block], first * size), first * size, size)

    def _samples(self, block: TextBlock, skip: int) -> Generator[Samples, None, None]:
        for piece in read_pieces(block, size=_PIECE):
            if piece.first_line + piece.lines <= block.first_line + skip:
                yield void_samples(piece.lines, self.shape)  # passed over
            else:
                yield self._parsed(block.file, piece)

    def _parsed(self, file: Path, piece: WholeLines) -> Samples:
        names = self._features.columns()
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
        samples = self._features.encode(table, Place(str(file), piece.first_line, str(file)), self._faults)
        if len(lines) == piece.lines:
            return samples
        # Lines that could not be parsed keep their places, so that positions stay what they are.
        kept = np.zeros(piece.lines, np.bool_)
        kept[lines] = True if samples.kept is None else samples.kept
        source = np.clip(np.cumsum(np.isin(np.arange(piece.lines), lines)) - 1, 0, None)
        if len(lines) == 0:
            return void_samples(piece.lines, self.shape)
        return samples.take(source)._replace(kept=kept)


def criteo_reader(
    paths: Paths,
    *,
    num_embeddings: int | Sequence[int] = 100_000,
    labelled: bool = True,
    on_error: OnError = "raise",
    window: int = 8192,
) -> StreamReader:
    """Open Criteo's data in the order of files and lines, for evaluation or scoring; see `parquet_reader`.

    Args:
        paths, num_embeddings, on_error, window: as for `criteo`.
        labelled: whether there is a label. Text without a label has 39 fields.

    Raises:
        DataError: damaged data; names the file, the line or row group, and the column.
    """
    faults = Faults(on_error)
    source = _source(paths, criteo_features(num_embeddings, labelled=labelled), faults)
    return StreamReader(source, seed=0, shuffle=False, window=window, skipped=faults.skipped)


def criteo(
    *,
    train: Paths,
    validation: Paths | None = None,
    test: Paths | None = None,
    split: Split | None = None,
    num_embeddings: int | Sequence[int] = 100_000,
    seed: int = 0,
    on_error: OnError = "raise",
    window: int = 8192,
    lanes: int = 8,
) -> Dataset:
    """Open Criteo's data. ``.parquet`` files have the columns of `criteo_features`; other files are text.

    Args:
        train, validation, test: files, folders (all ``day_*`` and ``*.parquet`` files in them) or patterns.
        split: takes validation and test rows out of ``train`` instead. A split by time uses the order of
            lines, as in day files.
        num_embeddings: number of rows of each of the 26 tables, or of all.
        seed, on_error, window, lanes: as for `meshrec.data.parquet`.

    Raises:
        DataError: damaged data; names the file, the line or row group, and the column.
    """
    check_seed(seed)
    features, faults = criteo_features(num_embeddings), Faults(on_error)

    def opened(paths: Paths, labelled: bool) -> Reader:
        return criteo_reader(
            paths, num_embeddings=num_embeddings, labelled=labelled, on_error=on_error, window=window
        )

    readers = part_readers(
        lambda paths: _source(paths, features, faults),
        train,
        validation,
        test,
        split,
        seed=seed,
        window=window,
        lanes=lanes,
        faults=faults,
    )
    return Dataset(
        name="criteo",
        features=features.described(),
        num_dense=_NUM_DENSE,
        train=readers.train,
        validation=readers.validation,
        test=readers.test,
        skipped=faults.by_file,
        open=opened,
    )


def _source(paths: Paths, features: "Features", faults: Faults) -> ParquetSource | CriteoText:
    files = [each for each in expand(paths, "*") if is_address(each) or not Path(each).is_dir()]
    kinds = {suffix_of(each) == ".parquet" for each in files}
    if len(kinds) > 1:
        raise DataError(f"{paths} has Parquet and text files. Give one kind, or a pattern.")
    if kinds.pop():
        return ParquetSource(files, features, faults)
    return CriteoText(as_local(files, "Criteo's day files"), features, faults)
