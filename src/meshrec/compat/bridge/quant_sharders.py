"""Sharders of quantised collections with TorchRec's arguments."""

from collections.abc import Mapping
from typing import Any

import torch

from meshrec.comms.mesh import ShardingEnv
from meshrec.compat.bridge.plans import module_to_own
from meshrec.compat.bridge.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.compat.bridge.sharders import SharderAnswers
from meshrec.distributed import sharders as own
from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.plan.sharding_plan import EmbeddingComputeKernel


class _QuantAnswers:
    """The common part of both sharders: TorchRec's arguments, and the kernel ``quant``."""

    def __init__(
        self, fused_params: Mapping[str, Any] | None = None, shardable_params: object | None = None
    ) -> None:
        if fused_params and "optimizer" in fused_params:
            raise ValueError(
                "quantised tables are not trained, but fused_params name an optimizer. Leave it out, or use "
                "EmbeddingBagCollectionSharder for the model as it was."
            )
        if shardable_params is not None:
            raise ValueError(
                "all tables of a collection are sharded. Leave shardable_params out; a table that is to be "
                "on every rank has the sharding type data_parallel."
            )
        super().__init__()
        self.fused_params = fused_params

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.QUANT.value]


class QuantEmbeddingBagCollectionSharder(_QuantAnswers, own.EmbeddingBagCollectionSharder, SharderAnswers):
    """MeshRec's sharder for quantised collections.

    Args:
        fused_params: TorchRec's kernel options, which change nothing here. They must not name an optimizer.
        shardable_params: must be None, because all tables are sharded.
    """

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: Mapping[str, Any],
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """Return the sharded module. The plan may have either library's form. Collective."""
        built = self.built(module, module_to_own(params), env, device, weighted=module.is_weighted())
        return ShardedEmbeddingBagCollection(module, built)


class QuantEmbeddingCollectionSharder(_QuantAnswers, own.EmbeddingCollectionSharder, SharderAnswers):
    """MeshRec's sharder for quantised collections; see ``QuantEmbeddingBagCollectionSharder``."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: Mapping[str, Any],
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """Return the sharded module. The plan may have either library's form. Collective."""
        built = self.built(module, module_to_own(params), env, device, sequence=True)
        return ShardedEmbeddingCollection(module, built)
