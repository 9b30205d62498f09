"""Sharded EmbeddingBagCollection and EmbeddingCollection."""

import operator
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.build import ModuleParts
from meshrec.distributed.lookup_batch import LookupBatch
from meshrec.distributed.printed_stages import PrintedStage, printed_stages
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from meshrec.modules.embedding_modules import module_dict_of
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.tables.optimizer import FusedOptimizer

# B: batch size, D: total columns, N: IDs in a feature

Embeddings = TypeVar("Embeddings")


class _ShardedCollection(nn.Module, Generic[Embeddings]):
    """Common base: tables, plan, optimizer, and lookup.

    ``holder`` names the attribute with the table parameters.
    """

    def __init__(self, built: ModuleParts, holder: str) -> None:
        super().__init__()
        self._holder = holder
        setattr(self, holder, module_dict_of(built.shards))
        self._take_over(built)
        self._names, self._dims = built.names, built.dims
        output = built.options.output_dtype
        self._dtype = None if output is None else output.dtype
        self.ahead: Callable[[KeyedJaggedTensor], Any] | None = None
        """A pipeline's hook that ``forward`` calls first. It returns the result if a lookup for this very
        object is under way, else None. The pipeline sets and clears it.
        """
        self.fused_optimizer: FusedOptimizer = built.fused_optimizer(prefix=holder)
        # A load changes rows that a pipeline may have looked up ahead.
        self.register_load_state_dict_post_hook(_count_change)  # type: ignore[no-untyped-call]

    def _take_over(self, built: ModuleParts) -> None:
        self.plan, self.built = built.plan, built
        self.tables: ShardedTables = built.tables
        """This rank's work for the module. ``rebuild`` replaces it."""
        self.has_ordinary_gradients = None in built.rules
        """Whether some table lacks a fused optimizer, so autograd returns the gradient."""

    def rebuild(self, built: ModuleParts) -> None:
        """Continue with the same tables under another plan, see ``reshard.moved``. Call this between steps
        only.
        """
        setattr(self, self._holder, module_dict_of(built.shards))
        self._take_over(built)
        # The optimizer object stays: the user and LR schedulers hold references to it.
        self.fused_optimizer.rebind(built.named_fused(prefix=self._holder), built.deferred())

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Embeddings]:
        """Return the unsharded module's result, awaited at first use."""
        # Take the pipeline's lookup if it is in flight for this object.
        if self.ahead is not None and (result := self.ahead(features)) is not None:
            return result  # type: ignore[no-any-return]
        batch = self.tables.route(features)
        return self.awaited(batch, self.tables.look_up(batch))

    def awaited(self, batch: LookupBatch, link: Tensor) -> LazyAwaitable[Embeddings]:
        """Return a batch's embeddings, awaited at first use.

        Args:
            batch: the batch.
            link: the result from ``ShardedTables.look_up``.
        """
        # Bind the current tables: ``rebuild`` may replace ``self.tables`` before the first use.
        return LazyAwaitable(partial(self._finished, self.tables, batch, link))

    @property
    def _input_dists(self) -> list[PrintedStage]:
        return printed_stages("ids to their shards", self.plan)

    @property
    def _lookups(self) -> list[PrintedStage]:
        return printed_stages("lookup of rows", self.plan, self.built.env.shard.rank)

    @property
    def _output_dists(self) -> list[PrintedStage]:
        return printed_stages("embeddings to their samples", self.plan)

    @abstractmethod
    def _finished(self, tables: ShardedTables, batch: LookupBatch, link: Tensor) -> Embeddings: ...

    @property
    def num_clamped_ids(self) -> int:
        """Number of IDs on this rank replaced by ``BoundsCheckMode.WARN`` so far."""
        return self.tables.num_clamped_ids


def _count_change(module: nn.Module, _: object) -> None:
    """Invalidate rows that were looked up before a load."""
    assert isinstance(module, _ShardedCollection)
    module.tables.num_changes += 1


class ShardedEmbeddingBagCollection(_ShardedCollection[KeyedTensor]):
    """Pooled embeddings [B, D] from sharded tables; parameters at ``embedding_bags.<table>.weight``.

    A pipeline can run the ``forward`` stages itself: it calls the methods in ``tables`` (see [Note: the
    stages of a batch] in ``sharded_tables.py``) and passes the results to ``awaited``.
    """

    embedding_bags: nn.ModuleDict

    def __init__(self, module: EmbeddingBagCollection, built: ModuleParts) -> None:
        super().__init__(built, "embedding_bags")
        self._configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self._offsets = list(accumulate(built.dims, initial=0))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the whole tables' configs."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether features have per-sample weights."""
        return self._is_weighted

    def _finished(self, tables: ShardedTables, batch: LookupBatch, link: Tensor) -> KeyedTensor:
        values = tables.finish(batch, link).to(dtype=self._dtype)
        return KeyedTensor(self._names, self._dims, values, offset_per_key=self._offsets)


class ShardedEmbeddingCollection(_ShardedCollection[dict[str, JaggedTensor]]):
    """Sequence embeddings, [N, dim] per feature, from sharded tables; parameters at
    ``embeddings.<table>.weight``.

    A pipeline can run the stages as for ShardedEmbeddingBagCollection.
    """

    embeddings: nn.ModuleDict

    def __init__(self, module: EmbeddingCollection, built: ModuleParts) -> None:
        super().__init__(built, "embeddings")
        self._configs = module.embedding_configs()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the whole tables' configs."""
        return self._configs

    def _finished(self, tables: ShardedTables, batch: LookupBatch, link: Tensor) -> dict[str, JaggedTensor]:
        source, order = batch.source, tables.uses_in_order
        bounds = source.bag_bounds()
        routes, uses = tables.routing.first_columns
        # Column shards read the same IDs, so count only the routes with column 0.
        counts = torch.zeros(len(self._dims), dtype=torch.int64)
        rows: list[int] = counts.index_add_(0, uses, source.counts[routes]).tolist()
        sizes = list(map(operator.mul, rows, self._dims))
        offsets = []
        for key in source.keys:
            offsets.append(source.offsets[bounds[key] : bounds[key + 1] + 1])
        # The result is flat, with data-parallel uses last; ``order`` restores the module's order.
        parts = tables.finish(batch, link).to(dtype=self._dtype).split(list(map(sizes.__getitem__, order)))
        values: list[Tensor] = [torch.empty(0)] * len(rows)
        for use, part in zip(order, parts, strict=True):
            values[use] = part.view(rows[use], self._dims[use])
        embeddings: dict[str, JaggedTensor] = {}
        for name, value, offset in zip(self._names, values, offsets, strict=True):
            embeddings[name] = JaggedTensor.unchecked(value, None, None, offset - offset[0])
        return embeddings
