"""Read a run's learned embeddings: a feature's embedding table, and the data value of every row."""

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from meshrec.data.faults import did_you_mean
from meshrec.modules.embedding_modules import TableCollection
from meshrec.runs.fitting import features_of
from meshrec.runs.saved_recipe import load_recipe
from meshrec.runs.scoring import load_trained_model
from meshrec.train.recipe import FittedSource
from meshrec.train.run_folder import RunFolder


class Vectors(NamedTuple):
    """Rows of an embedding table.

    Attributes:
        rows: embeddings, [num_rows, dim].
        ids: ID of every row, int64 [num_rows], for a hashed table, which assigns rows to IDs as they occur.
            None for a table in which row i belongs to ID i.
    """

    rows: Tensor
    ids: Tensor | None


def load_table(run: RunFolder, feature: str, *, step: int | None = None, last: bool = False) -> Vectors:
    """Load the whole embedding table of a feature, with the reported weights.

    A hashed table has a row for every ID in the table, in key order (by a hash of the ID).

    Args:
        run: the run.
        feature: feature name.
        step, last: which weights to load if not the reported ones; see
            ``meshrec.checkpoint.find_checkpoint``.

    Raises:
        ValueError: the run, checkpoint or feature does not exist.
    """
    model = load_trained_model(run, step=step, last=last).model
    collections = [module for module in model.modules() if isinstance(module, TableCollection)]
    feature_names: list[str] = []
    for collection in collections:
        hashed = collection.hashed_tables()
        for config, weight in collection.tables().values():
            # Collected for the error message.
            feature_names += config.feature_names
            if feature in config.feature_names and config.name in hashed:
                ids, rows, _ = hashed[config.name].items()
                return Vectors(rows, ids)
            if feature in config.feature_names:
                return Vectors(weight.detach(), None)
    raise ValueError(
        f"{run.path} has no feature {feature!r} with a table. Name one of "
        f"{feature_names}.{did_you_mean(feature, feature_names)}"
    )


def values_of_rows(run: RunFolder, feature: str, num_rows: int) -> Any:
    """Return the data value of every table row, as an Arrow array [num_rows].

    A row has a value only if the feature has a vocabulary or is an integer. Rows that represent several
    values, such as all unseen values, have null.

    Args:
        run: the run.
        feature: feature name.
        num_rows: number of table rows.
    """
    import pyarrow as pa

    from meshrec.data.features import Integer, Vocabulary

    source = load_recipe(run).data
    if not isinstance(source, FittedSource):
        return pa.nulls(num_rows, pa.int64())
    encoding = features_of(run)[feature]
    if isinstance(encoding, Vocabulary):
        # Rows before the vocabulary are for missing and unseen values; spare rows may follow.
        first = (
            num_rows - len(encoding.vocabulary)
            if encoding.num_embeddings is None
            else 1 + encoding.num_unseen
        )
        spare = num_rows - first - len(encoding.vocabulary)
        kind = encoding.vocabulary.type
        return pa.concat_arrays([pa.nulls(first, kind), encoding.vocabulary, pa.nulls(spare, kind)])
    if isinstance(encoding, Integer):
        return pa.array(np.arange(num_rows, dtype=np.int64))
    return pa.nulls(num_rows, pa.string())
