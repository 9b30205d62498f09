"""Evaluation of a run on labelled data: overall, by user, by column value, and with confidence intervals."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from meshrec.metrics import Interval, bootstrap_intervals, grouped_auc, rank_intervals, sliced_metrics
from meshrec.runs.scoring import Scorer, gather_scores
from meshrec.train.evaluation import Scored
from meshrec.train.losses import BinaryCrossEntropy, NextItem
from meshrec.train.ranks import Ranks

_MAX_SLICES = 20


class EvaluationResult(NamedTuple):
    """Result of an evaluation, on rank 0.

    Attributes:
        metrics: loss metrics, and ``gauc`` if a group is given.
        intervals: 95 % confidence intervals for the metrics; empty unless requested.
        slices: ``{column: {value: {metric: value}}}`` for a column's most frequent values; ``others`` stands
            for all other values together.
        num_nan: number of NaN scores, for which metrics are NaN too.
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
    seed: int = 0,
) -> EvaluationResult | None:
    """Score the data of a scorer and compute metrics. Collective; returns None on ranks other than 0.

    Args:
        scorer: a scorer with labelled data.
        ranks: the ranks, from `join`.
        by: columns to slice by value.
        group: a column, such as the user, to group by for grouped AUC (GAUC).
        draws: number of bootstrap resamples; 0: no intervals.
        seed: bootstrap seed.

    Raises:
        ValueError: a column does not exist, which is raised before scoring; or all sample weights are 0.
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
        intervals = rank_intervals(*loss.metric_inputs(*outputs), ks=loss.ks, num=draws, seed=seed)
    elif draws:
        intervals = bootstrap_intervals(*outputs, num=draws, seed=seed)
    return EvaluationResult(metrics, intervals, slices, int(whole.logits_B.isnan().sum()))


def _read_columns(reader: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return data columns as Arrow arrays, by name."""
    import pyarrow as pa

    blocks = list(reader.columns(names))
    return {name: pa.chunked_array([block[name] for block in blocks]) for name in names}


def _encode_by_frequency(
    column: Any, rows: "np.typing.NDArray[np.int64]"
) -> "tuple[list[str], np.typing.NDArray[np.int64]]":
    """Number a column's values by falling frequency.

    Args:
        column: Arrow column of the data.
        rows: data row of each scored sample, int64 [B].

    Returns:
        Values as strings, most frequent first, one more than can be shown; and the value number of each
        sample, int64 [B]. The column "a", "b", "b" gives ["b", "a"] and [1, 0, 0].
    """
    import pyarrow as pa

    array = column.combine_chunks().take(pa.array(rows))
    if pa.types.is_nested(array.type):
        raise ValueError(f"a column of {array.type} has no slices. Name one of single values.")
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    encoded = array.dictionary_encode("encode")
    codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    counts = np.bincount(codes, minlength=len(encoded.dictionary))
    order = np.argsort(-counts, kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    values = encoded.dictionary.take(pa.array(order[: _MAX_SLICES + 1])).to_pylist()
    null = "None (null)" if "None" in values else "None"
    return [null if value is None else str(value) for value in values], position[codes]


def _slice_metrics(whole: Scored, values: Sequence[str], value_indices: Any) -> dict[str, dict[str, float]]:
    """Return metrics by column value; arguments as returned by `_encode_by_frequency`."""
    shown_values = list(values[:_MAX_SLICES])
    remaining_name = "others (the rest)" if "others" in shown_values else "others"
    names = shown_values + ([remaining_name] if len(values) > len(shown_values) else [])
    metrics = sliced_metrics(
        whole.logits_B,
        whole.labels_B,
        np.minimum(value_indices, len(names) - 1),
        len(names),
        weights=whole.weights_B,
    )
    return dict(zip(names, metrics, strict=True))
