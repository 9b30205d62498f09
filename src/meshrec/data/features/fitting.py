"""Fitting of features in a pass over training data, possibly on several ranks, processes or machines."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np

from meshrec.comms.agreement import together
from meshrec.comms.collectives import gather_objects
from meshrec.comms.mesh import Axis
from meshrec.data.faults import DataError, Faults, OnError
from meshrec.data.features.features import Features, FitState
from meshrec.data.features.merging import StateMerger, merge_ranks
from meshrec.data.features.sketches import max_sample_hash, smallest_row_hashes
from meshrec.data.samples import Bools, Ints
from meshrec.data.shares import RowRange, cut_rows, row_ranges
from meshrec.data.splitting import Part, Parts, Split
from meshrec.data.streaming import Source
from meshrec.data.tables import OpenSource, Tables

_FIT_ROWS = 1 << 16
"""Rows per table while fitting. Fitted features do not depend on it, because states merge exactly."""

_HASHED_ROWS = 1 << 20
"""Rows whose hashes are computed at a time."""

Engine = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""The function ``map``, or a function with the same interface that uses other processes or machines."""


def fit_features(
    features: Features,
    open_source: OpenSource,
    train: Any,
    *,
    split: Split | None = None,
    on_error: OnError = "raise",
    engine: Engine = map,
) -> Features:
    """Fit features on training data with any size, which is streamed.

    Args:
        features: features to fit.
        open_source: function to open data as a source.
        train: training data, such as paths.
        split: rule that takes validation and test rows from ``train``; features are fitted on the other rows.
            None: on all rows.
        on_error: "raise" for damaged data, or "skip" to omit it.
        engine: maps a function over blocks of the data, possibly on other processes or machines. Function,
            blocks and results are picklable. The result does not depend on the engine:
            ``ProcessPoolExecutor(8).map`` uses eight local processes.

    Raises:
        DataError: the data cannot be read, or a feature has nothing to fit on.
    """
    source = open_source(train, features, Faults(on_error))
    assert isinstance(source, Tables)
    selected = None if split is None else _training_mask(split.parts_of(source))
    blocks = _blocks(row_ranges(source.block_sizes), selected)
    max_hash = max_sample_hash([smallest_row_hashes(_row_numbers(blocks))])
    merger = StateMerger()
    # States merge exactly in any order, so the engine may run blocks anywhere.
    for state in engine(functools.partial(_fit_block, source, features, max_hash), blocks):
        # A block may have no training rows.
        if state is not None:
            merger.add(state)
    return _fitted(features, merger.state(), source)


def fit_on_ranks(
    features: Features,
    open_source: OpenSource,
    train: Any,
    axis: Axis,
    *,
    split: Split | None = None,
    on_error: OnError = "raise",
    tell: Callable[[float], None] = lambda share: None,
) -> Features | None:
    """Fit features on all ranks together. Every rank reads an equal share of the rows. Collective.

    The result does not depend on the number of ranks.

    Args:
        features: features to fit.
        open_source, train: as for `fit_features`.
        axis: the ranks.
        split, on_error: as for `fit_features`.
        tell: called with the share of this rank's rows that are read, from 0 to 1.

    Returns:
        The fitted features on rank 0, None on other ranks.

    Raises:
        Exception: a rank failed, as for `fit_features`; raised on every rank.
    """
    name = "fitting features"
    # Errors on some ranks are raised on all, so that no rank waits in the next collective.
    with together(axis, name):
        source = open_source(train, features, Faults(on_error))
        assert isinstance(source, Tables)
    sizes = source.block_sizes
    selected = None if split is None else _training_rows(split, source, axis)
    first, last = cut_rows(int(sizes.sum()), axis.size, selected)[axis.rank : axis.rank + 2]
    blocks = _blocks(row_ranges(sizes, first, last), selected)
    max_hash = max_sample_hash(gather_objects(smallest_row_hashes(_row_numbers(blocks)), axis, name))
    merger = StateMerger()
    num_read = 0
    with together(axis, name):
        for block in blocks:
            for num_added in _add_rows(merger, source, features, block, max_hash):
                num_read += num_added
                tell(num_read / (last - first))
        states = merger.states()
    state = merge_ranks(states, axis)
    fitted = None
    with together(axis, name):
        # Only rank 0 stores the features. The other ranks read the stored ones.
        if axis.rank == 0:
            fitted = _fitted(features, state, source)
    return fitted


