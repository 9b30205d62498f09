"""LightGBM as a baseline: gradient-boosted trees on the same inputs as the model."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meshrec.metrics import area_under_curve
from meshrec.train.evaluation import concat_weights
from meshrec.train.lightgbm_import import early_stopping, import_lightgbm
from meshrec.train.linear import weights_of

if TYPE_CHECKING:
    from meshrec.data import Batch, Dataset, Reader

    Matrix = np.typing.NDArray[np.float32]

# Maximum number of trees. Early stopping usually ends the fit long before.
_ROUNDS = 2000
# Number of trees without a better AUC after which early stopping ends the fit.
_PATIENCE = 50
_MAX_IDS = 64
"""Maximum number of indicator columns for a feature with ID lists: its most frequent IDs."""
_MAX_CATEGORIES = 10_000
"""Maximum number of categories in a column. All rarer IDs share one more category."""


SAMPLES_PER_THREAD = 10_000
"""Number of samples per thread. With fewer, threads wait longer for one another than they work."""


def has_trees() -> bool:
    """Return whether LightGBM is installed."""
    return importlib.util.find_spec("lightgbm") is not None


class TreeBaseline:
    """LightGBM model, fitted to training samples on creation. Called with a batch, it returns logits.

    The inputs are dense values as they are, and IDs of single-ID features as categories. A feature with ID
    lists becomes several indicator columns, one for every frequent ID. Trees are added until the validation
    AUC has not improved for 50 trees. If validation data is missing or lacks a class, there are 200 trees.

    Args:
        dataset: the dataset, which has the features and the validation data.
        train: training samples.
        read: function that reads all batches of a reader, with the labels of a single task.
        tell: called with the finished share, from 0 to 1.
    """

    def __init__(
        self,
        dataset: "Dataset",
        train: "Batch",
        read: "Callable[[Reader], Iterator[Batch]]",
        tell: Callable[[float], None],
    ) -> None:
        lightgbm = import_lightgbm()
        # Most frequent IDs per list feature, which become indicator columns.
        self._lists: dict[str, Tensor] = {}
        self._rows = {feature.name: feature.num_embeddings for feature in dataset.features}
        for name in self._rows:
            ids = train.sparse[name]
            if len(ids.values()) and int(ids.lengths().max()) > 1:
                counts = torch.bincount(ids.values(), minlength=self._rows[name])
                self._lists[name] = torch.topk(counts, min(_MAX_IDS, len(counts))).indices
        # Most frequent IDs per single-ID feature; all other IDs share a category.
        self._frequent = {
            name: torch.topk(torch.bincount(train.sparse[name].values(), minlength=rows), most).indices
            for name, rows in self._rows.items()
            if name not in self._lists and (most := min(rows, _MAX_CATEGORIES)) < rows
        }
        singles = [name for name in self._rows if name not in self._lists]
        first = train.dense.shape[1]
        options = {
            "objective": "binary",
            "metric": "auc",
            "learning_rate": 0.1,
            # Use all cores, because only rank 0 computes baselines, while the other ranks wait.
            "num_threads": min(os.cpu_count() or 1, 1 + len(train.labels) // SAMPLES_PER_THREAD),
            "seed": 0,
            "verbosity": -1,
        }
        # Columns of single-ID features follow the dense columns; see `matrix`.
        data = lightgbm.Dataset(
            self.matrix(train),
            train.labels.contiguous().numpy(),  # LightGBM refuses a column of several labels
            weight=None if train.weights is None else weights_of(train).numpy(),
            categorical_feature=list(range(first, first + len(singles))),
            params={"verbosity": -1},
        )
        validation_sets = []
        if dataset.validation is not None:
            batches = list(read(dataset.validation))
            columns = np.concatenate([self.matrix(batch) for batch in batches])
            labels = torch.cat([batch.labels for batch in batches])
            weights = concat_weights([(batch.weights, len(batch)) for batch in batches])
            # Without samples of both classes, there is no AUC for early stopping.
            if area_under_curve(labels, labels, weights) is not None:
                of_samples = None if weights is None else weights.numpy()
                validation_sets = [
                    lightgbm.Dataset(columns, labels.numpy(), weight=of_samples, reference=data)
                ]
        rounds = _ROUNDS if validation_sets else 200

        def tell_iteration(state: Any) -> None:
            tell(state.iteration / rounds)

        stops = [early_stopping(_PATIENCE)] if validation_sets else []
        self._model = lightgbm.train(
            options, data, rounds, valid_sets=validation_sets, callbacks=[tell_iteration, *stops]
        )

    def __call__(self, batch: "Batch") -> Tensor:
        """Return the logits for a batch, [B] float64."""
        return torch.from_numpy(self._model.predict(self.matrix(batch), raw_score=True))

    def matrix(self, batch: "Batch") -> "Matrix":
        """Return a batch's input matrix, float32 [B, columns].

        The columns are the dense values, then a category per single-ID feature (NaN if the sample has no ID),
        and then the indicators of features with ID lists. An indicator belongs to a frequent ID: it is 1 if
        the list contains this ID, else 0.
        """
        columns = [batch.dense.numpy()]
        lists = []
        for name in self._rows:
            ids = batch.sparse[name]
            lengths, values = ids.lengths(), ids.values()
            sample = torch.repeat_interleave(torch.arange(len(batch)), lengths)
            frequent = self._lists.get(name)
            if frequent is None:
                # LightGBM treats NaN as missing.
                column = torch.full((len(batch),), float("nan"))
                column[sample] = self._category(name, values).float()
                columns.append(column[:, None].numpy())
                continue
            # Column of a table row among the indicators; -1: no column.
            positions = torch.full((self._rows[name],), -1)
            positions[frequent] = torch.arange(len(frequent))
            at = positions[values]
            occurs = torch.zeros(len(batch), len(frequent))
            occurs[sample[at >= 0], at[at >= 0]] = 1.0
            lists.append(occurs.numpy())
        return np.concatenate([*columns, *lists], axis=1).astype(np.float32)

    def _category(self, name: str, values: Tensor) -> Tensor:
        """Return the category of every ID.

        Frequent IDs have separate categories, numbered from 0 by descending frequency. All other IDs share
        the category after them. If the feature has few IDs, the category is the ID itself.
        """
        frequent = self._frequent.get(name)
        if frequent is None:
            return values
        categories = torch.full((self._rows[name],), len(frequent))
        categories[frequent] = torch.arange(len(frequent))
        return categories[values]
