"""Compare models on the same data split. Each is trained, selected on validation data, and tested once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from meshrec.metrics import Interval, auc_interval, effective_sizes, score_histograms
from meshrec.train.architectures import DeepFMConfig, DLRMConfig, DLRMDCNConfig
from meshrec.train.baselines import baselines
from meshrec.train.evaluation import concat_weights
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.ranks import join
from meshrec.train.recipe import FittedSource, ModelConfig, Placement, Recipe
from meshrec.train.trainer import Trainer
from meshrec.train.wide_deep import WideDeepConfig

MODELS: dict[str, ModelConfig] = {
    "wide_deep": WideDeepConfig(fit_wide=True),
    "dlrm": DLRMConfig(table_std=0.001, bottom=(32,), top=(128, 64)),
    "dcn": DLRMDCNConfig(table_std=0.001, bottom=(32,), top=(128, 64)),
    "deepfm": DeepFMConfig(table_std=0.001, bottom=(32,), deep=(128, 64)),
}
"""Models to compare, by name. The recipe proposed by `meshrec inspect` is ``wide_deep`` with trees. Trees are
left out here, because LightGBM is one of the baselines.
"""


class LeaderboardEntry(NamedTuple):
    """Leaderboard entry for a model or baseline.

    Attributes:
        model: name of the model or baseline.
        validation: AUC on validation data.
        test: AUC on test data.
        interval: 95 % confidence interval for the test AUC.
        kind: ``model`` or ``baseline``.
    """

    model: str
    validation: float
    test: float
    interval: Interval
    kind: str


def leaderboard(
    recipe: Recipe, *, models: Sequence[str] = tuple(MODELS), tell: Callable[[str], None] = lambda text: None
) -> list[LeaderboardEntry]:
    """Train models and baselines on the recipe's data, and rank them by decreasing test AUC.

    All models learn from the same training rows, are selected on the same validation rows, and are evaluated
    on the test rows only once. The features are fitted once. Everything runs in this process.

    Args:
        recipe: recipe with the data, optimizers and training options. Its model is ignored.
        models: names in `MODELS`.
        tell: called with the name of a model before the model is trained.

    Raises:
        ValueError: a name is unknown, the label is not 0 and 1, or validation or test data is missing.
    """
    unknown = [name for name in models if name not in MODELS]
    if unknown:
        raise ValueError(f"there is no model {unknown[0]!r}; take some of {', '.join(MODELS)}.")
    if not isinstance(recipe.loss, BinaryCrossEntropy):
        raise ValueError(
            f"a leaderboard compares AUCs of labels 0 and 1, and the loss is {type(recipe.loss).__name__}. "
            "Train the models one by one, and use `meshrec runs compare`."
        )
    source = recipe.data
    # Fitted once, so that all models learn from the same features.
    features = source.fit() if isinstance(source, FittedSource) else None
    # Unsharded: everything runs in this process.
    recipe = replace(recipe, placement=replace(Placement(), sharded=False))
    standings: list[LeaderboardEntry] = []
    for name, quality in _train_and_evaluate(recipe, features, models, tell):
        for data in ("validation", "test"):
            if "auc" not in quality.get(data, {}):
                raise ValueError(
                    f"the {data} data has no AUC: it needs rows of both classes. Give more data, or a split."
                )
        kind = "model" if name in MODELS else "baseline"
        test = quality["test"]
        interval = auc_interval(test["auc"], test["positive"], test["negative"])
        standings.append(LeaderboardEntry(name, quality["validation"]["auc"], test["auc"], interval, kind))
    return sorted(standings, key=lambda standing: -standing.test)


def _train_and_evaluate(
    recipe: Recipe, features: Any, models: Sequence[str], tell: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Train the models and evaluate the baselines.

    Yields:
        Pairs of a name and the metrics by data part, ``{"validation": {...}, "test": {...}}``. The test
        metrics include the effective number of samples per class, ``positive`` and ``negative``; see
        ``metrics.curves.effective_sizes``.
    """
    source = recipe.data

    def opened() -> Any:  # again for every model: a dataset counts skipped rows
        """Open the data, with the fitted features if the data source uses features."""
        return source.dataset(features) if isinstance(source, FittedSource) else source.load()

    # Used for labels and baselines. Every model opens the data again; see `opened`.
    dataset = opened()
    if dataset.validation is None or dataset.test is None:
        raise ValueError("there is no validation or no test data. Give the recipe a split, or files of both.")
    batches = list(dataset.test.batches(8192))
    labels = torch.cat([batch.labels for batch in batches])
    weights = concat_weights([(batch.weights, len(batch)) for batch in batches])
    # The confidence intervals need the class sizes in the test data; with sample weights, effective sizes.
    sizes = effective_sizes(score_histograms(labels, labels, weights))
    classes = dict(zip(("positive", "negative"), sizes, strict=True))
    for name in models:
        tell(name)
        trainer = Trainer(replace(recipe, model=MODELS[name]), opened(), join("cpu"))
        trainer.run()
        yield name, {"validation": trainer.validation, "test": {**trainer.test, **classes}}
    tell("the baselines")
    for name, quality, _ in baselines(dataset):
        # It has an AUC of 0.5 for any data.
        if name != "global mean":
            yield name, {**quality, "test": {**quality["test"], **classes}}
