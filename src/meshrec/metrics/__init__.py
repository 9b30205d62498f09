"""Prediction and ranking metrics over all ranks, for the current window and the whole run."""

from meshrec.metrics.areas import area_under_curve
from meshrec.metrics.binary import binary_metrics
from meshrec.metrics.classes import class_metrics
from meshrec.metrics.curves import auc_interval, curves_of, effective_sizes, score_histograms
from meshrec.metrics.grouped import Interval, bootstrap_intervals, grouped_auc, sliced_metrics
from meshrec.metrics.metric_set import MetricSet
from meshrec.metrics.named import METRICS, leading_metric, leading_text, metric_of, quality, title_of
from meshrec.metrics.number import number_metrics
from meshrec.metrics.queries import query_metrics
from meshrec.metrics.retrieval import rank_intervals, rank_metrics
from meshrec.metrics.windowed import Computed

# Earlier names, for one release.
place_intervals, place_metrics = rank_intervals, rank_metrics

__all__ = [
    "METRICS",
    "Computed",
    "Interval",
    "MetricSet",
    "area_under_curve",
    "auc_interval",
    "binary_metrics",
    "bootstrap_intervals",
    "class_metrics",
    "curves_of",
    "effective_sizes",
    "grouped_auc",
    "leading_metric",
    "leading_text",
    "metric_of",
    "number_metrics",
    "quality",
    "query_metrics",
    "rank_intervals",
    "rank_metrics",
    "score_histograms",
    "sliced_metrics",
    "title_of",
]
