"""Two-tower retrieval: a tower maps queries to vectors, another maps items to vectors, and an item's score is
the dot product.

See Yi et al.: "Sampling-bias-corrected neural modeling for large corpus item recommendations" (2019).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import OverArch
from meshrec.modules import EmbeddingBagCollection
from meshrec.ops.scores.top_k import top_k
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B batch, Q queries, I items, V vector width


class TowerVectors(NamedTuple):
    """Output of `TwoTower` for B samples: vectors with length 1."""

    query_BV: Tensor
    item_BV: Tensor


class TowerArch(nn.Module):
    """Tower: an MLP whose output vectors are normalized to length 1.

    Args:
        in_features: Input columns: all embeddings and dense values together.
        layer_sizes: Layer sizes; the last is V.
        device: Device for the parameters.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model = OverArch(in_features, layer_sizes, device)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Return vectors with length 1, [B, V].

        Args:
            inputs: Tensors with B rows, and ``in_features`` columns in total.
        """
        return nn.functional.normalize(self.model(torch.cat(inputs, dim=1)), dim=1)


class TwoTower(nn.Module):
    """Model with a query tower and an item tower, which read embeddings from the same table collection.

    Args:
        embedding_bag_collection: Tables; their widths may differ.
        query_features: Features that the query tower reads.
        item_features: Features that the item tower reads.
        layer_sizes: Layer sizes in both MLPs; the last is V.
        dense_in_features: Dense input columns, which only the query tower reads.
        dense_device: Device for the towers.

    Raises:
        ValueError: A feature has no table, or a tower has no features.

    Example::

        >>> from meshrec.modules import EmbeddingBagConfig
        >>> tables = [
        ...     EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=[name])
        ...     for name in ("user", "item")
        ... ]
        >>> model = TwoTower(EmbeddingBagCollection(tables), ["user"], ["item"], [8, 2])
        >>> ids = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        >>> model(torch.zeros(1, 0), ids).query_BV.shape
        torch.Size([1, 2])
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
        # Every table feature must be present in a lookup, also those of the other tower.
        self._features = list(dims)
        self._dense_in = dense_in_features
        query_in = sum(dims[name] for name in query_features) + dense_in_features
        self.query_arch = TowerArch(query_in, layer_sizes, dense_device)
        self.item_arch = TowerArch(sum(dims[name] for name in item_features), layer_sizes, dense_device)

    @property
    def num_dense(self) -> int:
        """Dense input columns."""
        return self._dense_in

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> TowerVectors:
        """Return a query vector and an item vector per sample, [B, V] each.

        Args:
            dense_features: Dense values, [B, dense_in_features].
            sparse_features: IDs for all features.
        """
        embeddings = self.embedding_bag_collection(sparse_features).to_dict()
        query = [embeddings[name] for name in self.query_features]
        if self._dense_in:
            query.append(dense_features)
        item = [embeddings[name] for name in self.item_features]
        return TowerVectors(self.query_arch(query), self.item_arch(item))

    def embed_items(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the item vectors for I samples, [I, V].

        Args:
            sparse_features: IDs for ``item_features``; other features may be missing.
        """
        embeddings = self.embedding_bag_collection(self._add_missing_features(sparse_features)).to_dict()
        vectors: Tensor = self.item_arch([embeddings[name] for name in self.item_features])
        return vectors

    def embed_queries(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the query vectors for Q samples, [Q, V].

        Args:
            dense_features: Dense values, [Q, dense_in_features].
            sparse_features: IDs for ``query_features``; other features may be missing.
        """
        embeddings = self.embedding_bag_collection(self._add_missing_features(sparse_features)).to_dict()
        query = [embeddings[name] for name in self.query_features]
        vectors: Tensor = self.query_arch([*query, dense_features] if self._dense_in else query)
        return vectors

    def _add_missing_features(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Add empty bags for missing features, because a lookup needs all features that have a table."""
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
    """Two-tower model that is trained on click labels: the logit is the dot product divided by a temperature.

    Args:
        two_tower: The towers.
        temperature: Number by which the dot product is divided.
    """

    def __init__(self, two_tower: TwoTower, *, temperature: float = 0.1) -> None:
        super().__init__()
        self.two_tower, self.temperature = two_tower, temperature

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B]."""
        vectors: TowerVectors = self.two_tower(dense_features, sparse_features)
        return (vectors.query_BV * vectors.item_BV).sum(1) / self.temperature


def in_batch_losses(
    query_BV: Tensor,
    item_IV: Tensor,
    *,
    temperature: float = 0.05,
    item_ids_I: Tensor | None = None,
    log_q_I: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Return the in-batch softmax loss per query, [B]: its item should score higher than all other items.

    The loss is the softmax cross-entropy with the query's item as the class, and all items as the classes.

    Args:
        query_BV: Query vectors.
        item_IV: Item vectors. Item ``first + b`` belongs to query b; other items are only negatives. There
            may be more items than queries.
        temperature: Number by which dot products are divided.
        item_ids_I: Item IDs. If given, the query's item is masked where it occurs again as a negative.
        log_q_I: Logarithm of the item's sampling probability. It is subtracted from the logits, because
            frequent items are negatives more often. None: no correction; see `ItemFrequency`.
        first: Index of the first query's item in ``item_IV``.
    """
    products_BI = query_BV @ item_IV.T / temperature
    if log_q_I is not None:
        products_BI = products_BI - log_q_I
    # With samples gathered from all ranks, this rank's items start at `first`.
    target_B = first + torch.arange(len(query_BV), device=query_BV.device)
    if item_ids_I is not None:
        repeated_BI = item_ids_I[target_B, None] == item_ids_I
        # The query's item itself must stay.
        repeated_BI = repeated_BI.scatter(1, target_B[:, None], False)
        products_BI = products_BI.masked_fill(repeated_BI, float("-inf"))
    return nn.functional.cross_entropy(products_BI, target_B, reduction="none")


class Retrieved(NamedTuple):
    """The K items with the highest scores for each of Q queries, best first."""

    scores_QK: Tensor
    """Dot products; -inf where fewer than K items were left."""
    ids_QK: Tensor
    """Item IDs."""


class BruteForceIndex:
    """Index for exact retrieval, which compares a query with all items.

    Args:
        vectors_IV: Item vectors.
        ids_I: Item IDs; None: 0, 1, ...
        chunk: Items compared at a time. A search needs memory for Q * (chunk + k) dot products.

    Raises:
        ValueError: IDs and vectors differ in number, or chunk is below 1.

    Example::

        >>> index = BruteForceIndex(torch.eye(3))
        >>> index.search(torch.tensor([[0.0, 2.0, 1.0]]), k=2).ids_QK
        tensor([[1, 2]])
    """

    def __init__(self, vectors_IV: Tensor, ids_I: Tensor | None = None, *, chunk: int = 65536) -> None:
        if chunk < 1 or (ids_I is not None and len(ids_I) != len(vectors_IV)):
            raise ValueError(
                f"there must be one id per vector and chunk >= 1, got {len(vectors_IV)} vectors, "
                f"{None if ids_I is None else len(ids_I)} ids, chunk {chunk}."
            )
        # The index keeps references, and does not copy vectors.
        self._vectors = vectors_IV
        self._ids = torch.arange(len(vectors_IV), device=vectors_IV.device) if ids_I is None else ids_I
        self._chunk = chunk

    @torch.no_grad()
    def search(self, query_QV: Tensor, k: int, *, exclude: JaggedTensor | None = None) -> Retrieved:
        """Return the ``k`` items with the largest dot products, per query.

        Args:
            query_QV: Query vectors.
            k: Items per query.
            exclude: Q bags with item IDs to exclude, such as seen items. If fewer than ``k`` items are left,
                the remaining scores are -inf.

        Raises:
            ValueError: ``k`` is not in [1, number of items].
        """
        if not 1 <= k <= len(self._vectors):
            raise ValueError(f"k must lie in [1, {len(self._vectors)}], the number of items, got {k}.")
        scores = query_QV.new_empty(len(query_QV), 0)
        ids = self._ids.new_empty(len(query_QV), 0)
        for start in range(0, len(self._vectors), self._chunk):
            chunk_ids = self._ids[start : start + self._chunk]
            products = query_QV @ self._vectors[start : start + self._chunk].T
            if exclude is not None:
                products = products.masked_fill(_bag_mask(chunk_ids, exclude), float("-inf"))
            scores = torch.cat([scores, products], dim=1)
            ids = torch.cat([ids, chunk_ids.expand(len(query_QV), -1)], dim=1)
            # Keep only the best k so far, so that memory does not grow with the number of items.
            scores, best = top_k(scores, min(k, scores.shape[1]))
            ids = ids.gather(1, best)
        return Retrieved(scores, ids)


def _bag_mask(ids_I: Tensor, bags: JaggedTensor) -> Tensor:
    """Return whether an item is in a query's bag, for all pairs, bool [Q, I]."""
    lengths = bags.lengths()
    # Item IDs may be in any order; searchsorted needs them sorted.
    order = torch.argsort(ids_I)
    index = torch.searchsorted(ids_I[order], bags.values()).clamp(max=len(ids_I) - 1)
    matches = ids_I[order][index] == bags.values()
    query = torch.repeat_interleave(torch.arange(len(lengths), device=ids_I.device), lengths)
    mask = torch.zeros(len(lengths), len(ids_I), dtype=torch.bool, device=ids_I.device)
    mask[query[matches], order[index[matches]]] = True
    return mask
