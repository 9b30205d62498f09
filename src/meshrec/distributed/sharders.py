"""The sharders, which make sharded modules from unsharded ones."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from meshrec.comms.mesh import ShardingEnv, default_env, group_device
from meshrec.comms.wire import AcrossNodes, CommsPrecision
from meshrec.distributed.build import BuildOptions, ModuleParts, build, source_tables
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.modules.embedding_modules import TableCollection
from meshrec.optim.from_torch import from_torch
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan
from meshrec.tables.optimizer import FusedOptimizer, UpdateMode

FusedParams = OptimizerSpec | Mapping[str, Any] | None


class _Sharder:
    """The common part of the sharders of both kinds of modules."""

    def __init__(
        self,
        fused_params: FusedParams = None,
        *,
        precision: CommsPrecision | None = None,
        update: UpdateMode | None = None,
        tables: Collection[str] | None = None,
        across_nodes: AcrossNodes = "sums",
    ) -> None:
        if across_nodes not in ("sums", "rows"):
            raise ValueError(f"across_nodes must be 'sums' or 'rows', got {across_nodes!r}.")
        self.across_nodes = across_nodes
        self.optimizer = _spec(fused_params)
        self.tables = None if tables is None else frozenset(tables)
        self.precision = precision or CommsPrecision()
        self.wires = self.precision.wires
        self.update = _checked(update)

    def built(
        self,
        module: TableCollection,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv | None,
        device: torch.device | None,
        **kind: bool,
    ) -> ModuleParts:
        """Make the parts of a sharded module. ``kind`` is ``weighted`` or ``sequence`` of `BuildOptions`.
        Collective.
        """
        env, device = _place(env, device)
        self._check_tables(module)
        fused = module.fused_optimizer if module.is_fused else None
        attached = fused if isinstance(fused, FusedOptimizer) else None
        is_deferred = attached is not None and not attached.updates_in_backward
        options = BuildOptions(
            optimizer=self.optimizer,
            optimizer_tables=self.tables,
            update=self.update or ("on_step" if is_deferred else "in_backward"),
            seed=DEFAULT_SEED if attached is None else next(iter(attached.tables.values())).rule.seed,
            wire=self.wires,
            across_nodes=self.across_nodes,
            bounds_check=module.bounds_check,
            output_dtype=module.output_dtype,
            **kind,
        )
        return build(source_tables(module), plan, env, device, options)

    def _check_tables(self, module: TableCollection) -> None:
        names = [config.name for config, _ in module.tables().values()]
        if unknown := sorted((self.tables or frozenset()).difference(names)):
            raise ValueError(
                f"the sharder's optimizer is for a table {unknown[0]!r}; the module has {names}. Name tables "
                "of the module, or leave tables out: all."
            )


class EmbeddingBagCollectionSharder(_Sharder):
    """The sharder of EmbeddingBagCollection: it makes a ShardedEmbeddingBagCollection.

    Args:
        fused_params: the optimizer of the tables without their own (``apply_optimizer_in_backward``): a spec,
            or a mapping with ``"optimizer"`` (a spec, or a class with its arguments beside it, such as
            ``{"optimizer": RowWiseAdagrad, "lr": 0.02}``). None: these tables get ordinary gradients. A
            GradScaler for them must be torch's ShardedGradScaler, because an overflow shows only on the ranks
            that hold the table.
        precision: the wire formats of embeddings and their gradients, for all tables or by table.
        update: ``"in_backward"``: the backward pass updates tables with an optimizer. ``"on_step"``: it
            collects their gradients for ``fused_optimizer.step()``. None: as the module was fused; in the
            backward pass if it was not.
        tables: the tables that ``fused_params`` is for (default: all).
        across_nodes: what crosses the network between nodes of a mesh with the axis ``node``: ``"sums"``,
            a row for each bag and node, or ``"rows"``, each distinct row of a node once, which is less
            where the ranks of a node share IDs.
    """

    module_type = EmbeddingBagCollection

    def shard(
        self,
        module: EmbeddingBagCollection,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """Return the sharded module, with the weights of ``module``, or new ones if it is on ``meta``.
        Collective.

        Args:
            module: the unsharded module.
            plan: the plan of its tables.
            env: the ranks (default: all of the default process group).
            device: device of this rank's tables (default: the device of the process group).

        Raises:
            ValueError: the plan or the device does not fit. It is raised before anything is allocated.
        """
        built = self.built(module, plan, env, device, weighted=module.is_weighted())
        return ShardedEmbeddingBagCollection(module, built)


class EmbeddingCollectionSharder(_Sharder):
    """Shards EmbeddingCollections; arguments as for EmbeddingBagCollectionSharder."""

    module_type = EmbeddingCollection

    def shard(
        self,
        module: EmbeddingCollection,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
    ) -> ShardedEmbeddingCollection:
        """Return the sharded module; see ``EmbeddingBagCollectionSharder.shard``."""
        return ShardedEmbeddingCollection(module, self.built(module, plan, env, device, sequence=True))


def _place(env: ShardingEnv | None, device: torch.device | None) -> tuple[ShardingEnv, torch.device]:
    env = default_env() if env is None else env
    needed = env.devices[0] if env.devices else group_device(env.world.group)
    if device is None:
        return env, needed
    if env.devices and torch.device(device) != needed:
        raise ValueError(
            f"device {device} is not the first of ShardingEnv.from_local, {needed}, which takes the input. "
            "Leave device out."
        )
    if env.world.group is not None and needed.type == "cuda" != torch.device(device).type:
        raise ValueError(
            f"device {device} does not fit the process group, whose backend nccl takes CUDA tensors only. "
            "Use a cuda device, or a process group of the backend gloo, which takes both."
        )
    return env, torch.device(device)


def _checked(update: UpdateMode | None) -> UpdateMode | None:
    if update not in ("in_backward", "on_step", None):
        raise ValueError(f"update must be 'in_backward', 'on_step' or None, got {update!r}.")
    return update


def _spec(fused_params: FusedParams) -> OptimizerSpec | None:
    if fused_params is None or isinstance(fused_params, OptimizerSpec):
        return fused_params
    rest = dict(fused_params)
    optimizer = rest.pop("optimizer", None)
    if isinstance(optimizer, OptimizerSpec) and not rest:
        return optimizer
    if isinstance(optimizer, type):
        return from_torch(optimizer, rest)
    raise ValueError(
        f"fused_params must name an optimizer, got {dict(fused_params)!r}. "
        "Pass RowWiseAdagrad(lr=0.02), or {'optimizer': RowWiseAdagrad, 'lr': 0.02}."
    )
