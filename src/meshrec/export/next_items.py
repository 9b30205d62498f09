"""Next-item models in packages: the query encoder, and the items to rank."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.data.faults import needs
from meshrec.data.samples import Floats, Ints
from meshrec.export.incremental import Encoder
from meshrec.models import DotProduct, HistoryModel
from meshrec.models.next_item import add_repeat_scores
from meshrec.models.repeats import RepeatedItems, repeated_items
from meshrec.models.top_k import top_k
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, I items, K recommendations, V vector width

ITEMS = "items.arrow"
"""Package file listing the items."""
_WEIGHT, _NORMALISE, _SCALE, _ENCODER = b"weight", b"normalise", b"scale", b"encoder"
_KEEP_SEEN, _REPEATS = b"keep_seen", b"repeats"


class NextItemQuery(nn.Module):
    """Part of a next-item model that computes queries from histories. Shares memory with the model.

    Args:
        model: the model.

    Raises:
        ValueError: the score is not a dot product of two vectors.
    """

    def __init__(self, model: HistoryModel) -> None:
        super().__init__()
        if not isinstance(model.similarity, DotProduct):
            raise ValueError(
                f"the scores of this model are a {type(model.similarity).__name__}, but a package returns a "
                "vector per history. Train with the similarity dot or cosine."
            )
        self.similarity = model.similarity
        self._encoder = Encoder.of(model)
        self.model = copy.copy(model)
        # Queries need neither the training sampler, nor new users' scores, which are stored with the
        # items.
        left_out = ("draws", "new_user_scores")
        self.model._modules = {name: child for name, child in model._modules.items() if name not in left_out}

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute the query for every history, [B, V]; ``dense`` is ignored."""
        return self.model.query_vectors(sparse, check=False)

    @property
    def reads_times(self) -> bool:
        """Whether the model reads item times in the history."""
        return self.model.features.times is not None

    @property
    def encoder(self) -> Encoder | None:
        """Model architecture; None if it cannot continue from cached keys and values."""
        return self._encoder

    def table(self) -> str:
        """Return the item table's weight name."""
        ((_, weight),) = self.model.embedding_collection.tables().values()
        return next(name for name, parameter in self.named_parameters() if parameter is weight)

    def repeats(self) -> str | None:
        """Return the name of the model's `meshrec.models.repeats.RepeatScores`, or None."""
        names = (name for name, child in self.named_modules() if child is self.model.repeats)
        return None if self.model.repeats is None else next(names)


class Recommended(NamedTuple):
    """The best items for every sample and their scores, best first; fewer than K if too few items remain."""

    items: list[list[Any]]
    scores: list[list[float]]


