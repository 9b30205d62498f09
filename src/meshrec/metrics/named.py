"""Registry of metrics: their display names, whether higher is better, and which one selects the best weights.

Trainers, commands and report pages read it.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """Display name of a metric, which direction is better, and where the metric is used."""

    title: str
    """Display name, such as "AUC"."""
    better: int
    """1 if higher is better, -1 if lower is better, 0 if neither."""
    leads: bool = False
    """Whether this is a leading metric: a run that computes it selects the best weights by it."""
    is_curve: bool = False
    """Whether a run's report page plots the metric over steps."""


METRICS: dict[str, Metric] = {
    "auc": Metric("AUC", 1, leads=True, is_curve=True),
    "auprc": Metric("AUPRC", 1),
    "ndcg": Metric("NDCG", 1, leads=True, is_curve=True),
    "recall": Metric("recall", 1),
    "mrr": Metric("MRR", 1),
    "loss": Metric("loss", -1, is_curve=True),
    "normalized_entropy": Metric("normalized entropy", -1, is_curve=True),
    "calibration": Metric("calibration", 0),
    "accuracy": Metric("accuracy", 1),
    "rmse": Metric("RMSE", -1),
    "mae": Metric("MAE", -1),
    "r2": Metric("R2", 1),
}
"""All metrics by name. Metrics for the first k items, such as ``ndcg@10``, use the part before ``@``."""

# Columns of result tables, by task; see `shown`.
CLICKS = ("auc", "loss", "normalized_entropy", "calibration")
RANKING = ("recall@10", "mrr", "loss")
REGRESSION = ("loss", "rmse", "mae", "r2")


def metric_of(name: str) -> Metric:
    """Return the registered metric for a name such as ``ndcg@10``.

    For an unknown name, return a metric with the name as the title, for which neither direction is better.
    """
    return METRICS.get(name.partition("@")[0], Metric(name, 0))


def metric_title(name: str) -> str:
    """Return a metric's display name: ``auc`` gives "AUC", ``ndcg@10`` gives "NDCG@10"."""
    # The cutoff after @ belongs to the title, too.
    _, at, k = name.partition("@")
    title = metric_of(name).title
    return title if title == name else f"{title}{at}{k}"


def leading_metric(metrics: Mapping[str, float]) -> str | None:
    """Return the name of the first leading metric, such as ``ndcg@10``; None if there is none."""
    return next((name for name in metrics if metric_of(name).leads), None)


def leading_text(metrics: Mapping[str, float]) -> str:
    """Format the leading metric, or the loss if there is none, as in "AUC 0.7906"; "-" without both."""
    name = leading_metric(metrics) or ("loss" if "loss" in metrics else None)
    return "-" if name is None else f"{metric_title(name)} {metrics[name]:.4f}"


def quality(metrics: Mapping[str, float]) -> float | None:
    """Return the number by which a run selects the best weights; higher is better.

    This is the leading metric (AUC or NDCG), or minus the loss for regression; -inf if it is NaN. None if
    ``metrics`` has neither.
    """
    name = leading_metric(metrics)
    if name is not None:
        value = metrics[name]
    # Only regression has an RMSE.
    elif "loss" in metrics and "rmse" in metrics:
        value = -metrics["loss"]
    else:
        return None
    return -math.inf if math.isnan(value) else value


def shown(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the metrics to show as columns in a result table, the leading metric first.

    Args:
        metrics: all metrics by name, from which the task is inferred.
    """
    leading = leading_metric(metrics)
    if "rmse" in metrics:
        return REGRESSION
    return CLICKS if leading in ("auc", None) else (leading, *RANKING)
