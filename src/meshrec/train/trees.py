"""LightGBM as a baseline: gradient-boosted trees on what the model reads."""

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from meshrec.data.faults import needs

if TYPE_CHECKING:
    from meshrec.data import Batch, Dataset, Reader

    Matrix = np.typing.NDArray[np.float32]

_ROUNDS = 2000
_PATIENCE = 50
_MOST_IDS = 64
"""Number of frequent IDs of a list that become columns of their own."""
_MOST_CATEGORIES = 10_000
"""Largest number of categories of a column. All rarer IDs are one more category."""


_SAMPLES_OF_A_THREAD = 10_000
"""Number of samples for which another thread pays."""


def has_trees() -> bool:
    """Return whether LightGBM is installed."""
    return importlib.util.find_spec("lightgbm") is not None


class Trees:
    """Gradient-boosted trees, fitted to training samples.

    They read dense values as they are, and single IDs as categories. From a list they read which of the most
    frequent IDs occur in it. Trees are added until validation data gains nothing for 50 of them; without
    validation data there are 200.

    Args:
        dataset: describes the samples, and has the validation data.
        train: the training samples.
        read: reads all batches of a reader, with the labels of one task.
        tell: is called with the finished share of the work.
    """

    def __init__(
        self,
        dataset: "Dataset",
        train: "Batch",
        read: "Callable[[Reader], Iterator[Batch]]",
        tell: Callable[[float], None],
    ) -> None:
        lightgbm = needs("lightgbm", "lightgbm")
        self._lists: dict[str, Tensor] = {}
        self._rows = {each.name: each.num_embeddings for each in dataset.features}
        for name in self._rows:
            ids = train.sparse[name]
            if len(ids.values()) and int(ids.lengths().max()) > 1:
                counts = torch.bincount(ids.values(), minlength=self._rows[name])
                self._lists[name] = torch.topk(counts, min(_MOST_IDS, len(counts))).indices
        self._kept = {
            name: torch.topk(torch.bincount(train.sparse[name].values(), minlength=rows), most).indices
            for name, rows in self._rows.items()
            if name not in self._lists and (most := min(rows, _MOST_CATEGORIES)) < rows
        }
        singles = [name for name in self._rows if name not in self._lists]
        first = train.dense.shape[1]
        options = {
            "objective": "binary",
            "metric": "auc",
            "learning_rate": 0.1,
            # One rank alone computes baselines, while the others wait: it takes all cores, unless its threads
            # would wait for each other longer than they work.
            "num_threads": min(os.cpu_count() or 1, 1 + len(train.labels) // _SAMPLES_OF_A_THREAD),
            "seed": 0,
            "verbosity": -1,
        }
        data = lightgbm.Dataset(
            self.matrix(train),
            train.labels.contiguous().numpy(),  # LightGBM refuses a column of several labels
            categorical_feature=list(range(first, first + len(singles))),
            params={"verbosity": -1},
        )
        judged = []
        if dataset.validation is not None:
            parts = [(self.matrix(each), each.labels.numpy()) for each in read(dataset.validation)]
            columns, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
            if 0 < labels.mean() < 1:  # without both classes there is no AUC
                judged = [lightgbm.Dataset(columns, labels, reference=data)]
        rounds = _ROUNDS if judged else 200

        def told(state: Any) -> None:
            tell(state.iteration / rounds)

        stops = [lightgbm.early_stopping(_PATIENCE, verbose=False)] if judged else []
        self._model = lightgbm.train(options, data, rounds, valid_sets=judged, callbacks=[told, *stops])

    def __call__(self, batch: "Batch") -> Tensor:
        """Return the logits of a batch, [B] float64."""
        return torch.from_numpy(self._model.predict(self.matrix(batch), raw_score=True))

    def matrix(self, batch: "Batch") -> "Matrix":
        """Return the columns of dense values, then one per single ID (NaN where it is missing), then those of
        lists.
        """
        columns = [batch.dense.numpy()]
        lists = []
        for name in self._rows:
            ids = batch.sparse[name]
            lengths, values = ids.lengths(), ids.values()
            sample = torch.repeat_interleave(torch.arange(len(batch)), lengths)
            frequent = self._lists.get(name)
            if frequent is None:
                column = torch.full((len(batch),), float("nan"))
                column[sample] = self._category(name, values).float()
                columns.append(column[:, None].numpy())
                continue
            place = torch.full((self._rows[name],), -1)
            place[frequent] = torch.arange(len(frequent))
            at = place[values]
            occurs = torch.zeros(len(batch), len(frequent))
            occurs[sample[at >= 0], at[at >= 0]] = 1.0
            lists.append(occurs.numpy())
        return np.concatenate([*columns, *lists], axis=1).astype(np.float32)

    def _category(self, name: str, values: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None:
            return values
        place = torch.full((self._rows[name],), len(kept))
        place[kept] = torch.arange(len(kept))
        return place[values]
