"""Regression metrics."""

import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.gathering import gather_columns, normalize_samples, stack_columns


def regression_metrics(
    values: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> dict[str, float]:
    """Compute regression metrics over the samples on all ranks.

    - ``loss``: the mean squared error.
    - ``rmse``: the root of the mean squared error.
    - ``mae``: the mean absolute error.
    - ``r2``: 1 - mean squared error / label variance. Omitted if all labels are equal, or if the variance
      underflows in float64.

    Collective if a process group is initialized.

    Args:
        values: predictions [n] or [n, 1]. n may differ between ranks.
        labels: same size, finite.
        weights: sample weights [n]; None: 1.
        group: process group; None: all ranks.
        gather: whether to include samples from other ranks. If False, not collective.

    Returns:
        Metrics by name; empty without samples.

    Raises:
        ValueError: sizes differ, or a label or weight is not allowed.
    """
    columns = stack_columns(values, labels, weights=weights)
    columns = gather_columns(columns, group) if gather else columns
    values, labels, weights = normalize_samples(columns, columns[-2].isfinite(), "finite")
    if not len(labels):
        return {}
    shares = weights / weights.sum()
    error = float((values - labels).square() @ shares)
    metrics = {"loss": error, "rmse": error**0.5, "mae": float((values - labels).abs() @ shares)}
    if bool((labels == labels[0]).all()):
        return metrics
    # Subtract a label before the mean, which avoids cancellation for a large common offset.
    deviations = labels - labels[0]
    deviations -= deviations @ shares
    scale = deviations.abs().max()  # avoid underflow and overflow in squares
    error, variance = (float((x / scale).square() @ shares) for x in (values - labels, deviations))
    return {**metrics, "r2": 1 - error / variance} if variance > 0 else metrics
