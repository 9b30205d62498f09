"""Datasets from tables, in files or in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshrec.data.dataset import Dataset, Reader, RowsOfFile
from meshrec.data.encoding import Encoding, RowOrigin
from meshrec.data.faults import DataError, Faults, OnError
from meshrec.data.nearest import did_you_mean
from meshrec.data.samples import Ints, Samples, rewindowed
from meshrec.data.splitting import Split, part_readers
from meshrec.data.streaming import Source, StreamReader, files_of


class Tables(ABC):
    """Source whose blocks are Arrow tables before they become samples."""

    @property
    @abstractmethod
    def arrow_schema(self) -> Any:
        """Column types."""

    @abstractmethod
    def tables(self, block: int, size: int) -> Generator[Any, None, None]:
        """Yield a block's original columns, ``size`` rows at a time.

        Raises:
            DataError: they cannot be read.
        """


OpenSource = Callable[[Any, Encoding, Faults], Source]
"""Function that opens data, such as paths, with features."""


class ArrowSource(Source, Tables):
    """Arrow tables in memory.

    Args:
        tables: pairs of a name, for messages, and a table.
        schema: features.
        faults: handles damage.

    Raises:
        DataError: columns are missing or of wrong types, or there are no rows.
    """

    def __init__(self, tables: Sequence[tuple[str, Any]], schema: Encoding, faults: Faults) -> None:
        # One chunk per column makes slices cheap, and lets features read the buffers.
        self._tables = [(name, table.combine_chunks()) for name, table in tables if table.num_rows]
        if not self._tables:
            raise DataError(f"{[name for name, _ in tables]} have no rows. Give some.")
        for name, table in self._tables:
            for wrong in schema.wrong_columns(table.schema):
                raise DataError(f"{name}: {wrong}. Give it as the schema says.")
        self._schema, self._faults = schema, faults
        self.keys, self.shape = schema.keys, schema.shape

    @property
    def files(self) -> Sequence[RowsOfFile]:
        """Tables, in place of files."""
        return files_of([(name, table.num_rows) for name, table in self._tables])

    @property
    def block_sizes(self) -> Ints:
        """Rows per table."""
        return np.array([table.num_rows for _, table in self._tables], dtype=np.int64)

    @property
    def arrow_schema(self) -> Any:
        """First table's schema."""
        return self._tables[0][1].schema

    def column(self, block: int, name: str) -> Any:
        where, table = self._tables[block]
        if name not in table.column_names:
            raise DataError(
                f"{where}: there is no column {name!r} among {table.column_names}."
                f"{did_you_mean(name, table.column_names)}"
            )
        return table[name].combine_chunks()

    def tables(self, block: int, size: int) -> Generator[Any, None, None]:
        """Yield slices of a table."""
        table = self._tables[block][1].select(list(self._schema.columns()))
        for first in range(0, table.num_rows, size):
            yield table.slice(first, size)

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Encode window by window.

        Args:
            block: table number.
            first: first window.
            size: rows per window.
        """
        where, table = self._tables[block]
        table = table.select(list(self._schema.columns()))
        pieces = (
            self._schema.encode(table.slice(row, size), RowOrigin(where, row, where), self._faults)
            for row in range(first * size, table.num_rows, size)
        )
        yield from rewindowed(pieces, 0, size)


def table_dataset(
    open_source: OpenSource,
    *,
    train: Any,
    validation: Any = None,
    test: Any = None,
    split: Split | None = None,
    schema: Encoding,
    name: str,
    seed: int = 0,
    on_error: OnError = "raise",
    window: int = 8192,
    lanes: int = 8,
) -> Dataset:
    """Open a dataset from tables.

    Args:
        open_source: opens data.
        train: training data.
        validation: validation data, or None.
        test: test data, or None.
        split: as for `meshrec.data.parquet`.
        schema: features.
        name: display name.
        seed: as for `meshrec.data.parquet`.
        on_error: as for `meshrec.data.parquet`.
        window: as for `meshrec.data.parquet`.
        lanes: as for `meshrec.data.parquet`.

    Raises:
        DataError: damaged data; names the file, location and column.
    """
    faults = Faults(on_error)
    readers = part_readers(
        lambda data: open_source(data, schema, faults),
        train,
        validation,
        test,
        split,
        seed=seed,
        window=window,
        lanes=lanes,
        faults=faults,
    )
    return replace(
        described_by(schema, readers.train, name),
        validation=readers.validation,
        test=readers.test,
        skipped=faults.by_file,
        open=lambda paths, labelled: ordered_reader(
            open_source, paths, schema, labelled=labelled, on_error=on_error, window=window
        ),
    )


def ordered_reader(
    open_source: OpenSource,
    data: Any,
    schema: Encoding,
    *,
    labelled: bool,
    on_error: OnError = "raise",
    window: int = 8192,
) -> StreamReader:
    """Open data in its original order: with labels for evaluation, or without for scoring.

    Args:
        open_source: opens data.
        data: paths or frames.
        schema: features.
        labelled: whether the data has labels.
        on_error: as for `meshrec.data.parquet`.
        window: as for `meshrec.data.parquet`.
    """
    faults = Faults(on_error)
    source = open_source(data, schema if labelled else schema.unlabelled(), faults)
    return StreamReader(source, seed=0, shuffle=False, window=window, skipped=faults.skipped)


def described_by(schema: Encoding, train: Reader, name: str) -> Dataset:
    """Return a dataset with only a training reader.

    Args:
        schema: features.
        train: training reader.
        name: display name.
    """
    return Dataset(
        name=name,
        features=schema.described(),
        num_dense=schema.shape.num_dense,
        train=train,
        id_columns=schema.id_columns(),
        has_id_weights=schema.shape.has_id_weights,
        labels=schema.labels_of(),
        number_edges=schema.number_edges,
        num_classes=schema.num_classes,
        dense_names=schema.dense_names,
    )
