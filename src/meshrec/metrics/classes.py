"""Multi-class classification metrics."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.areas import auc_by_group
from meshrec.metrics.gathering import gather_columns, normalize_samples, stack_columns


def class_metrics(
    outputs: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> dict[str, float]:
    """Compute multi-class metrics over the samples on all ranks.

    - ``auc``: for every class with a sample, the AUC for this class versus all others; the unweighted mean
      over these classes.
    - ``loss``: the softmax cross-entropy.
    - ``accuracy``: the share of samples whose label is the class with the largest logit, or the first of
      several classes with equal logits.

    Collective if a process group is initialized.

    Args:
        outputs: logits [n, C].
        labels: class indices [n].
        weights: sample weights [n]; None: 1.
        group: process group; None: all ranks.
        gather: whether to include samples from other ranks. If False, not collective.

    Returns:
        Metrics by name; empty without samples, and all NaN if a probability is NaN. ``auc`` is omitted if all
        labels are equal.

    Raises:
        ValueError: sizes differ, a label is not an integer in [0, C), or a weight is not allowed.
    """
    num_classes = outputs.shape[1]
    columns = stack_columns(*outputs.unbind(1), labels, weights=weights)
    columns = gather_columns(columns, group) if gather else columns
    classes = torch.arange(num_classes, device=columns.device)
    # All columns are float64, which represents class numbers exactly.
    allowed = torch.isin(columns[-2], classes.double())
    columns = normalize_samples(columns, allowed, f"integers in [0, {num_classes})").cpu()
    logits, classes_n, weights = columns[:-2].T, columns[-2].long(), columns[-1]
    if not len(classes_n):
        return {}
    logs = torch.log_softmax(logits, 1)
    shares = weights / weights.sum()
    metrics = {
        "loss": float(-logs.gather(1, classes_n[:, None])[:, 0] @ shares),
        "accuracy": float((logits.argmax(1) == classes_n).double() @ shares),
    }
    # An infinite logit makes softmax NaN, while argmax would still return an accuracy.
    if bool(logs.isnan().any()):
        return dict.fromkeys(["auc", *metrics], float("nan"))
    areas = [
        auc_by_group(scores.numpy(), (classes_n == number).double().numpy(), weights.numpy(), None)[0]
        for number, scores in enumerate(logs.unbind(1))
    ]
    return metrics if np.isnan(areas).all() else {"auc": float(np.nanmean(areas)), **metrics}
