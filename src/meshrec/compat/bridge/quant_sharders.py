"""TorchRec's sharders for quantized collections."""

from collections.abc import Mapping
from typing import Any

from meshrec.compat.bridge.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.compat.bridge.sharders import TorchRecSharder
from meshrec.distributed import sharders as core
from meshrec.plan.sharding_plan import EmbeddingComputeKernel


class _QuantSharder:
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


class QuantEmbeddingBagCollectionSharder(_QuantSharder, TorchRecSharder, core.EmbeddingBagCollectionSharder):
    """MeshRec's sharder for quantized collections.

    Args:
        fused_params: TorchRec's kernel options, which are ignored. They must not contain an optimizer.
        shardable_params: must be None, because all tables are sharded.
    """

    sharded_type = ShardedEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(_QuantSharder, TorchRecSharder, core.EmbeddingCollectionSharder):
    """Sharder for quantized collections without pooling; see ``QuantEmbeddingBagCollectionSharder``."""

    sharded_type = ShardedEmbeddingCollection
