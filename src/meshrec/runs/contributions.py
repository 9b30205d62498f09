"""Explain single predictions: compute how much each data column contributes to a row's output.

The contributions are Shapley values, estimated by sampling (Štrumbelj and Kononenko, "Explaining prediction
models and individual predictions with feature contributions", 2014, algorithm 1). Start from a background
row, and replace its values by those of the explained row, column by column in a random order. A column's
contribution is the change in the output when its value is replaced, averaged over many orders and background
rows. Gradients are not an option, because the trees in a wide & deep model do not have any.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from meshrec.data.exact_columns import plain_table
from meshrec.data.faults import missing_column
from meshrec.data.frames import column_names, read_columns
from meshrec.runs.fitting import features_of
from meshrec.runs.saved_recipe import load_recipe
from meshrec.runs.scoring import gather_scores, load_scorer, open_data
from meshrec.train.evaluation import Scored
from meshrec.train.losses import NextItem
from meshrec.train.ranks import join
from meshrec.train.recipe import TableSource
from meshrec.train.run_folder import RunFolder

# n rows to explain, d columns, m orders of columns

BASE, OUTPUT = "(base)", "(output)"
"""Names of two result columns: the mean output for background rows, and the output for the explained row."""

# Background rows are drawn from this many rows at the start of the background data.
_MAX_ROWS = 10_000
# Estimated duration in seconds above which the caller is told.
_LONG_SECONDS = 10.0


def contributions(
    run: RunFolder,
    data: Any,
    *,
    background: Any = None,
    num_orders: int = 32,
    step: int | None = None,
    last: bool = False,
    tell: Callable[[str], None] | None = None,
) -> pa.Table:
    """Compute the contribution of every data column to the model output, for every row to explain.

    Contributions are in the unit of the model output: logits, or the label's unit for a regression.

    Args:
        run: a run trained on a table with features.
        data: rows to explain: a table, or paths of files.
        background: rows to compare with, as a table or paths; None: the run's training data. Only the first
            10,000 rows are used.
        num_orders: number of random column orders per row, m. The error falls with 1 / sqrt(m).
        step: checkpoint step to load; None: the run's reported weights.
        last: whether to load the last checkpoint instead; see ``meshrec.checkpoint.find_checkpoint``.
        tell: called at most once, with a message with the estimated duration if it exceeds ten seconds.

    Returns:
        Table with a row per explained row. The float64 columns are the contribution of every model input,
        ``(base)`` with the mean output for background rows, and ``(output)`` with the sum of all other
        columns. If the model has several classes, the output is the logit of the row's most probable class.

    Raises:
        DataError: the rows or the background lack a column of the model.
        ValueError: the run has no columns to explain, or the background is empty.
    """
    if num_orders < 1:
        raise ValueError(f"the number of orders is {num_orders}; it must be at least 1.")
    recipe, ranks = load_recipe(run), join("cpu")
    source = recipe.data
    if not isinstance(source, TableSource) or isinstance(recipe.loss, NextItem):
        raise ValueError(
            f"{run.path} was trained on {type(source).__name__}, whose rows have no columns of their own to "
            "explain. Explain a run of Parquet, Csv or Frame."
        )
    features = features_of(run).unlabelled()
    names, kinds = features.columns(), features.fitted_kinds()

    def read(location: str, given: Any, max_rows: int | None = None) -> pa.Table:
        """Read the model's columns from a table or files, at most ``max_rows`` rows."""
        table = read_columns(given, names, kinds, source.csv_format)
        if missing := [name for name in names if name not in table.column_names]:
            raise missing_column(location, missing[0], column_names(given))
        return plain_table(table.slice(0, max_rows)).select(names)

    rows = read("the rows to explain", data)
    # The first part is the training data.
    background = source.parts()[0] if background is None else background
    background_rows = read("the background rows", background, _MAX_ROWS)
    if not len(background_rows):
        raise ValueError("there are no background rows to compare with. Give some.")
    # The model is loaded once. `outputs` replaces the data for every table to score.
    scorer = load_scorer(run, ranks, rows, labelled=False, step=step, last=last)

    def outputs(table: pa.Table) -> npt.NDArray[np.float64]:
        """Return the model outputs for the rows of a table, float64 [rows, classes], or [rows, 1]."""
        dataset = open_data(source, run, table, labelled=False)
        scored = Scored.concat(list(gather_scores(scorer._replace(dataset=dataset), ranks)))
        logits: npt.NDArray[np.float64] = scored.logits_B.double().numpy()
        # A column per class; a single column without classes.
        return logits.reshape(len(logits), -1)

    draws = np.random.default_rng(0)
    result = np.empty((len(rows), len(names) + 2))
    start = time.monotonic()
    for number in range(len(rows)):
        result[number] = _row_contributions(
            rows.slice(number, 1), background_rows, outputs, num_orders, draws
        )
        if number == 1 and tell is not None:  # the first row also warms up
            seconds = (time.monotonic() - start) / 2 * len(rows)
            if seconds > _LONG_SECONDS:
                tell(f"{len(rows):,} rows take about {seconds:,.0f} seconds; fewer rows or orders take less")
    return pa.table({name: result[:, at] for at, name in enumerate([*names, BASE, OUTPUT])})


def _row_contributions(
    row: pa.Table, background_rows: pa.Table, outputs: Any, num: int, draws: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Compute the column contributions for a single row.

    Args:
        outputs: function from a table to the model outputs, float64 [rows, classes].

    Returns:
        Contributions of the d columns, followed by base and output, float64 [d + 2].
    """
    names = row.column_names
    both = pa.concat_tables([row, background_rows], promote_options="permissive")
    # In `both`, index 0 is the explained row, and the background rows start at 1.
    # Position p in an order holds the column that changes from the background value to the row's at step p.
    orders = np.array([draws.permutation(len(names)) for _ in range(num)])
    drawn = 1 + draws.integers(0, len(background_rows), num)
    steps = np.arange(len(names) + 1)
    columns = {}
    for column, name in enumerate(names):
        # Position of the column in every order: at this step, the background value is replaced.
        step_of_change = (orders == column).argmax(1)
        index = np.where(step_of_change[:, None] < steps, 0, drawn[:, None])  # [m, d + 1]
        columns[name] = both[name].combine_chunks().take(pa.array(index.reshape(-1)))
    # All intermediate rows of all orders are scored at once: [m, d + 1, classes].
    scores = outputs(pa.table(columns)).reshape(num, len(names) + 1, -1)
    # Explain the most probable class, from the row's unchanged values.
    scores = scores[:, :, scores[0, -1].argmax()]
    changes = np.zeros((num, len(names)))
    np.put_along_axis(changes, orders, np.diff(scores, axis=1), axis=1)
    return np.concatenate([changes.mean(0), [scores[:, 0].mean(), scores[0, -1]]])
