"""Training objectives: a loss, its metrics, and the conversion of outputs to scores."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrec.metrics import binary_metrics, number_metrics, place_metrics

# B samples, T tasks


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """A training objective. The loss is a sum over samples, which the step divides by their number over all
    ranks.
    """

    @abstractmethod
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the loss over samples.

        Args:
            outputs: outputs of the model, [B] or [B, T].
            labels: labels of the same shape.
            weights: sample weights [B]; None: 1.
        """

    @abstractmethod
    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """Compute metrics over all ranks' samples. ``auc``, ``ndcg@k`` or else ``loss`` selects the best
        weights.

        Collective, unless ``gather`` is False.
        """

    @abstractmethod
    def scores(self, outputs: Tensor) -> Tensor:
        """Convert outputs to what users get: probabilities or values, of the same shape."""

    def score_names(self) -> tuple[str, ...]:
        """Return the names of the scores' columns."""
        return ("score",)


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of logits and labels in [0, 1].

    With ``positive_weight``, a sample counts that many times as much as its label is near 1. A weight of 9
    balances one click in ten. The predictions are then no longer click probabilities.
    """

    positive_weight: float = 1.0
    """Weight of a positive sample."""

    def __post_init__(self) -> None:
        if not self.positive_weight > 0:
            raise ValueError(f"loss.positive_weight is {self.positive_weight}; it must be above 0.")

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        positive = None if self.positive_weight == 1 else labels.new_tensor(self.positive_weight)
        return nn.functional.binary_cross_entropy_with_logits(
            outputs, labels, weights, reduction="sum", pos_weight=positive
        )

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        return binary_metrics(outputs, labels, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs)


@dataclass(frozen=True, kw_only=True)
class SquaredError(Loss):
    """Squared error of numeric labels."""

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        _check_shapes(outputs, labels)
        return _weighted((outputs - labels).square(), weights)

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        return number_metrics(outputs, labels, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the values."""
        return outputs


@dataclass(frozen=True, kw_only=True)
class Huber(Loss):
    """Huber loss: squared error near the label and absolute error far from it, which limits the effect of
    outliers.
    """

    delta: float = 1.0
    """Distance from the label at which squared error becomes absolute error."""

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"loss.delta is {self.delta}; it must be above 0.")

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        _check_shapes(outputs, labels)
        return _weighted(
            nn.functional.huber_loss(outputs, labels, reduction="none", delta=self.delta), weights
        )

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        return number_metrics(outputs, labels, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the values."""
        return outputs


@dataclass(frozen=True, kw_only=True)
class NextItem(Loss):
    """Objective of models that compute a loss and a rank themselves: see `meshrec.models.next_item`.

    Samples are weighted by their labels. Label 0 means that the user did not choose the item, and nothing is
    learned from it.
    """

    ks: tuple[int, ...] = (10, 50, 200)
    """Cut-offs of recall@k, NDCG@k and MRR@k. NDCG at the first one selects the best weights."""

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"loss.ks is {list(self.ks)}; it must be one number or more, each at least 1.")

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if outputs.shape != (*labels.shape, 2):
            raise ValueError(
                f"the model returned {list(outputs.shape)} for labels {list(labels.shape)}; NextItem "
                "takes a loss and a rank per label. Use a model for next items, such as SASRecConfig."
            )
        return _weighted(outputs[:, 0] * labels, weights)

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        chosen = outputs[labels > 0]
        return place_metrics(chosen[:, 0], chosen[:, 1], ks=self.ks, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the rank of the item among all, from 1."""
        return outputs[:, 1]


def sum_of_members(loss: Loss, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the loss over samples. Outputs [B, T, M] of an ensemble are the mean of the members' losses."""
    if outputs.dim() < 3:
        return loss.sum(outputs, labels, weights)
    each = [loss.sum(squeezed(member), labels, weights) for member in outputs.unbind(2)]
    return torch.stack(each).mean()


def squeezed(outputs: Tensor) -> Tensor:
    """Return outputs [B, 1] as [B], and others as they are."""
    return outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs


class Task(NamedTuple):
    """One of several labels: its name, its loss, and the weight of that loss."""

    name: str
    loss: Loss
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Tasks(Loss):
    """Objective for several labels: the weighted sum of their losses. The first task's metrics select the
    best weights.

    Args:
        tasks: one task per label, in the order of the labels.
    """

    tasks: tuple[Any, ...]
    """The tasks. Set them in the recipe's function."""

    def __post_init__(self) -> None:
        if len(self.tasks) < 2 or len({task.name for task in self.tasks}) < len(self.tasks):
            raise ValueError(
                f"loss.tasks must be two or more of different names: {[task.name for task in self.tasks]}."
            )

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if outputs.shape != labels.shape or outputs.shape[-1] != len(self.tasks):
            raise ValueError(
                f"the model returned {list(outputs.shape)}, labels are {list(labels.shape)}, the loss has "
                f"{len(self.tasks)} tasks. Give each task one output and one label."
            )
        parts = [
            task.weight * task.loss.sum(outputs[:, number], labels[:, number], weights)
            for number, task in enumerate(self.tasks)
        ]
        return torch.stack(parts).sum()

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """Compute the first task's metrics by their names, and those of all tasks as ``task/name``."""
        found: dict[str, float] = {}
        for number, task in enumerate(self.tasks):
            metrics = task.loss.metrics(outputs[:, number], labels[:, number], group=group, gather=gather)
            found |= {} if number else metrics
            found |= {f"{task.name}/{name}": value for name, value in metrics.items()}
        return found

    def score_names(self) -> tuple[str, ...]:
        return tuple(f"score_{task.name}" for task in self.tasks)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the scores of each task."""
        return torch.stack(
            [task.loss.scores(outputs[:, number]) for number, task in enumerate(self.tasks)], dim=1
        )


def _check_shapes(outputs: Tensor, labels: Tensor) -> None:
    """Raise ValueError where one of the two would be broadcast to the other."""
    if outputs.shape != labels.shape:
        raise ValueError(
            f"the model returned {list(outputs.shape)}, and labels are {list(labels.shape)}. Return one "
            "output per label, and use the loss Tasks for several labels."
        )


def _weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    return losses.sum() if weights is None else (losses * weights).sum()
