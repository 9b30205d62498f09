"""EmbeddingBagCollection and EmbeddingCollection with their tables split over ranks."""

import operator
from collections.abc import Callable
from functools import partial
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
    """The common part of the pooled and the sequence module: tables, plan, optimizer, and the stages up to
    the lookup.

    ``holder`` is the name of the attribute with the parameters of each table.
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
        """A function that ``forward`` calls first. It returns the result for this very object if its lookup
        is under way, else None.
        """
        self.fused_optimizer: FusedOptimizer = built.fused_optimizer(prefix=holder)
        self.register_load_state_dict_post_hook(_count_change)  # type: ignore[no-untyped-call]

    @property
    def tables(self) -> ShardedTables:
        """This rank's work for the module. ``rebuild`` replaces it."""
        return self._tables

    def rebuild(self, built: ModuleParts) -> None:
        """Continue with the same tables under another plan, see ``reshard.moved``. Call it between steps
        only.
        """
        setattr(self, self._holder, holder_of(built.shards))
        self._tables, self.plan, self.built = built.tables, built.plan, built
        self.fused_optimizer.rebind(built.named_fused(prefix=self._holder), built.deferred())

    @property
    def num_clamped_ids(self) -> int:
        """The number of this rank's IDs that ``BoundsCheckMode.WARN`` has replaced so far."""
        return self._tables.num_clamped_ids

    @property
    def has_ordinary_gradients(self) -> bool:
        """Whether some table has no fused optimizer, so that autograd returns its gradient."""
        return None in self.built.rules


def _count_change(module: nn.Module, _: object) -> None:
    """Mark rows that have been looked up as outdated, after a load."""
    assert isinstance(module, _ShardedCollection)
    module.tables.num_changes += 1


class ShardedEmbeddingBagCollection(_ShardedCollection):
    """Pooled embeddings of split tables; parameters at ``embedding_bags.<table>.weight``.

    A pipeline can run the stages of ``forward`` itself: it calls those of ``tables`` (see [Note: the stages
    of a batch] in ``sharded_tables.py``), and passes the results to ``awaited``.
    """

    embedding_bags: nn.ModuleDict

    def __init__(self, module: EmbeddingBagCollection, built: ModuleParts) -> None:
        super().__init__(built, "embedding_bags")
        self._configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self._offsets = list(accumulate(built.dims, initial=0))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the whole tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether features have per-sample weights."""
        return self._is_weighted

    def awaited(self, results: Results) -> LazyAwaitable[KeyedTensor]:
        """Return the embeddings of a lookup, which are awaited at their first use."""
        return LazyAwaitable(partial(self._keyed, results))

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Return the embeddings [B, D] by feature, like the unsharded module. They are awaited at their first
        use.
        """
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
    """Embeddings of every ID, from split tables; parameters at ``embeddings.<table>.weight``.

    A pipeline can run its stages like those of ShardedEmbeddingBagCollection.
    """

    embeddings: nn.ModuleDict

    def __init__(self, module: EmbeddingCollection, built: ModuleParts) -> None:
        super().__init__(built, "embeddings")
        self._configs = module.embedding_configs()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the whole tables."""
        return self._configs

    def awaited(self, results: Results) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Return the embeddings of a lookup, which are awaited at their first use."""
        return LazyAwaitable(partial(self._jagged, results))

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Return a JaggedTensor of [N, dim] for each feature, like the unsharded module. They are awaited at
        their first use.
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
        routes, uses = results.tables.routing.first_columns
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
