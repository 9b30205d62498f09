"""Parquet files, read by row group."""

import contextlib
import functools
import itertools
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from typing_extensions import Unpack, override

from meshrec.data.arrow import pa, pa_parquet
from meshrec.data.dataset import Dataset, Paths
from meshrec.data.encoding import Encoding, RowOrigin
from meshrec.data.exact_columns import is_list, plain, plain_schema, plain_table
from meshrec.data.faults import DataError, Faults, NoRowsError
from meshrec.data.locations import File, expand, not_parquet, opened
from meshrec.data.partitions import partition_keys, with_keys
from meshrec.data.samples import Samples, void_samples
from meshrec.data.streaming import Source
from meshrec.data.tables import EncodedRows, ReadOptions, Tables, table_dataset

_READ_ROWS = 1 << 14
"""Minimum rows to decode at a time, even if the window is smaller."""


class _RowGroup(NamedTuple):
    """Parquet row group: a block of `ParquetSource`."""

    file: File
    number: int
    """Index in the file."""
    rows: int
    """Row count."""
    first_row: int
    """Row number in the file for the first row."""


class ParquetSource(EncodedRows, Tables, Source):
    """Source of samples from Parquet files. A row group is a block.

    Args:
        files: paths and URIs, in file order.
        schema: features encoding the rows, fitted where required.
        faults: raises for damaged data, or counts it. Then files that cannot be opened, and files with a
            column with a wrong type, are omitted.
        dictionaries: whether `tables` have text columns as dictionaries, which are faster to encode.

    Raises:
        DataError: a file is damaged, a column is missing or has a wrong type, or no rows remain.
    """

    def __init__(
        self, files: Sequence[File], schema: Encoding, faults: Faults, *, dictionaries: bool = False
    ) -> None:
        super().__init__(schema, faults)
        self._dictionaries = dictionaries
        # Footers of the opened files, so they are parsed only once.
        self._metadata: dict[File, Any] = {}
        self._versions: dict[File, str | None] = {}  # of files in stores, which must stay the same
        self._schemas: dict[File, Any] = {}  # of normalized columns, including partition columns
        self._keys = partition_keys(files, schema.fitted_kinds())
        self._partition_columns: dict[File, set[str]] = {}  # partition columns missing from the file itself
        # Blocks, by number. `_open` fills the dictionaries above, so it must run last.
        self._groups = [group for file in files for group in self._open(file)]
        if not self._groups:
            raise NoRowsError(
                f"none of {len(files)} Parquet files has rows: {[str(file) for file in files[:5]]}."
            )
        self.blocks = [(str(group.file), group.rows) for group in self._groups]

    def column(self, block: int, name: str) -> Any:
        """Return a column of a row group as an Arrow array, with the type in ``arrow_schema``.

        Raises:
            DataError: the column cannot be read.
        """
        group = self._groups[block]
        try:
            # Columns of partitions, such as ``day=1``, are in the folder name instead of the file.
            if not self._in_file(group.file, [name]):
                return pa.repeat(self._keys[group.file][name], group.rows)
            with self._reopened(group.file) as opened:
                table = opened.read_row_group(group.number, columns=[name], use_threads=False)
                array = plain(table[name]).combine_chunks()
                kind = self.arrow_schema.field(name).type
                # Files may store a column with another type than the common schema.
                return array if array.type == kind else array.cast(kind)
        except (pa.ArrowException, OSError, KeyError) as error:
            names = self._schemas[group.file].names
            raise DataError(
                f"{group.file}: column {name!r} cannot be read: {error}. It has the columns {names}."
            ) from error

    @functools.cached_property
    def arrow_schema(self) -> Any:
        """The first file's Arrow schema, with types widened to represent the columns of all files."""
        first, *other_schemas = self._schemas.values()
        for other in other_schemas:
            if other.equals(first):
                continue  # so that 10,000 files with 100 columns do not take seconds
            for position, field in enumerate(first):
                if other.get_field_index(field.name) < 0 or other.field(field.name).type == field.type:
                    continue
                both = [pa.schema([(field.name, schema.field(field.name).type)]) for schema in (first, other)]
                # Without a common type, reading reports the error.
                with contextlib.suppress(pa.ArrowException):
                    first = first.set(position, pa.unify_schemas(both, promote_options="permissive").field(0))
        return first

    def tables(self, block: int, size: int) -> Generator[Any, None, None]:
        """Yield a row group as Arrow tables with at most ``size`` rows, with the columns for the features.

        Raises:
            DataError: the columns cannot be read.
        """
        group = self._groups[block]
        try:
            names = self._in_file(group.file, self._schema.columns())
            text_columns = _text_columns(self._metadata[group.file], names) if self._dictionaries else []
            with self._reopened(group.file, read_dictionary=text_columns) as opened:
                for batch in opened.iter_batches(size, [group.number], names, use_threads=False):
                    table = plain_table(pa.Table.from_batches([batch]))
                    yield with_keys(table, self._keys[group.file]).select(list(self._schema.columns()))
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"{group.file}: row group {group.number} cannot be read: {error}. Repair the data."
            ) from error

    def _open(self, file: File) -> list[_RowGroup]:
        """Check a file's columns, and return its row groups with rows; none if the file is omitted."""
        try:
            with open_parquet_file(file) as opened:
                self._versions[file] = opened.store_version
                # Readers apply `plain`, so compare the types after it.
                metadata, schema = opened.metadata, plain_schema(opened.schema_arrow)
                self._partition_columns[file] = self._keys[file].keys() - set(schema.names)
                for name in sorted(self._partition_columns[file]):
                    schema = schema.append(pa.field(name, self._keys[file][name].type))
        except (pa.ArrowException, OSError) as error:
            self._faults.report(not_parquet(file, error), 0, str(file))
            return []
        if metadata.num_rows == 0:
            return []  # engines write empty files for empty partitions, possibly without column types
        for message in self._schema.wrong_columns(schema):
            # A configuration error, which skipping rows would hide.
            if message.startswith("there is no column"):
                raise DataError(f"{file}: {message}. Name a column that it has, or leave the file out.")
            self._faults.report(f"{file}: {message}", metadata.num_rows, str(file), every_row=True)
            return []
        # Keep the footer: parsing it again for every row group is slow for wide files.
        self._metadata[file], self._schemas[file] = metadata, schema
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        firsts = itertools.accumulate(sizes, initial=0)
        return [
            _RowGroup(file, number, rows, first)
            for number, (rows, first) in enumerate(zip(sizes, firsts, strict=False))
            if rows
        ]

    @override
    def pieces(self, block: int, skip: int, size: int) -> Generator[Samples, None, None]:
        group = self._groups[block]
        name, row = f"{group.file}: row group {group.number}", 0
        try:
            columns = self._in_file(group.file, self._schema.columns())
            # Read as dictionaries, so every distinct value is hashed once.
            text_columns = _text_columns(self._metadata[group.file], columns)
            with self._reopened(group.file, read_dictionary=text_columns) as opened:
                batches = opened.iter_batches(
                    batch_size=size * -(-_READ_ROWS // size),  # whole windows, which are not copied
                    row_groups=[group.number],
                    columns=columns,
                    use_threads=False,
                )
                for batch in batches:
                    if row + batch.num_rows <= skip:
                        yield void_samples(batch.num_rows, self.shape)  # before the requested rows
                    else:
                        table = plain_table(pa.Table.from_batches([batch]))
                        table = with_keys(table, self._keys[group.file])
                        origin = RowOrigin(name, group.first_row + row, str(group.file))
                        yield self._schema.encode(table, origin, self._faults)
                    row += batch.num_rows
                if row != group.rows:
                    raise pa.ArrowInvalid(f"it has {row} rows, its footer says {group.rows}")
        except (pa.ArrowException, OSError) as error:
            column = self._damaged_column(group)
            self._faults.report(f"{name}{column}: {error}", group.rows - row, str(group.file))
            # Invalid samples replace the damaged rows, so positions of later samples do not shift.
            yield void_samples(group.rows - row, self.shape)

    def _reopened(self, file: File, **options: Any) -> contextlib.AbstractContextManager[Any]:
        """Open a file again; see `open_parquet_file`."""
        metadata, version = self._metadata[file], self._versions[file]
        return open_parquet_file(file, version, metadata=metadata, **options)

    def _in_file(self, file: File, columns: Sequence[str]) -> list[str]:
        """Return the columns stored in the file, as opposed to partition columns."""
        return [name for name in columns if name not in self._partition_columns[file]]

    def _damaged_column(self, group: _RowGroup) -> str:
        """Return text for an error message: the first column that cannot be read; empty if all can."""
        for column in self._in_file(group.file, self._schema.columns()):
            try:
                with self._reopened(group.file) as opened:
                    opened.read_row_group(group.number, columns=[column], use_threads=False)
            except (pa.ArrowException, OSError):
                return f", column {column!r}"
        return ""


@contextlib.contextmanager
def open_parquet_file(file: File, version: str | None = None, **options: Any) -> Generator[Any, None, None]:
    """Open a Parquet file, local or in a store, as a ``pyarrow.parquet.ParquetFile``.

    The yielded object has an additional attribute ``store_version``: the version of a file in a store, None
    for a local file.

    Args:
        file: path or address.
        version: version that a file in a store must have; None: any.
        options: further keyword arguments of ``ParquetFile``.

    Raises:
        StoreError: a file in a store cannot be read, or has changed since it was opened.
    """
    # Nanoseconds, Arrow's default for INT96, wrap around outside the years 1677 to 2262.
    with (
        opened(file, version) as source,
        pa_parquet.ParquetFile(source, coerce_int96_timestamp_unit="us", **options) as file_reader,
    ):
        file_reader.store_version = getattr(source, "version", None)
        yield file_reader


def _text_columns(metadata: Any, columns: Sequence[str]) -> list[str]:
    """Return the Parquet paths of the columns with strings or binaries, or with lists of them."""
    from meshrec.data.features.values import is_text

    schema = metadata.schema.to_arrow_schema()
    types = {name: schema.field(name).type for name in columns}
    roots = tuple(f"{name}." for name, kind in types.items() if is_list(kind) and is_text(kind.value_type))
    fields = [metadata.schema.column(index) for index in range(metadata.num_columns)]
    # A list is a nested column, such as "tags.list.element".
    paths = [f.path for f in fields if f.physical_type == "BYTE_ARRAY" and f.path.startswith(roots)]
    return [name for name, kind in types.items() if is_text(kind)] + paths


def parquet(
    *,
    train: Paths,
    schema: Encoding,
    name: str = "parquet",
    **options: Unpack[ReadOptions],
) -> Dataset:
    """Open Parquet files as a dataset; see `meshrec.data.StreamReader` for the order.

    Args:
        train: files, folders (all ``*.parquet`` files in them) or patterns. Folders and patterns are sorted
            by name.
        schema: column semantics, a `meshrec.data.features.Features`, fitted where required.
        name: display name.
        options: keyword arguments:

            - ``validation`` and ``test``: like ``train``; None (the default): no such data.
            - ``split``: takes validation and test rows from ``train`` instead, see `meshrec.data.Split`.
            - ``seed``: shuffle seed, 0 by default.
            - ``on_error``: "raise" (the default), or "skip" to omit damaged rows, row groups and files with a
              warning, counted in ``Dataset.skipped``.
            - ``window`` and ``lanes``: see `meshrec.data.StreamReader`.

    Raises:
        DataError: damaged data; names the file, row group and column.
    """
    return table_dataset(open_parquet, train=train, schema=schema, name=name, **options)


def open_parquet(paths: Paths, schema: Encoding, faults: Faults) -> ParquetSource:
    """Open files, folders (all ``*.parquet`` files in them) or patterns as a source; see `table_dataset`.

    Args:
        paths: files, folders or patterns.
        schema: features encoding the rows.
        faults: raises for damaged rows, or counts them.
    """
    return ParquetSource(expand(paths, "*.parquet"), schema, faults)
