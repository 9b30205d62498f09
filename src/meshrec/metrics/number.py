"""Metrics of regression models."""

import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.binary import checked
from meshrec.metrics.gathering import gathered


def number_metrics(
    values: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
) -> dict[str, float]:
    """Compute ``loss`` (mean squared error), ``rmse``, ``mae`` and ``r2`` over the samples of all ranks.

    ``r2`` is the share of the labels' variance that the model explains; it is left out if the variance is 0.
    The result is empty without samples. Collective if a process group is initialized.

    Args:
        values, labels: tensors [n] or [n, 1]. Ranks may have different numbers of samples.
        group: process group of the ranks; None: all ranks.
        gather: whether to include the samples of other ranks. If False, nothing is collective.

    Raises:
        ValueError: the shapes differ.
    """
    columns = checked(values, labels, None)
    if gather:
        columns = gathered(columns, group)
    said, truth = columns[0], columns[1]
    if not len(truth):
        return {}
    error = float((said - truth).square().mean())
    found = {"loss": error, "rmse": error**0.5, "mae": float((said - truth).abs().mean())}
    variance = float((truth - truth.mean()).square().mean())
    return {**found, "r2": 1 - error / variance} if variance > 0 else found
