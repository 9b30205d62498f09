"""Logistic regression on dataset samples, with a weight per ID and per dense value."""

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data import Batch
from meshrec.data.faults import needs
from meshrec.metrics import area_under_curve
from meshrec.modules import PoolingType
from meshrec.sparse import KeyedJaggedTensor
from meshrec.train.evaluation import concat_weights

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

    Vector = np.typing.NDArray[np.float64]

MAX_SAMPLES = 200_000
"""Maximum number of training samples in a regression, taken from the start of the first epoch."""
# Samples per read; MAX_SAMPLES is rounded up to whole batches.
BATCH = 8192
# L2 penalties on the summed losses, strongest first: every fit starts from the previous solution.
_PENALTIES = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
# Iteration limit, and the denominator for progress.
_ITERATIONS = 60
_TOLERANCE, _FOLD_TOLERANCE = 2e-9, 1e-7
"""Relative loss decrease at which a fit ends: for the regression itself, and for fits on folds, whose
weights only score held-out samples.
"""
_HELD_OUT_EVERY = 10  # without validation data, one training sample in ten chooses the penalty

Tell = Callable[[float], None]
"""Progress callback, called with the finished share in [0, 1]. An exception from the callback ends
the work.
"""


class LabelledSamples(NamedTuple):
    """Inputs, labels and weights of samples for a regression."""

    inputs: Any
    """Sparse input matrix from `design_matrix`."""
    labels: "Vector"
    """Labels, 0 or 1."""
    weights: "Vector | None" = None
    """Sample weights; None: 1."""

    @classmethod
    def of(cls, samples: Batch, inputs: Any) -> "LabelledSamples":
        """Combine the labels and weights of a batch with its input matrix from `design_matrix`."""
        return cls(inputs, samples.labels.double().numpy(), weights_of(samples).numpy())

    def where(self, mask: Any) -> "LabelledSamples":
        """Select the samples where ``mask`` is True."""
        weights = None if self.weights is None else self.weights[mask]
        return LabelledSamples(self.inputs[mask], self.labels[mask], weights)


def weights_of(samples: Batch) -> Tensor:
    """Return sample weights as float64, scaled so that the weights above 0 have mean 1.

    Penalties and smoothing are then independent of the weights' unit.

    Raises:
        ValueError: all weights are 0.
    """
    if samples.weights is None:
        return torch.ones(len(samples), dtype=torch.float64)
    weights = samples.weights.double()
    if not bool((weights > 0).any()):
        raise ValueError("all weights of the first training samples are 0. Give them weights, or shuffle.")
    return weights / weights[weights > 0].mean()


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of values [n]."""
    return values.double() @ weights.double() / weights.sum()


def concat_batches(parts: Iterator[Batch]) -> Batch:
    """Concatenate batches to a single one, without row numbers and ID weights."""
    batches = list(parts)
    keys = batches[0].sparse.keys()
    values, lengths = [], []
    for key in keys:
        bags = [batch.sparse[key] for batch in batches]
        values += [part.values() for part in bags]
        lengths += [part.lengths() for part in bags]
    return Batch(
        torch.cat([batch.dense for batch in batches]),
        KeyedJaggedTensor.from_lengths_sync(keys=keys, values=torch.cat(values), lengths=torch.cat(lengths)),
        torch.cat([batch.labels for batch in batches]),
        weights=concat_weights([(batch.weights, len(batch)) for batch in batches]),
    )


def first_samples(reader: "Reader") -> Batch:
    """Read the first `MAX_SAMPLES` samples, rounded up to whole batches."""
    return concat_batches(itertools.islice(reader.batches(BATCH), -(-MAX_SAMPLES // BATCH)))


def design_matrix(dataset: "Dataset", samples: Batch, dense: Tensor, *, shared: bool = False) -> Any:
    """Return the design matrix of a linear model: a column per table row and dense value, and a bias column.

    IDs count as the tables pool them: with MEAN pooling, the IDs in a bag share a weight of 1.

    Args:
        dataset: describes the tables.
        samples: the samples.
        dense: encoded dense values of the samples, [B, N].
        shared: whether features with a common table share columns too.
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
            # CSR row offsets, [B + 1].
            ends = torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)
            of_feature = (weights.numpy(), jagged.values().int().numpy(), ends.int().numpy())
            of_table.append(sparse.csr_matrix(of_feature, shape=(num_samples, table.num_embeddings)))
        parts += [sum(of_table[1:], of_table[0])] if shared else of_table
    last = torch.cat([dense.double(), torch.ones(num_samples, 1, dtype=torch.float64)], dim=1)
    return sparse.hstack([*parts, sparse.csr_matrix(last.numpy())], format="csr")


