"""TorchRec's sharders for quantized collections."""

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
    """Common base for both sharders: TorchRec's arguments and the compute kernel ``quant``."""

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
        self.fused_params = None if fused_params is None else dict(fused_params)  # the caller may change it

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.QUANT.value]


class QuantEmbeddingBagCollectionSharder(_QuantAnswers, own.EmbeddingBagCollectionSharder, SharderAnswers):
    """MeshRec's sharder for quantized collections.

    Args:
        fused_params: TorchRec's kernel options, which are ignored. They must not contain an optimizer.
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
        """Return the sharded module. Collective.

        Args:
            module: quantized collection.
            params: module plan from either library.
            env: ranks or devices (default: all ranks).
            device: device (default: the process group's).
            module_fqn: ignored.
        """
        built = self.built(module, module_to_own(params), env, device)
        return ShardedEmbeddingBagCollection(module, built)


class QuantEmbeddingCollectionSharder(_QuantAnswers, own.EmbeddingCollectionSharder, SharderAnswers):
    """Sharder for quantized collections without pooling; see ``QuantEmbeddingBagCollectionSharder``."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: Mapping[str, Any],
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """Return the sharded module. Collective.

        Args:
            module: quantized collection.
            params: module plan from either library.
            env: ranks or devices (default: all ranks).
            device: device (default: the process group's).
            module_fqn: ignored.
        """
        built = self.built(module, module_to_own(params), env, device)
        return ShardedEmbeddingCollection(module, built)
