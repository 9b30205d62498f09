"""Training objectives. An objective has a loss, metrics, and a conversion from model outputs to scores."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from meshrec import metrics

# B samples, T tasks, C classes


@dataclass(frozen=True, kw_only=True)
class Loss(ABC):
    """Base class for training objectives: a loss, metrics, and a conversion from model outputs to scores.

    A loss is a sum over samples. The training step divides it by the number of samples over all ranks,
    including samples with weight 0.
    """

    @abstractmethod
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sum of the samples' losses, a 0-d tensor.

        Args:
            outputs: model outputs, [B] or [B, T].
            labels: labels of the same shape.
            weights: sample weights [B]; None: all weights are 1.
        """

    def per_sample(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        """Return the unweighted loss of every sample, [B], or None if samples do not have separate losses."""
        return None

    def metrics(
        self,
        outputs: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        gather: bool = True,
    ) -> dict[str, float]:
        """Compute metrics over the samples on all ranks. Collective, unless ``gather`` is False.

        During training, the metric ``auc``, ``ndcg@k`` or else ``loss`` selects the best weights.

        Args:
            outputs, labels: as in `sum`.
            weights: sample weights [B], on all ranks or on none. None: all weights are 1.
            group: process group; None: all ranks.
            gather: whether to include the samples on other ranks.

        Returns:
            Metrics by name, such as "auc" and "loss".
        """
        return self._metrics(outputs, labels, weights, group=group, gather=gather)

    @abstractmethod
    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        """Implement `metrics`. ``ranks`` has the keyword arguments ``group`` and ``gather``."""

    @abstractmethod
    def scores(self, outputs: Tensor) -> Tensor:
        """Convert model outputs to scores for users, such as probabilities or predicted values."""

    def score_names(self) -> tuple[str, ...]:
        """Return the names of the scores, as columns in a score file."""
        return ("score",)


@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy with logits and labels in [0, 1].

    With a ``positive_weight`` other than 1, predictions are not click probabilities any more.
    """

    positive_weight: float = 1.0
    """Factor for the loss of positive samples. If one sample in ten is a click, 9 balances both classes."""
    fake_negative_weighting: bool = False
    """For labels that come later: whether every impression is first a negative sample, and a positive one a
    second sample, as from ``LabelJoin(negatives="at_once")``. Positives then have the weight 1 + p, and
    negatives (1 - p) (1 + p). Here, p is the model's prediction, through which no gradient flows.

    These are importance weights. If a share p of the impressions is positive, p / (1 + p) of the samples are
    positive, and 1 / (1 + p) negative. With the weights, predictions still converge to p. Only training is
    weighted: evaluate on samples with final labels. Source: "fake negative weighted" loss of Ktena et al.,
    Addressing Delayed Feedback for Continuous Training with Neural Networks in CTR prediction, RecSys 2019.
    """

    def __post_init__(self) -> None:
        if not self.positive_weight > 0:
            raise ValueError(f"loss.positive_weight is {self.positive_weight}; it must be above 0.")
        if self.fake_negative_weighting and self.positive_weight != 1:
            raise ValueError(
                f"loss.positive_weight is {self.positive_weight} with loss.fake_negative_weighting, whose "
                "weights take predictions for probabilities. Leave one of them out."
            )

    @override
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if self.fake_negative_weighting:
            predictions = torch.sigmoid(outputs.detach())
            importance = (1 + predictions) * (1 - predictions * (1 - labels))
            return _weighted_sum(self.per_sample(outputs, labels) * importance, weights)
        return nn.functional.binary_cross_entropy_with_logits(
            outputs, labels, weights, reduction="sum", pos_weight=self._factor(labels)
        )

    def per_sample(self, outputs: Tensor, labels: Tensor) -> Tensor:
        # Without importance weights: it evaluates predictions on samples whose labels are final.
        return nn.functional.binary_cross_entropy_with_logits(
            outputs, labels, reduction="none", pos_weight=self._factor(labels)
        )

    def _factor(self, labels: Tensor) -> Tensor | None:
        """Return ``positive_weight`` as a tensor for torch's ``pos_weight``, or None if it is 1."""
        return None if self.positive_weight == 1 else labels.new_tensor(self.positive_weight)

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        return metrics.binary_metrics(outputs, labels, weights, **ranks)

    def scores(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs)


@dataclass(frozen=True, kw_only=True)
class SquaredError(Loss):
    """Squared error, for numeric labels."""

    @override
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        return _weighted_sum(self.per_sample(outputs, labels), weights)

    def per_sample(self, outputs: Tensor, labels: Tensor) -> Tensor:
        _check_shapes(outputs, labels)
        return (outputs - labels).square()

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        return metrics.regression_metrics(outputs, labels, weights, **ranks)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs


@dataclass(frozen=True, kw_only=True)
class Huber(Loss):
    """Huber loss: squared error near the label, and absolute error far from it.

    Outliers have less effect than with the squared error.
    """

    delta: float = 1.0
    """Distance from the label at which the squared error becomes an absolute error."""

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ValueError(f"loss.delta is {self.delta}; it must be above 0.")

    @override
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        return _weighted_sum(self.per_sample(outputs, labels), weights)

    def per_sample(self, outputs: Tensor, labels: Tensor) -> Tensor:
        _check_shapes(outputs, labels)
        return nn.functional.huber_loss(outputs, labels, reduction="none", delta=self.delta)

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        return metrics.regression_metrics(outputs, labels, weights, **ranks)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs


@dataclass(frozen=True, kw_only=True)
class Softmax(Loss):
    """Softmax cross-entropy, for labels that are class indices. The model has an output per class, [B, C].

    During training, the mean one-vs-rest AUC selects the best weights.
    """

    classes: tuple[Any, ...]
    """Classes in the order of their indices, as in ``Label(kind="class", classes=...)``."""

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) < len(self.classes):
            raise ValueError(
                f"loss.classes must be two or more different ones, got {list(self.classes)}. Take the "
                "classes of the label."
            )

    @override
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        return _weighted_sum(self.per_sample(outputs, labels), weights)

    def per_sample(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self._check(outputs, labels)
        return nn.functional.cross_entropy(outputs, labels.long(), reduction="none")

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        """Compute class metrics with `meshrec.metrics.class_metrics`."""
        self._check(outputs, labels)
        return metrics.class_metrics(outputs, labels, weights, **ranks)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return class probabilities, [B, C]."""
        return torch.softmax(outputs, dim=1)

    def score_names(self) -> tuple[str, ...]:
        return tuple(f"score_{label}" for label in self.classes)

    def _check(self, outputs: Tensor, labels: Tensor) -> None:
        """Raise ValueError unless the model has an output per class."""
        if outputs.shape != (*labels.shape, len(self.classes)):
            raise ValueError(
                f"the model returned {list(outputs.shape)} for labels {list(labels.shape)} of "
                f"{len(self.classes)} classes: it must return one output per class. Use WideDeepConfig, "
                "DLRMConfig or DLRMDCNConfig, and a label of kind='class'."
            )


@dataclass(frozen=True, kw_only=True)
class Ranking(Loss):
    """Learning-to-rank loss: samples are ranked only against other samples of the same query.

    The data has two labels per sample: the relevance, at least 0, and the query, ``Label(kind="query")``.
    During training, NDCG at the first cut-off selects the best weights.
    """

    kind: Literal["pairwise", "listwise"] = "listwise"
    """``pairwise``: RankNet, log(1 + exp(lower - higher)) over all pairs in a query, where ``higher`` is the
    score of the more relevant sample. ``listwise``: ListNet, the cross-entropy between the softmax of the
    scores and the relevance as a share of its sum in the query.
    """
    ks: tuple[int, ...] = (10,)
    """Cut-offs for NDCG@k."""

    def __post_init__(self) -> None:
        if self.kind not in ("pairwise", "listwise"):
            raise ValueError(f"loss.kind is {self.kind!r}; take 'pairwise' or 'listwise'.")
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"loss.ks is {list(self.ks)}; it must be one number or more, each at least 1.")

    @override
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sum of the losses of all queries in the batch.

        A query that is split over two batches counts as two queries. Samples with weight 0 are left out. For
        the pairwise loss, a pair of samples has the weight of the more relevant sample.

        Args:
            outputs: scores [B].
            labels: relevance and query, [B, 2].
            weights: sample weights [B]; None: all weights are 1.
        """
        self._check(outputs, labels)
        if weights is not None:
            # Samples are dropped rather than multiplied by 0, because 0 times NaN is NaN.
            counts = weights != 0
            outputs, labels, weights = outputs[counts], labels[counts], weights[counts]
        loss = _pairwise if self.kind == "pairwise" else _listwise
        return loss(outputs, labels[:, 0], labels[:, 1], weights)

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        """Compute query metrics with `meshrec.metrics.query_metrics`."""
        self._check(outputs, labels)
        return metrics.query_metrics(outputs, labels[:, 0], labels[:, 1], weights, ks=self.ks, **ranks)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the outputs unchanged. Only the order of scores within a query is meaningful."""
        return outputs

    def _check(self, outputs: Tensor, labels: Tensor) -> None:
        """Raise ValueError unless there is an output per sample, and two labels."""
        if labels.shape != (*outputs.shape, 2):
            raise ValueError(
                f"the model returned {list(outputs.shape)} for labels {list(labels.shape)}: Ranking takes "
                "one output per sample, and two labels, the second of kind='query'. Name them in Features."
            )


@dataclass(frozen=True, kw_only=True)
class NextItem(Loss):
    """Objective for next-item models, which compute the loss and the target's rank themselves.

    See `meshrec.models.next_item`. Model outputs are [B, 2]: loss and rank. Outputs [B, 3] also have the
    number of other items with the same score as the target. Labels are factors for the loss. Label 0 marks an
    item that the user did not choose: it adds nothing to the loss, and metrics leave it out.
    """

    ks: tuple[int, ...] = (10, 50, 200)
    """Cut-offs k for recall@k, NDCG@k and MRR@k. NDCG at the first cut-off selects the best weights."""

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"loss.ks is {list(self.ks)}; it must be one number or more, each at least 1.")

    @override
    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        if outputs.shape[:-1] != labels.shape or outputs.shape[-1] not in (2, 3):
            raise ValueError(
                f"the model returned {list(outputs.shape)} for labels {list(labels.shape)}; NextItem "
                "takes a loss and a rank per label. Use a model for next items, such as SASRecConfig."
            )
        return _weighted_sum(outputs[:, 0] * labels, weights)

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        return metrics.rank_metrics(*self.metric_inputs(outputs, labels, weights), ks=self.ks, **ranks)

    def metric_inputs(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Select the samples with a label above 0, and return the arguments of `rank_metrics` for them.

        Args:
            outputs: model outputs, [B, 2] or [B, 3].
            labels: labels [B]; above 0 if the user chose the item.
            weights: sample weights [B]; None: all weights are 1.

        Returns:
            - The loss of every selected sample, [n].
            - The rank of the target item, [n].
            - The sample weights, [n]; None if all weights are 1.
            - The number of items with the same score as the target, [n]; None if ``outputs`` has no such
              column.
        """
        is_positive = labels > 0
        return (
            outputs[is_positive, 0],
            outputs[is_positive, 1],
            None if weights is None else weights[is_positive],
            outputs[is_positive, 2] if outputs.shape[1] > 2 else None,
        )

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the rank of the target item among all items, [B]; 1 is the best."""
        return outputs[:, 1]


def ensemble_loss(loss: Loss, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of the samples' losses. For outputs of an ensemble with M members, average over members.

    A sample with weight 0 adds nothing, even if output or label is NaN.

    Args:
        loss: the loss.
        outputs: model outputs, [B], [B, T], or [B, T, M] for an ensemble.
        labels: labels, [B] or [B, T].
        weights: sample weights [B]; None: all weights are 1.
    """
    if weights is not None:
        outputs, labels = (_zero_unweighted(values, weights) for values in (outputs, labels))
    if outputs.dim() < 3:
        return loss.sum(outputs, labels, weights)
    # Members are trained on the same samples, each with its own loss.
    losses = [loss.sum(squeeze_outputs(member), labels, weights) for member in outputs.unbind(2)]
    return torch.stack(losses).mean()


def _zero_unweighted(values: Tensor, weights: Tensor) -> Tensor:
    """Replace values [B, ...] by zeros where the sample weight [B] is 0.

    Multiplying by the weight would not suffice, because 0 times NaN is NaN, also in gradients.
    """
    counts = (weights != 0).view(-1, *[1] * (values.dim() - 1))
    return torch.where(counts, values, 0)


def squeeze_outputs(outputs: Tensor) -> Tensor:
    """Return outputs of shape [B, 1] as [B], and outputs of other shapes unchanged."""
    return outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs


class Task(NamedTuple):
    """A task (label) in a multi-label objective.

    Attributes:
        name: task name, used as prefix of metrics and in score columns.
        loss: loss for this label.
        weight: factor for the loss.
    """

    name: str
    loss: Loss
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Tasks(Loss):
    """Multi-label objective: the tasks' losses, weighted and added up.

    During training, the metrics of the first task select the best weights.
    """

    tasks: tuple[Any, ...]
    """A `Task` per label, in label order. Set them in the recipe function."""

    def __post_init__(self) -> None:
        if len(self.tasks) < 2 or len({task.name for task in self.tasks}) < len(self.tasks):
            raise ValueError(
                f"loss.tasks must be two or more of different names: {[task.name for task in self.tasks]}."
            )

    @override
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

    def per_sample(self, outputs: Tensor, labels: Tensor) -> Tensor | None:
        parts = [
            task.loss.per_sample(outputs[:, number], labels[:, number])
            for number, task in enumerate(self.tasks)
        ]
        losses = [
            task.weight * part for task, part in zip(self.tasks, parts, strict=True) if part is not None
        ]
        # If one task has no loss per sample, their sum has none either.
        return torch.stack(losses).sum(0) if len(losses) == len(parts) else None

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        """Compute the metrics of all tasks as ``task/name``, and those of the first task also as ``name``."""
        all_metrics: dict[str, float] = {}
        for number, task in enumerate(self.tasks):
            metrics = task.loss.metrics(outputs[:, number], labels[:, number], weights, **ranks)
            # The first task selects the best weights, so its metrics also appear without a prefix.
            all_metrics |= {} if number else metrics
            all_metrics |= {f"{task.name}/{name}": value for name, value in metrics.items()}
        return all_metrics

    def score_names(self) -> tuple[str, ...]:
        return tuple(f"score_{task.name}" for task in self.tasks)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the scores of all tasks, [B, T]."""
        return torch.stack(
            [task.loss.scores(outputs[:, number]) for number, task in enumerate(self.tasks)], dim=1
        )


def _check_shapes(outputs: Tensor, labels: Tensor) -> None:
    """Raise ValueError if outputs and labels have different shapes, which torch would silently broadcast."""
    if outputs.shape != labels.shape:
        raise ValueError(
            f"the model returned {list(outputs.shape)}, and labels are {list(labels.shape)}. Return one "
            "output per label, and use the loss Tasks for several labels."
        )


def _weighted_sum(losses: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sum of losses [B], multiplied by sample weights [B] unless these are None."""
    return losses.sum() if weights is None else (losses * weights).sum()


def _pairwise(scores: Tensor, labels: Tensor, queries: Tensor, weights: Tensor | None) -> Tensor:
    """Return the RankNet loss, summed over queries. A query's loss is the mean over its pairs.

    A pair consists of two samples in the same query with different relevance.
    """
    # Masks of all pairs in the batch take B * B bytes: 16 MiB for 4096 samples.
    better = (labels[:, None] > labels[None]) & (queries[:, None] == queries[None])
    first, second = better.nonzero(as_tuple=True)
    losses = nn.functional.softplus(scores[second] - scores[first])
    if weights is not None:
        losses = losses * weights[first]
    of_query = torch.unique(queries, return_inverse=True)[1][first]
    # Pairs per query, by which the query's loss is divided. Queries without pairs have no loss.
    num_pairs = torch.bincount(of_query, minlength=1)
    return (losses / num_pairs[of_query]).sum()


def _listwise(scores: Tensor, labels: Tensor, queries: Tensor, weights: Tensor | None) -> Tensor:
    """Return the ListNet loss, summed over queries.

    A query's loss is the cross-entropy between two distributions over the query's samples: the relevance
    divided by the query's total relevance, and the softmax of the scores.
    """
    names, of_query = torch.unique(queries, return_inverse=True)
    num = len(names)
    # Subtract the query's maximum before exp, as in a stable softmax. It needs no gradient, because the shift
    # cancels out.
    highest = scores.new_full((num,), -torch.inf).scatter_reduce(0, of_query, scores.detach(), "amax")
    shifted = scores - highest[of_query]
    total = scores.new_zeros(num).index_add(0, of_query, shifted.exp())
    logs = shifted - total.log()[of_query]
    # Weights scale the numerator only, so that a query with weight w counts w times as much.
    gains = labels if weights is None else labels * weights
    # A query without any relevance has gains of 0. The clamp makes its loss 0 instead of NaN.
    shares = gains / scores.new_zeros(num).index_add(0, of_query, labels).clamp(min=1e-12)[of_query]
    return -(shares * logs).sum()
