"""Explain a run's model for the report: permutation importance, and metrics by feature value."""

from collections.abc import Iterable, Mapping
from typing import Any

from meshrec.runs.fitting import FEATURES, features_of
from meshrec.train.explaining import explain
from meshrec.train.run_folder import RunFolder
from meshrec.train.trainer import Trainer


def explain_run(trainer: Trainer, folder: RunFolder) -> dict[str, Any] | None:
    """Compute permutation importance and metrics by feature value. Collective.

    Returns:
        The explanation as plain JSON types, or None if the run was stopped or has no validation data.
    """
    reader, loss = trainer.dataset.validation, trainer.recipe.loss
    # A stopped run ends as soon as possible.
    if trainer.stopped or reader is None:
        return None
    explanation = explain(trainer.built.model, trainer.dataset, reader, trainer.ranks, loss=loss)
    return None if explanation is None else explanation.to_json(names_of_rows(folder, explanation.slices))


def names_of_rows(
    folder: RunFolder, rows_by_feature: Mapping[str, Iterable[int]]
) -> dict[str, dict[int, str]]:
    """Return which data value each embedding table row represents, for display.

    Returns:
        Value by feature name and row index, such as ``{"country": {0: "missing", 5: "DE"}}``. Hashed
        features are missing, because many values share a row.
    """
    from meshrec.data.features import Buckets, DatePart, Vocabulary

    # Data sources without fitted features have no names for table rows.
    if folder.read_json(FEATURES) is None:
        return {}
    features = features_of(folder)
    names: dict[str, dict[int, str]] = {}
    for name, rows in rows_by_feature.items():
        feature = features[name]
        if isinstance(feature, Vocabulary):
            first, values = feature.rows - len(feature.vocabulary), feature.vocabulary
            # Rows: 0 for missing values, `num_unseen` rows for unseen values, then the vocabulary. If the
            # table size is fixed, spare rows follow the vocabulary, so the start must be counted from row 0.
            if feature.num_embeddings is not None:
                first = 1 + feature.num_unseen
            values_by_row = {
                row: str(values[row - first]) for row in rows if first <= row < first + len(values)
            }
            names[name] = {0: "missing", **dict.fromkeys(range(1, first), "unseen"), **values_by_row}
        elif isinstance(feature, Buckets):
            names[name] = {0: "missing", **dict(enumerate(feature.ranges(), 1))}
        elif isinstance(feature, DatePart):
            names[name] = {row: feature.text_of(row) for row in rows if row >= 0}
    return names
