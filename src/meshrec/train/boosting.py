"""Boosted trees beside a fitted model. LightGBM fits them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data.faults import needs
from meshrec.metrics import area_under_curve, auc_interval
from meshrec.modules.boosted_trees import Branch, Leaf, scaled

NUM_LEVELS = 4
_LEAVES = 6
_PATIENCE = 100
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
    """Samples that trees read: their inputs [B, X] float32, labels [B], and a fitted model's logits [B]."""

    inputs: Tensor
    labels: Tensor
    logits: Tensor

    def where(self, mask: Tensor) -> "TreeSamples":
        """Return the samples where ``mask`` [B] is True."""
        return TreeSamples(*(each[mask] for each in self))


def scores_of(ids: Tensor, labels: Tensor, num_rows: int) -> Tensor:
    """Return a score for each row of a table: the logit of its mean label, less that of all labels.

    The mean is smoothed with 20 samples of the global mean. Rows with fewer than ten samples have 0.

    Args:
        ids: the rows of the samples' IDs, [n].
        labels: the label of each ID's sample, [n], 0 or 1.
        num_rows: number of rows of the table.
    """
    counts = torch.bincount(ids, minlength=num_rows).double()
    positive = torch.bincount(ids, weights=labels.double(), minlength=num_rows)
    mean = labels.double().mean().clamp(1e-6, 1 - 1e-6)
    smoothed = (positive + _SMOOTHING * mean) / (counts + _SMOOTHING)
    scores = torch.logit(smoothed) - torch.logit(mean)
    return torch.where(counts >= _LEAST, scores, 0.0).float()


class Boosted(NamedTuple):
    """A model with trees: its logits times ``share``, plus ``bias``, plus the sum of ``trees``."""

    share: float
    bias: float
    trees: list[Branch | Leaf]


def boosted(train: TreeSamples, judged: TreeSamples, num_trees: int, *, seed: int) -> Boosted:
    """Fit trees beside a model.

    Half of them learn what the model leaves over; there are none if they make the AUC no better on other
    samples. The other half learns the labels without the model, and the mean of both logits is taken: it
    depends less on the samples that were drawn. The model has its own trees alone if their AUC is better than
    that of the mean by more than its standard error, or if no AUC exists.

    Args:
        train: the samples to learn from.
        judged: the samples that choose the number of trees.
        num_trees: number of trees, at most.
        seed: of the samples and inputs that each tree draws.

    Raises:
        ModuleNotFoundError: LightGBM is not installed.
        ValueError: a label is neither 0 nor 1. LightGBM would take all labels above 0 for 1.
    """
    between = train.labels[(train.labels != 0) & (train.labels != 1)]
    if len(between):
        raise ValueError(
            f"model.fit_trees: trees learn labels 0 and 1, and a training sample has {float(between[0])}. "
            "Take model.fit_trees 0."
        )
    before = area_under_curve(judged.logits, judged.labels)
    if before is None:
        return Boosted(1.0, 0.0, [])
    over, added = _grown(train, judged, num_trees - num_trees // 2, seed)
    one = judged.logits + added
    after = _auc(one, judged)
    if after <= before:
        over, one, after = [], judged.logits, before
    bias = float(torch.logit(train.labels.double().mean(), eps=1e-6))
    start = [each._replace(logits=torch.full_like(each.logits, bias)) for each in (train, judged)]
    alone, added = _grown(start[0], start[1], num_trees // 2, seed)
    positive = float(judged.labels.sum())
    interval = auc_interval(after, positive, len(judged.labels) - positive)
    if not alone or after - _auc(one + bias + added, judged) > (interval.high - interval.low) / 4:
        return Boosted(1.0, 0.0, over)
    return Boosted(0.5, bias / 2, [scaled(each, 0.5) for each in (*over, *alone)])


def _auc(logits: Tensor, judged: TreeSamples) -> float:
    found = area_under_curve(logits, judged.labels)
    assert found is not None
    return found


def _grown(
    train: TreeSamples, judged: TreeSamples, num_trees: int, seed: int
) -> tuple[list[Branch | Leaf], Tensor]:
    """Return the trees with the best AUC on other samples, and what they add to the logits of these."""
    lightgbm = needs("lightgbm", "lightgbm")
    if not num_trees:
        return [], torch.zeros_like(judged.logits)
    data = lightgbm.Dataset(
        train.inputs.numpy(), train.labels.numpy(), init_score=train.logits.numpy(), params={"verbosity": -1}
    )
    other = lightgbm.Dataset(
        judged.inputs.numpy(), judged.labels.numpy(), init_score=judged.logits.numpy(), reference=data
    )
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
    options = _OPTIONS | {"seed": seed, "num_threads": torch.get_num_threads()}
    model = lightgbm.train(options, data, num_trees, valid_sets=[other], callbacks=[stop])
    found = model.dump_model(num_iteration=model.best_iteration)["tree_info"]
    trees = [_node(each["tree_structure"]) for each in found]
    return trees, torch.from_numpy(model.predict(judged.inputs.numpy(), raw_score=True))


def _node(saved: dict[str, Any]) -> Branch | Leaf:
    """Return a node, and those below it, from LightGBM's form."""
    if "split_feature" not in saved:
        return Leaf(saved["leaf_value"])
    threshold = np.float32(saved["threshold"])
    if float(threshold) > saved["threshold"]:  # An input just above must stay above: round down.
        threshold = np.nextafter(threshold, np.float32(-np.inf))
    left, right = _node(saved["left_child"]), _node(saved["right_child"])
    return Branch(saved["split_feature"], float(threshold), left, right)
