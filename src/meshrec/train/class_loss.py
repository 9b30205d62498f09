"""Softmax cross-entropy for labels with several classes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.metrics.classes import class_metrics
from meshrec.train.losses import Loss

# B samples, C classes


@dataclass(frozen=True, kw_only=True)
class Softmax(Loss):
    """Softmax cross-entropy with an output per class; the label is the class index.

    The mean one-vs-rest AUC selects the best weights.
    """

    classes: tuple[Any, ...]
    """Classes in label order: ``Label(kind="class", classes=...)``."""

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError(
                f"loss.classes must be two or more different ones, got {list(self.classes)}. Take the "
                "classes of the label."
            )

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        losses = self.per_sample(outputs, labels)
        return losses.sum() if weights is None else (losses * weights).sum()

    def per_sample(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self._check(outputs, labels)
        return nn.functional.cross_entropy(outputs, labels.long(), reduction="none")

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        """Compute class metrics with `meshrec.metrics.class_metrics`."""
        self._check(outputs, labels)
        return class_metrics(outputs, labels, weights, **ranks)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return class probabilities, [B, C]."""
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
