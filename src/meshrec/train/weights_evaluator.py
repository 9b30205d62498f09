"""Evaluate a run's weights: on validation data during training, and on test data once at the end."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.data import Dataset, Reader
from meshrec.metrics import auc_interval, binary_curves, effective_sizes, score_histograms
from meshrec.metrics.named import metric_title, quality
from meshrec.models.settings import SelectedSettings
from meshrec.train.evaluation import EVALUATION_BATCH, Scored, concat_weights, evaluation_batch_size, score
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.stopping import EarlyStopping
from meshrec.train.watch import LossError

_INITIAL_WEIGHTS_LEAD = 0.08
"""How much AUC later weights must gain over fitted initial weights, as a share of the width of the AUC's 95 %
confidence interval. Without this margin, the best of many evaluations on few samples beats the first merely
by chance. On thirteen tables, gains up to 0.04 were lost on test data, and gains from 0.2 on were kept.
"""
_MAX_TESTED_SAMPLES = 100_000
"""Maximum number of validation samples in the paired loss test. More would not change the outcome."""


class WeightsEvaluator:
    """Evaluator of a run's weights, which records which weights the run reports. All methods are collective.

    Args:
        recipe: the recipe.
        dataset: the dataset.
        model: the model, whose current weights are evaluated.
        ranks: the ranks, from `join`.

    Attributes:
        early: early stopping, which counts evaluations without a better result.
        validation: validation metrics of the last evaluation; after training, those of the reported weights.
        test: test metrics for the reported weights. The test data is read once, at the end.
        curves: ROC curve and calibration by data part ("validation", "test"), for clicks only; see
            `meshrec.metrics.binary_curves`. Set by `compute_curves`.
        weights_step: step of the last evaluated weights; after training, that of the reported weights.
        last_step: step of the last `validate` in this process; -1 before it.
    """

    def __init__(self, recipe: Recipe, dataset: Dataset, model: nn.Module, ranks: Ranks) -> None:
        self._recipe, self._dataset, self._model, self._ranks = recipe, dataset, model, ranks
        self.early = EarlyStopping(recipe.training.patience, recipe.training.chance_patience)
        self.validation: dict[str, float] = {}
        self.test: dict[str, float] = {}
        self.curves: dict[str, Any] = {}
        self.weights_step = 0
        self.last_step = -1
        # This rank's score histograms by data part, from the last evaluation. Only for BinaryCrossEntropy.
        self._histograms: dict[str, Tensor] = {}

    def validate(self, step: int) -> bool:
        """Evaluate the current weights on the validation data, and return whether they are the best so far.

        Raises:
            LossError: a validation metric is NaN, or the loss is infinite.
            ValueError: all validation sample weights are 0.
        """
        # Before the evaluation, whose metrics depend on the selected settings.
        self._tune_settings(step)
        self._validate(step, step, tests=True)
        self.last_step = step
        return self.early.record(quality(self.validation), step)

    def _tune_settings(self, step: int) -> None:
        """Select the model's settings that are not trained, such as those in [Note: repeated items].

        The settings are selected on the validation data, by the metric that also selects the best weights.
        Most models have no such settings.
        """
        reader = self._dataset.validation
        assert reader is not None

        def measured() -> float:
            """Evaluate the current settings on the validation data, and return the quality."""
            metrics = self._metrics("validation", self._scored(reader, evaluation_batch_size(reader)), step)
            return quality(metrics) or 0.0

        for module in self._model.modules():
            if isinstance(module, SelectedSettings) and module.candidates:
                # Tries several settings, each with a full evaluation.
                module.choose(measured)

    def reevaluate(self, weights_step: int, step: int) -> None:
        """Evaluate the model on the validation data again, after weights were loaded from a checkpoint.

        The result replaces the validation metrics. It has no effect on early stopping.
        """
        self._validate(weights_step, step, tests=False)

    def _validate(self, weights_step: int, step: int, *, tests: bool) -> None:
        """Evaluate the model on the validation data, and set ``validation`` and ``weights_step``.

        Args:
            tests: whether to add the result to the paired test against earlier weights; see `PairedTest`.
        """
        reader = self._dataset.validation
        assert reader is not None
        scored = self._scored(reader, evaluation_batch_size(reader))
        self.validation = self._metrics("validation", scored, step)
        self.weights_step = weights_step
        test = self.early.test
        # A run that is resumed after its last step evaluates that step again.
        is_new = test.step is None or step > self.early.last_step
        if tests and is_new and test.patience is not None:
            self._paired_test(scored, reader.num_samples, step)

    def _paired_test(self, scored: Scored, num_samples: int, step: int) -> None:
        """Add the loss of every validation sample to the paired test against earlier weights.

        See `PairedTest`. Samples are sorted by row number, so that the result does not depend on the number
        of ranks. Without row numbers, or if samples do not have separate losses, do nothing.
        """
        losses = self._recipe.loss.per_sample(scored.logits_B, scored.labels_B)
        if losses is None or scored.rows_B is None:
            return
        # Every k-th row number, so that all evaluations test the same samples on any number of ranks.
        tested = scored.rows_B % -(-num_samples // _MAX_TESTED_SAMPLES) == 0
        weights = None if scored.weights_B is None else scored.weights_B[tested]
        parts = self._ranks.collect((scored.rows_B[tested], losses[tested], weights))
        order = torch.cat([part[0] for part in parts]).argsort(stable=True)
        joined = concat_weights([(part[2], len(part[0])) for part in parts])
        every = None if joined is None else joined[order]
        self.early.test.add(torch.cat([part[1] for part in parts])[order], every, step)

    def favor_current(self) -> None:
        """Raise the AUC that later weights must exceed to become the best weights.

        The new threshold is the validation AUC of the current weights plus a margin. The margin is a small
        share of the AUC's 95 % confidence interval, so that later weights do not win merely by chance. Call
        this method after the current weights have been evaluated on validation data. Without validation data,
        or without an AUC, it does nothing.
        """
        auc = self.validation.get("auc")
        if auc is not None:
            interval = auc_interval(
                auc, *effective_sizes(self._sum_over_ranks(self._histograms["validation"]))
            )
            lead = _INITIAL_WEIGHTS_LEAD * (interval.high - interval.low)
            # Below 1 unless the AUC is 1, so that better weights can still win.
            self.early.best_auc = auc + min(lead, (1 - auc) / 2)

    def evaluate_test(self, step: int) -> None:
        """Evaluate the final weights on the test data."""
        assert self._dataset.test is not None
        self.test = self._metrics("test", self._scored(self._dataset.test, EVALUATION_BATCH), step)

    def compute_curves(self) -> None:
        """Compute ``curves`` from the last evaluation of every data part."""
        for data, histograms in self._histograms.items():
            # Summed over ranks only when needed: evaluations during training keep local histograms.
            self.curves[data] = binary_curves(self._sum_over_ranks(histograms))

    def _sum_over_ranks(self, histograms: Tensor) -> Tensor:
        """Sum histograms over all ranks."""
        sums = self._ranks.sum(histograms.flatten().tolist())
        return torch.tensor(sums, dtype=torch.float64).view(histograms.shape)

    def _scored(self, reader: Reader, batch_size: int) -> Scored:
        """Score this rank's share of a reader's samples."""
        return Scored.concat(list(score(self._model, reader, self._ranks, batch_size=batch_size)))

    def _metrics(self, data: str, scored: Scored, step: int) -> dict[str, float]:
        """Compute metrics over all ranks, and store this rank's score histograms for the curves."""
        recipe, outputs = self._recipe, (scored.logits_B, scored.labels_B, scored.weights_B)
        metrics = recipe.loss.metrics(*outputs, group=self._ranks.control)
        # Before the histograms, because a NaN score has no bin.
        self._check_defined(data, step, metrics, outputs)
        if isinstance(recipe.loss, BinaryCrossEntropy):
            self._histograms[data] = score_histograms(*outputs)
        return metrics

    def _check_defined(
        self, data: str, step: int, metrics: dict[str, float], outputs: tuple[Tensor, Tensor, Tensor | None]
    ) -> None:
        """Raise an error if metrics are missing or undefined."""
        # The metrics are those of all ranks, so all ranks take the same branches below and meet in the sums.
        logits, _, weights = outputs
        if not metrics and weights is not None:
            num, num_weighted = self._ranks.sum([float(len(weights)), float((weights > 0).sum())])
            if num and not num_weighted:
                raise ValueError(
                    f"the {data} data has no metrics: all its sample weights are 0. Give rows weights."
                )
        for name, value in metrics.items():
            if math.isnan(value) or (name == "loss" and math.isinf(value)):
                num_nan, num = self._ranks.sum([float(logits.isnan().sum()), float(logits.numel())])
                raise LossError(
                    f"step {step}: the {metric_title(name)} on the {data} data is {value}: {num_nan:,.0f} of "
                    f"{num:,.0f} scores are NaN. Lower the learning rates (--tables.lr, --dense.lr), or clip "
                    "the gradients (--training.clip-norm 1)."
                )
