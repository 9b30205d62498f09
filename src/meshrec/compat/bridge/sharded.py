"""Sharded collections with the attributes that TorchRec's programs use: a combined optimizer, and stages to
print.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.fx import Proxy

from meshrec.compat.bridge.keyed import CombinedOptimizer
from meshrec.compat.bridge.sharded_traces import record_bags, record_sequences
from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.compat.bridge.stages import Stage, stages
from meshrec.distributed import embedding_modules as own
from meshrec.distributed.build import ModuleParts
from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.tables import FusedOptimizer


class _Shown:
    """The stages of a sharded module, as TorchRec's tutorials print them."""

    plan: Any
    built: ModuleParts

    @property
    def _input_dists(self) -> list[Stage]:
        return stages("ids to their shards", self.plan)

    @property
    def _lookups(self) -> list[Stage]:
        return stages("lookup of rows", self.plan, self.built.env.shard.rank)

    @property
    def _output_dists(self) -> list[Stage]:
        return stages("embeddings to their samples", self.plan)


class ShardedEmbeddingBagCollection(_Shown, own.ShardedEmbeddingBagCollection):
    """MeshRec's sharded collection, with TorchRec's names for its parts."""

    def __init__(self, module: EmbeddingBagCollection, built: ModuleParts) -> None:
        super().__init__(module, built)
        self.fused_optimizer = _as_combined(self.fused_optimizer)  # type: ignore[assignment]

    def forward(self, features: KeyedJaggedTensor) -> Any:  # type: ignore[override]
        """Look up; torch.fx records one lookup after the other, see ``sharded_traces``."""
        if isinstance(features, Proxy):
            configs = self.embedding_bag_configs()
            return record_bags(self.built, configs, features, weighted=self.is_weighted())
        return super().forward(features)


class ShardedEmbeddingCollection(_Shown, own.ShardedEmbeddingCollection):
    """MeshRec's sharded collection, with TorchRec's names for its parts."""

    def __init__(self, module: EmbeddingCollection, built: ModuleParts) -> None:
        super().__init__(module, built)
        self.fused_optimizer = _as_combined(self.fused_optimizer)  # type: ignore[assignment]
        self._need_indices = bool(getattr(module, "_need_indices", False))

    def forward(self, features: KeyedJaggedTensor) -> Any:  # type: ignore[override]
        """Look up; torch.fx records one lookup after the other, see ``sharded_traces``."""
        if isinstance(features, Proxy):
            configs = self.embedding_configs()
            return record_sequences(self.built, configs, features, need_indices=self._need_indices)
        return super().forward(features)


def _as_combined(tables: FusedOptimizer) -> CombinedOptimizer:
    """Return a module's optimizer as a combination of one; of none if no table is fused."""
    return CombinedOptimizer([("", tables)] if tables.params else [])


def combined(modules: Mapping[str, nn.Module]) -> CombinedOptimizer:
    """Return the optimizers of sharded modules, by path, as one."""
    return CombinedOptimizer([(path, module.fused_optimizer) for path, module in modules.items()])  # type: ignore[misc]
