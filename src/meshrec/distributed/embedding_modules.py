"""EmbeddingBagCollection and EmbeddingCollection with their tables split over ranks."""

import operator
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.build import ModuleParts
from meshrec.distributed.sharded_tables import Results, ShardedTables
from meshrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from meshrec.modules.embedding_modules import holder_of
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.tables.optimizer import FusedOptimizer

# B batch, D columns of all tables, N ids of a feature


class _ShardedCollection(nn.Module):
    """What the pooled and the sequence module share: tables, plan, optimizer, and the stages before lookup.

    ``holder`` is the name of the attribute that holds the parameters of each table.
    """

    def __init__(self, built: ModuleParts, holder: str) -> None:
        super().__init__()
        self._holder = holder
        setattr(self, holder, holder_of(built.shards))
        self._tables, self.plan, self.built = built.tables, built.plan, built
        self._names, self._dims = built.names, built.dims
        output = built.options.output_dtype
        self._dtype = None if output is None else output.dtype
        self.ahead: Callable[[KeyedJaggedTensor], Any] | None = None
        """Is asked first by ``forward``: the result for this very object, if it is under way, else None."""
        self.fused_optimizer: FusedOptimizer = built.fused_optimizer(prefix=holder)
        self.register_load_state_dict_post_hook(_count_change)  # type: ignore[no-untyped-call]

    @property
    def tables(self) -> ShardedTables:
        """What this rank does for the module; another one after ``rebuild``."""
        return self._tables

    def rebuild(self, built: ModuleParts) -> None:
        """Goes on with the same tables under another plan, see ``reshard.moved``; between steps only."""
        setattr(self, self._holder, holder_of(built.shards))
        self._tables, self.plan, self.built = built.tables, built.plan, built
        self.fused_optimizer.rebind(built.named_fused(prefix=self._holder), built.deferred())

    @property
    def num_clamped_ids(self) -> int:
        """How many ids of this rank ``BoundsCheckMode.WARN`` replaced so far."""
        return self._tables.num_clamped_ids

    @property
    def has_ordinary_gradients(self) -> bool:
        """Whether some table has no fused optimizer: autograd gives its gradient to any other."""
        return None in self.built.rules


def _count_change(module: nn.Module, _: object) -> None:
    """After a load: what has been looked up is of old rows."""
    assert isinstance(module, _ShardedCollection)
    module.tables.num_changes += 1


class ShardedEmbeddingBagCollection(_ShardedCollection):
    """Pooled embeddings of split tables; parameters at ``embedding_bags.<table>.weight``.

    A pipeline may take ``forward`` apart: it calls the stages of ``tables`` itself (see
    [Note: the stages of a batch] in ``sharded_tables.py``) and hands the results to ``awaited``.
    """

    embedding_bags: nn.ModuleDict

    def __init__(self, module: EmbeddingBagCollection, built: ModuleParts) -> None:
        super().__init__(built, "embedding_bags")
        self._configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self._offsets = list(accumulate(built.dims, initial=0))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs of the whole tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether features carry per-sample weights."""
        return self._is_weighted

    def awaited(self, results: Results) -> LazyAwaitable[KeyedTensor]:
        """Return the embeddings of a lookup, awaited at their first use."""
        return LazyAwaitable(lambda: self._keyed(results))

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """[B, D] by feature, as the unsharded module has it; waits when it is first used."""
        if self.ahead is not None and (found := self.ahead(features)) is not None:
            return found  # type: ignore[no-any-return]
        tables = self._tables
        batch = tables.arrive(tables.exchange(tables.route(features)))
        if tables.needs_resolve:
            tables.resolve(batch)
        return self.awaited(tables.look_up(batch))

    def _keyed(self, results: Results) -> KeyedTensor:
        values = results.wait().to(dtype=self._dtype)
        return KeyedTensor(self._names, self._dims, values, offset_per_key=self._offsets)


class ShardedEmbeddingCollection(_ShardedCollection):
    """Embeddings of every id, from split tables; parameters at ``embeddings.<table>.weight``.

    Taken apart for pipelines as ShardedEmbeddingBagCollection is.
    """

    embeddings: nn.ModuleDict

    def __init__(self, module: EmbeddingCollection, built: ModuleParts) -> None:
        super().__init__(built, "embeddings")
        self._configs = module.embedding_configs()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs of the whole tables."""
        return self._configs

    def awaited(self, results: Results) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Return the embeddings of a lookup, awaited at their first use."""
        return LazyAwaitable(lambda: self._jagged(results))

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """A JaggedTensor of [N, dim] for each feature, as the unsharded module has it; waits when first
        used.
        """
        if self.ahead is not None and (found := self.ahead(features)) is not None:
            return found  # type: ignore[no-any-return]
        tables = self._tables
        batch = tables.arrive(tables.exchange(tables.route(features)))
        if tables.needs_resolve:
            tables.resolve(batch)
        return self.awaited(tables.look_up(batch))

    def _jagged(self, results: Results) -> dict[str, JaggedTensor]:
        source = results.pending.batch.asked.source
        order = results.tables.uses_in_order
        bounds = source.bag_bounds()
        routes, uses = self.built.routing.first_columns
        counts = torch.zeros(len(self._dims), dtype=torch.int64)
        rows: list[int] = counts.index_add_(0, uses, source.counts[routes]).tolist()
        sizes = list(map(operator.mul, rows, self._dims))
        offsets = []
        for key in source.keys:
            offsets.append(source.offsets[bounds[key] : bounds[key + 1] + 1])
        parts = results.wait().to(dtype=self._dtype).split(list(map(sizes.__getitem__, order)))
        values: list[Tensor] = [torch.empty(0)] * len(rows)
        for use, part in zip(order, parts, strict=True):
            values[use] = part.view(rows[use], self._dims[use])
        return {
            name: JaggedTensor.unchecked(value, None, None, offset - offset[0])
            for name, value, offset in zip(self._names, values, offsets, strict=True)
        }
