"""Metrics of models that say numbers."""

import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.binary import checked, of_all_ranks


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
    if gather:
        columns = of_all_ranks(columns, group)
    said, truth = columns[0], columns[1]
    if not len(truth):
        return {}
    error = float((said - truth).square().mean())
    found = {"loss": error, "rmse": error**0.5, "mae": float((said - truth).abs().mean())}
    variance = float((truth - truth.mean()).square().mean())
    return {**found, "r2": 1 - error / variance} if variance > 0 else found
