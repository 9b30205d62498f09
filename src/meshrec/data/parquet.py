"""Parquet files, read row group by row group."""

import contextlib
import functools
import itertools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshrec.data.dataset import Dataset, FileRows, Paths
from meshrec.data.encoding import Encoding, Place
from meshrec.data.faults import DataError, Faults, OnError, needs
from meshrec.data.locations import File, expand, opened
from meshrec.data.samples import Ints, Samples, Shape, rewindowed, void_samples
from meshrec.data.splitting import Split
from meshrec.data.streaming import Source, StreamReader, files_of
from meshrec.data.tables import Tables, table_dataset

_READ_ROWS = 1 << 15


class _RowGroup(NamedTuple):
    file: File
    number: int
    rows: int
    first_row: int


class ParquetSource(Source, Tables):
    """The row groups of some Parquet files.

    Args:
        files: the files, in the order in which they are read without shuffling.
        schema: the features, fitted where they need it.
        faults: handles damage. Files that cannot be opened or lack columns are left out as a whole.

    Raises:
        DataError: a file is damaged, a column is missing or has a wrong type, or no rows are left.
    """

    def __init__(self, files: Sequence[File], schema: Encoding, faults: Faults) -> None:
        self._schema = schema
        self._faults = faults
        self._metadata: dict[File, Any] = {}
        self._groups = [group for file in files for group in self._open(file)]
        if not self._groups:
            raise DataError(
                f"none of {len(files)} Parquet files has rows: {[str(file) for file in files[:5]]}."
            )

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the ID columns."""
        return self._schema.keys

    @property
    def shape(self) -> Shape:
        """Shape of the samples, as the schema says."""
        return self._schema.shape

    @property
    def files(self) -> Sequence[FileRows]:
        """Files that can be read."""
        return files_of([(str(group.file), group.rows) for group in self._groups])

    def column(self, block: int, name: str) -> Any:
        """Return a column of a row group as an Arrow array.

        Raises:
            DataError: the column cannot be read.
        """
        import pyarrow as pa

        group = self._groups[block]
        try:
            with open_parquet_file(group.file, metadata=self._metadata[group.file]) as opened:
                table = opened.read_row_group(group.number, columns=[name], use_threads=False)
                array = table[name].combine_chunks()
                kind = self.arrow_schema.field(name).type
                return array if array.type == kind else array.cast(kind)
        except (pa.ArrowException, OSError, KeyError) as error:
            names = self._metadata[group.file].schema.to_arrow_schema().names
            raise DataError(
                f"{group.file}: column {name!r} cannot be read: {error}. It has the columns {names}."
            ) from error

    @functools.cached_property
    def arrow_schema(self) -> Any:
        """Arrow schema of the first file, with types that can hold those of the other files."""
        pa = needs("pyarrow", "data")
        first, *others = (metadata.schema.to_arrow_schema() for metadata in self._metadata.values())
        for other in others:
            for at, field in enumerate(first):
                if other.get_field_index(field.name) < 0 or other.field(field.name).type == field.type:
                    continue
                both = [pa.schema([(field.name, each.field(field.name).type)]) for each in (first, other)]
                with contextlib.suppress(pa.ArrowException):  # types that have nothing in common
                    first = first.set(at, pa.unify_schemas(both, promote_options="permissive").field(0))
        return first

    def tables(self, block: int, size: int) -> Generator[Any, None, None]:
        """Yield the columns of a row group, ``size`` rows at a time.

        Raises:
            DataError: they cannot be read.
        """
        import pyarrow as pa

        group = self._groups[block]
        try:
            with open_parquet_file(group.file, metadata=self._metadata[group.file]) as opened:
                names = list(self._schema.columns())
                for batch in opened.iter_batches(size, [group.number], names, use_threads=False):
                    yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{group.file}: row group {group.number} cannot be read: {error}. Repair the data."
            ) from error

    @property
    def block_sizes(self) -> Ints:
        """Number of rows of each row group."""
        return np.array([group.rows for group in self._groups], dtype=np.int64)

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Decode a row group, one window at a time."""
        yield from rewindowed(self._pieces(self._groups[block], first * size, size), first * size, size)

    def _open(self, file: File) -> list[_RowGroup]:
        pa = needs("pyarrow", "data")
        try:
            with open_parquet_file(file) as opened:
                metadata, found = opened.metadata, opened.schema_arrow
        except (pa.ArrowException, OSError) as error:
            self._faults.found(f"{file} cannot be read as Parquet: {error}", 0, str(file))
            return []
        if metadata.num_rows == 0:
            return []  # as engines write for empty partitions; their columns may lack a type
        for wrong in self._schema.wrong_columns(found):
            if wrong.startswith("there is no column"):  # skipping rows would not help
                raise DataError(f"{file}: {wrong}. Name a column that it has, or leave the file out.")
            self._faults.found(f"{file}: {wrong}", metadata.num_rows, str(file))
            return []
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

        name, row = f"{group.file}: row group {group.number}", 0
        try:
            metadata = self._metadata[group.file]
            texts = _texts(metadata, self._schema.columns())  # each value of a dictionary is hashed once
            with open_parquet_file(group.file, metadata=metadata, read_dictionary=texts) as opened:
                batches = opened.iter_batches(
                    batch_size=max(size, _READ_ROWS),
                    row_groups=[group.number],
                    columns=self._schema.columns(),
                    use_threads=False,
                )
                for batch in batches:
                    if row + batch.num_rows <= skip:
                        yield void_samples(batch.num_rows, self.shape)  # the caller asked for later rows
                    else:
                        table = pa.Table.from_batches([batch])
                        place = Place(name, group.first_row + row, str(group.file))
                        yield self._schema.encode(table, place, self._faults)
                    row += batch.num_rows
                if row != group.rows:
                    raise pa.ArrowInvalid(f"it has {row} rows, its footer says {group.rows}")
        except (pa.ArrowException, OSError) as error:
            column = self._damaged_column(group)
            self._faults.found(f"{name}{column}: {error}", group.rows - row, str(group.file))
            yield void_samples(group.rows - row, self.shape)

    def _damaged_column(self, group: _RowGroup) -> str:
        import pyarrow as pa

        for column in self._schema.columns():
            try:
                with open_parquet_file(group.file, metadata=self._metadata[group.file]) as opened:
                    opened.read_row_group(group.number, columns=[column], use_threads=False)
            except (pa.ArrowException, OSError):
                return f", column {column!r}"
        return ""


