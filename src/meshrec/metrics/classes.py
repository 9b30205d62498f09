"""Metrics of labels that are one of several classes."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrec.metrics.binary import area_under_curve
from meshrec.metrics.gathering import gathered


def class_metrics(
    outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
) -> dict[str, float]:
    """Compute ``auc``, ``loss`` and ``accuracy`` over the samples of all ranks.

    ``auc`` is the mean over classes of the AUC of that class against all others (Hand and Till call it
    one-versus-rest); classes that do not occur are left out. ``loss`` is the softmax cross-entropy. The
    result is empty without samples. Collective if a process group is initialized.

    Args:
        outputs: logits [n, C].
        labels: numbers of the true classes [n].
        group: process group of the ranks; None: all ranks.
        gather: whether to include the samples of other ranks.
    """
    columns = torch.cat([outputs.double().T, labels.double()[None]])
    if gather:
        columns = gathered(columns, group)
    logits, truth = columns[:-1].T, columns[-1].long()
    if not len(truth):
        return {}
    loss = float(nn.functional.cross_entropy(logits, truth))
    accuracy = float((logits.argmax(1) == truth).double().mean())
    areas = [
        area
        for each, scores in enumerate(torch.log_softmax(logits, 1).unbind(1))
        if (area := area_under_curve(scores, (truth == each).double())) is not None
    ]
    found = {"auc": sum(areas) / len(areas)} if areas else {}
    return {**found, "loss": loss, "accuracy": accuracy}
