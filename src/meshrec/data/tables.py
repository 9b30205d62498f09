"""Datasets from tables in files or in memory, encoded by features."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from typing_extensions import override

from meshrec.data.arrow import pa
from meshrec.data.dataset import Dataset, Reader
from meshrec.data.encoding import Encoding, RowOrigin
from meshrec.data.faults import DataError, Faults, NoRowsError, OnError, missing_column
from meshrec.data.order import check_seed
from meshrec.data.samples import Samples, regroup_into_windows, void_samples
from meshrec.data.splitting import Part, Split
from meshrec.data.streaming import Source, StreamReader


class EncodedRows(ABC):
    """Mixin for a `Source` that implements `Source.windows`. A subclass encodes rows in pieces with any size.

    Args:
        schema: features encoding the rows.
        faults: raises for damaged rows, or counts them.
    """

    def __init__(self, schema: Encoding, faults: Faults) -> None:
        self._schema, self._faults = schema, faults
        self.keys, self.shape = schema.keys, schema.shape

    @abstractmethod
    def pieces(self, block: int, skip: int, size: int) -> Generator[Samples, None, None]:
        """Yield all samples in a block, in pieces with any size.

        The first ``skip`` samples may be invalid placeholders, so skipped rows need not be encoded.

        Args:
            block: block number.
            skip: rows at the start, not used by the caller.
            size: rows per window of the caller, as a hint for the size of pieces.
        """

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Yield a block's windows from window ``first`` on, see `Source.windows`.

        Args:
            block: block number.
            first: number of the first window to yield.
            size: rows per window.
        """
        yield from regroup_into_windows(self.pieces(block, first * size, size), first * size, size)


class Tables(ABC):
    """Mixin for a `Source` whose blocks can also be read as Arrow tables, before encoding."""

    @property
    @abstractmethod
    def arrow_schema(self) -> Any:
        """The tables' Arrow schema."""

    @abstractmethod
    def tables(self, block: int, size: int) -> Generator[Any, None, None]:
        """Yield a block's rows as Arrow tables with at most ``size`` rows, with the columns for the features.

        Raises:
            DataError: the columns cannot be read.
        """


OpenSource = Callable[[Any, Encoding, Faults], Source]
"""Function ``open_source(data, schema, faults)`` that opens data, such as paths, as a source of samples."""


class ArrowSource(EncodedRows, Tables, Source):
    """Source of samples from Arrow tables in memory. A table is a block.

    Args:
        tables: pairs of a display name and a table.
        schema: features encoding the rows.
        faults: raises for damaged rows, or counts them.

    Raises:
        DataError: a column is missing or has a wrong type, or no table has rows.
    """

    def __init__(self, tables: Sequence[tuple[str, Any]], schema: Encoding, faults: Faults) -> None:
        super().__init__(schema, faults)
        # One chunk per column makes slices cheap, and lets features read the buffers.
        self._tables = [(name, table.combine_chunks()) for name, table in tables if table.num_rows]
        if not self._tables:
            raise NoRowsError(f"{[name for name, _ in tables]} have no rows. Give some.")
        for name, table in self._tables:
            # The first message is enough.
            for wrong in schema.wrong_columns(table.schema):
                raise DataError(f"{name}: {wrong}. Give it as the schema says.")
        # Block k is table k.
        self.blocks = [(name, table.num_rows) for name, table in self._tables]

    @property
    def arrow_schema(self) -> Any:
        """The first table's Arrow schema."""
        return self._tables[0][1].schema

    def column(self, block: int, name: str) -> Any:
        location, table = self._tables[block]
        if name not in table.column_names:
            raise missing_column(location, name, table.column_names)
        return table[name].combine_chunks()

    def tables(self, block: int, size: int) -> Generator[Any, None, None]:
        """Yield slices of a table, with the columns that features read."""
        table = self._tables[block][1].select(list(self._schema.columns()))
        for first in range(0, table.num_rows, size):
            yield table.slice(first, size)

    @override
    def pieces(self, block: int, skip: int, size: int) -> Generator[Samples, None, None]:
        name, table = self._tables[block]
        table = table.select(list(self._schema.columns()))
        # Placeholders keep the positions of the samples that follow.
        yield void_samples(skip, self.shape)
        for row in range(skip, table.num_rows, size):
            yield self._schema.encode(table.slice(row, size), RowOrigin(name, row, name), self._faults)


class ReadOptions(TypedDict, total=False):
    """Options that all datasets from files share; see `meshrec.data.parquet`."""

    validation: Any
    test: Any
    split: Split | None
    seed: int
    on_error: OnError
    window: int
    lanes: int


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
    """Create a dataset with streamed readers for training, validation and test data.

    Args:
        open_source: function to open data as a source.
        train: training data, such as paths.
        validation: validation data, or None.
        test: test data, or None.
        split: as for `meshrec.data.parquet`.
        schema: features encoding the rows, fitted where required.
        name: display name.
        seed, on_error, window, lanes: as for `meshrec.data.parquet`.

    Raises:
        DataError: damaged data; names the file, location and column.
        ValueError: both a split and files per part are given, or the split leaves a part empty.
    """
    check_seed(seed)  # before the first pass over the files
    if split is not None and (validation is not None or test is not None):
        raise ValueError(
            "a split takes validation and test out of the training data: give it, or their files."
        )
    faults = Faults(on_error)
    opened = open_source(train, schema, faults)
    # Training, validation and test data, in the order of `Part`; None: no such data.
    sources: Sequence[Source | None]
    if split is None:
        paths = (validation, test)
        sources = [opened, *(None if data is None else open_source(data, schema, faults) for data in paths)]
    else:
        sources = split.sources(opened)
    # Evaluation data stay in file order, so predictions match rows.
    readers = [
        None
        if source is None
        else StreamReader(
            source, seed=seed, shuffle=part is Part.TRAIN, window=window, lanes=lanes, skipped=faults.skipped
        )
        for part, source in zip(Part, sources, strict=True)
    ]
    assert readers[0] is not None
    return replace(
        training_dataset(schema, readers[0], name, _read_schema(opened, schema)),
        validation=readers[1],
        test=readers[2],
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
    """Open data as a reader in file and row order, for evaluation or scoring.

    Args:
        open_source: function to open data as a source.
        data: paths or frames.
        schema: features encoding the rows, fitted where required.
        labelled: whether the data has labels, as needed for evaluation.
        on_error, window: as for `meshrec.data.parquet`.
    """
    faults = Faults(on_error)
    source = open_source(data, schema if labelled else schema.unlabelled(), faults)
    return StreamReader(source, seed=0, shuffle=False, window=window, skipped=faults.skipped)


def _read_schema(source: Source, schema: Encoding) -> Any:
    """Return the Arrow schema of the columns that features read; None if the source has no tables."""
    if not isinstance(source, Tables):
        return None
    return pa.schema([(name, source.arrow_schema.field(name).type) for name in schema.columns()])


def training_dataset(schema: Encoding, train: Reader, name: str, arrow_schema: Any = None) -> Dataset:
    """Create a dataset that has only a training reader, and describes the samples by ``schema``.

    Args:
        schema: features encoding the rows.
        train: training reader.
        name: display name.
        arrow_schema: as for `Dataset`.
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
        arrow_schema=arrow_schema,
    )
