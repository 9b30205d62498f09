"""Datasets of tables, in files or in memory."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshrec.data.dataset import Dataset, FileRows, Reader
from meshrec.data.encoding import Encoding
from meshrec.data.faults import DataError, Faults, OnError
from meshrec.data.samples import Bools, Ints, Samples, Shape, rewindowed
from meshrec.data.splitting import Part, Split, part_readers
from meshrec.data.streaming import Source, StreamReader, files_of

if TYPE_CHECKING:
    from meshrec.data.features import Features, FitState

_FIT_ROWS = 1 << 16


class Tables(ABC):
    """A source whose blocks are Arrow tables before they become samples."""

    @property
    @abstractmethod
    def arrow_schema(self) -> Any:
        """Types of all columns."""

    @abstractmethod
    def tables(self, block: int, size: int) -> Generator[Any, None, None]:
        """Yield the columns of a block as they are in the data, ``size`` rows at a time.

        Raises:
            DataError: they cannot be read.
        """


Engine = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""``map``, or a function that maps on other processes or machines."""
OpenSource = Callable[[Any, Encoding, Faults], Source]
"""Opens data, such as paths, with an encoding."""


class ArrowSource(Source, Tables):
    """Arrow tables in memory.

    Args:
        tables: pairs of a name, for messages, and a table.
        schema: the encoding.
        faults: handles damage.

    Raises:
        DataError: columns are missing or of wrong types, or there are no rows.
    """

    def __init__(self, tables: Sequence[tuple[str, Any]], schema: Encoding, faults: Faults) -> None:
        self._tables = [(name, table.combine_chunks()) for name, table in tables if table.num_rows]
        if not self._tables:
            raise DataError(f"{[name for name, _ in tables]} have no rows. Give some.")
        for name, table in self._tables:
            for wrong in schema.wrong_columns(table.schema):
                raise DataError(f"{name}: {wrong}. Give it as the schema says.")
        self._schema, self._faults = schema, faults

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the ID features."""
        return self._schema.keys

    @property
    def shape(self) -> Shape:
        """Shape of the samples, as the encoding says."""
        return self._schema.shape

    @property
    def files(self) -> Sequence[FileRows]:
        """The tables, in place of files."""
        return files_of([(name, table.num_rows) for name, table in self._tables])

    @property
    def block_sizes(self) -> Ints:
        """Number of rows of each table."""
        return np.array([table.num_rows for _, table in self._tables], dtype=np.int64)

    @property
    def arrow_schema(self) -> Any:
        """Arrow schema of the first table."""
        return self._tables[0][1].schema

    def column(self, block: int, name: str) -> Any:
        where, table = self._tables[block]
        if name not in table.column_names:
            raise DataError(f"{where}: there is no column {name!r} among {table.column_names}.")
        return table[name].combine_chunks()

    def tables(self, block: int, size: int) -> Generator[Any, None, None]:
        """Yield slices of a table."""
        table = self._tables[block][1].select(list(self._schema.columns()))
        for first in range(0, table.num_rows, size):
            yield table.slice(first, size)

    def windows(self, block: int, first: int, size: int) -> Generator[Samples, None, None]:
        """Encode one window at a time."""
        from meshrec.data.columns import Place

        where, table = self._tables[block]
        table = table.select(list(self._schema.columns()))
        pieces = (
            self._schema.encode(table.slice(row, size), Place(where, row, where), self._faults)
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
    """Open a dataset of tables. The arguments are those of `meshrec.data.parquet`.

    Raises:
        DataError: damaged data; names the file, place and column.
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
    """Open data in its own order: with labels for evaluation, or without for scoring."""
    faults = Faults(on_error)
    source = open_source(data, schema if labelled else schema.unlabelled(), faults)
    return StreamReader(source, seed=0, shuffle=False, window=window, skipped=faults.skipped)


def described_by(schema: Encoding, train: Reader, name: str) -> Dataset:
    """Return a dataset of one reader."""
    return Dataset(
        name=name,
        features=schema.described(),
        num_dense=schema.shape.num_dense,
        train=train,
        id_columns=schema.id_columns(),
        has_id_weights=schema.shape.has_id_weights,
        labels=schema.labels_of(),
    )


def fit_features(
    features: "Features",
    open_source: OpenSource,
    train: Any,
    *,
    split: Split | None = None,
    on_error: OnError = "raise",
    engine: Engine = map,
) -> "Features":
    """Fit features on the training data, or on its training rows if there is a ``split``. Streams the data.

    Args:
        features: the features to fit.
        open_source, train: the data.
        split: decides which rows are training rows.
        on_error: handling of damage.
        engine: maps a function over blocks of the data, on other processes or machines if it wants to.
            Function, blocks and results can be pickled. The result does not depend on the engine:
            ``ProcessPoolExecutor(8).map`` uses eight processes of this machine.

    Raises:
        DataError: the data cannot be read, or a feature has nothing to fit on.
    """
    source = open_source(train, features, Faults(on_error))
    assert isinstance(source, Tables)
    parts = None if split is None else split.parts_of(source)
    state: FitState | None = None
    firsts = np.cumsum(source.block_sizes) - source.block_sizes
    blocks = [
        _Block(number, int(first), None if parts is None else parts[number] == Part.TRAIN)
        for number, first in enumerate(firsts)
    ]
    for mine in engine(functools.partial(_fit_block, source, features), blocks):
        if mine is not None:
            state = mine if state is None else state.merged(mine)
    if state is None:
        raise DataError("there is no training row to fit features on. Give more data, or another split.")
    return features.fitted(state, features.joined_schema(source.arrow_schema))


class _Block(NamedTuple):
    """A block of a source, the number of its first row, and a mask of its training rows."""

    number: int
    first_row: int
    chosen: Bools | None


def _fit_block(source: Tables, features: "Features", block: _Block) -> "FitState | None":
    """Return the fit state of a block; None if it has no training row."""
    state: FitState | None = None
    at = 0
    for table in source.tables(block.number, _FIT_ROWS):
        num = table.num_rows
        rows = np.arange(num) if block.chosen is None else np.flatnonzero(block.chosen[at : at + num])
        if len(rows):
            mine = features.state_of(table.take(rows), block.first_row + at + rows)
            state = mine if state is None else state.merged(mine)
        at += num
    return state
