"""What a model is trained to do: a loss, the metrics that go with it, and how outputs become scores."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrec.metrics import binary_metrics, number_metrics, place_metrics

# B samples, T tasks


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """Of a batch, as a sum over its samples: the step divides by their number over all ranks."""

    @abstractmethod
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The sum over samples of what the model says [B] or [B, T] against labels of the same shape.

        ``weights``: [B], each sample's; None: 1.
        """

    @abstractmethod
    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """Of all ranks' samples; ``auc``, ``ndcg@k`` or else ``loss`` chooses among weights.

        Collective, unless other ranks' samples are not to ``gather``.
        """

    @abstractmethod
    def scores(self, outputs: Tensor) -> Tensor:
        """What users are told: probabilities, or values. Of the shape of the outputs."""


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(Loss):
    """Of logits against labels in [0, 1].

    With ``positive_weight``, samples count that many times as much as their label is near 1: 9 balances one
    click in ten. Predictions are then no probabilities of clicks any more.
    """

    positive_weight: float = 1.0
    """How much a positive sample counts."""

    def __post_init__(self) -> None:
        if not self.positive_weight > 0:
            raise ValueError(f"loss.positive_weight is {self.positive_weight}; it must be above 0.")

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """See `Loss`."""
        positive = None if self.positive_weight == 1 else labels.new_tensor(self.positive_weight)
        return nn.functional.binary_cross_entropy_with_logits(
            outputs, labels, weights, reduction="sum", pos_weight=positive
        )

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """`meshrec.metrics.binary_metrics`."""
        return binary_metrics(outputs, labels, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """Probabilities."""
        return torch.sigmoid(outputs)


@dataclass(frozen=True, kw_only=True)
class SquaredError(Loss):
    """Of values against labels that are numbers."""

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """See `Loss`."""
        _check_shapes(outputs, labels)
        return _weighted((outputs - labels).square(), weights)

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """`meshrec.metrics.number_metrics`."""
        return number_metrics(outputs, labels, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """The values."""
        return outputs


@dataclass(frozen=True, kw_only=True)
class Huber(Loss):
    """Squared error near the label and absolute error far from it, so that few odd labels do not rule."""

    delta: float = 1.0
    """Where one becomes the other."""

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"loss.delta is {self.delta}; it must be above 0.")

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """See `Loss`."""
        _check_shapes(outputs, labels)
        return _weighted(
            nn.functional.huber_loss(outputs, labels, reduction="none", delta=self.delta), weights
        )

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """`meshrec.metrics.number_metrics`."""
        return number_metrics(outputs, labels, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """The values."""
        return outputs


@dataclass(frozen=True, kw_only=True)
class NextItem(Loss):
    """Of models that say a loss and a place themselves: see `meshrec.models.next_item`.

    Samples count by their labels: those with label 0 are no choice of a user, and nothing is learned of them.
    """

    ks: tuple[int, ...] = (10,)
    """How many items count, for recall@k and NDCG@k; NDCG at the first chooses among weights."""

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"loss.ks is {list(self.ks)}; it must be one number or more, each at least 1.")

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """See `Loss`."""
        if outputs.shape != (*labels.shape, 2):
            raise ValueError(
                f"the model says {list(outputs.shape)} of labels {list(labels.shape)}, and the loss NextItem "
                "takes a loss and a place of each. Take a model for next items, such as SASRecConfig."
            )
        return _weighted(outputs[:, 0] * labels, weights)

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """`meshrec.metrics.place_metrics`."""
        chosen = outputs[labels > 0]
        return place_metrics(chosen[:, 0], chosen[:, 1], ks=self.ks, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """The place of the item among all, from 1."""
        return outputs[:, 1]


class Task(NamedTuple):
    """One of several labels: its name, its loss, and how much that counts."""

    name: str
    loss: Loss
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Tasks(Loss):
    """Several labels at once: the weighted sum of their losses. The first one's metrics choose among weights.

    Args:
        tasks: as many as there are labels, in their order.
    """

    tasks: tuple[Any, ...]
    """The tasks: set them in the recipe's function."""

    def __post_init__(self) -> None:
        if len(self.tasks) < 2 or len({task.name for task in self.tasks}) < len(self.tasks):
            raise ValueError(
                f"loss.tasks must be two or more of different names: {[task.name for task in self.tasks]}."
            )

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """See `Loss`."""
        if outputs.shape != labels.shape or outputs.shape[-1] != len(self.tasks):
            raise ValueError(
                f"the model says {list(outputs.shape)}, labels are {list(labels.shape)}, and the loss has "
                f"{len(self.tasks)} tasks. Give one output and one label to each."
            )
        parts = [
            task.weight * task.loss.sum(outputs[:, number], labels[:, number], weights)
            for number, task in enumerate(self.tasks)
        ]
        return torch.stack(parts).sum()

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """Those of the first task by their names, and those of all as ``task/name``."""
        found: dict[str, float] = {}
        for number, task in enumerate(self.tasks):
            metrics = task.loss.metrics(outputs[:, number], labels[:, number], group=group, gather=gather)
            found |= {} if number else metrics
            found |= {f"{task.name}/{name}": value for name, value in metrics.items()}
        return found

    def scores(self, outputs: Tensor) -> Tensor:
        """Each task's."""
        return torch.stack(
            [task.loss.scores(outputs[:, number]) for number, task in enumerate(self.tasks)], dim=1
        )


def quality(metrics: dict[str, float]) -> float | None:
    """What is to be large: the AUC, the NDCG, or where there is none the loss with a minus."""
    name = leading_metric(metrics)
    if name is not None:
        return metrics[name]
    return -metrics["loss"] if "loss" in metrics and "rmse" in metrics else None


def leading_metric(metrics: Mapping[str, float]) -> str | None:
    """The name of the metric that chooses among weights, where it is to be large: AUC or NDCG."""
    return next((name for name in metrics if name == "auc" or name.startswith("ndcg@")), None)


def _check_shapes(outputs: Tensor, labels: Tensor) -> None:
    """ValueError where one would be spread over the other."""
    if outputs.shape != labels.shape:
        raise ValueError(
            f"the model says {list(outputs.shape)}, and labels are {list(labels.shape)}. Give one output to "
            "each label, and of several labels a loss of Tasks."
        )


def _weighted(losses: Tensor, weights: Tensor | None) -> Tensor:
    return losses.sum() if weights is None else (losses * weights).sum()
