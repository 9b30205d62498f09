"""Calibrate a run's probabilities after training, by a curve from logits to probabilities.

The curve is fitted to validation data.
"""

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshrec.data.faults import needs
from meshrec.runs.fitting import data_of_run
from meshrec.runs.scoring import Scorer
from meshrec.train.evaluation import concat_weights, outputs_of
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RunFolder

# n validation samples

CalibrationKind = Literal["isotonic", "platt"]


class Curve(NamedTuple):
    """Calibration curve from logits to probabilities.

    For ``isotonic``, the curve connects points (logit, probability) by straight lines, and is constant
    outside them. For ``platt``, the probability is ``sigmoid(slope * logit + intercept)``.
    """

    kind: CalibrationKind
    logits: list[float]
    """For ``isotonic``, the logits of the points, ascending. For ``platt``, a list with the slope."""
    probabilities: list[float]
    """For ``isotonic``, the probabilities of the points. For ``platt``, a list with the intercept."""

    def __call__(self, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return calibrated probabilities, with the shape of ``logits``."""
        if self.kind == "isotonic":
            return np.interp(logits, self.logits, self.probabilities)
        return 1 / (1 + np.exp(-(self.logits[0] * logits + self.probabilities[0])))

    def calibrate_logits(self, logits: Tensor) -> Tensor:
        """Return calibrated logits, float64, with the shape of ``logits``.

        The sigmoid of a calibrated logit is the calibrated probability. Logits are infinite for the
        probabilities 0 and 1.
        """
        # Isotonic curves reach 0 and 1, whose logits are infinite; a sigmoid maps them back.
        return torch.logit(torch.from_numpy(self(logits.double().numpy())))


def fit_curve(
    kind: CalibrationKind,
    logits: npt.NDArray[np.float64],
    labels: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64] | None = None,
) -> Curve:
    """Fit a calibration curve with scikit-learn.

    Args:
        kind: curve type. ``isotonic`` needs thousands of samples (Zadrozny and Elkan, "Transforming
            classifier scores into accurate multiclass probability estimates", 2002). ``platt`` is a logistic
            regression on the logit, for fewer samples (Platt, "Probabilistic outputs for support vector
            machines", 1999).
        logits: model outputs for held-out samples, float64 [n].
        labels: labels in [0, 1], float64 [n].
        weights: sample weights, float64 [n]; None: all weights are 1.

    Raises:
        ValueError: all labels are the same.
    """
    weights = np.ones_like(logits) if weights is None else weights
    # Both kinds of curve need samples of both classes.
    if labels.min() == labels.max():
        raise ValueError(
            f"all {len(labels):,} validation labels are {labels[0]:g}: nothing can be calibrated. Give more."
        )
    if kind == "isotonic":
        isotonic = needs("sklearn.isotonic", "estimators").IsotonicRegression(y_min=0, y_max=1)
        isotonic.fit(logits, labels, sample_weight=weights)
        return Curve(kind, isotonic.X_thresholds_.tolist(), isotonic.y_thresholds_.tolist())
    # A fractional label counts as a weighted sample of both classes.
    both, ones = np.concatenate([logits, logits]), np.repeat([1, 0], len(logits))
    parts = np.concatenate([weights * labels, weights * (1 - labels)])
    has_weight = parts > 0
    # Practically unregularized: the curve has only two parameters, and shrinking them would bias it.
    regression = needs("sklearn.linear_model", "estimators").LogisticRegression(C=1e10)
    regression.fit(both[has_weight, None], ones[has_weight], sample_weight=parts[has_weight])
    return Curve(kind, regression.coef_[0].tolist(), regression.intercept_.tolist())


def fit_run_curve(run: RunFolder, scorer: Scorer, ranks: Ranks, kind: CalibrationKind) -> Curve:
    """Fit a calibration curve to a run's validation data. Collective.

    Args:
        run: the run.
        scorer: the run's model and recipe.
        ranks: the ranks, from `join`.
        kind: ``isotonic`` or ``platt``; see `fit_curve`.

    Raises:
        ValueError: the run's loss is not `BinaryCrossEntropy`, or the run has no validation data.
    """
    if not isinstance(scorer.recipe.loss, BinaryCrossEntropy):
        raise ValueError(
            f"the run's loss is {type(scorer.recipe.loss).__name__}, and probabilities of binary labels are "
            "calibrated. Leave the calibration out."
        )
    reader = data_of_run(scorer.recipe.data, run).validation
    if reader is None:
        raise ValueError(f"{run.path} has no validation data to calibrate on. Leave the calibration out.")
    # Every rank scores a share of the validation data.
    local_outputs = outputs_of(scorer.model, reader, ranks)
    # Every rank gets all validation samples, and therefore fits the same curve.
    outputs_by_rank = ranks.collect(local_outputs)
    logits, labels = (
        torch.cat([part[index] for part in outputs_by_rank]).double().numpy() for index in (0, 1)
    )
    weights = concat_weights([(part[2], len(part[1])) for part in outputs_by_rank])
    return fit_curve(kind, logits, labels, None if weights is None else weights.double().numpy())
