"""Fit boosted trees with LightGBM, whose output is added to the logits of an already fitted model."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.metrics import area_under_curve, auc_interval, effective_sizes, score_histograms
from meshrec.modules.boosted_trees import Branch, Leaf, scale_leaves
from meshrec.train.lightgbm_import import early_stopping, import_lightgbm
from meshrec.train.linear import weighted_mean
from meshrec.train.trees import SAMPLES_PER_THREAD

NUM_LEVELS = 4
"""Maximum depth of a tree."""
# Maximum number of leaves of a tree.
_LEAVES = 6
# Number of trees without a better AUC after which early stopping ends the fit.
_PATIENCE = 100
# Weight of the global mean in a row score, and the minimum total weight of a row that gets a score; see
# `row_scores`.
_SMOOTHING = 20.0
_MIN_ROW_WEIGHT = 10
# LightGBM options. Small trees with strong regularization: they only correct the logits of a model that is
# fitted already. Every tree sees a random part of the samples and inputs.
_OPTIONS = {
    "objective": "binary",
    # Early stopping uses the metric by which runs select their weights.
    "metric": "auc",
    "learning_rate": 0.1,
    "max_depth": NUM_LEVELS,
    "num_leaves": _LEAVES,
    "min_child_samples": 50,
    "subsample": 0.8,
    "subsample_freq": 1,
    "colsample_bytree": 0.5,
    "reg_lambda": 10.0,
    "deterministic": True,
    "force_row_wise": True,  # otherwise LightGBM times both layouts, and results depend on the load
    "use_missing": False,  # inputs are never missing, and `BoostedTrees` has no branch for them
    "verbosity": -1,
}


class TreeSamples(NamedTuple):
    """Samples for fitting trees.

    Attributes:
        inputs: the X values per sample on which trees split, float32 [B, X].
        labels: labels, 0 or 1, [B].
        logits: logits of the fitted model, from which the trees start, [B].
        weights: sample weights, [B].
    """

    inputs: Tensor
    labels: Tensor
    logits: Tensor
    weights: Tensor

    def where(self, mask: Tensor) -> "TreeSamples":
        """Select the samples where ``mask`` [B] is True."""
        return TreeSamples(*(field[mask] for field in self))


def row_scores(ids: Tensor, labels: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    """Compute a score for every embedding table row, from the labels of the samples with this row.

    The score is the logit of the row's mean label, minus the logit of the global mean. A row's mean is
    weighted, and smoothed towards the global mean with weight 20. Rows with a total weight below ten get 0.

    Args:
        ids: table row of every ID occurrence, [n].
        labels, weights: label (0 or 1) and weight of the sample that contains the ID, [n].
        num_rows: number of table rows.

    Returns:
        Scores, float32 [num_rows].
    """
    weights = weights.double()
    counts = torch.bincount(ids, weights=weights, minlength=num_rows)
    positive = torch.bincount(ids, weights=labels * weights, minlength=num_rows)
    mean = weighted_mean(labels, weights).nan_to_num().clamp(1e-6, 1 - 1e-6)
    smoothed = (positive + _SMOOTHING * mean) / (counts + _SMOOTHING)
    scores = torch.logit(smoothed) - torch.logit(mean)
    return torch.where(counts >= _MIN_ROW_WEIGHT, scores, 0.0).float()


class BoostedModel(NamedTuple):
    """Trees to add to a model: the new logit is ``share * model logit + bias + sum of tree outputs``.

    Attributes:
        share: factor for the model's logit.
        bias: constant term.
        trees: the trees.
        counts: number of trees fitted to the model's residuals, and of trees fitted without the model.
    """

    share: float
    bias: float
    trees: list[Branch | Leaf]
    counts: tuple[int, int] = (0, 0)


def fit_boosted(train: TreeSamples, held_out: TreeSamples, num_trees: int, *, seed: int) -> BoostedModel:
    """Fit trees that correct a model, and trees that replace it, and average both predictions.

    The first half of the trees learns the model's residuals (residual trees). They are dropped if they do not
    raise the AUC on ``held_out``. The second half learns the labels without the model (independent trees).
    The result averages the logits of the model with residual trees and the logits of the independent trees,
    which lowers the variance. The independent trees are dropped if they lower the AUC on ``held_out`` by more
    than a standard error. If the samples in ``held_out`` have only one class, there is no AUC, and the result
    has no trees.

    Args:
        train: training samples.
        held_out: held-out samples, which select the tree count.
        num_trees: maximum number of trees.
        seed: seed by which LightGBM draws samples and inputs for every tree.

    Raises:
        ModuleNotFoundError: LightGBM is not installed.
        ValueError: a label is neither 0 nor 1. LightGBM would read all labels above 0 as 1.
    """
    # LightGBM would silently read such labels as 1.
    fractional_labels = train.labels[(train.labels != 0) & (train.labels != 1)]
    if len(fractional_labels):
        raise ValueError(
            f"model.fit_trees: trees learn labels 0 and 1, and a training sample has "
            f"{float(fractional_labels[0])}. Take model.fit_trees 0."
        )
    # None if the samples have only one class. Then nothing can select trees.
    before = area_under_curve(held_out.logits, held_out.labels, held_out.weights)
    if before is None:
        return BoostedModel(1.0, 0.0, [], (0, 0))
    # First half: trees that start from the model's logits.
    residual, added = _fit_trees(train, held_out, num_trees - num_trees // 2, seed)
    logits = held_out.logits + added
    after = _area_under_curve(logits, held_out)
    # Residual trees that do not help are dropped.
    if after <= before:
        residual, logits, after = [], held_out.logits, before
    bias = _bias(train)
    # The second half starts from the bias, as if there were no model.
    start = [samples._replace(logits=torch.full_like(samples.logits, bias)) for samples in (train, held_out)]
    independent_trees, added = _fit_trees(start[0], start[1], num_trees // 2, seed)
    histograms = score_histograms(held_out.logits, held_out.labels, held_out.weights)
    interval = auc_interval(after, *effective_sizes(histograms))
    # A 95 % interval spans about four standard errors, so a quarter is one standard error. The AUC of the
    # sum of both logits is the same as that of their average.
    if (
        not independent_trees
        or after - _area_under_curve(logits + bias + added, held_out) > (interval.high - interval.low) / 4
    ):
        return BoostedModel(1.0, 0.0, residual, (len(residual), 0))
    return _average_with_model(bias, residual, independent_trees)


def refit_boosted(train: TreeSamples, counts: tuple[int, int], *, seed: int) -> BoostedModel:
    """Fit as many trees as `fit_boosted` selected in an earlier fit, without held-out samples.

    Args:
        train: training samples.
        counts: numbers of residual trees and independent trees, from `BoostedModel.counts`.
        seed: see `fit_boosted`.
    """
    residual, _ = _fit_trees(train, None, counts[0], seed)
    # No independent trees: the earlier fit dropped them, and then the model's logit is not halved either.
    if not counts[1]:
        return BoostedModel(1.0, 0.0, residual, (len(residual), 0))
    bias = _bias(train)
    independent_trees, _ = _fit_trees(
        train._replace(logits=torch.full_like(train.logits, bias)), None, counts[1], seed
    )
    return _average_with_model(bias, residual, independent_trees)


def _bias(train: TreeSamples) -> float:
    """Return the logit of the weighted mean label."""
    return float(torch.logit(weighted_mean(train.labels, train.weights), eps=1e-6))


def _average_with_model(
    bias: float, residual: list[Branch | Leaf], independent_trees: list[Branch | Leaf]
) -> BoostedModel:
    """Average two predictors: the model plus residual trees, and the bias plus independent trees."""
    trees = [scale_leaves(tree, 0.5) for tree in (*residual, *independent_trees)]
    return BoostedModel(0.5, bias / 2, trees, (len(residual), len(independent_trees)))


def _area_under_curve(logits: Tensor, held_out: TreeSamples) -> float:
    """Return the AUC of logits [B] for the labels of ``held_out``, which must have both classes."""
    auc = area_under_curve(logits, held_out.labels, held_out.weights)
    assert auc is not None
    return auc


def _fit_trees(
    train: TreeSamples, held_out: TreeSamples | None, num_trees: int, seed: int
) -> tuple[list[Branch | Leaf], Tensor]:
    """Fit boosted trees to samples, starting from the samples' logits.

    Args:
        held_out: held-out samples whose AUC selects the tree count; None: keep all trees.

    Returns:
        The trees, and the sum of their outputs for every held-out sample, [B]. The sums are an empty tensor
        without ``held_out``.
    """
    lightgbm = import_lightgbm()
    if not num_trees:
        return [], torch.zeros_like(held_out.logits if held_out is not None else train.logits[:0])

    def data_of(samples: TreeSamples, reference: Any) -> Any:
        """Convert samples to a LightGBM dataset, with the bins of the dataset ``reference`` unless None."""
        return lightgbm.Dataset(
            samples.inputs.numpy(),
            samples.labels.numpy(),
            # Without weights, LightGBM sums faster.
            weight=None if bool((samples.weights == 1).all()) else samples.weights.numpy(),
            # Trees learn what these logits leave over. Predictions do not include them.
            init_score=samples.logits.numpy(),
            reference=reference,
            params={"verbosity": -1},
        )

    data = data_of(train, None)
    # LightGBM's default would take all cores, also those of other ranks on this host.
    num_threads = min(torch.get_num_threads(), 1 + len(train.labels) // SAMPLES_PER_THREAD)
    options = _OPTIONS | {"seed": seed, "num_threads": num_threads}
    if held_out is None:
        model = lightgbm.train(options, data, num_trees)
        tree_info = model.dump_model(num_iteration=num_trees)["tree_info"]
        return [_node(info["tree_structure"]) for info in tree_info], train.logits[:0]
    other = data_of(held_out, data)
    stops = [early_stopping(_PATIENCE)]
    model = lightgbm.train(options, data, num_trees, valid_sets=[other], callbacks=stops)
    tree_info = model.dump_model(num_iteration=model.best_iteration)["tree_info"]
    trees = [_node(info["tree_structure"]) for info in tree_info]
    outputs = model.predict(held_out.inputs.numpy(), raw_score=True, num_threads=num_threads)
    return trees, torch.from_numpy(outputs)


def _node(saved: dict[str, Any]) -> Branch | Leaf:
    """Convert a LightGBM tree node and all descendants."""
    if "split_feature" not in saved:
        return Leaf(saved["leaf_value"])
    # LightGBM's thresholds are float64, and ours float32. Round down, because an input just above the
    # threshold must stay above it.
    threshold = np.float32(saved["threshold"])
    if float(threshold) > saved["threshold"]:
        threshold = np.nextafter(threshold, np.float32(-np.inf))
    left, right = _node(saved["left_child"]), _node(saved["right_child"])
    return Branch(saved["split_feature"], float(threshold), left, right)