@contextlib.contextmanager
def open_parquet_file(file: File, **options: Any) -> Generator[Any, None, None]:
    """Open a ``pyarrow.parquet.ParquetFile``, on this machine or in a store."""
    with (
        opened(file) as source,
        needs("pyarrow.parquet", "data").ParquetFile(source, **options) as found,
    ):
        yield found


def _texts(metadata: Any, columns: Sequence[str]) -> list[str]:
    """Return the columns that hold plain text."""
    from meshrec.data.features.values import is_text

    found = metadata.schema.to_arrow_schema()
    return [name for name in columns if is_text(found.field(name).type)]


def parquet_reader(
    paths: Paths,
    *,
    schema: Encoding,
    seed: int = 0,
    shuffle: bool = False,
    on_error: OnError = "raise",
    window: int = 8192,
    lanes: int = 8,
) -> StreamReader:
    """Open Parquet files as a reader in the order of files and rows, for evaluation or scoring.

    Each batch has the row numbers of its samples (``Batch.rows``), which `locate` turns into file and row.
    With ``schema.unlabelled()`` the files need no labels.

    Args:
        paths: files, folders (all ``*.parquet`` files in them) or patterns. Folders and patterns are sorted
            by name.
        schema, seed, on_error, window, lanes: as for `parquet`.
        shuffle: whether to shuffle the rows, as for training.

    Raises:
        DataError: damaged data; names the file, row group and column.
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
    schema: Encoding,
    name: str = "parquet",
    seed: int = 0,
    on_error: OnError = "raise",
    window: int = 8192,
    lanes: int = 8,
) -> Dataset:
    """Open Parquet files as a dataset; see `meshrec.data.StreamReader` for the order.

    Args:
        train, validation, test: files, folders (all ``*.parquet`` files in them) or patterns. Folders and
            patterns are sorted by name.
        split: takes validation and test rows out of ``train`` instead, see `meshrec.data.Split`.
        schema: the meaning of the columns, as `meshrec.data.features.Features`, fitted where they need it.
        name: name for reports.
        seed: seed of the shuffle.
        on_error: "raise", or "skip" to leave out damaged rows, row groups and files with a warning. They are
            counted in ``Dataset.skipped``.
        window, lanes: see `meshrec.data.StreamReader`.

    Raises:
        DataError: damaged data; names the file, row group and column.
    """
    return table_dataset(
        open_parquet,
        train=train,
        validation=validation,
        test=test,
        split=split,
        schema=schema,
        name=name,
        seed=seed,
        on_error=on_error,
        window=window,
        lanes=lanes,
    )


def open_parquet(paths: Paths, schema: Encoding, faults: Faults) -> ParquetSource:
    """Open files, folders (all ``*.parquet`` files in them) or patterns as a source; see `table_dataset`."""
    return ParquetSource(expand(paths, "*.parquet"), schema, faults)