class RankedItems(NamedTuple):
    """Items a package can recommend.

    Attributes:
        ids_I: item rows in the item table, ascending.
        values: raw item values (as named in the data), as an Arrow array.
        weight: the item table's weight name.
        normalise: whether rows are scaled to length 1.
        scale: factor from dot product to score.
        encoder: model architecture; None if it cannot continue from cached keys and values.
        new_user_scores_I: scores for users without a history, whose query is 0; None: the model has none.
        keep_seen: whether items in the history are recommended as well, unless a request says otherwise.
        repeats: name of the module whose weights score history items, see [Note: repeated items];
            None: none.
    """

    ids_I: Ints
    values: Any
    weight: str
    normalise: bool
    scale: float
    encoder: Encoder | None = None
    new_user_scores_I: Floats | None = None
    keep_seen: bool = False
    repeats: str | None = None

    @staticmethod
    def of(
        query: NextItemQuery,
        ids_I: Ints,
        values: Any,
        *,
        new_user_scores_I: Floats | None = None,
        keep_seen: bool = False,
    ) -> "RankedItems":
        """Create the items for a model.

        Args:
            query: the exported part of the model.
            ids_I: item rows in the item table, ascending.
            values: raw item values, as an Arrow array.
            new_user_scores_I: scores for users without a history.
            keep_seen: whether items in the history are recommended as well, unless a request says otherwise.
        """
        normalise, temperature = query.similarity.options
        return RankedItems(
            ids_I,
            values,
            query.table(),
            normalise,
            1 / temperature,
            query.encoder,
            new_user_scores_I,
            keep_seen,
            query.repeats(),
        )

    def vectors(self, weights: dict[str, Tensor]) -> Tensor:
        """Compute all item vectors, [I, V], from package weights by name."""
        rows = weights[self.weight][torch.from_numpy(self.ids_I)].float()
        return nn.functional.normalize(rows, dim=1) if self.normalise else rows

    def repeated(self, weights: dict[str, Tensor], values_N: Ints, lengths_B: Ints) -> RepeatedItems | None:
        """Score the items in users' histories, which may be recommended again.

        Returns None if the model has no module for repeated items (``repeats`` is None).

        Args:
            weights: package weights by name.
            values_N: item rows in all histories, int64.
            lengths_B: item count per history, int64.
        """
        if self.repeats is None:
            return None
        history = JaggedTensor(torch.from_numpy(values_N), lengths=torch.from_numpy(lengths_B))
        weight_F, options = (weights[f"{self.repeats}.{name}"] for name in ("weight", "chosen"))
        return repeated_items(weight_F, options, history)

    def best(
        self,
        queries_BV: Floats,
        vectors_IV: Tensor,
        k: int,
        hidden: list[tuple[Ints, Ints]],
        *,
        repeated: RepeatedItems | None = None,
    ) -> Recommended:
        """Return the K items with the highest scores for every query. Equal scores are ordered by item row.

        Args:
            queries_BV: queries.
            vectors_IV: item vectors.
            k: number of items.
            hidden: rows of items not to recommend, int64 [N], and their number per sample, int64 [B].
            repeated: result of the method `repeated`; None: history items have no additional scores.
        """
        scores_BI = torch.from_numpy(queries_BV) @ vectors_IV.T * self.scale
        if self.new_user_scores_I is not None:
            is_new_B = torch.from_numpy(~queries_BV.any(1))
            scores_BI[is_new_B] = torch.from_numpy(self.new_user_scores_I)
        if repeated is not None:
            scores_BI = add_repeat_scores(scores_BI, torch.from_numpy(self.ids_I), repeated)
        for rows, lengths in hidden:
            at = np.searchsorted(self.ids_I, rows).clip(max=len(self.ids_I) - 1)
            is_item = self.ids_I[at] == rows
            of = np.repeat(np.arange(len(lengths)), lengths)
            scores_BI[torch.from_numpy(of[is_item]), torch.from_numpy(at[is_item])] = float("-inf")
        best, indices = top_k(scores_BI, min(k, len(self.ids_I)))
        is_finite = best > float("-inf")
        return Recommended(
            [
                self.values.take(row[is_left].numpy()).to_pylist()
                for row, is_left in zip(indices, is_finite, strict=True)
            ],
            [row[is_left].tolist() for row, is_left in zip(best, is_finite, strict=True)],
        )

    def save(self, folder: Path) -> None:
        """Write the items to a package folder."""
        pa, feather = needs("pyarrow", "data"), needs("pyarrow.feather", "data")
        about = {_WEIGHT: self.weight, _NORMALISE: str(int(self.normalise)), _SCALE: repr(self.scale)}
        about[_KEEP_SEEN] = str(int(self.keep_seen))
        if self.repeats is not None:
            about[_REPEATS] = self.repeats
        if self.encoder is not None:
            about[_ENCODER] = self.encoder.to_json()
        columns = {"id": self.ids_I, "value": self.values}
        if self.new_user_scores_I is not None:
            columns["new_user_score"] = self.new_user_scores_I
        table = pa.table(columns).replace_schema_metadata(about)
        feather.write_feather(table, str(folder / ITEMS), compression="uncompressed")

    @staticmethod
    def load(folder: Path) -> "RankedItems":
        """Read the items written to a package folder by `save`."""
        table = needs("pyarrow.feather", "data").read_table(str(folder / ITEMS), memory_map=False)
        about = table.schema.metadata
        return RankedItems(
            table["id"].to_numpy().copy(),  # torch warns about read-only memory
            table["value"].combine_chunks(),
            about[_WEIGHT].decode(),
            about[_NORMALISE] == b"1",
            float(about[_SCALE]),
            Encoder.from_json(about[_ENCODER]) if _ENCODER in about else None,
            table["new_user_score"].to_numpy().copy() if "new_user_score" in table.column_names else None,
            about.get(_KEEP_SEEN) == b"1",
            about[_REPEATS].decode() if _REPEATS in about else None,
        )