def validation_mask(num_samples: int) -> Any:
    """Return a mask with every tenth training sample, a substitute for missing validation data."""
    return np.arange(num_samples) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1


class Regression(NamedTuple):
    """Fitted logistic regression."""

    weights: "Vector"
    """Weights, a value per column."""
    penalty: float
    """L2 penalty on the summed losses."""


def fit_regression(
    train: LabelledSamples,
    judged: LabelledSamples | None = None,
    *,
    penalty: float | None = None,
    tell: Tell = lambda share: None,
) -> Regression:
    """Fit a weight per column, with the best of seven L2 penalties by AUC on held-out samples.

    Penalties are tried in decreasing order, until the AUC no longer rises.

    Args:
        train: training samples.
        judged: samples that select the penalty; if None, every tenth training sample.
        penalty: a penalty selected earlier; all training samples are then used to fit.
        tell: called with the finished share of the work.
    """
    if penalty is not None:
        transposed = train.inputs.T.tocsr()
        return Regression(_fit(train, transposed, penalty=penalty, start=None, tell=tell), penalty)
    if judged is None:
        chooses = validation_mask(len(train.labels))
        judged, train = train.where(chooses), train.where(~chooses)
    transposed = train.inputs.T.tocsr()
    judged_weights = None if judged.weights is None else torch.from_numpy(judged.weights)
    best, best_fit, last = -1.0, None, None
    for number, penalty in enumerate(_PENALTIES):

        def tell_share(share: float, number: int = number) -> None:
            tell((number + share) / len(_PENALTIES))

        last = _fit(train, transposed, penalty=penalty, start=last, tell=tell_share)
        logits = torch.from_numpy(judged.inputs @ last)
        auc = area_under_curve(logits, torch.from_numpy(judged.labels), judged_weights)
        if auc is None:  # one class only: nothing chooses, so the strongest penalty stays
            return Regression(last, penalty)
        if auc <= best:
            break
        best, best_fit = auc, Regression(last, penalty)
    assert best_fit is not None
    return best_fit


def refit_regression(fit: Regression, train: LabelledSamples) -> "Vector":
    """Refit the regression on other samples at the same penalty; return the weights."""
    start, penalty = fit
    transposed = train.inputs.T.tocsr()
    return _fit(train, transposed, penalty=penalty, start=start, tolerance=_FOLD_TOLERANCE)


def _fit(
    train: LabelledSamples,
    transposed: Any,
    *,
    penalty: float,
    start: "Vector | None",
    tell: Tell = lambda share: None,
    tolerance: float = _TOLERANCE,
) -> "Vector":
    """Minimize the weighted sum of losses plus ``penalty`` / 2 times the squared weights.

    Columns are scaled by the Hessian's diagonal at zero: L-BFGS then needs some 30 iterations. Unscaled, it
    has not converged after 40.
    """
    from scipy.optimize import minimize

    data, labels, weights = train
    of_samples = np.ones(len(labels)) if weights is None else weights
    penalized = np.full(data.shape[1], penalty)
    penalized[-1] = 0.0  # the bias
    # p (1 - p) is 1/4 at zero, where the fit starts.
    curvature = transposed.multiply(transposed) @ (0.25 * of_samples) + penalized
    scale = 1.0 / np.sqrt(np.maximum(curvature, 1e-12))
    num, calls = len(labels), itertools.count()

    def loss(scaled: "Vector") -> "tuple[float, Vector]":
        tell(min(1.0, next(calls) / _ITERATIONS))
        coefficients = scaled * scale
        logits = data @ coefficients
        # log(1 + exp(x)) without overflow.
        losses = np.maximum(logits, 0.0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))
        errors = of_samples * (1.0 / (1.0 + np.exp(-np.clip(logits, -500.0, 500.0))) - labels)
        gradient = (transposed @ errors + penalized * coefficients) * scale
        return float(losses @ of_samples + penalized @ coefficients**2 / 2) / num, gradient / num

    first = np.zeros(data.shape[1]) if start is None else start / scale
    options = {"maxiter": _ITERATIONS, "maxcor": 8, "gtol": 1e-6, "ftol": tolerance}
    # L-BFGS vectors are short: BLAS threads would spin between calls, for two thirds of the CPU time.
    with needs("threadpoolctl", "train").threadpool_limits(1, user_api="blas"):
        result = minimize(loss, first, jac=True, method="L-BFGS-B", options=options)
    coefficients: Vector = result.x * scale
    return coefficients
