"""Baselines that a model has to beat: the global mean, item popularity, logistic regression, and LightGBM."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data import Batch
from meshrec.metrics import area_under_curve, binary_metrics
from meshrec.modules import PoolingType
from meshrec.sparse import KeyedJaggedTensor
from meshrec.train.trees import Trees, has_trees

if TYPE_CHECKING:
    from meshrec.data import Dataset

    Vector = np.typing.NDArray[np.float64]

MAX_SAMPLES = 200_000
"""Training samples that baselines learn from: the first of the first epoch."""
_BATCH = 8192
# Penalties per sum of losses, strongest first: each fit starts from the last one.
_PENALTIES = (10.0, 3.0, 1.0)
_ITERATIONS = 60
_SMOOTHING = 5.0
_CHOICE = 10  # one training sample in ten chooses the penalty

Tell = Callable[[float], None]
"""A function that is called with the finished share of the work, in [0, 1]. An exception from it ends the
work.
"""


class Baseline(NamedTuple):
    """The name of a baseline, and its metrics on each part of the data: ``validation``, ``test``."""

    name: str
    quality: dict[str, dict[str, float]]


def baselines(dataset: "Dataset", tell: Tell = lambda done: None) -> Iterator[Baseline]:
    """Compute baselines one by one: the global mean, item popularity, logistic regression, LightGBM.

    Popularity is the item's mean label in training, smoothed with five samples of the global mean. It is left
    out if the dataset does not name its item. Logistic regression has one weight per ID and per dense value.
    Its L2 penalty is the one of three that, fitted on nine tenths of the training samples, predicts the other
    tenth best. LightGBM is left out where it is not installed, see `meshrec.train.trees`.

    All of them learn from the first `MAX_SAMPLES` training samples. They are evaluated on the same samples as
    the model: all of the validation and test data. With several labels, each label has its own
    baselines. As in `Tasks`, the metrics of the first label also appear under their plain names.
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
    train = _whole(label(itertools.islice(dataset.train.batches(_BATCH), -(-MAX_SAMPLES // _BATCH))))
    mean = train.labels.mean().clamp(1e-6, 1 - 1e-6)

    def quality(logits: Callable[[Batch], Tensor]) -> dict[str, dict[str, float]]:
        return {
            name: _judge(label(reader.batches(_BATCH)), reader.num_samples, logits, tell)
            for name, reader in judged.items()
        }

    yield Baseline("global mean", quality(lambda batch: torch.logit(mean).expand(len(batch))))
    if dataset.item is not None:
        yield Baseline("item popularity", quality(_popularity(dataset, train)))
    weights = _regression(dataset, train, tell)
    yield Baseline("logistic regression", quality(lambda batch: _logits(_columns(dataset, batch), weights)))
    if has_trees():
        trees = Trees(dataset, train, lambda reader: label(reader.batches(_BATCH)), tell)
        yield Baseline("LightGBM", quality(trees))


def _judge(
    batches: Iterator[Batch], num_samples: int, logits: Callable[[Batch], Tensor], tell: Tell
) -> dict[str, float]:
    found: list[tuple[Tensor, Tensor]] = []
    for number, batch in enumerate(batches):
        tell(min(1.0, number * _BATCH / num_samples))
        found.append((logits(batch), batch.labels))
    tell(1.0)
    # Not collective: one rank alone computes the baselines.
    scores, labels = (torch.cat(each) for each in zip(*found, strict=True))
    return binary_metrics(scores, labels, gather=False)


def _whole(parts: Iterator[Batch]) -> Batch:
    batches = list(parts)
    keys = batches[0].sparse.keys()
    values, lengths = [], []
    for key in keys:
        each_key = [batch.sparse[key] for batch in batches]
        values += [part.values() for part in each_key]
        lengths += [part.lengths() for part in each_key]
    return Batch(
        torch.cat([batch.dense for batch in batches]),
        KeyedJaggedTensor.from_lengths_sync(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths)),
        torch.cat([batch.labels for batch in batches]),
    )


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


def _columns(dataset: "Dataset", samples: Batch) -> Any:
    """Return samples as a sparse matrix: a column per ID of each feature, per dense value, and for the bias.

    IDs count as the tables pool them: in a MEAN they share a weight of 1.
    """
    from scipy import sparse

    num_samples, parts = len(samples), []
    for table in dataset.tables(1):
        for feature in table.feature_names:
            jagged = samples.sparse[feature]
            lengths = jagged.lengths()
            share = 1.0 / lengths.clamp(min=1).double()
            weights = torch.repeat_interleave(
                share if table.pooling is PoolingType.MEAN else share**0, lengths
            )
            ends = torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)
            of_feature = (weights.numpy(), jagged.values().int().numpy(), ends.int().numpy())
            parts.append(sparse.csr_matrix(of_feature, shape=(num_samples, table.num_embeddings)))
    dense = torch.cat([samples.dense.double(), torch.ones(num_samples, 1, dtype=torch.float64)], dim=1)
    return sparse.hstack([*parts, sparse.csr_matrix(dense.numpy())], format="csr")


def _logits(columns: Any, weights: "Vector") -> Tensor:
    return torch.from_numpy(columns @ weights)


def _regression(dataset: "Dataset", train: Batch, tell: Tell) -> "Vector":
    """Fit all training samples, with the penalty that predicts a tenth of them best from the others."""
    data, labels = _columns(dataset, train), train.labels.double().numpy()
    transposed = data.T.tocsr()
    chooses = np.arange(len(labels)) % _CHOICE == _CHOICE - 1
    num_fits, fits = len(_PENALTIES) + 1, itertools.count()

    def fit(penalty: float, weight_B: "Vector", start: "Vector | None") -> "Vector":
        number = next(fits)
        return _fit(
            data,
            transposed,
            labels,
            weight_B,
            penalty=penalty,
            start=start,
            tell=lambda done: tell((number + done) / num_fits),
        )

    def how_good(weights: "Vector") -> float:
        found = area_under_curve(_logits(data[chooses], weights), torch.from_numpy(labels[chooses]))
        return 0.5 if found is None else found

    tried: list[Vector] = []
    for penalty in _PENALTIES:
        tried.append(fit(penalty, (~chooses).astype(np.float64), tried[-1] if tried else None))
    best = max(range(len(tried)), key=lambda number: how_good(tried[number]))
    return fit(_PENALTIES[best], np.ones_like(labels), tried[best])


def _fit(
    data: Any,
    transposed: Any,
    labels: "Vector",
    weight_B: "Vector",
    *,
    penalty: float,
    start: "Vector | None",
    tell: Tell,
) -> "Vector":
    """Find the minimum of the weighted sum of losses, plus the penalty times half the squared weights.

    Columns are scaled by the diagonal of the Hessian at zero: L-BFGS then needs some 30 iterations, where it
    has not converged after 40 without.
    """
    from scipy.optimize import minimize

    penalized = np.full(data.shape[1], penalty)
    penalized[-1] = 0.0  # the bias
    curvature = transposed.multiply(transposed) @ (weight_B / 4) + penalized
    scale = 1.0 / np.sqrt(np.maximum(curvature, 1e-12))
    num, calls = float(weight_B.sum()), itertools.count()

    def loss(scaled: "Vector") -> "tuple[float, Vector]":
        tell(min(1.0, next(calls) / _ITERATIONS))
        weights = scaled * scale
        logits = data @ weights
        # log(1 + exp(x)) without overflow.
        each = np.maximum(logits, 0.0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))
        errors = (1.0 / (1.0 + np.exp(-np.clip(logits, -500.0, 500.0))) - labels) * weight_B
        gradient = (transposed @ errors + penalized * weights) * scale
        return float(each @ weight_B + penalized @ weights**2 / 2) / num, gradient / num

    first = np.zeros(data.shape[1]) if start is None else start / scale
    found = minimize(
        loss, first, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS, "maxcor": 8, "gtol": 1e-6}
    )
    weights: Vector = found.x * scale
    return weights
