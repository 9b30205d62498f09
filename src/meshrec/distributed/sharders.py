"""Sharders, which create the sharded module for an unsharded embedding collection from a plan."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import Self

from meshrec.comms.mesh import ShardingEnv, default_env, group_device
from meshrec.comms.wire import AcrossNodes, CommsPrecision
from meshrec.distributed.build import BuildOptions, ModuleParts, build, source_tables
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.modules.embedding_modules import TableCollection
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec
from meshrec.optim.table_names import by_module
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan
from meshrec.tables.optimizer import FusedOptimizer, UpdateMode

M = TypeVar("M", bound=TableCollection)
"""Unsharded collection."""
S = TypeVar("S")
"""Sharded collection."""
FusedParams = OptimizerSpec | Mapping[str, Any] | None


class _Sharder(Generic[M, S]):
    """Base class for sharders; see `EmbeddingBagCollectionSharder` for the arguments."""

    module_type: type[M]
    sharded_type: Callable[[M, ModuleParts], S]

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
        self.optimizer = _optimizer_spec(fused_params)
        self.tables = None if tables is None else frozenset(tables)
        self.precision = precision or CommsPrecision()
        # Checked here, so an unknown format raises when the sharder is created.
        self.wires = self.precision.wires
        self.update = _check_update(update)

    def by_path(
        self, tables: Mapping[str, Sequence[str]], model: Mapping[str, Sequence[str]]
    ) -> dict[str, Self]:
        """Return a copy of this sharder for every module to shard, by module path.

        A copy's options name only tables in that module.

        Args:
            tables: table names in the modules to shard, by module path.
            model: table names in all embedding modules of the model, by module path. The option ``precision``
                may name any of them.

        Raises:
            ValueError: an option names a table which no module has, or which several modules have.
        """
        optimized = None
        if self.tables is not None and tables:
            optimized = by_module(dict.fromkeys(self.tables), tables, "the sharder's tables name")
        wires = by_module(self.wires.tables, model, "the sharder's precision names")
        sharders = {}
        for path in tables:
            # A shallow copy is enough, because the options below are replaced and not changed.
            sharders[path] = copy.copy(self)
            sharders[path].tables = None if optimized is None else frozenset(optimized[path])
            sharders[path].wires = self.wires._replace(tables=wires[path])
        return sharders

    def shard(
        self,
        module: M,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
    ) -> S:
        """Create the sharded module for ``module``. Collective.

        Args:
            module: the unsharded module. The sharded tables copy its weights, or draw initial weights if they
                are on the ``meta`` device.
            plan: the module's plan, equal on all ranks.
            env: the ranks; by default all ranks in the default process group.
            device: device for this rank's tables; by default the process group's device.

        Raises:
            TypeError: this sharder does not shard modules of this type.
            ValueError: the plan or the device does not fit. Nothing has been allocated.
        """
        return self.sharded_type(module, self.built(module, plan, env, device))

    def built(
        self,
        module: TableCollection,
        plan: EmbeddingModuleShardingPlan,
        env: ShardingEnv | None,
        device: torch.device | None,
    ) -> ModuleParts:
        """Build the sharded module parts. Collective.

        Args:
            module: the unsharded module.
            plan: the module's plan.
            env: the ranks; None: all ranks in the default process group.
            device: device for this rank's tables; None: the process group's device.
        """
        if not isinstance(module, self.module_type):
            raise TypeError(
                f"{type(self).__name__} shards {self.module_type.__name__}s, got a {type(module).__name__}. "
                "Use the sharder for its kind."
            )
        env, device = _env_and_device(env, device)
        # A module alone has the path "".
        tables = {"": [config.name for config, _ in module.tables().values()]}
        self.by_path(tables, tables)  # the options must name tables in the module
        fused = module.fused_optimizer if module.is_fused else None
        attached = fused if isinstance(fused, FusedOptimizer) else None
        # A module fused with ``update="on_step"`` keeps this choice when it is sharded.
        is_deferred = attached is not None and not attached.updates_in_backward
        options = BuildOptions(
            optimizer=self.optimizer,
            optimizer_tables=self.tables,
            update=self.update or ("on_step" if is_deferred else "in_backward"),
            # All tables of a fused module have the same seed.
            seed=DEFAULT_SEED if attached is None else next(iter(attached.tables.values())).rule.seed,
            wire=self.wires,
            across_nodes=self.across_nodes,
            bounds_check=module.bounds_check,
            output_dtype=module.output_dtype,
            weighted=isinstance(module, EmbeddingBagCollection) and module.is_weighted(),
            sequence=not isinstance(module, EmbeddingBagCollection),
        )
        return build(source_tables(module), plan, env, device, options)


class EmbeddingBagCollectionSharder(_Sharder[EmbeddingBagCollection, ShardedEmbeddingBagCollection]):
    """Factory of ShardedEmbeddingBagCollection, from an EmbeddingBagCollection and a sharding plan.

    Args:
        fused_params: fused optimizer for tables to which ``apply_optimizer_in_backward`` has not attached
            one. Either a spec such as ``RowWiseAdagrad(lr=0.02)``, or a mapping such as ``{"optimizer":
            RowWiseAdagrad, "lr": 0.02}``. None: these tables get ordinary gradients. In that case, use
            torch's ShardedGradScaler instead of GradScaler, because only ranks with a shard of the table see
            an overflow.
        precision: encodings for embeddings and gradients in messages between ranks, for all tables or by
            table. Tables are named as in ``tables``.
        update: ``"in_backward"``: the backward pass updates fused tables. ``"on_step"``: the backward pass
            collects gradients, and ``fused_optimizer.step()`` updates the tables. None: as set by
            ``meshrec.fuse``, or else in the backward pass.
        tables: names of the tables to which ``fused_params`` applies; None: all tables. If several modules
            have a table with the same name, write ``path.name``.
        across_nodes: what nodes exchange on a mesh with the axis ``node``. ``"sums"``: a partial sum per bag
            and node. ``"rows"``: every distinct row once per node, which is less if a node's ranks look up
            the same IDs.
    """

    module_type = EmbeddingBagCollection
    sharded_type = ShardedEmbeddingBagCollection


class EmbeddingCollectionSharder(_Sharder[EmbeddingCollection, ShardedEmbeddingCollection]):
    """Factory of ShardedEmbeddingCollection; arguments as for EmbeddingBagCollectionSharder."""

    module_type = EmbeddingCollection
    sharded_type = ShardedEmbeddingCollection


def _env_and_device(env: ShardingEnv | None, device: torch.device | None) -> tuple[ShardingEnv, torch.device]:
    """Return the ranks and the device to use, with defaults for None."""
    env = default_env() if env is None else env
    # The device which takes the input.
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


def _check_update(update: UpdateMode | None) -> UpdateMode | None:
    """Return ``update``, or raise ValueError if it is not an allowed value."""
    if update not in ("in_backward", "on_step", None):
        raise ValueError(f"update must be 'in_backward', 'on_step' or None, got {update!r}.")
    return update


def _optimizer_spec(fused_params: FusedParams) -> OptimizerSpec | None:
    """Return the optimizer spec for the argument ``fused_params``; None for None."""
    if fused_params is None or isinstance(fused_params, OptimizerSpec):
        return fused_params
    arguments = dict(fused_params)
    optimizer = arguments.pop("optimizer", None)
    if isinstance(optimizer, OptimizerSpec) and not arguments:
        return optimizer
    if isinstance(optimizer, type):
        from meshrec.optim.torch_optimizers import from_torch

        return from_torch(optimizer, arguments)
    raise ValueError(
        f"fused_params must name an optimizer, got {dict(fused_params)!r}. "
        "Pass RowWiseAdagrad(lr=0.02), or {'optimizer': RowWiseAdagrad, 'lr': 0.02}."
    )
