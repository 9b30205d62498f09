"""Evaluate a run on labelled data: overall, by user, by column value, and with confidence intervals."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from meshrec.metrics import Interval, bootstrap_intervals, grouped_auc, rank_intervals, sliced_metrics
from meshrec.runs.scoring import Scorer, gather_scores
from meshrec.train.evaluation import Scored
from meshrec.train.losses import BinaryCrossEntropy, NextItem
from meshrec.train.ranks import Ranks

# Column values with metrics; less frequent values are combined.
_MAX_SLICES = 20


class EvaluationResult(NamedTuple):
    """Result of an evaluation, available on rank 0 only.

    Attributes:
        metrics: the metrics of the recipe's loss, and ``gauc`` if a group column was given.
        intervals: 95 % confidence intervals by metric; empty unless requested.
        slices: metrics by column and column value, ``{column: {value: {metric: value}}}``, for a column's
            most frequent values. The value ``others`` combines all other values.
        num_nan: number of scores that are NaN. If it is above 0, metrics are NaN, too.
    """

    metrics: dict[str, float]
    intervals: dict[str, Interval]
    slices: dict[str, dict[str, dict[str, float]]]
    num_nan: int = 0


def evaluate_scorer(
    scorer: Scorer,
    ranks: Ranks,
    *,
    by: Sequence[str] = (),
    group: str | None = None,
    draws: int = 0,
) -> EvaluationResult | None:
    """Score labelled data with a model, and compute metrics. Collective.

    Args:
        scorer: model with labelled data.
        ranks: the ranks, from `join`.
        by: data columns; metrics are also computed for every value in such a column (a slice).
        group: data column, such as the user ID, by which the grouped AUC (GAUC) groups samples.
        draws: number of bootstrap resamples; 0: no confidence intervals.

    Returns:
        The result on rank 0, and None on all other ranks.

    Raises:
        ValueError: a column does not exist (raised before scoring), the loss does not support the requested
            metrics, or all sample weights are 0.
    """
    loss = scorer.recipe.loss
    if (by or group is not None) and not isinstance(loss, BinaryCrossEntropy):
        raise ValueError(
            f"the run's loss is {type(loss).__name__}: slices and GAUC are of one label of clicks. Leave "
            "--by and --group out."
        )
    if draws and not isinstance(loss, BinaryCrossEntropy | NextItem):
        raise ValueError(
            f"the run's loss is {type(loss).__name__}: intervals are of one label of clicks, or of next "
            "items. Leave --intervals out."
        )
    reader = scorer.dataset.train
    names = list(dict.fromkeys([*by, *([] if group is None else [group])]))
    # Read the columns before scoring, so that an unknown name fails early.
    columns = _read_columns(reader, names) if names and ranks.is_first else {}
    scored = list(gather_scores(scorer, ranks))
    if not ranks.is_first:
        return None
    whole = Scored.concat(scored)
    outputs = (whole.logits_B, whole.labels_B, whole.weights_B)
    # This rank has all samples, and the other ranks have returned.
    metrics = loss.metrics(*outputs, gather=False)
    if len(whole.labels_B) and whole.weights_B is not None and not bool((whole.weights_B > 0).any()):
        raise ValueError("the data has no metrics: all its sample weights are 0. Name data with weights.")
    slices = {}
    for name in names:
        assert whole.rows_B is not None
        # Row numbers align data columns with scores.
        values, value_indices = _encode_by_frequency(columns[name], whole.rows_B.numpy())
        if name == group:
            area = grouped_auc(
                whole.logits_B, whole.labels_B, torch.from_numpy(value_indices), weights=whole.weights_B
            )
            metrics |= {} if area is None else {"gauc": area}
        if name in by:
            slices[name] = _slice_metrics(whole, values, value_indices)
    intervals = {}
    if draws and isinstance(loss, NextItem):
        intervals = rank_intervals(*loss.metric_inputs(*outputs), ks=loss.ks, num=draws)
    elif draws:
        intervals = bootstrap_intervals(*outputs, num=draws)
    return EvaluationResult(metrics, intervals, slices, int(whole.logits_B.isnan().sum()))


def _read_columns(reader: Any, names: Sequence[str]) -> dict[str, Any]:
    """Read data columns completely, and return them as Arrow chunked arrays by name."""
    import pyarrow as pa

    blocks = list(reader.columns(names))
    return {name: pa.chunked_array([block[name] for block in blocks]) for name in names}


def _encode_by_frequency(
    column: Any, rows: "np.typing.NDArray[np.int64]"
) -> "tuple[list[str], np.typing.NDArray[np.int64]]":
    """Number the distinct values in a column from 0, by decreasing frequency among the scored samples.

    Example: for samples with values "a", "b", "b", return ``["b", "a"]`` and ``[1, 0, 0]``.

    Returns:
        Two results. The first is a list of the most frequent values as strings, in number order. The second
        is the value number of every sample, int64 [B]. The list has at most ``_MAX_SLICES + 1`` values, which
        is 1 more than the caller shows, so the caller knows whether some values are not shown. The numbers
        are not limited.
    """
    import pyarrow as pa

    # The value for every scored sample. Skipped rows have no sample.
    array = column.combine_chunks().take(pa.array(rows))
    if pa.types.is_nested(array.type):
        raise ValueError(f"a column of {array.type} has no slices. Name one of single values.")
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    # "encode" gives nulls a code, so that they are a slice of their own.
    encoded = array.dictionary_encode("encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    counts = np.bincount(codes, minlength=len(encoded.dictionary))
    order = np.argsort(-counts, kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    values = encoded.dictionary.take(pa.array(order[: _MAX_SLICES + 1])).to_pylist()
    # Null is shown as "None", unless the column also has the string "None".
    null = "None (null)" if "None" in values else "None"
    return [null if value is None else str(value) for value in values], position[codes]


def _slice_metrics(whole: Scored, values: Sequence[str], value_indices: Any) -> dict[str, dict[str, float]]:
    """Compute the metrics for samples with each column value.

    Returns:
        Metrics by name, for each of the ``_MAX_SLICES`` most frequent values. All other values are combined
        as ``others``.
    """
    shown_values = list(values[:_MAX_SLICES])
    remaining_name = "others (the rest)" if "others" in shown_values else "others"
    names = shown_values + ([remaining_name] if len(values) > len(shown_values) else [])
    metrics = sliced_metrics(
        whole.logits_B,
        whole.labels_B,
        # All values that are not shown fall into the last slice, `others`.
        np.minimum(value_indices, len(names) - 1),
        len(names),
        weights=whole.weights_B,
    )
    return dict(zip(names, metrics, strict=True))
