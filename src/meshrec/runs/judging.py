"""Evaluation of a run on labelled data: overall, by user, by values of a column, and with confidence
intervals.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from meshrec.metrics import Interval, bootstrap_intervals, grouped_auc, place_intervals, sliced_metrics
from meshrec.runs.scoring import Scorer, gathered
from meshrec.train.evaluation import Scored
from meshrec.train.losses import BinaryCrossEntropy, NextItem
from meshrec.train.ranks import Ranks

_MOST_SLICES = 20


class Judged(NamedTuple):
    """Result of an evaluation, on rank 0.

    Attributes:
        metrics: metrics of the loss, and ``gauc`` if a group is given.
        intervals: 95 % confidence intervals of the metrics; empty unless asked for.
        slices: metrics by column, for each of its most frequent values and for the others together as
            "others".
    """

    metrics: dict[str, float]
    intervals: dict[str, Interval]
    slices: dict[str, dict[str, dict[str, float]]]


def judge(
    scorer: Scorer,
    ranks: Ranks,
    *,
    by: Sequence[str] = (),
    group: str | None = None,
    draws: int = 0,
    seed: int = 0,
) -> Judged | None:
    """Score all of the scorer's data, and evaluate it. Collective; returns None on ranks other than 0.

    Args:
        scorer: a scorer with labelled data.
        ranks: the ranks, from `join`.
        by: columns of the data whose values are evaluated one by one.
        group: a column, such as the user, within whose values AUCs are computed (GAUC).
        draws: number of bootstrap resamplings; 0: no intervals.
        seed: seed of the bootstrap.

    Raises:
        ValueError: a column does not exist; raised before anything is scored.
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
    columns = _columns(reader, names) if names and ranks.is_first else {}
    found = list(gathered(scorer, ranks))
    if not ranks.is_first:
        return None
    whole = _joined(found)
    metrics = loss.metrics(whole.logits_B, whole.labels_B, gather=False)
    slices = {}
    for name in names:
        assert whole.rows_B is not None
        values, numbers = _numbered(columns[name], whole.rows_B.numpy())
        if name == group:
            area = grouped_auc(whole.logits_B, whole.labels_B, torch.from_numpy(numbers))
            metrics |= {} if area is None else {"gauc": area}
        if name in by:
            slices[name] = _slices(whole, values, numbers)
    intervals = {}
    if draws and isinstance(loss, NextItem):
        losses, places = whole.logits_B.unbind(1)
        intervals = place_intervals(losses, places, ks=loss.ks, num=draws, seed=seed)
    elif draws:
        intervals = bootstrap_intervals(whole.logits_B, whole.labels_B, num=draws, seed=seed)
    return Judged(metrics, intervals, slices)


def _columns(reader: Any, names: Sequence[str]) -> dict[str, Any]:
    import pyarrow as pa

    blocks = list(reader.columns(names))
    return {name: pa.chunked_array([block[name] for block in blocks]) for name in names}


def _joined(found: Sequence[Scored]) -> Scored:
    rows = [each.rows_B for each in found if each.rows_B is not None]
    return Scored(
        torch.cat(rows) if rows else None,
        torch.cat([each.logits_B for each in found]),
        torch.cat([each.labels_B for each in found]),
    )


def _numbered(
    column: Any, rows: "np.typing.NDArray[np.int64]"
) -> "tuple[list[str], np.typing.NDArray[np.int64]]":
    """Return distinct values as text, most frequent first, and the number of each row's value."""
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
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    values = encoded.dictionary.take(pa.array(order[: _MOST_SLICES + 1])).to_pylist()
    null = "None (null)" if "None" in values else "None"
    return [null if each is None else str(each) for each in values], place[codes]


def _slices(whole: Scored, values: Sequence[str], numbers: Any) -> dict[str, dict[str, float]]:
    kept = list(values[:_MOST_SLICES])
    rest = "others (the rest)" if "others" in kept else "others"
    names = kept + ([rest] if len(values) > len(kept) else [])
    found = sliced_metrics(whole.logits_B, whole.labels_B, np.minimum(numbers, len(names) - 1), len(names))
    return dict(zip(names, found, strict=True))
