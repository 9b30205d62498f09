"""TorchRec's sharders."""

import logging
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from meshrec.comms.mesh import ShardingEnv
from meshrec.compat.bridge.optimizers import spec_of
from meshrec.compat.bridge.plans import module_to_core
from meshrec.compat.bridge.qcomms import Registry, checked_registry, precision_of
from meshrec.compat.bridge.sharded import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.distributed import sharders as core
from meshrec.distributed.build import ModuleParts
from meshrec.modules import EmbeddingBagCollection
from meshrec.modules.embedding_modules import TableCollection
from meshrec.optim.in_backward import in_backward_spec
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.plan.sharding_plan import EmbeddingComputeKernel, EmbeddingModuleShardingPlan, ShardingType

_logger = logging.getLogger("meshrec")
M = TypeVar("M", bound=nn.Module)


class _SharderMeta(ABCMeta):
    """Metaclass that makes MeshRec's sharders instances of TorchRec's ``ModuleSharder``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, core.EmbeddingBagCollectionSharder | core.EmbeddingCollectionSharder)


class ModuleSharder(Generic[M], metaclass=_SharderMeta):
    """Type of all sharders, for annotations: ``ModuleSharder[nn.Module]``."""


class TorchRecSharder:
    """Mixin with the methods of TorchRec's sharders: ``shard``, and the methods that planners call.

    Subclasses may override ``sharding_types`` to allow fewer types.
    """

    fused_params: Any
    sharded_type: Callable[[Any, ModuleParts], nn.Module]
    """Class of the sharded module."""

    def shard(
        self,
        module: TableCollection,
        params: Mapping[str, Any],
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Return the sharded module. Collective.

        Args:
            module: collection.
            params: module plan of TorchRec or MeshRec.
            env: ranks or devices (default: all ranks).
            device: device (default: the process group's).
            module_fqn: ignored.
        """
        plan = module_to_core(params)
        return self.sharded_type(module, self.core_sharder(module, plan).built(module, plan, env, device))

    def core_sharder(self, module: TableCollection, plan: EmbeddingModuleShardingPlan) -> Any:
        """Return MeshRec's sharder for a module that is sharded under a plan; by default this object."""
        return self

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the allowed sharding types; all by default."""
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return ``dense`` for data-parallel tables, ``fused`` otherwise."""
        is_dense = sharding_type == ShardingType.DATA_PARALLEL.value
        kernel = EmbeddingComputeKernel.DENSE if is_dense else EmbeddingComputeKernel.FUSED
        return [kernel.value]

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Return the table weights by table name."""
        # Quantized rows are buffers, not parameters.
        quantised = [(name, rows) for name, rows in module.named_buffers() if name.endswith(".weight")]
        weights: list[Any] = [*module.named_parameters(), *quantised]
        return {name.split(".")[-2]: weight for name, weight in weights}


class _FusedSharder:
    """Base class for sharders of trainable tables. The constructor has the same arguments as TorchRec's."""

    fused_params: Any
    optimizer: OptimizerSpec | None
    core_type: type[core.EmbeddingBagCollectionSharder] | type[core.EmbeddingCollectionSharder]
    """MeshRec's sharder class."""

    def __init__(
        self, fused_params: Mapping[str, Any] | None = None, qcomm_codecs_registry: Registry | None = None
    ) -> None:
        super().__init__(spec_of(fused_params or {}))  # type: ignore[call-arg]  # core_type's constructor
        self.fused_params = fused_params
        self.qcomm_codecs_registry = checked_registry(qcomm_codecs_registry)

    def core_sharder(self, module: TableCollection, plan: EmbeddingModuleShardingPlan) -> Any:
        """Return MeshRec's sharder with the fused tables and the wire formats from the plan.

        A fused table is updated in the backward pass. The wire format is the precision in which values are
        sent to other ranks.
        """
        # MeshRec's sharder takes wire formats and tables at construction, and both depend on the plan.
        tables = _fused_tables(module, plan, has_params=self.fused_params is not None)
        pooled = isinstance(module, EmbeddingBagCollection)
        precision = precision_of(self.qcomm_codecs_registry, plan, pooled=pooled)
        return self.core_type(self.optimizer, precision=precision, tables=tables)


class EmbeddingBagCollectionSharder(_FusedSharder, TorchRecSharder, core.EmbeddingBagCollectionSharder):
    """MeshRec's sharder with TorchRec's arguments.

    Args:
        fused_params: optimizer for tables with the compute kernel ``fused`` and without an in-backward
            optimizer, such as ``{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02}``.
            None: FBGEMM's default, SGD with learning rate 0.01.
        qcomm_codecs_registry: codecs from ``get_qcomm_codecs_registry``; None: fp32.
    """

    core_type, sharded_type = core.EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection


class EmbeddingCollectionSharder(_FusedSharder, TorchRecSharder, core.EmbeddingCollectionSharder):
    """MeshRec's sharder with TorchRec's arguments; see ``EmbeddingBagCollectionSharder``."""

    core_type, sharded_type = core.EmbeddingCollectionSharder, ShardedEmbeddingCollection

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)


def _fused_tables(
    module: TableCollection, plan: EmbeddingModuleShardingPlan, *, has_params: bool
) -> list[str]:
    """Return the tables that get the sharder's optimizer.

    Such tables have the compute kernel ``fused`` and no in-backward optimizer. As in TorchRec, other tables
    get ordinary gradients.
    """
    fused, unfused = [], []
    for config, weight in module.tables().values():
        placed = plan.get(config.name)
        # An optimizer that is attached to the weight takes precedence over the sharder's.
        if placed is None or in_backward_spec(weight) is not None:
            continue
        if not has_params and not isinstance(weight, nn.Parameter):
            continue  # quantised rows are buffers: FBGEMM's default optimizer is not for them
        is_fused = placed.compute_kernel is EmbeddingComputeKernel.FUSED
        if is_fused and placed.sharding_type is not ShardingType.DATA_PARALLEL:
            fused.append(config.name)
        else:
            unfused.append(config.name)
    if unfused and has_params:
        _logger.warning(
            "the plan has the tables %s with the compute kernel 'dense': fused_params do not apply to them, "
            "they have ordinary gradients.",
            unfused,
        )
    return fused