def _training_mask(parts: Sequence[Parts]) -> Bools:
    """Return the mask of training rows, from the `Part` per row in some arrays."""
    return np.concatenate([np.zeros(0, np.bool_), *(block == Part.TRAIN for block in parts)])


def _training_rows(split: Split, source: Source, axis: Axis) -> Bools:
    """Return the mask of all training rows, of which every rank computes an equal share. Collective."""
    name = "dividing rows into training and other data"
    sizes = source.block_sizes
    first, last = cut_rows(int(sizes.sum()), axis.size)[axis.rank : axis.rank + 2]
    with together(axis, name):
        keys = split.keys_of(source, row_ranges(sizes, first, last))
    own = _training_mask(split.parts_of_keys(keys, lambda item: gather_objects(item, axis, name)))
    # Eight rows per byte, because every rank receives the masks of all ranks.
    masks = gather_objects((np.packbits(own), len(own)), axis, name)
    return np.concatenate([np.unpackbits(bits, count=num).view(np.bool_) for bits, num in masks])


def _fitted(features: Features, state: FitState | None, source: Tables) -> Features:
    """Return the fitted features. ``state`` has statistics of all training rows; None if there are none."""
    if state is None:
        raise DataError("there is no training row to fit features on. Give more data, or another split.")
    return features.fitted(state, features.joined_schema(source.arrow_schema))


class _Block(NamedTuple):
    """Rows of a block whose statistics are computed as one task; see `fit_features`."""

    rows: RowRange
    """The rows."""
    selected: Bools | None
    """Mask of the training rows; None: all rows."""


def _blocks(ranges: Sequence[RowRange], selected: Bools | None) -> list[_Block]:
    """Return the tasks for some rows, of which the training rows are ``selected``."""
    return [
        _Block(rows, None if selected is None else selected[rows.first_row :][: rows.stop - rows.start])
        for rows in ranges
    ]


def _row_numbers(blocks: Sequence[_Block]) -> Iterator[Ints]:
    """Yield the numbers of the training rows in some blocks, in arrays with a limited size."""
    for (_, start, stop, first_row), selected in blocks:
        for offset in range(0, stop - start, _HASHED_ROWS):
            rows = np.arange(offset, min(offset + _HASHED_ROWS, stop - start))
            yield first_row + (rows if selected is None else rows[selected[rows]])


def _fit_block(
    source: Tables, features: Features, max_hash: np.uint64 | None, block: _Block
) -> FitState | None:
    """Compute the statistics of the training rows in a block; None if it has no training rows."""
    merger = StateMerger()
    for _ in _add_rows(merger, source, features, block, max_hash):
        pass
    return merger.state()


def _add_rows(
    merger: StateMerger, source: Tables, features: Features, block: _Block, max_hash: np.uint64 | None
) -> Iterator[int]:
    """Add the statistics of the training rows in a block, table by table. Yields the rows read."""
    number, start, stop, first_row = block.rows
    at = 0
    with closing(source.tables(number, _FIT_ROWS)) as tables:
        for table in tables:
            # The rows of this table, counted in the block.
            low, high = max(start, at), min(stop, at + table.num_rows)
            if low < high:
                rows = np.arange(low, high)
                if block.selected is not None:
                    rows = rows[block.selected[low - start : high - start]]
                if len(rows):
                    is_all = len(rows) == table.num_rows
                    selected = table if is_all else table.take(rows - at)
                    # Row numbers in the whole data choose the sample, which then does not depend on blocks.
                    merger.add(features.state_of(selected, first_row - start + rows, max_hash))
                yield high - low
            at += table.num_rows
            if at >= stop:
                return
