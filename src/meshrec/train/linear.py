"""Logistic regression on the samples of a dataset: one weight per ID, and per dense value."""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data import Batch
from meshrec.metrics import area_under_curve
from meshrec.modules import PoolingType
from meshrec.sparse import KeyedJaggedTensor

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

    Vector = np.typing.NDArray[np.float64]
    Labelled = tuple[Any, Vector]

MAX_SAMPLES = 200_000
"""Training samples that a regression learns from: the first of the first epoch."""
BATCH = 8192
# Penalties per sum of losses, strongest first: each fit starts from the last one.
_PENALTIES = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
_ITERATIONS = 60
_CHOICE = 10  # without validation data, one training sample in ten chooses the penalty

Tell = Callable[[float], None]
"""A function that is called with the finished share of the work, in [0, 1]. An exception from it ends the
work.
"""


def whole(parts: Iterator[Batch]) -> Batch:
    """Join batches into one."""
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


def first_samples(reader: "Reader") -> Batch:
    """Read the first `MAX_SAMPLES` samples, rounded up to whole batches."""
    return whole(itertools.islice(reader.batches(BATCH), -(-MAX_SAMPLES // BATCH)))


def columns(dataset: "Dataset", samples: Batch, dense: Tensor, *, shared: bool = False) -> Any:
    """Return samples as a sparse matrix: a column per ID of each feature, per dense value, and for the bias.

    IDs count as the tables pool them: in a MEAN they share a weight of 1.

    Args:
        dataset: describes the tables.
        samples: the samples.
        dense: the dense values [B, N] of the samples, encoded as they should be.
        shared: whether features that share a table also share its columns.
    """
    from scipy import sparse

    num_samples, parts = len(samples), []
    for table in dataset.tables(1):
        if table.keys is not None:
            continue  # IDs of hashed tables have no columns
        of_table = []
        for feature in table.feature_names:
            jagged = samples.sparse[feature]
            lengths = jagged.lengths()
            share = 1.0 / lengths.clamp(min=1).double()
            weights = torch.repeat_interleave(
                share if table.pooling is PoolingType.MEAN else share**0, lengths
            )
            ends = torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)
            of_feature = (weights.numpy(), jagged.values().int().numpy(), ends.int().numpy())
            of_table.append(sparse.csr_matrix(of_feature, shape=(num_samples, table.num_embeddings)))
        parts += [sum(of_table[1:], of_table[0])] if shared else of_table
    last = torch.cat([dense.double(), torch.ones(num_samples, 1, dtype=torch.float64)], dim=1)
    return sparse.hstack([*parts, sparse.csr_matrix(last.numpy())], format="csr")


def chosen(num_samples: int) -> Any:
    """Return a mask of every tenth training sample. They stand in for validation data where there is none."""
    return np.arange(num_samples) % _CHOICE == _CHOICE - 1


class Regression(NamedTuple):
    """A fitted regression."""

    weights: "Vector"
    """A weight per column."""
    penalty: float
    """The L2 penalty of the sum of losses."""


def regression(
    train: "Labelled", judged: "Labelled | None" = None, *, tell: Tell = lambda done: None
) -> Regression:
    """Fit a weight per column, with the L2 penalty of seven that has the best AUC on other samples.

    Penalties are tried from the strongest on, until one is worse than the one before it.

    Args:
        train: the `columns` of the training samples, and their labels, 0 or 1.
        judged: those of the samples that choose the penalty; if none, every tenth training sample.
        tell: is called with the finished share of the work.
    """
    data, labels = train
    if judged is None:
        chooses = chosen(len(labels))
        judged, data, labels = (data[chooses], labels[chooses]), data[~chooses], labels[~chooses]
    transposed = data.T.tocsr()
    best, kept, last = -1.0, None, None
    for number, penalty in enumerate(_PENALTIES):

        def told(done: float, number: int = number) -> None:
            tell((number + done) / len(_PENALTIES))

        last = _fit(data, transposed, labels, penalty=penalty, start=last, tell=told)
        found = area_under_curve(torch.from_numpy(judged[0] @ last), torch.from_numpy(judged[1]))
        if found is None:  # one class only: nothing chooses, so the strongest penalty stays
            return Regression(last, penalty)
        if found <= best:
            break
        best, kept = found, Regression(last, penalty)
    assert kept is not None
    return kept


def fitted_again(found: Regression, train: "Labelled") -> "Vector":
    """Return the weights of the regression that other samples give, at the same penalty."""
    data, labels = train
    start, penalty = found
    return _fit(data, data.T.tocsr(), labels, penalty=penalty, start=start, tell=lambda done: None)


def _fit(
    data: Any, transposed: Any, labels: "Vector", *, penalty: float, start: "Vector | None", tell: Tell
) -> "Vector":
    """Find the minimum of the sum of losses, plus the penalty times half the squared weights.

    Columns are scaled by the diagonal of the Hessian at zero: L-BFGS then needs some 30 iterations, where it
    has not converged after 40 without.
    """
    from scipy.optimize import minimize

    penalized = np.full(data.shape[1], penalty)
    penalized[-1] = 0.0  # the bias
    curvature = transposed.multiply(transposed) @ np.full(len(labels), 0.25) + penalized
    scale = 1.0 / np.sqrt(np.maximum(curvature, 1e-12))
    num, calls = len(labels), itertools.count()

    def loss(scaled: "Vector") -> "tuple[float, Vector]":
        tell(min(1.0, next(calls) / _ITERATIONS))
        weights = scaled * scale
        logits = data @ weights
        # log(1 + exp(x)) without overflow.
        each = np.maximum(logits, 0.0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))
        errors = 1.0 / (1.0 + np.exp(-np.clip(logits, -500.0, 500.0))) - labels
        gradient = (transposed @ errors + penalized * weights) * scale
        return float(each.sum() + penalized @ weights**2 / 2) / num, gradient / num

    first = np.zeros(data.shape[1]) if start is None else start / scale
    found = minimize(
        loss, first, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS, "maxcor": 8, "gtol": 1e-6}
    )
    weights: Vector = found.x * scale
    return weights
