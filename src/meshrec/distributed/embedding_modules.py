"""Sharded EmbeddingBagCollection and EmbeddingCollection.

These modules are thin. `ShardedTables` exchanges IDs and embeddings and updates the tables.
"""

import operator
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.distributed.build import ModuleParts
from meshrec.distributed.lookup_batch import LookupBatch
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.modules import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from meshrec.modules.embedding_modules import module_dict_of
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingType
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meshrec.tables.optimizer import FusedOptimizer


@dataclass(frozen=True)
class PrintedStage:
    """Summary of a stage for all tables with the same sharding type. ``repr`` prints it."""

    title: str
    """Stage description, such as "lookup of rows"."""
    sharding_type: str
    tables: dict[str, tuple[str, ...]]
    """Shards of each table as strings with rows, columns and rank, such as ``[0:10, 0:4]@1``."""

    def __repr__(self) -> str:
        # A rank may have no shard of a table.
        shards = [f"    {name}: {', '.join(texts) or 'nothing'}" for name, texts in self.tables.items()]
        return "\n".join([f"{self.title}, {self.sharding_type}", *shards])


def printed_stages(
    title: str, plan: EmbeddingModuleShardingPlan, rank: int | None = None
) -> list[PrintedStage]:
    """Return summaries of a stage, one for each sharding type in the plan.

    Args:
        title: stage description.
        plan: the module's plan.
        rank: list only shards on this rank; None: list all shards.
    """
    by_type: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, sharding in plan.items():
        here = [shard for shard in sharding.shards if rank in (None, shard.placement.rank)]
        is_whole = sharding.sharding_type is ShardingType.DATA_PARALLEL
        texts = ("on every rank",) if is_whole else tuple(map(str, here))
        by_type.setdefault(sharding.sharding_type.value, {})[name] = texts
    return [PrintedStage(title, kind, tables) for kind, tables in by_type.items()]


# B: batch size, D: total columns, N: IDs in a feature

Embeddings = TypeVar("Embeddings")


class _ShardedCollection(nn.Module, Generic[Embeddings]):
    """Base class for sharded embedding collections, whose ``forward`` returns a lazy value.

    Args:
        built: parts of the sharded module, from a sharder.
        holder: attribute name for the table modules, such as ``embedding_bags``. Parameter names start with
            it.
    """

    def __init__(self, built: ModuleParts, holder: str) -> None:
        super().__init__()
        # Fixed. ``_set_parts`` sets everything that depends on the plan.
        self._holder = holder
        # As an attribute with TorchRec's name, so that parameter names are equal.
        setattr(self, holder, module_dict_of(built.shards))
        self._set_parts(built)
        # Features and their number of columns, in output order. Equal under all plans, so ``rebuild`` keeps
        # them.
        self._names, self._dims = built.names, built.dims
        output = built.options.output_dtype
        self._dtype = None if output is None else output.dtype
        self.take_lookup: Callable[[KeyedJaggedTensor], Any] | None = None
        """Function which a pipeline sets while its model's forward pass runs, and clears afterward.
        ``forward`` calls it with the input. It returns the result if the pipeline has already started a
        lookup for this input object, else None.
        """
        self.fused_optimizer: FusedOptimizer = built.fused_optimizer(prefix=holder)
        # Loading a state dict changes rows that a pipeline may have looked up already.
        self.register_load_state_dict_post_hook(_count_change)  # type: ignore[no-untyped-call]

    def _set_parts(self, built: ModuleParts) -> None:
        """Set the attributes that depend on the plan."""
        # Kept for printing and for resharding.
        self.plan, self.built = built.plan, built
        self.tables: ShardedTables = built.tables
        """Lookup and update of the tables on this rank. ``rebuild`` replaces it."""
        self.has_ordinary_gradients = None in built.rules
        """Whether some table has no fused optimizer, so the backward pass sets its ``grad``."""

    def rebuild(self, built: ModuleParts) -> None:
        """Switch to another plan, keeping tables and optimizer state. Call it between steps only.

        Args:
            built: parts under the new plan, from ``reshard.reshard_tables``.
        """
        setattr(self, self._holder, module_dict_of(built.shards))
        self._set_parts(built)
        # The optimizer object stays: the user and LR schedulers hold references to it.
        self.fused_optimizer.rebind(built.named_fused(prefix=self._holder), built.deferred())

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Embeddings]:
        """Start to look up embeddings. They equal the unsharded module's embeddings.

        Args:
            features: IDs of this rank's samples.

        Returns:
            Lazy result, which waits for the embeddings at first use.
        """
        if self.take_lookup is not None and (result := self.take_lookup(features)) is not None:
            return result  # type: ignore[no-any-return]
        batch = self.tables.route(features)
        return self.awaited(batch, self.tables.look_up(batch))

    def awaited(self, batch: LookupBatch, link: Tensor) -> LazyAwaitable[Embeddings]:
        """Return the embeddings of a batch after ``ShardedTables.look_up``, for a pipeline.

        Args:
            batch: the batch.
            link: result of ``ShardedTables.look_up``.

        Returns:
            Lazy result, which waits for the embeddings at first use.
        """
        # Bind the current tables, because ``rebuild`` may replace ``self.tables`` before the first use.
        return LazyAwaitable(partial(self._to_output, self.tables, batch, link))

    # The names of the next three properties are TorchRec's. They only describe the module when printed.
    @property
    def _input_dists(self) -> list[PrintedStage]:
        """Table shards, on all ranks, to which the ID exchange sends IDs."""
        return printed_stages("ids to their shards", self.plan)

    @property
    def _lookups(self) -> list[PrintedStage]:
        """Table shards on this rank, in which it looks up rows."""
        return printed_stages("lookup of rows", self.plan, self.built.env.shard.rank)

    @property
    def _output_dists(self) -> list[PrintedStage]:
        """Table shards, on all ranks, from which the output exchange returns embeddings."""
        return printed_stages("embeddings to their samples", self.plan)

    @abstractmethod
    def _to_output(self, tables: ShardedTables, batch: LookupBatch, link: Tensor) -> Embeddings:
        """Wait for a batch's embeddings, and return them in the module's output type.

        Args:
            tables: tables in which the batch was looked up.
            batch: the batch.
            link: result of ``tables.look_up``.
        """
        ...

    @property
    def num_clamped_ids(self) -> int:
        """Number of invalid IDs which ``BoundsCheckMode.WARN`` has replaced on this rank so far."""
        return self.tables.num_clamped_ids


