"""Fit a logistic regression to a dataset's samples, with a weight per ID and per dense value."""

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
# L2 penalties on the summed losses. Strongest first, because every fit starts from the previous solution.
_PENALTIES = (300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3)
# Iteration limit, also used to report progress.
_ITERATIONS = 60
_TOLERANCE, _FOLD_TOLERANCE = 2e-9, 1e-7
"""Relative decrease in loss at which a fit ends: for the regression itself, and for fits on folds, whose
weights only score held-out samples and need less precision.
"""
# Without validation data, every tenth training sample is held out to select the penalty.
_HELD_OUT_EVERY = 10

Tell = Callable[[float], None]
"""Progress callback, called with the finished share of the work in [0, 1]. If it raises, the work ends."""


class LabelledSamples(NamedTuple):
    """Inputs, labels and weights of the samples for a regression.

    Attributes:
        inputs: sparse input matrix from `design_matrix`, [B, columns].
        labels: labels, 0 or 1, float64 [B].
        weights: sample weights, float64 [B]; None: all weights are 1.
    """

    inputs: Any
    labels: "Vector"
    weights: "Vector | None" = None

    @classmethod
    def of(cls, samples: Batch, inputs: Any) -> "LabelledSamples":
        """Combine a batch's labels and weights with the batch's input matrix from `design_matrix`."""
        return cls(inputs, samples.labels.double().numpy(), weights_of(samples).numpy())

    def where(self, mask: Any) -> "LabelledSamples":
        """Select the samples where ``mask``, bool [B], is True."""
        weights = None if self.weights is None else self.weights[mask]
        return LabelledSamples(self.inputs[mask], self.labels[mask], weights)


def weights_of(samples: Batch) -> Tensor:
    """Return a batch's sample weights, float64 [B], scaled so that the weights above 0 have mean 1.

    The effect of penalties and smoothing then does not depend on the scale of the weights.

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
    """Return the weighted mean of values [n], as a 0-d float64 tensor."""
    return values.double() @ weights.double() / weights.sum()


def concat_batches(parts: Iterator[Batch]) -> Batch:
    """Concatenate batches to a single batch. Row numbers and ID weights are left out."""
    # A KeyedJaggedTensor stores its values key by key, so the batches are joined for each key.
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
    """Read the first `MAX_SAMPLES` samples, rounded up to whole batches, as a single batch."""
    return concat_batches(itertools.islice(reader.batches(BATCH), -(-MAX_SAMPLES // BATCH)))


def design_matrix(dataset: "Dataset", samples: Batch, dense: Tensor, *, shared: bool = False) -> Any:
    """Return the input matrix of a linear model, a sparse matrix [B, columns].

    The matrix has a column per feature and table row, a column per dense value, and last a bias column. The
    entry for an ID follows the table's pooling. With SUM pooling, the entry is 1. With MEAN pooling, it is 1
    divided by the number of IDs in the bag. Hashed tables, which find rows by the hash of an ID, have no
    columns.

    Args:
        dataset: the dataset, which determines the tables.
        samples: the samples.
        dense: encoded dense values of the samples, [B, N].
        shared: whether features with a common table share the same columns.
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
            # The clamp avoids a division by 0 for empty bags, which have no entries anyway.
            share = 1.0 / lengths.clamp(min=1).double()
            # share ** 0 is 1 for every ID, the entry for sum pooling.
            weights = torch.repeat_interleave(
                share if table.pooling is PoolingType.MEAN else share**0, lengths
            )
            # CSR row offsets, [B + 1].
            ends = torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)
            of_feature = (weights.numpy(), jagged.values().int().numpy(), ends.int().numpy())
            of_table.append(sparse.csr_matrix(of_feature, shape=(num_samples, table.num_embeddings)))
        # With shared columns, the matrices of a table's features are added.
        parts += [sum(of_table[1:], of_table[0])] if shared else of_table
    last = torch.cat([dense.double(), torch.ones(num_samples, 1, dtype=torch.float64)], dim=1)
    return sparse.hstack([*parts, sparse.csr_matrix(last.numpy())], format="csr")


def validation_mask(num_samples: int) -> Any:
    """Return a mask, bool [num_samples], that selects every tenth training sample.

    These samples replace validation data if a dataset has none.
    """
    return np.arange(num_samples) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1


class Regression(NamedTuple):
    """Fitted logistic regression.

    Attributes:
        weights: weight per column of the design matrix, float64. The last is the bias.
        penalty: L2 penalty on the summed losses, with which the weights were fitted.
    """

    weights: "Vector"
    penalty: float


