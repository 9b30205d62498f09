"""Next-item models in packages: the exported part that encodes histories, and the items to rank.

The program in the package computes a query vector [V] per history. The server multiplies it with the item
vectors, which are rows of the item table, and recommends the items with the highest scores.
"""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.data.faults import needs
from meshrec.data.samples import Floats, Ints
from meshrec.export.incremental import EncoderSpec
from meshrec.models import DotProduct, HistoryModel
from meshrec.models.next_item import add_repeat_scores
from meshrec.models.repeats import RepeatedItems, repeated_items
from meshrec.ops.scores.top_k import top_k
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, I items, K recommendations, V vector width

ITEMS = "items.arrow"
"""Package file which lists the items to rank."""
# Keys in the metadata of this Arrow file.
_WEIGHT, _NORMALISE, _SCALE, _ENCODER = b"weight", b"normalise", b"scale", b"encoder"
_KEEP_SEEN, _REPEATS = b"keep_seen", b"repeats"


class NextItemQuery(nn.Module):
    """Part of a next-item model that computes query vectors from histories. Shares memory with the model.

    Args:
        model: the complete model.

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
        self._encoder = EncoderSpec.of(model)
        # A shallow copy, so that removing modules does not change the caller's model.
        self.model = copy.copy(model)
        # Queries need neither the training sampler, nor trends and new users' scores, which are stored with
        # the items.
        left_out = ("draws", "new_user_scores", "trends")
        # A new dict, because the shallow copy shares the dict of the caller's model.
        self.model._modules = {name: child for name, child in model._modules.items() if name not in left_out}

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute a query vector per history, [B, V]. ``dense`` is ignored, but packages always pass it."""
        return self.model.query_vectors(sparse, check=False)

    @property
    def encoder(self) -> EncoderSpec | None:
        """Model architecture, from which Python rebuilds the model; None without KV cache support."""
        return self._encoder

    def table(self) -> str:
        """Return the name of the item table's weight, as in ``named_parameters()``."""
        ((_, weight),) = self.model.embedding_collection.tables().values()
        return next(name for name, parameter in self.named_parameters() if parameter is weight)

    def repeats(self) -> str | None:
        """Return the module name of the model's `meshrec.models.repeats.RepeatScores`, or None."""
        names = (name for name, child in self.named_modules() if child is self.model.repeats)
        return None if self.model.repeats is None else next(names)


class Recommended(NamedTuple):
    """Recommendations for B samples.

    Attributes:
        items: for every sample, up to K raw item values, best first. There are fewer if too few items remain
            after hidden items are removed.
        scores: for every sample, the scores of these items.
    """

    items: list[list[Any]]
    scores: list[list[float]]


class RankedItems(NamedTuple):
    """The I items that a package can recommend, and how to score them.

    Attributes:
        ids_I: rows of the items in the item table, int64, ascending.
        values: raw item values (as named in the training data), as an Arrow array in the same order.
        weight: name of the item table's weight in the package.
        normalise: whether item vectors are scaled to length 1.
        scale: factor from dot product to score.
        encoder: model architecture; None if the model does not support a KV cache.
        new_user_scores_I: scores for users without a history, whose query vector is 0; None: the model has no
            such scores.
        keep_seen: whether items in the history are recommended as well, unless a request says otherwise.
        repeats: name of the module whose weights give history items additional scores, see
            [Note: repeated items]; None: the model has no such module.
        trends_I: term that is added to every item's score, see `meshrec.models.trends.TrendScores`; None: the
            model has no such term.
    """

    ids_I: Ints
    values: Any
    weight: str
    normalise: bool
    scale: float
    encoder: EncoderSpec | None = None
    new_user_scores_I: Floats | None = None
    keep_seen: bool = False
    repeats: str | None = None
    trends_I: Floats | None = None

    @staticmethod
    def of(
        query: NextItemQuery,
        ids_I: Ints,
        values: Any,
        *,
        new_user_scores_I: Floats | None = None,
        trends_I: Floats | None = None,
        keep_seen: bool = False,
    ) -> "RankedItems":
        """Describe the items of a model, for export together with the query encoder.

        Args:
            query: the exported part of the model.
            ids_I: rows of the items in the item table, int64, ascending.
            values: raw item values, as an Arrow array in the same order.
            new_user_scores_I: scores for users without a history.
            trends_I: term that is added to every item's score.
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
            trends_I,
        )

    def vectors(self, weights: dict[str, Tensor]) -> Tensor:
        """Return the vectors of all items, float32 [I, V], from package weights by name."""
        rows = weights[self.weight][torch.from_numpy(self.ids_I)].float()
        return nn.functional.normalize(rows, dim=1) if self.normalise else rows

    def repeated(self, weights: dict[str, Tensor], values_N: Ints, lengths_B: Ints) -> RepeatedItems | None:
        """Compute additional scores for items which are already in a user's history.

        Args:
            weights: package weights by name.
            values_N: item rows in all histories, int64, sample by sample.
            lengths_B: number of items per history, int64.

        Returns:
            Input for `best`, or None if the model does not score repeated items (``repeats`` is None).
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
            queries_BV: query vectors.
            vectors_IV: result of `vectors`.
            k: number of items to recommend per query.
            hidden: items not to recommend, as a list of pairs (rows, counts). ``rows``, int64 [N], has the
                item rows of all samples, sample by sample. ``counts``, int64 [B], has their number per
                sample.
            repeated: result of the method `repeated`; None: history items have no additional scores.
        """
        scores_BI = torch.from_numpy(queries_BV) @ vectors_IV.T * self.scale
        if self.trends_I is not None:
            scores_BI += torch.from_numpy(self.trends_I)
        if self.new_user_scores_I is not None:
            # Models with these scores have the query vector 0 for an empty history.
            is_new_B = torch.from_numpy(~queries_BV.any(1))
            scores_BI[is_new_B] = torch.from_numpy(self.new_user_scores_I)
        if repeated is not None:
            add_repeat_scores(scores_BI, torch.from_numpy(self.ids_I), repeated)
        for rows, lengths in hidden:
            # Hidden rows need not be among the items; `is_item` drops the others.
            at = np.searchsorted(self.ids_I, rows).clip(max=len(self.ids_I) - 1)
            is_item = self.ids_I[at] == rows
            of = np.repeat(np.arange(len(lengths)), lengths)
            # Below all scores. Hidden items that are still among the best K are removed below.
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
        """Write the items to ``items.arrow`` in a package folder. Scalar attributes go to the metadata."""
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
        if self.trends_I is not None:
            columns["trend"] = self.trends_I
        table = pa.table(columns).replace_schema_metadata(about)
        feather.write_feather(table, str(folder / ITEMS), compression="uncompressed")

    @staticmethod
    def load(folder: Path) -> "RankedItems":
        """Read the items which `save` wrote to a package folder."""
        table = needs("pyarrow.feather", "data").read_table(str(folder / ITEMS), memory_map=False)
        about = table.schema.metadata

        def scores(name: str) -> Floats | None:
            """Return a copy of a column, because torch warns about read-only memory; None without it."""
            return table[name].to_numpy().copy() if name in table.column_names else None

        return RankedItems(
            table["id"].to_numpy().copy(),  # torch warns about read-only memory
            table["value"].combine_chunks(),
            about[_WEIGHT].decode(),
            about[_NORMALISE] == b"1",
            float(about[_SCALE]),
            EncoderSpec.from_json(about[_ENCODER]) if _ENCODER in about else None,
            scores("new_user_score"),
            about.get(_KEEP_SEEN) == b"1",
            about[_REPEATS].decode() if _REPEATS in about else None,
            scores("trend"),
        )
