"""Quality over all ranks: of the training steps since the last line, and of the validation data."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from meshrec.metrics import binary_metrics
from meshrec.train.ranks import Ranks
from meshrec.train.step import Outputs, forward

if TYPE_CHECKING:
    from meshrec.data import Reader

EVALUATION_BATCH = 4096
"""Samples per rank and step of an evaluation."""


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
        """`meshrec.metrics.binary_metrics` of all ranks' samples since the last time. Collective."""
        outputs, self._outputs = self._outputs, []
        logits = torch.cat([each.logits for each in outputs]).cpu()
        labels = torch.cat([each.labels for each in outputs]).cpu()
        return binary_metrics(logits, labels, group=ranks.control)


def evaluate(model: nn.Module, reader: "Reader", ranks: Ranks, *, bf16: bool = False) -> dict[str, float]:
    """`meshrec.metrics.binary_metrics` on all of ``reader``.

    Collective; the model is in training mode again afterwards.
    """
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
    return binary_metrics(torch.cat(logits).cpu(), torch.cat(labels).cpu(), group=ranks.control)
