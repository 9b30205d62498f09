"""The pass over training data that fits features."""

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

Engine = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
"""``map``, or a function that maps on other processes or machines."""


def fit_features(
    features: Features,
    open_source: OpenSource,
    train: Any,
    *,
    split: Split | None = None,
    on_error: OnError = "raise",
    engine: Engine = map,
) -> Features:
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


def _fit_block(source: Tables, features: Features, block: _Block) -> FitState | None:
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
