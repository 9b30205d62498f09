"""Prediction and ranking metrics over all ranks, for the current window and the whole run."""

from typing import TYPE_CHECKING

from meshrec.lazy import import_on_use

if TYPE_CHECKING:
    from meshrec.metrics.areas import area_under_curve
    from meshrec.metrics.binary import binary_metrics
    from meshrec.metrics.classes import class_metrics
    from meshrec.metrics.curves import auc_interval, binary_curves, effective_sizes, score_histograms
    from meshrec.metrics.grouped import Interval, bootstrap_intervals, grouped_auc, sliced_metrics
    from meshrec.metrics.metric_set import MetricSet, MetricValues
    from meshrec.metrics.named import METRICS, leading_metric, leading_text, metric_of, metric_title, quality
    from meshrec.metrics.queries import query_metrics
    from meshrec.metrics.regression import regression_metrics
    from meshrec.metrics.retrieval import rank_intervals, rank_metrics
    from meshrec.metrics.sliding import SlidingMetrics

__all__ = [
    "METRICS",
    "Interval",
    "MetricSet",
    "MetricValues",
    "SlidingMetrics",
    "area_under_curve",
    "auc_interval",
    "binary_curves",
    "binary_metrics",
    "bootstrap_intervals",
    "class_metrics",
    "effective_sizes",
    "grouped_auc",
    "leading_metric",
    "leading_text",
    "metric_of",
    "metric_title",
    "quality",
    "query_metrics",
    "rank_intervals",
    "rank_metrics",
    "regression_metrics",
    "score_histograms",
    "sliced_metrics",
]

import_on_use(__name__)