def _count_change(module: nn.Module, _: object) -> None:
    """Hook after ``load_state_dict``: tell pipelines that rows looked up earlier are outdated."""
    assert isinstance(module, _ShardedCollection)
    module.tables.num_changes += 1


class ShardedEmbeddingBagCollection(_ShardedCollection[KeyedTensor]):
    """Sharded EmbeddingBagCollection: returns a KeyedTensor with pooled embeddings, [B, D].

    B is this rank's batch size, and D the sum of the embedding dimensions over all features. Parameters are
    named ``embedding_bags.<table>.weight``. Create it with `EmbeddingBagCollectionSharder` or
    DistributedModelParallel.

    A pipeline may run the stages of ``forward`` separately. It calls the methods of ``tables`` (see [Note:
    the stages of a batch] in ``sharded_tables.py``) and passes the result to ``awaited``.
    """

    embedding_bags: nn.ModuleDict

    def __init__(self, module: EmbeddingBagCollection, built: ModuleParts) -> None:
        super().__init__(built, "embedding_bags")
        # From the unsharded module. Resharding keeps them.
        self._configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        # First output column of every feature, and the total.
        self._offsets = list(accumulate(built.dims, initial=0))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables, with their unsharded sizes."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether IDs have per-sample weights, which multiply the rows before pooling."""
        return self._is_weighted

    def _to_output(self, tables: ShardedTables, batch: LookupBatch, link: Tensor) -> KeyedTensor:
        values = tables.finish(batch, link).to(dtype=self._dtype)
        return KeyedTensor(self._names, self._dims, values, offset_per_key=self._offsets)


class ShardedEmbeddingCollection(_ShardedCollection[dict[str, JaggedTensor]]):
    """Sharded EmbeddingCollection: returns a JaggedTensor per feature, with a row per ID, [N, dim].

    Parameters are named ``embeddings.<table>.weight``. Create it with `EmbeddingCollectionSharder` or
    DistributedModelParallel. A pipeline may run the stages separately, as for ShardedEmbeddingBagCollection.
    """

    embeddings: nn.ModuleDict

    def __init__(self, module: EmbeddingCollection, built: ModuleParts) -> None:
        super().__init__(built, "embeddings")
        self._configs = module.embedding_configs()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables, with their unsharded sizes."""
        return self._configs

    def _to_output(self, tables: ShardedTables, batch: LookupBatch, link: Tensor) -> dict[str, JaggedTensor]:
        source, order = batch.source, tables.uses_in_order
        bounds = source.bag_bounds()
        routes, uses = tables.routing.first_columns
        # Column shards read the same IDs, so count only the routes with column 0.
        counts = torch.zeros(len(self._dims), dtype=torch.int64)
        # Number of rows for every use, and of values.
        rows: list[int] = counts.index_add_(0, uses, source.counts[routes]).tolist()
        sizes = list(map(operator.mul, rows, self._dims))
        # Offsets of every key are cut out of the offsets for all keys.
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
