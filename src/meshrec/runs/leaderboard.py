"""Models side by side on one split: trained, chosen on validation data, and judged once on test data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshrec.metrics import Interval, auc_interval
from meshrec.train.architectures import DeepFMConfig, DLRMConfig, DLRMDCNConfig
from meshrec.train.baselines import baselines
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
"""The models by name. `meshrec inspect` proposes the first; it has no trees here, beside LightGBM."""


class Standing(NamedTuple):
    """The result of a model: its AUCs, and the 95 % interval of the one on test data."""

    model: str
    validation: float
    test: float
    interval: Interval
    kind: str
    """``model``, or ``baseline``."""


def leaderboard(
    recipe: Recipe, *, models: Sequence[str] = tuple(MODELS), tell: Callable[[str], None] = lambda text: None
) -> list[Standing]:
    """Train models and baselines on the recipe's data, and return them by falling test AUC.

    All learn from the same training rows, choose on the same validation rows, and read the test rows once.
    The features are fitted once. Everything runs in this process.

    Args:
        recipe: data, optimizers and training; its model is not used.
        models: names of `MODELS`.
        tell: is called with the name of the model that begins.

    Raises:
        ValueError: a name is unknown, the label is not 0 and 1, or there is no validation or test data.
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
    features = source.fit() if isinstance(source, FittedSource) else None
    recipe = replace(recipe, placement=replace(Placement(), sharded=False))
    found: list[Standing] = []
    for name, quality in _judged(recipe, features, models, tell):
        for data in ("validation", "test"):
            if "auc" not in quality.get(data, {}):
                raise ValueError(
                    f"the {data} data has no AUC: it needs rows of both classes. Give more data, or a split."
                )
        kind = "model" if name in MODELS else "baseline"
        interval = auc_interval(quality["test"]["auc"], *_classes(quality))
        found.append(Standing(name, quality["validation"]["auc"], quality["test"]["auc"], interval, kind))
    return sorted(found, key=lambda each: -each.test)


def _judged(
    recipe: Recipe, features: Any, models: Sequence[str], tell: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, dict[str, float]]]]:
    """Train each model, and return its name and its metrics by part of the data."""
    source = recipe.data

    def opened() -> Any:
        return source.dataset(features) if isinstance(source, FittedSource) else source.load()

    dataset = opened()
    if dataset.validation is None or dataset.test is None:
        raise ValueError("there is no validation or no test data. Give the recipe a split, or files of both.")
    labels = np.concatenate([batch.labels.numpy() for batch in dataset.test.batches(8192)])
    classes = {"positive": float(labels.sum()), "negative": float(len(labels) - labels.sum())}
    for name in models:
        tell(name)
        trainer = Trainer(replace(recipe, model=MODELS[name]), opened(), join("cpu"))
        trainer.run()
        yield name, {"validation": trainer.validation, "test": {**trainer.test, **classes}}
    tell("the baselines")
    for name, quality in baselines(dataset):
        if name != "global mean":
            yield name, {**quality, "test": {**quality["test"], **classes}}


def _classes(quality: dict[str, dict[str, float]]) -> tuple[float, float]:
    return quality["test"]["positive"], quality["test"]["negative"]
