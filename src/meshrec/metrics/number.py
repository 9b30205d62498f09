"""Metrics of models that say numbers."""

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.data.faults import needs
from meshrec.metrics.binary import checked


def number_metrics(
    values: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
) -> dict[str, float]:
    """``loss`` (mean squared error), ``rmse``, ``mae``, ``r2`` of all ranks' samples; empty without samples.

    ``r2`` is the share of the labels' variance that is explained; left out where they have none. Collective
    where a process group is initialized.

    Args:
        values, labels: [n] or [n, 1]; ranks may have different numbers of samples.
        group: the ranks; without it all.
        gather: whether other ranks' samples count; otherwise this is not collective.

    Raises:
        ValueError: shapes differ.
    """
    columns = checked(values, labels, None)
    if gather and dist.is_available() and dist.is_initialized():
        distributed = needs("torchmetrics.utilities.distributed", "metrics")
        columns = torch.cat(distributed.gather_all_tensors(columns, group), dim=1)
    said, truth = columns[0], columns[1]
    if not len(truth):
        return {}
    error = float((said - truth).square().mean())
    found = {"loss": error, "rmse": error**0.5, "mae": float((said - truth).abs().mean())}
    variance = float((truth - truth.mean()).square().mean())
    return {**found, "r2": 1 - error / variance} if variance > 0 else found
