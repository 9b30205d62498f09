"""Quality over all ranks: of the training steps since the last line, and of the validation data."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshrec.train.ranks import Ranks
from meshrec.train.step import Outputs, forward

if TYPE_CHECKING:
    from meshrec.data import Reader

EVALUATION_BATCH = 4096
"""Samples per rank and step of an evaluation."""


def quality(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """``loss`` (log loss), ``auc``, ``normalized_entropy``, ``calibration``, ``accuracy`` of all samples.

    What the labels leave undefined is left out: AUC and normalized entropy when there is one class only.
    """
    logits, labels = logits.double(), labels.double()
    rate = float(labels.mean())
    loss = float(nn.functional.binary_cross_entropy_with_logits(logits, labels))
    found = {"loss": loss, "accuracy": float(((logits > 0) == (labels > 0.5)).double().mean())}
    if rate > 0:
        found["calibration"] = float(torch.sigmoid(logits).mean()) / rate
    if 0 < rate < 1:
        found["auc"] = area_under_curve(logits, labels)
        entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
        found["normalized_entropy"] = loss / entropy
    return found


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """P(score of a positive > score of a negative), ties counting half: exact (Mann and Whitney, 1947)."""
    _, place, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    mean_rank = (last - (counts - 1) / 2)[place].double()
    positive = labels > 0.5
    num_positive, num_negative = int(positive.sum()), int((~positive).sum())
    assert num_positive > 0
    assert num_negative > 0
    above = float(mean_rank[positive].sum()) - num_positive * (num_positive + 1) / 2
    return above / (num_positive * num_negative)


class Window:
    """Collects the outputs of steps until they are asked for."""

    def __init__(self) -> None:
        self._outputs: list[Outputs] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take."""
        return not self._outputs

    def add(self, outputs: list[Outputs]) -> None:
        """Takes the outputs of a step."""
        self._outputs += outputs

    def take(self, ranks: Ranks) -> dict[str, float]:
        """`quality` of all ranks' samples since the last time. Collective."""
        outputs, self._outputs = self._outputs, []
        logits = ranks.gather(torch.cat([each.logits for each in outputs]))
        labels = ranks.gather(torch.cat([each.labels for each in outputs]))
        return quality(logits, labels)


def evaluate(model: nn.Module, reader: "Reader", ranks: Ranks, *, bf16: bool = False) -> dict[str, float]:
    """`quality` on all of ``reader``. Collective; the model is in training mode again afterwards."""
    logits, labels = [], []
    model.eval()
    try:
        with torch.no_grad():
            for batch in reader.batches(EVALUATION_BATCH, rank=ranks.rank, world_size=ranks.size):
                moved = batch.to(ranks.device)
                logits.append(forward(model, moved, ranks.device, bf16=bf16))
                labels.append(moved.labels)
    finally:
        model.train()
    return quality(ranks.gather(torch.cat(logits)), ranks.gather(torch.cat(labels)))
