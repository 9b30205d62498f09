"""The explanation of a run's model in its report: importance of features, and metrics by value."""

from collections.abc import Iterable, Mapping
from typing import Any

from meshrec.runs.fitting import FEATURES, features_of
from meshrec.train.explaining import explain
from meshrec.train.losses import BinaryCrossEntropy
from meshrec.train.run_folder import RunFolder
from meshrec.train.trainer import Trainer


def explained(trainer: Trainer, folder: RunFolder) -> dict[str, Any] | None:
    """Return permutation importance and slices as plain JSON types. Collective.

    None for a stopped run, without validation data, and for other labels than one of clicks.
    """
    reader, recipe = trainer.dataset.validation, trainer.recipe
    if trainer.stopped or reader is None or not isinstance(recipe.loss, BinaryCrossEntropy):
        return None
    bf16 = recipe.training.bf16
    found = explain(trainer.built.model, trainer.dataset, reader, trainer.ranks, bf16=bf16)
    return None if found is None else found.to_json(names_of_rows(folder, found.slices))


def names_of_rows(folder: RunFolder, wanted: Mapping[str, Iterable[int]]) -> dict[str, dict[int, str]]:
    """Return the values that rows of tables stand for, as text, by feature; rows of hashes have none."""
    from meshrec.data.features import Vocabulary

    if folder.read_json(FEATURES) is None:
        return {}
    features = features_of(folder)
    found: dict[str, dict[int, str]] = {}
    for name, rows in wanted.items():
        feature = features[name]
        if isinstance(feature, Vocabulary):
            first, values = feature.rows - len(feature.vocabulary), feature.vocabulary
            if feature.num_embeddings is not None:
                first = 1 + feature.num_unseen
            known = {row: str(values[row - first]) for row in rows if first <= row < first + len(values)}
            found[name] = {0: "missing", **dict.fromkeys(range(1, first), "unseen"), **known}
    return found
