"""Parquet files, row group by row group."""

import glob
import itertools
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshrec.data.dataset import Dataset, FileRows, Paths, Reader
from meshrec.data.faults import DataError, Faults, OnError, needs
from meshrec.data.samples import Ints, Samples, rewindowed, void_samples
from meshrec.data.schema import Schema
from meshrec.data.splitting import Split, part_readers
from meshrec.data.streaming import Source, StreamReader, files_of


class _RowGroup(NamedTuple):
    file: Path
    number: int
    rows: int
    first_row: int


class ParquetSource(Source):
    """The row groups of files.

    Args:
        files: read in this order where nothing is shuffled.
        schema: which columns.
        faults: what to do about damage. Files that cannot be opened or lack columns are left out as a whole.

    Raises:
        DataError: for damaged files, missing columns, wrong types, and where no rows are left.
    """

    def __init__(self, files: Sequence[Path], schema: Schema, faults: Faults) -> None:
        self._schema = schema
        self._faults = faults
        self._metadata: dict[Path, Any] = {}
        self._groups = [group for file in files for group in self._open(file)]
        if not self._groups:
            raise DataError(
                f"none of {len(files)} Parquet files has rows: {[str(file) for file in files[:5]]}."
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """The id columns."""
        return tuple(each.name for each in self._schema.ids)

    @property
    def num_dense(self) -> int:
        """The number of dense columns."""
        return len(self._schema.dense)

    @property
    def files(self) -> Sequence[FileRows]:
        """The files that can be read."""
        return files_of([(str(group.file), group.rows) for group in self._groups])

    def column(self, block: int, name: str) -> Any:
        """A column of a row group, as an Arrow array. DataError where it cannot be read."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        group = self._groups[block]
        try:
            with pq.ParquetFile(group.file, metadata=self._metadata[group.file]) as opened:
                table = opened.read_row_group(group.number, columns=[name], use_threads=False)
                return table[name].combine_chunks()
        except (pa.ArrowException, OSError, KeyError) as error:
            names = self._metadata[group.file].schema.to_arrow_schema().names
            raise DataError(
                f"{group.file}: column {name!r} cannot be read: {error}. It has the columns {names}."
            ) from error

    @property
    def block_sizes(self) -> Ints:
        """Rows of each row group."""
        return np.array([group.rows for group in self._groups], dtype=np.int64)

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Decodes a row group a window at a time."""
        yield from rewindowed(self._pieces(self._groups[block], first * size, size), first * size, size)

    def _open(self, file: Path) -> list[_RowGroup]:
        pa, parquet = needs("pyarrow", "data"), needs("pyarrow.parquet", "data")
        from meshrec.data.columns import wrong_columns

        try:
            with parquet.ParquetFile(file) as opened:
                metadata, found = opened.metadata, opened.schema_arrow
        except (pa.ArrowException, OSError) as error:
            self._faults.found(f"{file} cannot be read as Parquet: {error}", 0, str(file))
            return []
        for wrong in wrong_columns(self._schema, found):
            if wrong.startswith("there is no column"):  # no damage that rows could be skipped for
                raise DataError(f"{file}: {wrong}. Name a column that it has, or leave the file out.")
            self._faults.found(f"{file}: {wrong}", metadata.num_rows, str(file))
            return []
        if metadata.num_rows == 0:
            self._faults.found(f"{file} has no rows", 0, str(file))
        self._metadata[file] = metadata
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        firsts = itertools.accumulate(sizes, initial=0)
        return [
            _RowGroup(file, number, rows, first)
            for number, (rows, first) in enumerate(zip(sizes, firsts, strict=False))
            if rows
        ]

    def _pieces(self, group: _RowGroup, skip: int, size: int) -> Generator[Samples, None, None]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        from meshrec.data.columns import Place, encode

        name, row = f"{group.file}: row group {group.number}", 0
        try:
            with pq.ParquetFile(group.file, metadata=self._metadata[group.file]) as opened:
                batches = opened.iter_batches(
                    batch_size=size,
                    row_groups=[group.number],
                    columns=self._schema.columns(),
                    use_threads=False,
                )
                for batch in batches:
                    if row + batch.num_rows <= skip:
                        yield void_samples(batch.num_rows, self.num_dense, len(self.keys))  # passed over
                    else:
                        table = pa.Table.from_batches([batch])
                        yield encode(
                            table,
                            self._schema,
                            Place(name, group.first_row + row, str(group.file)),
                            self._faults,
                        )
                    row += batch.num_rows
                if row != group.rows:
                    raise pa.ArrowInvalid(f"it has {row} rows, its footer says {group.rows}")
        except (pa.ArrowException, OSError) as error:
            column = self._damaged_column(group)
            self._faults.found(f"{name}{column}: {error}", group.rows - row, str(group.file))
            yield void_samples(group.rows - row, self.num_dense, len(self.keys))

    def _damaged_column(self, group: _RowGroup) -> str:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for column in self._schema.columns():
            try:
                with pq.ParquetFile(group.file, metadata=self._metadata[group.file]) as opened:
                    opened.read_row_group(group.number, columns=[column], use_threads=False)
            except (pa.ArrowException, OSError):
                return f", column {column!r}"
        return ""


def parquet_reader(
    paths: Paths,
    *,
    schema: Schema,
    seed: int = 0,
    shuffle: bool = False,
    on_error: OnError = "raise",
    window: int = 8192,
    lanes: int = 8,
) -> StreamReader:
    """Parquet files as a reader: in the order of files and rows, to judge or to score them.

    Each batch carries its samples' row numbers (``Batch.rows``), which `locate` turns into file and row; with
    ``schema.unlabelled()`` the files need no labels.

    Args:
        paths: files, folders (all ``*.parquet`` in them) or patterns, sorted by name within each.
        schema, seed, on_error, window, lanes: as for :func:`parquet`.
        shuffle: mix the rows, as for training.

    Raises:
        DataError: names file, row group and column.
    """
    faults = Faults(on_error)
    source = ParquetSource(expand(paths, "*.parquet"), schema, faults)
    return StreamReader(
        source, seed=seed, shuffle=shuffle, window=window, lanes=lanes, skipped=faults.skipped
    )


def parquet(
    *,
    train: Paths,
    validation: Paths | None = None,
    test: Paths | None = None,
    split: Split | None = None,
    schema: Schema,
    name: str = "parquet",
    seed: int = 0,
    on_error: OnError = "raise",
    window: int = 8192,
    lanes: int = 8,
) -> Dataset:
    """Parquet files as a dataset; see :class:`meshrec.data.StreamReader` for the order.

    Args:
        train, validation, test: files, folders (all ``*.parquet`` in them) or patterns, sorted by name within
            each.
        split: takes validation and test rows out of ``train`` instead, see :class:`meshrec.data.Split`.
        schema: which columns are what.
        name: for reports.
        seed: of the order.
        on_error: "raise"; or "skip" to leave out damaged rows, row groups and files, with a warning, counted
            in ``Dataset.skipped``.
        window, lanes: see :class:`meshrec.data.StreamReader`.

    Raises:
        DataError: names file, row group and column.
    """
    faults = Faults(on_error)

    def source(paths: Paths) -> ParquetSource:
        return ParquetSource(expand(paths, "*.parquet"), schema, faults)

    def opened(paths: Paths, labelled: bool) -> Reader:
        wanted = schema if labelled else schema.unlabelled()
        return parquet_reader(paths, schema=wanted, on_error=on_error, window=window)

    readers = part_readers(
        source,
        ParquetSource.column,
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
        name=name,
        features=schema.features(),
        num_dense=len(schema.dense),
        train=readers.train,
        validation=readers.validation,
        test=readers.test,
        skipped=faults.by_file,
        open=opened,
    )


def expand(paths: Paths, pattern: str) -> list[Path]:
    """The files that paths, folders and patterns stand for.

    Raises:
        DataError: one of them stands for none.
    """
    files: list[Path] = []
    for each in [paths] if isinstance(paths, str | Path) else paths:
        path = Path(each)
        if path.is_dir():
            found = sorted(path.glob(pattern))
        else:
            found = [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(each)))]
        if not found:
            raise DataError(f"{each} stands for no file in {Path.cwd()}; folders are searched for {pattern}.")
        files += found
    if not files:
        raise DataError("no paths were given.")
    return files
