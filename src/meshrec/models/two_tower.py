"""Retrieval by two towers: queries and items become vectors, and the best items have the largest products.

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
    """One vector of length 1 per query, and per item."""

    query_BV: Tensor
    item_BV: Tensor


class RetrievalOutputs(NamedTuple):
    """For metrics, detached: the loss, and the vectors."""

    loss: Tensor
    query: Tensor
    item: Tensor


class TowerArch(nn.Module):
    """An MLP over what is known of one side, to vectors of length 1.

    Args:
        in_features: columns of the embeddings side by side, and of the dense input.
        layer_sizes: of the MLP; the last size is V.
        device: of the parameters.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model = OverArch(in_features, layer_sizes, device)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Tensors [B, ...] with ``in_features`` columns together -> [B, V]."""
        return nn.functional.normalize(self.model(torch.cat(inputs, dim=1)), dim=1)


class TwoTower(nn.Module):
    """Tables that both towers read, a query tower and an item tower.

    Args:
        embedding_bag_collection: the tables; widths may differ.
        query_features, item_features: which features each tower sees.
        layer_sizes: of both towers' MLPs; the last size is V.
        dense_in_features: columns of the dense input, which the query tower sees.
        dense_device: where the dense parameters live.

    Raises:
        ValueError: a feature has no table, or a tower has no feature.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        query_features: Sequence[str],
        item_features: Sequence[str],
        layer_sizes: Sequence[int],
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
        """Columns of the dense input, which the query tower sees."""
        return self._dense_in

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> TowerVectors:
        """Dense [B, dense_in_features] and the ids of both sides -> vectors of both, [B, V]."""
        embeddings = self.embedding_bag_collection(sparse_features).to_dict()
        query = [embeddings[name] for name in self.query_features]
        if self._dense_in:
            query.append(dense_features)
        item = [embeddings[name] for name in self.item_features]
        return TowerVectors(self.query_arch(query), self.item_arch(item))

    def embed_items(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Items alone, such as all of the catalogue: ids of ``item_features`` -> [I, V]."""
        embeddings = self.embedding_bag_collection(self._completed(sparse_features)).to_dict()
        vectors: Tensor = self.item_arch([embeddings[name] for name in self.item_features])
        return vectors

    def embed_queries(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Queries alone: ids of ``query_features`` -> [Q, V]."""
        embeddings = self.embedding_bag_collection(self._completed(sparse_features)).to_dict()
        query = [embeddings[name] for name in self.query_features]
        vectors: Tensor = self.query_arch([*query, dense_features] if self._dense_in else query)
        return vectors

    def _completed(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """With empty bags for the features that the other tower would read."""
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
    """How well an item fits a query, as a logit: for losses over clicks, such as binary cross-entropy.

    Args:
        two_tower: the model.
        temperature: products of vectors are divided by it.
    """

    def __init__(self, two_tower: TwoTower, *, temperature: float = 0.1) -> None:
        super().__init__()
        self.two_tower, self.temperature = two_tower, temperature

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Logits [B]."""
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
    """Cross-entropy of each query's own item among the items of the batch.

    Args:
        query_BV, item_BV: vectors; item b belongs to query b.
        temperature: products are divided by it.
        item_ids_B: with it, other occurrences of a query's own item do not count as wrong answers.
        log_q_B: log of the probability that an item is in a batch. Frequent items are more often among the
            wrong answers; subtracting this from their products corrects that.
        weights_B: of queries, such as the labels, so that only clicks count.

    Returns:
        The weighted mean; 0 where all weights are 0.
    """
    losses = in_batch_losses(
        query_BV, item_BV, temperature=temperature, item_ids_B=item_ids_B, log_q_B=log_q_B
    )
    if weights_B is None:
        return losses.mean()
    return (losses * weights_B).sum() / weights_B.sum().clamp(min=1e-12)


def in_batch_losses(
    query_BV: Tensor,
    item_BV: Tensor,
    *,
    temperature: float = 0.05,
    item_ids_B: Tensor | None = None,
    log_q_B: Tensor | None = None,
) -> Tensor:
    """The losses of :func:`in_batch_softmax` one by one, [B]."""
    products_BB = query_BV @ item_BV.T / temperature
    if log_q_B is not None:
        products_BB = products_BB - log_q_B
    if item_ids_B is not None:
        own = torch.eye(len(item_ids_B), dtype=torch.bool, device=item_ids_B.device)
        again = (item_ids_B[:, None] == item_ids_B) & ~own
        products_BB = products_BB.masked_fill(again, float("-inf"))
    target = torch.arange(len(query_BV), device=query_BV.device)
    return nn.functional.cross_entropy(products_BB, target, reduction="none")


class TwoTowerTrain(nn.Module):
    """A two-tower model with its loss; only samples with label 1 count as queries, all as items.

    Frequent items are frequent among the wrong answers of a batch, too. Left uncorrected, the model learns to
    avoid what is popular, and finds less than a list of the most popular items does; so the correction of
    :func:`in_batch_softmax` is the default, with shares estimated from the batches of the first rank.

    Args:
        two_tower: the model, with an ``embedding_bag_collection``.
        item_feature: the feature with one id per sample that tells items apart.
        temperature: see :func:`in_batch_softmax`.
        log_q: the correction: "estimated" by :class:`ItemFrequency`, known logs of shares [items], or None
            for no correction, where wrong answers are not drawn by popularity.

    Raises:
        ValueError: no table of the model has the item feature, or ``log_q`` is something else.
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
        """The loss, and what metrics need, detached."""
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
    """Rows of the item feature's table."""
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
    """The best items of each query, the best first."""

    scores_QK: Tensor
    ids_QK: Tensor


class BruteForceIndex:
    """All items, compared with every query.

    Args:
        vectors_IV: of the items.
        ids_I: their ids; without them 0, 1, ...
        chunk: items that are compared at a time, which bounds the memory to Q x (chunk + k) products.

    Raises:
        ValueError: there are as many ids as vectors, or the chunk is empty.
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
        """The ``k`` items with the largest products.

        Args:
            query_QV: vectors.
            k: how many.
            exclude: Q bags of item ids that are not to be found, such as those a user has seen. Where too few
                items are left, scores are -inf.

        Raises:
            ValueError: k is not in [1, number of items].
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
    """[Q, I]: whether an item is in a query's bag."""
    lengths = bags.lengths()
    order = torch.argsort(ids_I)
    place = torch.searchsorted(ids_I[order], bags.values()).clamp(max=len(ids_I) - 1)
    found = ids_I[order][place] == bags.values()
    query = torch.repeat_interleave(torch.arange(len(lengths), device=ids_I.device), lengths)
    mask = torch.zeros(len(lengths), len(ids_I), dtype=torch.bool, device=ids_I.device)
    mask[query[found], order[place[found]]] = True
    return mask
