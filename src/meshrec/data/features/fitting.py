"""Fitting of features in a pass over training data, possibly on several processes or machines."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from meshrec.data.faults import DataError, Faults, OnError
from meshrec.data.features.features import Features, FitState
from meshrec.data.samples import Bools
from meshrec.data.splitting import Part, Split
from meshrec.data.tables import OpenSource, Tables

_FIT_ROWS = 1 << 16
"""Rows per table while fitting. Fitted features do not depend on it, because states merge exactly."""

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
    parts = None if split is None else split.parts_of(source)
    state: FitState | None = None
    firsts = np.cumsum(source.block_sizes) - source.block_sizes
    # Global row numbers choose the sample, which then does not depend on block sizes.
    blocks = [
        _Block(number, int(first), None if parts is None else parts[number] == Part.TRAIN)
        for number, first in enumerate(firsts)
    ]
    # States merge exactly in any order, so the engine may run blocks anywhere.
    for block_state in engine(functools.partial(_fit_block, source, features), blocks):
        # A block may have no training rows.
        if block_state is not None:
            state = block_state if state is None else state.merged(block_state)
    if state is None:
        raise DataError("there is no training row to fit features on. Give more data, or another split.")
    return features.fitted(state, features.joined_schema(source.arrow_schema))


class _Block(NamedTuple):
    """Block of the data whose statistics an engine computes as one task; see `fit_features`."""

    number: int
    """Number of the block in the source."""
    first_row: int
    """Row number in the whole data for the first row."""
    selected: Bools | None
    """Mask of the training rows in the block; None: all rows."""


def _fit_block(source: Tables, features: Features, block: _Block) -> FitState | None:
    """Compute the statistics of the training rows in a block; None if it has no training rows.

    Args:
        source: source with the block.
        features: features to fit.
        block: the block.
    """
    state: FitState | None = None
    at = 0
    for table in source.tables(block.number, _FIT_ROWS):
        num = table.num_rows
        rows = np.arange(num) if block.selected is None else np.flatnonzero(block.selected[at : at + num])
        if len(rows):
            table_state = features.state_of(table.take(rows), block.first_row + at + rows)
            state = table_state if state is None else state.merged(table_state)
        at += num
    return state
