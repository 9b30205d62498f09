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
    """Base class of sharded collections.

    Args:
        built: parts of the sharded module.
        holder: name of the attribute with the table modules, such as ``embedding_bags``.
    """

    def __init__(self, built: ModuleParts, holder: str) -> None:
        super().__init__()
        self._holder = holder
        setattr(self, holder, module_dict_of(built.shards))
        self._set_parts(built)
        self._names, self._dims = built.names, built.dims
        output = built.options.output_dtype
        self._dtype = None if output is None else output.dtype
        self.ahead: Callable[[KeyedJaggedTensor], Any] | None = None
        """Hook of a pipeline, called first in ``forward``. It returns the result of a lookup started for
        this very input object, or None. The pipeline sets it for the forward pass, and clears it afterward.
        """
        self.fused_optimizer: FusedOptimizer = built.fused_optimizer(prefix=holder)
        # Loading a state dict changes rows that a pipeline may have looked up already.
        self.register_load_state_dict_post_hook(_count_change)  # type: ignore[no-untyped-call]

    def _set_parts(self, built: ModuleParts) -> None:
        self.plan, self.built = built.plan, built
        self.tables: ShardedTables = built.tables
        """Lookup and update of the tables on this rank. ``rebuild`` replaces it."""
        self.has_ordinary_gradients = None in built.rules
        """Whether some table has no fused optimizer, so that the backward pass returns its gradient."""

    def rebuild(self, built: ModuleParts) -> None:
        """Replace the tables by the same tables under another plan. Call this method between steps only.

        Args:
            built: result of ``reshard.reshard_tables`` for this module.
        """
        setattr(self, self._holder, module_dict_of(built.shards))
        self._set_parts(built)
        # The optimizer object stays: the user and LR schedulers hold references to it.
        self.fused_optimizer.rebind(built.named_fused(prefix=self._holder), built.deferred())

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Embeddings]:
        """Look up embeddings, equal to those of the unsharded module.

        The result waits for them at first use.
        """
        if self.ahead is not None and (result := self.ahead(features)) is not None:
            return result  # type: ignore[no-any-return]
        batch = self.tables.route(features)
        return self.awaited(batch, self.tables.look_up(batch))

    def awaited(self, batch: LookupBatch, link: Tensor) -> LazyAwaitable[Embeddings]:
        """Return the embeddings of a batch that has been looked up. The result waits for them at first use.

        Args:
            batch: the batch.
            link: the result of ``ShardedTables.look_up``.
        """
        # Bind the current tables, because ``rebuild`` may replace ``self.tables`` before the first use.
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
    """Count a change of all tables, so that pipelines do not use rows looked up before a load."""
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
        """Return the configs of the unsharded tables."""
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
