"""Softmax cross-entropy: labels that are one of several classes."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrec.metrics.classes import class_metrics
from meshrec.train.losses import Loss

# B samples, C classes


@dataclass(frozen=True, kw_only=True)
class Softmax(Loss):
    """Softmax cross-entropy of one output per class; the label is the number of the true class.

    The mean of the classes' AUCs, each against all others, selects the best weights.
    """

    classes: tuple[Any, ...]
    """The classes, in the order of the label's: ``Label(kind="class", classes=...)``."""

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError(
                f"loss.classes must be two or more different ones, got {list(self.classes)}. Take the "
                "classes of the label."
            )

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        self._check(outputs, labels)
        each = nn.functional.cross_entropy(outputs, labels.long(), reduction="none")
        return each.sum() if weights is None else (each * weights).sum()

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """Compute the metrics of classes, with `meshrec.metrics.class_metrics`."""
        self._check(outputs, labels)
        return class_metrics(outputs, labels, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the probability of each class, [B, C]."""
        return torch.softmax(outputs, dim=1)

    def score_names(self) -> tuple[str, ...]:
        return tuple(f"score_{each}" for each in self.classes)

    def _check(self, outputs: Tensor, labels: Tensor) -> None:
        if outputs.shape != (*labels.shape, len(self.classes)):
            raise ValueError(
                f"the model returned {list(outputs.shape)} for labels {list(labels.shape)} of "
                f"{len(self.classes)} classes: it must return one output per class. Use WideDeepConfig, "
                "DLRMConfig or DLRMDCNConfig, and a label of kind='class'."
            )
