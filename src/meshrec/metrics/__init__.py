"""Quality of predictions and of retrieval, over all ranks, since the last look and since the start."""

from meshrec.metrics.binary import area_under_curve, binary_metrics
from meshrec.metrics.metric_set import MetricSet
from meshrec.metrics.retrieval import RetrievalMetrics
from meshrec.metrics.windowed import Computed

__all__ = ["Computed", "MetricSet", "RetrievalMetrics", "area_under_curve", "binary_metrics"]