def fit_regression(
    train: LabelledSamples,
    held_out: LabelledSamples | None = None,
    *,
    penalty: float | None = None,
    tell: Tell = lambda share: None,
) -> Regression:
    """Fit a logistic regression, and select the best of seven L2 penalties by AUC on held-out samples.

    Penalties are tried in decreasing order, until the AUC no longer rises.

    Args:
        train: training samples.
        held_out: held-out samples, which select the penalty. None: hold out every tenth training sample.
        penalty: penalty selected in an earlier fit. If given, only fit with it, on all training samples.
        tell: called with the finished share, from 0 to 1.
    """
    if penalty is not None:
        transposed = train.inputs.T.tocsr()
        return Regression(_fit(train, transposed, penalty=penalty, start=None, tell=tell), penalty)
    if held_out is None:
        held_out_mask = validation_mask(len(train.labels))
        held_out, train = train.where(held_out_mask), train.where(~held_out_mask)
    transposed = train.inputs.T.tocsr()
    held_out_weights = None if held_out.weights is None else torch.from_numpy(held_out.weights)
    best, best_fit, last = -1.0, None, None
    for number, penalty in enumerate(_PENALTIES):

        def tell_share(share: float, number: int = number) -> None:
            """Report progress over all penalties, from the finished share of the fit with this penalty."""
            tell((number + share) / len(_PENALTIES))

        # Starts from the fit with the stronger penalty, which is close to this one's.
        last = _fit(train, transposed, penalty=penalty, start=last, tell=tell_share)
        logits = torch.from_numpy(held_out.inputs @ last)
        auc = area_under_curve(logits, torch.from_numpy(held_out.labels), held_out_weights)
        # With only one class there is no AUC to select by. Keep the strongest penalty, which was tried first.
        if auc is None:
            return Regression(last, penalty)
        # A weaker penalty does not help any more; penalties are sorted.
        if auc <= best:
            break
        best, best_fit = auc, Regression(last, penalty)
    assert best_fit is not None
    return best_fit


def refit_regression(fit: Regression, train: LabelledSamples) -> "Vector":
    """Refit a regression to other samples with the same penalty, and return the weights.

    The fit starts from the weights of ``fit``, and has a lower precision.
    """
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
    """Minimize the weighted sum of losses plus ``penalty`` / 2 times the sum of squared weights.

    L-BFGS runs on columns that are scaled by the Hessian's diagonal at zero. It then needs about 30
    iterations. Without scaling, it has not converged after 40 iterations.

    Args:
        start: weights to start from; None: zeros.
        tell: called with the finished share, from 0 to 1.
    """
    from scipy.optimize import minimize

    data, labels, weights = train
    of_samples = np.ones(len(labels)) if weights is None else weights
    penalized = np.full(data.shape[1], penalty)
    penalized[-1] = 0.0  # the bias
    # Diagonal of the Hessian at zero, where p (1 - p) is 1/4.
    curvature = transposed.multiply(transposed) @ (0.25 * of_samples) + penalized
    scale = 1.0 / np.sqrt(np.maximum(curvature, 1e-12))
    num, calls = len(labels), itertools.count()

    def loss(scaled: "Vector") -> "tuple[float, Vector]":
        """Return the loss with penalty, divided by the sample count, and the gradient for scaled weights."""
        tell(min(1.0, next(calls) / _ITERATIONS))
        coefficients = scaled * scale
        logits = data @ coefficients
        # log(1 + exp(x)) without overflow.
        losses = np.maximum(logits, 0.0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))
        # The clip keeps exp from overflowing. At 500, the probability is within 1e-200 of 0 or 1.
        errors = of_samples * (1.0 / (1.0 + np.exp(-np.clip(logits, -500.0, 500.0))) - labels)
        gradient = (transposed @ errors + penalized * coefficients) * scale
        return float(losses @ of_samples + penalized @ coefficients**2 / 2) / num, gradient / num

    # `start` has unscaled weights.
    first = np.zeros(data.shape[1]) if start is None else start / scale
    options = {"maxiter": _ITERATIONS, "maxcor": 8, "gtol": 1e-6, "ftol": tolerance}
    # L-BFGS vectors are short: BLAS threads would spin between calls, for two thirds of the CPU time.
    with needs("threadpoolctl", "train").threadpool_limits(1, user_api="blas"):
        result = minimize(loss, first, jac=True, method="L-BFGS-B", options=options)
    coefficients: Vector = result.x * scale
    return coefficients
