"""Baselines that a model has to beat: the global mean, item popularity, logistic regression, and LightGBM."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshrec.data import Batch
from meshrec.metrics import binary_metrics
from meshrec.train.linear import BATCH, Tell, columns, first_samples, regression
from meshrec.train.trees import Trees, has_trees

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

_SMOOTHING = 5.0


class Baseline(NamedTuple):
    """The name of a baseline, and its metrics on each part of the data: ``validation``, ``test``."""

    name: str
    quality: dict[str, dict[str, float]]


def baselines(dataset: "Dataset", tell: Tell = lambda done: None) -> Iterator[Baseline]:
    """Compute baselines one by one: the global mean, item popularity, logistic regression, LightGBM.

    Popularity is the item's mean label in training, smoothed with five samples of the global mean. It is left
    out if the dataset does not name its item. Logistic regression has one weight per ID and per dense value.
    The validation data chooses its L2 penalty. LightGBM is left out where it is not installed, see
    `meshrec.train.trees`.

    All of them learn from the first 200,000 training samples, see `meshrec.train.linear`. They are evaluated
    on the same samples as the model: all of the validation and test data. With several labels, each label
    has its own baselines. As in `Tasks`, the metrics of the first label also appear under their plain names.
    """
    if not dataset.labels:
        yield from _of_label(dataset, None, tell)
        return
    every = [_of_label(dataset, number, tell) for number in range(len(dataset.labels))]
    for found in zip(*every, strict=True):
        quality: dict[str, dict[str, float]] = {}
        for label, each in zip(dataset.labels, found, strict=True):
            for data, metrics in each.quality.items():
                of_label = {f"{label}/{name}": value for name, value in metrics.items()}
                quality[data] = {**(quality.get(data) or metrics), **of_label}
        yield Baseline(found[0].name, quality)


def _of_label(dataset: "Dataset", number: int | None, tell: Tell) -> Iterator[Baseline]:
    """Compute the baselines of one label; ``number`` is None if there is only one."""

    def label(batches: Iterator[Batch]) -> Iterator[Batch]:
        return (
            batches if number is None else (replace(each, labels=each.labels[:, number]) for each in batches)
        )

    found = {"validation": dataset.validation, "test": dataset.test}
    judged = {name: reader for name, reader in found.items() if reader is not None}

    def read(reader: "Reader") -> Batch:
        samples = first_samples(reader)
        return samples if number is None else replace(samples, labels=samples.labels[:, number])

    train = read(dataset.train)
    mean = train.labels.mean().clamp(1e-6, 1 - 1e-6)

    def quality(logits: Callable[[Batch], Tensor]) -> dict[str, dict[str, float]]:
        return {
            name: _judge(label(reader.batches(BATCH)), reader.num_samples, logits, tell)
            for name, reader in judged.items()
        }

    yield Baseline("global mean", quality(lambda batch: torch.logit(mean).expand(len(batch))))
    if dataset.item is not None:
        yield Baseline("item popularity", quality(_popularity(dataset, train)))
    chooses = None if dataset.validation is None else read(dataset.validation)
    parts = [
        (columns(dataset, each, each.dense), each.labels.double().numpy())
        for each in (train, chooses)
        if each is not None
    ]
    weights = regression(*parts, tell=tell).weights
    yield Baseline(
        "logistic regression",
        quality(lambda batch: torch.from_numpy(columns(dataset, batch, batch.dense) @ weights)),
    )
    if has_trees():
        trees = Trees(dataset, train, lambda reader: label(reader.batches(BATCH)), tell)
        yield Baseline("LightGBM", quality(trees))


def _judge(
    batches: Iterator[Batch], num_samples: int, logits: Callable[[Batch], Tensor], tell: Tell
) -> dict[str, float]:
    found: list[tuple[Tensor, Tensor]] = []
    for number, batch in enumerate(batches):
        tell(min(1.0, number * BATCH / num_samples))
        found.append((logits(batch), batch.labels))
    tell(1.0)
    # Not collective: one rank alone computes the baselines.
    scores, labels = (torch.cat(each) for each in zip(*found, strict=True))
    return binary_metrics(scores, labels, gather=False)


def _popularity(dataset: "Dataset", train: Batch) -> Callable[[Batch], Tensor]:
    item = dataset.item
    assert item is not None
    rows = next(each.num_embeddings for each in dataset.features if each.name == item)
    items = train.sparse[item]
    samples = torch.repeat_interleave(torch.arange(len(train)), items.lengths())
    count = torch.bincount(items.values(), minlength=rows)
    positive = torch.bincount(items.values(), weights=train.labels[samples], minlength=rows)
    rate = (positive + _SMOOTHING * train.labels.mean()) / (count + _SMOOTHING)
    score = torch.logit(rate.double().clamp(1e-6, 1 - 1e-6))

    def logits(batch: Batch) -> Tensor:
        judged = batch.sparse[item]
        of = torch.repeat_interleave(torch.arange(len(batch)), judged.lengths())
        total = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, of, score[judged.values()])
        return total / judged.lengths().clamp(min=1)

    return logits
