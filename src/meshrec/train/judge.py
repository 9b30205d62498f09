"""Evaluation of a run's weights: on validation data as they are trained, on test data once, at the end."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.data import Dataset, Reader
from meshrec.metrics import auc_interval, curves_of, score_histograms
from meshrec.metrics.named import quality
from meshrec.train.evaluation import outputs_of
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.stopping import EarlyStopping
from meshrec.train.watch import LossError

_LEAD = 0.02
"""The lead of fitted first weights, as a share of the 95 % interval of their AUC. The best of many
evaluations on few samples is better than the first one by chance.
"""


class Judge:
    """Metrics of the weights that a run reports. All methods are collective.

    Args:
        recipe: the recipe.
        dataset: the dataset.
        model: the model.
        ranks: the ranks, from `join`.

    Attributes:
        early: counts the evaluations without a better result.
        validation: validation metrics of the weights that the run reports.
        test: test metrics of these weights. The test data is read once, at the end.
        curves: the ROC curve and the calibration of these weights by part of the data, for clicks only; see
            `meshrec.metrics.curves_of`.
        weights_step: the step of these weights: the best by validation AUC, or the last.
        last_step: the step of the last evaluation of this process; -1 before it.
    """

    def __init__(self, recipe: Recipe, dataset: Dataset, model: nn.Module, ranks: Ranks) -> None:
        self._recipe, self._dataset, self._model, self._ranks = recipe, dataset, model, ranks
        self.early = EarlyStopping(recipe.training.patience)
        self.validation: dict[str, float] = {}
        self.test: dict[str, float] = {}
        self.curves: dict[str, Any] = {}
        self.weights_step = 0
        self.last_step = -1
        self._histograms: dict[str, Tensor] = {}

    def validate(self, step: int) -> bool:
        """Evaluate the current weights on the validation data; return whether they are the best so far.

        Raises:
            LossError: the loss on the validation data is not finite.
        """
        self.remeasure(step, step)
        self.last_step = step
        return self.early.improves(quality(self.validation), step)

    def remeasure(self, weights_step: int, step: int) -> None:
        """Evaluate the weights of ``weights_step``, which the model has now, on the validation data.

        ``step`` is the current step, for messages.
        """
        assert self._dataset.validation is not None
        self.validation = self._metrics("validation", self._dataset.validation, step)
        self.weights_step = weights_step

    def prefer_first(self) -> None:
        """Give the current weights a lead: later ones must be better by more than chance.

        Call it after the current weights were evaluated on the validation data, if there is any.
        """
        auc = self.validation.get("auc")
        if auc is not None:
            counts = self._ranks.sum(self._histograms["validation"][:2].sum(1).tolist())
            interval = auc_interval(auc, *counts)
            self.early.best_auc = auc + _LEAD * (interval.high - interval.low)

    def examine(self, step: int) -> None:
        """Evaluate the final weights on the test data."""
        assert self._dataset.test is not None
        self.test = self._metrics("test", self._dataset.test, step)

    def draw_curves(self) -> None:
        """Compute ``curves`` from the last evaluation of each part of the data."""
        for data, histograms in self._histograms.items():
            total = self._ranks.sum(histograms.flatten().tolist())
            self.curves[data] = curves_of(torch.tensor(total, dtype=torch.float64).view(histograms.shape))

    def _metrics(self, data: str, reader: Reader, step: int) -> dict[str, float]:
        recipe = self._recipe
        outputs = outputs_of(self._model, reader, self._ranks, bf16=recipe.training.bf16)
        found = recipe.loss.metrics(*outputs, group=self._ranks.control)
        if isinstance(recipe.loss, BinaryCrossEntropy):
            self._histograms[data] = score_histograms(*outputs)
        if not math.isfinite(found.get("loss", 0.0)):
            raise LossError(
                f"step {step}: the loss on the validation data is {found['loss']}. Lower the learning rates "
                "(--tables.lr, --dense.lr), or clip the gradients (--training.clip-norm 1)."
            )
        return found
