"""Boosted trees next to a fitted model, fitted with LightGBM."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data.faults import needs
from meshrec.metrics import area_under_curve, auc_interval, effective_sizes, score_histograms
from meshrec.modules.boosted_trees import Branch, Leaf, scale_leaves
from meshrec.train.linear import weighted_mean

NUM_LEVELS = 4
_LEAVES = 6
# Trees without a better AUC, after which early stopping ends the fit.
_PATIENCE = 100
# Weight of the global mean in a row score, and the smallest row weight with a score; see `scores_of`.
_SMOOTHING = 20.0
_LEAST = 10
_OPTIONS = {
    "objective": "binary",
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
    "force_row_wise": True,
    "use_missing": False,
    "verbosity": -1,
}


class TreeSamples(NamedTuple):
    """Samples that trees read: inputs [B, X] float32; labels, the fitted model's logits and weights,
    all [B].
    """

    inputs: Tensor
    labels: Tensor
    logits: Tensor
    weights: Tensor

    def where(self, mask: Tensor) -> "TreeSamples":
        """Select the samples where ``mask`` [B] is True."""
        return TreeSamples(*(field[mask] for field in self))


def scores_of(ids: Tensor, labels: Tensor, weights: Tensor, num_rows: int) -> Tensor:
    """Return a score per table row, float32 [num_rows]: the logit of the row's mean label minus the global
    logit.

    Means are weighted, and smoothed towards the global mean with weight 20. Rows with a total weight below
    ten score 0.

    Args:
        ids: the table row of every ID, [n].
        labels, weights: label (0 or 1) and weight of the sample that contains the ID, [n].
        num_rows: number of table rows.
    """
    weights = weights.double()
    counts = torch.bincount(ids, weights=weights, minlength=num_rows)
    positive = torch.bincount(ids, weights=labels * weights, minlength=num_rows)
    mean = weighted_mean(labels, weights).nan_to_num().clamp(1e-6, 1 - 1e-6)
    smoothed = (positive + _SMOOTHING * mean) / (counts + _SMOOTHING)
    scores = torch.logit(smoothed) - torch.logit(mean)
    return torch.where(counts >= _LEAST, scores, 0.0).float()


class Boosted(NamedTuple):
    """A model with trees: the logit is ``share`` times the model's logit, plus ``bias``, plus the sum over
    ``trees``.
    """

    share: float
    bias: float
    trees: list[Branch | Leaf]
    counts: tuple[int, int] = (0, 0)
    """Number of trees fitted next to the model, and without it."""


def boosted(train: TreeSamples, judged: TreeSamples, num_trees: int, *, seed: int) -> Boosted:
    """Fit trees next to a model.

    The first half learns the model's residuals. These trees are dropped if they do not raise the AUC on
    ``judged``. The second half learns the labels without the model, and the result averages both logits: the
    mean depends less on the drawn samples. The second half is dropped if the model with residual trees has an
    AUC above the mean's by more than a standard error. If no AUC exists, the result has no trees.

    Args:
        train: the training samples.
        judged: the samples that select the number of trees.
        num_trees: maximum number of trees.
        seed: seed for the samples and inputs that a tree draws.

    Raises:
        ModuleNotFoundError: LightGBM is not installed.
        ValueError: a label is neither 0 nor 1. LightGBM would read all labels above 0 as 1.
    """
    between = train.labels[(train.labels != 0) & (train.labels != 1)]
    if len(between):
        raise ValueError(
            f"model.fit_trees: trees learn labels 0 and 1, and a training sample has {float(between[0])}. "
            "Take model.fit_trees 0."
        )
    # None if the samples have only one class: nothing can select trees then.
    before = area_under_curve(judged.logits, judged.labels, judged.weights)
    if before is None:
        return Boosted(1.0, 0.0, [], (0, 0))
    residual, added = _grown(train, judged, num_trees - num_trees // 2, seed)
    logits = judged.logits + added
    after = _auc(logits, judged)
    if after <= before:
        residual, logits, after = [], judged.logits, before
    bias = _bias(train)
    # The second half starts from the bias, as if there were no model.
    start = [samples._replace(logits=torch.full_like(samples.logits, bias)) for samples in (train, judged)]
    separate, added = _grown(start[0], start[1], num_trees // 2, seed)
    histograms = score_histograms(judged.logits, judged.labels, judged.weights)
    interval = auc_interval(after, *effective_sizes(histograms))
    # The interval spans about four standard errors, so a quarter is one.
    if not separate or after - _auc(logits + bias + added, judged) > (interval.high - interval.low) / 4:
        return Boosted(1.0, 0.0, residual, (len(residual), 0))
    return _mean(bias, residual, separate)


def boosted_again(train: TreeSamples, counts: tuple[int, int], *, seed: int) -> Boosted:
    """Refit as many trees as `boosted` selected, when no samples remain to select with.

    Args:
        train: the training samples.
        counts: number of trees next to the model, and without it.
        seed: as for `boosted`.
    """
    residual, _ = _grown(train, None, counts[0], seed)
    if not counts[1]:
        return Boosted(1.0, 0.0, residual, (len(residual), 0))
    bias = _bias(train)
    separate, _ = _grown(train._replace(logits=torch.full_like(train.logits, bias)), None, counts[1], seed)
    return _mean(bias, residual, separate)


def _bias(train: TreeSamples) -> float:
    return float(torch.logit(weighted_mean(train.labels, train.weights), eps=1e-6))


def _mean(bias: float, residual: list[Branch | Leaf], separate: list[Branch | Leaf]) -> Boosted:
    """Average the model plus residual trees with the bias plus independent trees."""
    trees = [scale_leaves(tree, 0.5) for tree in (*residual, *separate)]
    return Boosted(0.5, bias / 2, trees, (len(residual), len(separate)))


def _auc(logits: Tensor, judged: TreeSamples) -> float:
    auc = area_under_curve(logits, judged.labels, judged.weights)
    assert auc is not None
    return auc


def _grown(
    train: TreeSamples, judged: TreeSamples | None, num_trees: int, seed: int
) -> tuple[list[Branch | Leaf], Tensor]:
    """Return the trees with the best AUC on ``judged``, and their contribution to the judged logits. Without
    ``judged``, return all trees.
    """
    lightgbm = needs("lightgbm", "lightgbm")
    if not num_trees:
        return [], torch.zeros_like(judged.logits if judged is not None else train.logits[:0])

    def data_of(samples: TreeSamples, reference: Any) -> Any:
        return lightgbm.Dataset(
            samples.inputs.numpy(),
            samples.labels.numpy(),
            # Without weights, LightGBM sums faster.
            weight=None if bool((samples.weights == 1).all()) else samples.weights.numpy(),
            init_score=samples.logits.numpy(),
            reference=reference,
            params={"verbosity": -1},
        )

    data = data_of(train, None)
    options = _OPTIONS | {"seed": seed, "num_threads": torch.get_num_threads()}
    if judged is None:
        model = lightgbm.train(options, data, num_trees)
        tree_info = model.dump_model(num_iteration=num_trees)["tree_info"]
        return [_node(info["tree_structure"]) for info in tree_info], train.logits[:0]
    other = data_of(judged, data)
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
    model = lightgbm.train(options, data, num_trees, valid_sets=[other], callbacks=[stop])
    tree_info = model.dump_model(num_iteration=model.best_iteration)["tree_info"]
    trees = [_node(info["tree_structure"]) for info in tree_info]
    return trees, torch.from_numpy(model.predict(judged.inputs.numpy(), raw_score=True))


def _node(saved: dict[str, Any]) -> Branch | Leaf:
    """Convert a LightGBM node and all descendants."""
    if "split_feature" not in saved:
        return Leaf(saved["leaf_value"])
    threshold = np.float32(saved["threshold"])
    if float(threshold) > saved["threshold"]:  # An input just above must stay above: round down.
        threshold = np.nextafter(threshold, np.float32(-np.inf))
    left, right = _node(saved["left_child"]), _node(saved["right_child"])
    return Branch(saved["split_feature"], float(threshold), left, right)
