"""The one table of metrics: what people call each, whether more is better, and which one leads.

Trainers, commands and pages read it, so that they agree.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """A metric, as people see it."""

    title: str
    """Its name for people."""
    better: int
    """1 if more is better, -1 if less is better, 0 if neither."""
    leads: bool = False
    """Whether it selects the best weights where it is there."""
    is_curve: bool = False
    """Whether a run's page draws it over the steps."""


METRICS: dict[str, Metric] = {
    "auc": Metric("AUC", 1, leads=True, is_curve=True),
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
"""All metrics by name. Metrics of the first k items, such as ``ndcg@10``, have the key before the ``@``."""

CLICKS = ("auc", "loss", "normalized_entropy", "calibration")
RANKING = ("recall@10", "mrr", "loss")
NUMBERS = ("loss", "rmse", "mae", "r2")


def metric_of(name: str) -> Metric:
    """Return the entry of a metric. A metric of yours gets an entry with its name as the title."""
    return METRICS.get(name.partition("@")[0], Metric(name, 0))


def title_of(name: str) -> str:
    """Return the name of a metric as people write it: AUC, NDCG@10, loss."""
    _, at, k = name.partition("@")
    title = metric_of(name).title
    return title if title == name else f"{title}{at}{k}"


def leading_metric(metrics: Mapping[str, float]) -> str | None:
    """Return the name of the metric that selects the best weights, AUC or NDCG, if there is one."""
    return next((name for name in metrics if metric_of(name).leads), None)


def leading_text(metrics: Mapping[str, float]) -> str:
    """Return the metric that selects the best weights with its value, such as "AUC 0.7906" or "loss 0.5"."""
    name = leading_metric(metrics) or ("loss" if "loss" in metrics else None)
    return "-" if name is None else f"{title_of(name)} {metrics[name]:.4f}"


def quality(metrics: Mapping[str, float]) -> float | None:
    """Return the value that selects the best weights: AUC, NDCG, or for numbers the negative loss.

    Larger is better. None: no metric selects weights.
    """
    name = leading_metric(metrics)
    if name is not None:
        return metrics[name]
    return -metrics["loss"] if "loss" in metrics and "rmse" in metrics else None


def shown(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """Return the names of the metrics that a table of results has columns for; the leading one is first."""
    leading = leading_metric(metrics)
    if "rmse" in metrics:
        return NUMBERS
    return CLICKS if leading in ("auc", None) else (leading, *RANKING)
