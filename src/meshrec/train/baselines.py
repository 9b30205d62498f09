"""What a model has to beat: the global mean, item popularity, and logistic regression."""

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.metrics import binary_metrics
from meshrec.modules import PoolingType
from meshrec.sparse import KeyedJaggedTensor

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

MAX_SAMPLES = 200_000
"""Training and validation samples that baselines look at: the first of them."""
_BATCH = 8192
# Penalties per sum of losses, strongest first: each fit starts from the last one.
_PENALTIES = (10.0, 3.0, 1.0)
_ITERATIONS = 40
_SMOOTHING = 5.0


class Baseline(NamedTuple):
    """A baseline's name and its metrics on the validation data."""

    name: str
    quality: dict[str, float]


def baselines(dataset: "Dataset") -> Iterator[Baseline]:
    """The three, one after the other; popularity only where the dataset names its item.

    Popularity is the item's mean label in training, smoothed with five samples of the global mean. Logistic
    regression has one weight per id and per dense value; of three L2 penalties the best *on the validation
    data* counts, which flatters it.
    """
    assert dataset.validation is not None
    train, validation = _whole(dataset.train), _whole(dataset.validation)
    mean = train.labels.mean().clamp(1e-6, 1 - 1e-6)
    constant = torch.logit(mean).expand(len(validation.labels))
    # Not collective: baselines are one rank's work.
    quality = partial(binary_metrics, labels=validation.labels, gather=False)
    yield Baseline("global mean", quality(constant))
    if dataset.item is not None:
        yield Baseline("item popularity", quality(_popularity(dataset, train, validation)))
    fits = [quality(logits) for logits in _regressions(dataset, train, validation)]
    yield Baseline("logistic regression", max(fits, key=lambda found: found.get("auc", 0.5)))


class _Samples(NamedTuple):
    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor


def _whole(reader: "Reader") -> _Samples:
    batches = list(itertools.islice(reader.batches(_BATCH), -(-MAX_SAMPLES // _BATCH)))
    keys = batches[0].sparse.keys()
    values, lengths = [], []
    for key in keys:
        parts = [batch.sparse[key] for batch in batches]
        values += [part.values() for part in parts]
        lengths += [part.lengths() for part in parts]
    return _Samples(
        torch.cat([batch.dense for batch in batches]),
        KeyedJaggedTensor.from_lengths_sync(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths)),
        torch.cat([batch.labels for batch in batches]),
    )


def _popularity(dataset: "Dataset", train: _Samples, validation: _Samples) -> Tensor:
    assert dataset.item is not None
    rows = next(each.num_embeddings for each in dataset.features if each.name == dataset.item)
    items = train.sparse[dataset.item]
    samples = torch.repeat_interleave(torch.arange(len(train.labels)), items.lengths())
    count = torch.bincount(items.values(), minlength=rows)
    positive = torch.bincount(items.values(), weights=train.labels[samples], minlength=rows)
    rate = (positive + _SMOOTHING * train.labels.mean()) / (count + _SMOOTHING)
    judged = validation.sparse[dataset.item]
    total = torch.zeros(len(validation.labels), dtype=torch.float64)
    of = torch.repeat_interleave(torch.arange(len(validation.labels)), judged.lengths())
    total.index_add_(0, of, torch.logit(rate.double().clamp(1e-6, 1 - 1e-6))[judged.values()])
    return total / judged.lengths().clamp(min=1)


class _Columns(NamedTuple):
    """Samples as a sparse matrix: a column for each id of each feature, for each dense value, and the bias.

    Value n stands in column ``columns_N[n]`` of the sample that ``ends_B`` says.
    """

    columns_N: Tensor
    values_N: Tensor
    sample_N: Tensor
    ends_B: Tensor
    num_columns: int

    def logits(self, weights: Tensor) -> Tensor:
        """[B]: the matrix times the weights."""
        total = torch.zeros(len(self.values_N) + 1, dtype=torch.float64)
        torch.cumsum(self.values_N * weights[self.columns_N], 0, out=total[1:])
        ends = total[self.ends_B]
        return ends - torch.cat([ends.new_zeros(1), ends[:-1]])

    def gradient(self, errors_B: Tensor) -> Tensor:
        """[columns]: the transposed matrix times the errors."""
        return torch.bincount(
            self.columns_N, self.values_N * errors_B[self.sample_N], minlength=self.num_columns
        )


def _columns(dataset: "Dataset", samples: _Samples) -> _Columns:
    """Ids count as the tables pool them: a MEAN shares a weight of 1 among its ids."""
    num_samples, start = len(samples.labels), 0
    columns, values, rows = [], [], []
    for table in dataset.tables(1):
        for feature in table.feature_names:
            jagged = samples.sparse[feature]
            lengths = jagged.lengths()
            share = 1.0 / lengths.clamp(min=1).double()
            columns.append(jagged.values().long() + start)
            values.append(
                torch.repeat_interleave(share if table.pooling is PoolingType.MEAN else share**0, lengths)
            )
            rows.append(torch.repeat_interleave(torch.arange(num_samples), lengths))
            start += table.num_embeddings
    dense = torch.cat([samples.dense.double(), torch.ones(num_samples, 1, dtype=torch.float64)], dim=1)
    width = dense.shape[1]
    columns.append(torch.arange(start, start + width).repeat(num_samples))
    values.append(dense.reshape(-1))
    rows.append(torch.arange(num_samples).repeat_interleave(width))
    row = torch.cat(rows)
    order = torch.argsort(row, stable=True)
    ends = torch.bincount(row, minlength=num_samples).cumsum(0)
    return _Columns(torch.cat(columns)[order], torch.cat(values)[order], row[order], ends, start + width)


def _regressions(dataset: "Dataset", train: _Samples, validation: _Samples) -> Iterator[Tensor]:
    """Validation logits of a fit for each penalty."""
    data, judged, labels = _columns(dataset, train), _columns(dataset, validation), train.labels.double()
    weights = torch.zeros(data.num_columns, dtype=torch.float64, requires_grad=True)
    penalized = torch.ones(data.num_columns, dtype=torch.float64)
    penalized[-1] = 0.0  # the bias
    for strength in _PENALTIES:
        optimizer = torch.optim.LBFGS(
            [weights], max_iter=_ITERATIONS, history_size=8, line_search_fn="strong_wolfe"
        )

        def closure(decay: Tensor = strength * penalized) -> float:
            now = weights.detach()
            logits = data.logits(now)
            weights.grad = (data.gradient(torch.sigmoid(logits) - labels) + decay * now) / len(labels)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
            return float(loss + (decay * now).dot(now) / (2 * len(labels)))

        optimizer.step(closure)
        yield judged.logits(weights.detach())
