"""Metric registry: display name, direction, and which metric selects the best weights.

Shared by trainers, commands and pages.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """Metric display properties."""

    title: str
    """Display name."""
    better: int
    """1 if higher is better, -1 if lower is better, 0 if neither."""
    leads: bool = False
    """Whether it selects the best weights when present."""
    is_curve: bool = False
    """Whether a run's page plots it over steps."""


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
"""All metrics by name. Metrics of the first k items, such as ``ndcg@10``, use the part before ``@``."""

CLICKS = ("auc", "loss", "normalized_entropy", "calibration")
RANKING = ("recall@10", "mrr", "loss")
REGRESSION = ("loss", "rmse", "mae", "r2")


def metric_of(name: str) -> Metric:
    """Return a metric's entry. Unknown metrics get an entry titled by their name."""
    return METRICS.get(name.partition("@")[0], Metric(name, 0))


def title_of(name: str) -> str:
    """Return a metric's display name: AUC, NDCG@10, loss."""
    _, at, k = name.partition("@")
    title = metric_of(name).title
    return title if title == name else f"{title}{at}{k}"


def leading_metric(metrics: Mapping[str, float]) -> str | None:
    """Return the metric that selects the best weights, AUC or NDCG, if present."""
    return next((name for name in metrics if metric_of(name).leads), None)


def leading_text(metrics: Mapping[str, float]) -> str:
    """Format the leading metric and value, such as "AUC 0.7906" or "loss 0.5000"."""
    name = leading_metric(metrics) or ("loss" if "loss" in metrics else None)
    return "-" if name is None else f"{title_of(name)} {metrics[name]:.4f}"


def quality(metrics: Mapping[str, float]) -> float | None:
    """Return the value that selects the best weights: AUC, NDCG, or the negative regression loss.

    Higher is better; NaN becomes -inf. None: no metric selects weights.
    """
    name = leading_metric(metrics)
    if name is not None:
        value = metrics[name]
    elif "loss" in metrics and "rmse" in metrics:
        value = -metrics["loss"]
    else:
        return None
    return -math.inf if math.isnan(value) else value


def shown(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return the metrics shown as result table columns, leading metric first."""
    leading = leading_metric(metrics)
    if "rmse" in metrics:
        return REGRESSION
    return CLICKS if leading in ("auc", None) else (leading, *RANKING)
