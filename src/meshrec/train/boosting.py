"""Boosted trees that predict the residual of a fitted model. LightGBM fits them."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data.faults import needs
from meshrec.metrics import area_under_curve
from meshrec.modules.boosted_trees import Branch, Leaf

NUM_LEVELS = 4
_LEAVES = 8
_PATIENCE = 100
_SMOOTHING = 20.0
_LEAST = 10
_OPTIONS = {
    "objective": "binary",
    "metric": "auc",
    "learning_rate": 0.05,
    "max_depth": NUM_LEVELS,
    "num_leaves": _LEAVES,
    "min_child_samples": 30,
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


def boosted(train: TreeSamples, judged: TreeSamples, num_trees: int, *, seed: int) -> list[Branch | Leaf]:
    """Fit trees whose sum is added to the logits of a model; return those with the best AUC on other samples.

    There are none if all of them together make the AUC no better, or if it does not exist.

    Args:
        train: the samples to learn from.
        judged: the samples that choose the number of trees.
        num_trees: number of trees, at most.
        seed: of the samples and inputs that each tree draws.

    Raises:
        ModuleNotFoundError: LightGBM is not installed.
        ValueError: a label is neither 0 nor 1. LightGBM would take all labels above 0 for 1.
    """
    lightgbm = needs("lightgbm", "lightgbm")
    between = train.labels[(train.labels != 0) & (train.labels != 1)]
    if len(between):
        raise ValueError(
            f"model.fit_trees: trees learn labels 0 and 1, and a training sample has {float(between[0])}. "
            "Take model.fit_trees 0."
        )
    before = area_under_curve(judged.logits, judged.labels)
    if before is None:
        return []
    data = lightgbm.Dataset(
        train.inputs.numpy(), train.labels.numpy(), init_score=train.logits.numpy(), params={"verbosity": -1}
    )
    other = lightgbm.Dataset(
        judged.inputs.numpy(), judged.labels.numpy(), init_score=judged.logits.numpy(), reference=data
    )
    stop = lightgbm.early_stopping(_PATIENCE, verbose=False)
    options = _OPTIONS | {"seed": seed, "num_threads": torch.get_num_threads()}
    model = lightgbm.train(options, data, num_trees, valid_sets=[other], callbacks=[stop])
    added = torch.from_numpy(model.predict(judged.inputs.numpy(), raw_score=True))
    after = area_under_curve(judged.logits + added, judged.labels)
    if after is None or after <= before:
        return []
    found = model.dump_model(num_iteration=model.best_iteration)["tree_info"]
    return [_node(each["tree_structure"]) for each in found]


def _node(saved: dict[str, Any]) -> Branch | Leaf:
    """Return a node, and those below it, from LightGBM's form."""
    if "split_feature" not in saved:
        return Leaf(saved["leaf_value"])
    threshold = np.float32(saved["threshold"])
    if float(threshold) > saved["threshold"]:  # An input just above must stay above: round down.
        threshold = np.nextafter(threshold, np.float32(-np.inf))
    left, right = _node(saved["left_child"]), _node(saved["right_child"])
    return Branch(saved["split_feature"], float(threshold), left, right)
