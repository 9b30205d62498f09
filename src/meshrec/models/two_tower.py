"""Retrieval with two towers: queries and items become vectors, and the dot product is the score.

Yi et al.: "Sampling-bias-corrected neural modeling for large corpus item recommendations" (2019).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import ClickBatch, OverArch
from meshrec.models.item_frequency import ItemFrequency
from meshrec.modules import EmbeddingBagCollection
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B batch, Q queries, I items, V vector width


class TowerVectors(NamedTuple):
    """Unit-length vectors of queries and of items, [B, V] each."""

    query_BV: Tensor
    item_BV: Tensor


class RetrievalOutputs(NamedTuple):
    """Detached values for metrics: the loss and the vectors of both towers."""

    loss: Tensor
    query: Tensor
    item: Tensor


class TowerArch(nn.Module):
    """One tower: an MLP whose output is normalised to length 1.

    Args:
        in_features: total number of columns of the embeddings and the dense input.
        layer_sizes: layer sizes of the MLP; the last size is V.
        device: device of the parameters.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model = OverArch(in_features, layer_sizes, device)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Join the inputs [B, ...], ``in_features`` columns in all, and map them to [B, V]."""
        return nn.functional.normalize(self.model(torch.cat(inputs, dim=1)), dim=1)


class TwoTower(nn.Module):
    """A query tower and an item tower over a shared collection of tables.

    Args:
        embedding_bag_collection: the tables; their widths may differ.
        query_features, item_features: names of the features that each tower reads.
        layer_sizes: layer sizes of both MLPs; the last size is V.
        dense_in_features: number of columns of the dense input, which the query tower reads.
        dense_device: device of the dense parameters.

    Raises:
        ValueError: a feature has no table, or a tower has no feature.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        query_features: Sequence[str],
        item_features: Sequence[str],
        layer_sizes: Sequence[int],
        *,
        dense_in_features: int = 0,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.query_features, self.item_features = list(query_features), list(item_features)
        configs = embedding_bag_collection.embedding_bag_configs()
        dims = {name: config.embedding_dim for config in configs for name in config.feature_names}
        unknown = sorted({*query_features, *item_features} - dims.keys())
        if unknown or not query_features or not item_features:
            raise ValueError(
                f"each tower needs features that have a table; without one: {unknown}, there are "
                f"{sorted(dims)}; query_features {self.query_features}, item_features {self.item_features}."
            )
        self._features = list(dims)
        self._dense_in = dense_in_features
        query_in = sum(dims[name] for name in query_features) + dense_in_features
        self.query_arch = TowerArch(query_in, layer_sizes, dense_device)
        self.item_arch = TowerArch(sum(dims[name] for name in item_features), layer_sizes, dense_device)

    @property
    def num_dense(self) -> int:
        """Number of columns of the dense input."""
        return self._dense_in

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> TowerVectors:
        """Return the vectors of both towers, [B, V], for dense values [B, dense_in_features] and the IDs."""
        embeddings = self.embedding_bag_collection(sparse_features).to_dict()
        query = [embeddings[name] for name in self.query_features]
        if self._dense_in:
            query.append(dense_features)
        item = [embeddings[name] for name in self.item_features]
        return TowerVectors(self.query_arch(query), self.item_arch(item))

    def embed_items(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return vectors [I, V] for the IDs of ``item_features`` alone, such as those of a catalogue."""
        embeddings = self.embedding_bag_collection(self._completed(sparse_features)).to_dict()
        vectors: Tensor = self.item_arch([embeddings[name] for name in self.item_features])
        return vectors

    def embed_queries(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return vectors [Q, V] for dense values and the IDs of ``query_features`` alone."""
        embeddings = self.embedding_bag_collection(self._completed(sparse_features)).to_dict()
        query = [embeddings[name] for name in self.query_features]
        vectors: Tensor = self.query_arch([*query, dense_features] if self._dense_in else query)
        return vectors

    def _completed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Add empty bags for the features that only the other tower reads."""
        missing = [name for name in self._features if name not in features.keys()]  # noqa: SIM118
        if not missing:
            return features
        lengths = features.lengths()
        empty = KeyedJaggedTensor(
            missing,
            features.values().new_empty(0),
            lengths=lengths.new_zeros(len(missing) * features.stride()),
            stride=features.stride(),
        )
        return KeyedJaggedTensor.concat([features, empty])


class TwoTowerClicks(nn.Module):
    """Two towers as a click model: the scaled dot product is the logit, for losses such as binary cross-
    entropy.

    Args:
        two_tower: the towers.
        temperature: divisor of the dot products.
    """

    def __init__(self, two_tower: TwoTower, *, temperature: float = 0.1) -> None:
        super().__init__()
        self.two_tower, self.temperature = two_tower, temperature

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B]."""
        vectors: TowerVectors = self.two_tower(dense_features, sparse_features)
        return (vectors.query_BV * vectors.item_BV).sum(1) / self.temperature


def in_batch_softmax(
    query_BV: Tensor,
    item_BV: Tensor,
    *,
    temperature: float = 0.05,
    item_ids_B: Tensor | None = None,
    log_q_B: Tensor | None = None,
    weights_B: Tensor | None = None,
) -> Tensor:
    """Compute the cross-entropy of each query's own item among the items of the batch.

    Args:
        query_BV, item_BV: vectors; item b belongs to query b.
        temperature: divisor of the dot products.
        item_ids_B: IDs of the items. If given, other occurrences of a query's own item are masked out.
        log_q_B: log of the probability that an item is in a batch. Frequent items occur more often as
            negatives; subtracting this value from their logits corrects for it.
        weights_B: weights of the queries. With labels as weights only clicks count.

    Returns:
        The weighted mean; 0 if all weights are 0.
    """
    losses = in_batch_losses(
        query_BV, item_BV, temperature=temperature, item_ids_I=item_ids_B, log_q_I=log_q_B
    )
    if weights_B is None:
        return losses.mean()
    return (losses * weights_B).sum() / weights_B.sum().clamp(min=1e-12)


def in_batch_losses(
    query_BV: Tensor,
    item_IV: Tensor,
    *,
    temperature: float = 0.05,
    item_ids_I: Tensor | None = None,
    log_q_I: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return the unreduced losses of `in_batch_softmax`, [B].

    Item ``first + b`` belongs to query b; there may be further items.
    """
    products_BI = query_BV @ item_IV.T / temperature
    if log_q_I is not None:
        products_BI = products_BI - log_q_I
    target_B = first + torch.arange(len(query_BV), device=query_BV.device)
    if item_ids_I is not None:
        again_BI = item_ids_I[target_B, None] == item_ids_I
        again_BI = again_BI.scatter(1, target_B[:, None], False)
        products_BI = products_BI.masked_fill(again_BI, float("-inf"))
    return nn.functional.cross_entropy(products_BI, target_B, reduction="none")


class TwoTowerTrain(nn.Module):
    """A two-tower model with its loss. Samples with label 1 are queries; the items of all samples are
    candidates.

    Frequent items are also frequent among the negatives of a batch. Without a correction the model learns to
    avoid popular items, and retrieves worse than a list of the most popular items. The correction of
    `in_batch_softmax` is therefore the default, with item shares estimated from the batches of rank 0.

    Args:
        two_tower: the model, with an ``embedding_bag_collection``.
        item_feature: name of the feature with one ID per sample that identifies the item.
        temperature: see `in_batch_softmax`.
        log_q: the correction: "estimated" by `ItemFrequency`, known logs of the shares [items], or None for
            no correction, which is right when negatives are not drawn by popularity.

    Raises:
        ValueError: no table of the model reads the item feature, or ``log_q`` is something else.
    """

    def __init__(
        self,
        two_tower: nn.Module,
        item_feature: str,
        temperature: float = 0.05,
        log_q: Tensor | Literal["estimated"] | None = "estimated",
    ) -> None:
        super().__init__()
        self.model = two_tower
        self._item_feature = item_feature
        self._temperature = temperature
        known = log_q if isinstance(log_q, Tensor) else None
        if known is None and log_q not in ("estimated", None):
            raise ValueError(f'log_q must be "estimated", a tensor or None, got {log_q!r}.')
        self.register_buffer("log_q", known, persistent=False)
        self.frequency: ItemFrequency | None = None
        if log_q == "estimated" and known is None:
            self.frequency = ItemFrequency(_num_items(two_tower, item_feature))

    def forward(self, batch: ClickBatch) -> tuple[Tensor, RetrievalOutputs]:
        """Return the loss, and detached values for metrics."""
        query, item = self.model(batch.dense_features, batch.sparse_features)
        ids = batch.sparse_features[self._item_feature].values().long()
        loss = in_batch_softmax(
            query,
            item,
            temperature=self._temperature,
            item_ids_B=ids,
            log_q_B=self._log_q(ids),
            weights_B=batch.labels.float(),
        )
        return loss, RetrievalOutputs(loss.detach(), query.detach(), item.detach())

    def _log_q(self, ids_B: Tensor) -> Tensor | None:
        if self.frequency is not None:
            log_q: Tensor = self.frequency(ids_B)
            return log_q
        known = self.log_q
        return None if known is None else known[ids_B]  # type: ignore[index]


def _num_items(two_tower: nn.Module, item_feature: str) -> int:
    """Return the number of rows of the item feature's table."""
    tables = [
        config
        for config in two_tower.embedding_bag_collection.embedding_bag_configs()  # type: ignore[union-attr, operator]
        if item_feature in config.feature_names
    ]
    if not tables:
        raise ValueError(
            f"no table has the item feature {item_feature!r}, by which items are counted. Name a feature of "
            "the model, or give log_q."
        )
    return int(tables[0].num_embeddings)


class Retrieved(NamedTuple):
    """The best items of each query, best first: scores and IDs, [Q, k] each."""

    scores_QK: Tensor
    ids_QK: Tensor


class BruteForceIndex:
    """Exact nearest-item search that compares every query with all items.

    Args:
        vectors_IV: vectors of the items.
        ids_I: IDs of the items; 0, 1, ... if None.
        chunk: number of items compared at a time. Memory is bounded by Q x (chunk + k) products.

    Raises:
        ValueError: the number of IDs differs from that of the vectors, or chunk is below 1.
    """

    def __init__(self, vectors_IV: Tensor, ids_I: Tensor | None = None, *, chunk: int = 65536) -> None:
        if chunk < 1 or (ids_I is not None and len(ids_I) != len(vectors_IV)):
            raise ValueError(
                f"there must be one id per vector and chunk >= 1, got {len(vectors_IV)} vectors, "
                f"{None if ids_I is None else len(ids_I)} ids, chunk {chunk}."
            )
        self._vectors = vectors_IV
        self._ids = torch.arange(len(vectors_IV), device=vectors_IV.device) if ids_I is None else ids_I
        self._chunk = chunk

    @torch.no_grad()
    def search(self, query_QV: Tensor, k: int, *, exclude: JaggedTensor | None = None) -> Retrieved:
        """Return the ``k`` items with the largest dot products.

        Args:
            query_QV: vectors of the queries.
            k: number of items to return.
            exclude: Q bags of item IDs that must not be returned, such as those a user has seen. If fewer
                than ``k`` items are left, the remaining scores are -inf.

        Raises:
            ValueError: ``k`` is not in [1, number of items].
        """
        if not 1 <= k <= len(self._vectors):
            raise ValueError(f"k must lie in [1, {len(self._vectors)}], the number of items, got {k}.")
        scores = query_QV.new_empty(len(query_QV), 0)
        ids = self._ids.new_empty(len(query_QV), 0)
        for start in range(0, len(self._vectors), self._chunk):
            some = self._ids[start : start + self._chunk]
            products = query_QV @ self._vectors[start : start + self._chunk].T
            if exclude is not None:
                products = products.masked_fill(_among(some, exclude), float("-inf"))
            scores = torch.cat([scores, products], dim=1)
            ids = torch.cat([ids, some.expand(len(query_QV), -1)], dim=1)
            best = scores.topk(min(k, scores.shape[1]), dim=1)
            scores, ids = best.values, ids.gather(1, best.indices)
        return Retrieved(scores, ids)


def _among(ids_I: Tensor, bags: JaggedTensor) -> Tensor:
    """Return a mask [Q, I] that is True where an item is in a query's bag."""
    lengths = bags.lengths()
    order = torch.argsort(ids_I)
    place = torch.searchsorted(ids_I[order], bags.values()).clamp(max=len(ids_I) - 1)
    found = ids_I[order][place] == bags.values()
    query = torch.repeat_interleave(torch.arange(len(lengths), device=ids_I.device), lengths)
    mask = torch.zeros(len(lengths), len(ids_I), dtype=torch.bool, device=ids_I.device)
    mask[query[found], order[place[found]]] = True
    return mask
