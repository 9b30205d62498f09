"""DistributedModelParallel and single-module sharding with TorchRec's arguments."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from typing_extensions import override

from meshrec import model_parallel as core
from meshrec.comms.mesh import ShardingEnv, default_env, group_device
from meshrec.compat.bridge.keyed import CombinedOptimizer
from meshrec.compat.bridge.planner import EmbeddingShardingPlanner
from meshrec.compat.bridge.plans import EmbeddingModuleShardingPlan, ShardingPlan, from_core, to_core
from meshrec.compat.bridge.sharded import combined_optimizer
from meshrec.compat.bridge.sharding_plan import (
    apply_to_all,
    construct_module_sharding_plan,
    get_default_sharders,
    get_module_to_default_sharders,
)
from meshrec.optim.in_backward import accept_fused_parameters
from meshrec.plan.sharding_plan import ShardingPlan as OwnPlan
from meshrec.planner import types

# For the whole process: TorchRec programs pass all parameters, fused tables included, to the dense optimizer.
accept_fused_parameters()
# DDP communication hooks by the name of the gradient's dtype on the wire.
_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}

# torch has renamed this argument, and the old name warns.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DataParallelWrapper(ABC):
    """Strategy that makes the dense part of a model data-parallel, for example with DistributedDataParallel.

    Subclasses implement ``wrap``, which replaces the attribute ``_dmp_wrapped_module`` of the model.
    """

    @abstractmethod
    def wrap(self, dmp: "DistributedModelParallel", env: ShardingEnv, device: torch.device) -> None:
        """Replace ``dmp._dmp_wrapped_module`` by a data-parallel module.

        Args:
            dmp: model to change.
            env: ranks over which the model is data-parallel and sharded.
            device: device of the dense part.
        """


class DefaultDataParallelWrapper(DataParallelWrapper):
    """DistributedDataParallel around the dense part.

    Args:
        bucket_cap_mb: DistributedDataParallel argument.
        static_graph: DistributedDataParallel argument.
        find_unused_parameters: DistributedDataParallel argument.
        allreduce_comm_precision: dtype for sending gradients, ``"fp16"`` or ``"bf16"``; None: unchanged.
        params_to_ignore: must be empty.
        ddp_kwargs: further DistributedDataParallel arguments.
    """

    def __init__(
        self,
        bucket_cap_mb: int = 25,
        static_graph: bool = True,
        find_unused_parameters: bool = False,
        allreduce_comm_precision: str | None = None,
        params_to_ignore: Sequence[str] | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if params_to_ignore:
            raise ValueError(
                "params_to_ignore cannot be passed on. Set requires_grad=False on them, or pass "
                "init_data_parallel=False and wrap the module yourself."
            )
        if allreduce_comm_precision not in (None, *_HOOKS):
            raise ValueError(
                f"allreduce_comm_precision must be one of {sorted(_HOOKS)}, got {allreduce_comm_precision!r}."
            )
        self._precision = allreduce_comm_precision
        self.options: dict[str, Any] = {
            "gradient_as_bucket_view": True,
            # TorchRec's default: no buffer broadcast per forward pass.
            _SYNC_BUFFERS: False,
            "static_graph": static_graph,
            "find_unused_parameters": find_unused_parameters,
            "bucket_cap_mb": bucket_cap_mb,
            **(ddp_kwargs or {}),
        }

    @override
    def wrap(self, dmp: "DistributedModelParallel", env: ShardingEnv, device: torch.device) -> None:
        """Make the dense part data-parallel. Repeated calls do nothing."""
        # Not dmp.init_data_parallel, which would call this method again.
        core.DistributedModelParallel.init_data_parallel(dmp)
        if self._precision and isinstance(dmp._dmp_wrapped_module, nn.parallel.DistributedDataParallel):
            dmp.register_comm_hook(None, _HOOKS[self._precision])


class DistributedModelParallel(core.DistributedModelParallel):
    """MeshRec's DistributedModelParallel with TorchRec's arguments. ``plan`` accepts both libraries' plans.

    Args:
        module, env, device, plan, sharders, init_data_parallel, init_parameters: as for MeshRec's.
        data_parallel_wrapper: data-parallel strategy for the dense part.
        model_tracker_configs: must be None.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: Any = None,
        sharders: Sequence[Any] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        model_tracker_configs: object | None = None,
    ) -> None:
        if model_tracker_configs is not None:
            raise ValueError("MeshRec has no model trackers. Leave model_tracker_configs out.")
        wrapper = DefaultDataParallelWrapper() if data_parallel_wrapper is None else data_parallel_wrapper
        options = wrapper.options if isinstance(wrapper, DefaultDataParallelWrapper) else {}
        env = default_env() if env is None else env
        sharders = get_default_sharders() if sharders is None else sharders
        super().__init__(
            module,
            env,
            device,
            _planned(module, env, device, sharders) if plan is None else to_core(plan),
            sharders,
            init_data_parallel=False,
            init_parameters=init_parameters,
            dense_options=options,
        )
        self._wrapper = wrapper
        self.device, self.sharders = self._device, list(sharders)
        # Last, because it reads self._wrapper.
        if init_data_parallel:
            self.init_data_parallel()

    def init_data_parallel(self) -> None:
        if not isinstance(self._dmp_wrapped_module, nn.parallel.DistributedDataParallel):
            self._wrapper.wrap(self, self._env, self._device)

    @property
    def plan(self) -> ShardingPlan:  # type: ignore[override]
        shard = self._env.shard
        return from_core(self._plan, world_size=shard.size, local_size=self._env.local_size)

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        return combined_optimizer(self.sharded_modules)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return MeshRec's state dict, which ``torch.save`` then writes rank by rank."""
        if self._env.shard.group is not None:
            from meshrec.compat.bridge.state_dicts import pickle_by_rank  # torch's DTensor is slow to import

            pickle_by_rank()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], prefix: str = "", strict: bool = True
    ) -> Any:
        """Load a result of ``state_dict``, or plain full-table tensors.

        Args:
            state_dict: tensors by name.
            prefix: must be empty.
            strict: whether names must match exactly.

        Raises:
            ValueError: ``prefix`` is not empty.
        """
        if prefix:
            raise ValueError(f"prefix must be empty, got {prefix!r}. Strip it from the names.")
        return super().load_state_dict(state_dict, strict=strict)

    def bare_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the same pairs as ``named_parameters``."""
        return self.named_parameters(prefix, recurse)


def shard(
    module: nn.Module,
    plan: Any,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    sharder: Any = None,
) -> nn.Module:
    """Return the sharded form of an embedding module. Collective.

    Args:
        module: embedding module.
        plan: module plan, a generator for all tables, or a generator per table.
        env: ranks (default: all).
        device: device (default: the process group's).
        sharder: sharder (default: by module type).

    Raises:
        ValueError: no sharder handles this module.
    """
    # Subclasses of a known module type use its sharder.
    by_type = get_module_to_default_sharders()
    sharder = sharder or next((by_type[kind] for kind in type(module).__mro__ if kind in by_type), None)
    if sharder is None:
        raise ValueError(
            f"{type(module).__name__} is not an embedding module, so it cannot be sharded by itself. "
            "shard_modules shards what is inside it."
        )
    env = default_env() if env is None else env
    if not callable(plan) and not isinstance(plan, Mapping):
        raise TypeError(
            "the plan of one module is an EmbeddingModuleShardingPlan or made of generators, got a "
            f"{type(plan).__name__}. Take plan.plan[path] of a model's plan."
        )
    if not isinstance(plan, EmbeddingModuleShardingPlan):
        # A single generator is for all tables.
        generators = apply_to_all(module, plan, sharder) if callable(plan) else plan
        plan = construct_module_sharding_plan(
            module, generators, sharder, env.local_size, env.shard.size, group_device(env.world.group).type
        )
    return sharder.shard(module, plan, env, device)  # type: ignore[no-any-return]


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: Any = None,
    sharders: Sequence[Any] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Shard all embedding modules inside ``module``, in place. Collective.

    Args:
        module: model to change. Dense modules are not wrapped.
        env: ranks (default: all).
        device: device (default: the process group's).
        plan: plan from either library; None: call the planner.
        sharders: sharders (default: all kinds).
        init_params: move the dense part to the device, initialize meta tensors, and copy rank 0's
            values to all ranks; False leaves the dense part as it is.
    """
    env = default_env() if env is None else env
    sharders = get_default_sharders() if sharders is None else sharders
    return core.DistributedModelParallel(
        module,
        env,
        device,
        _planned(module, env, device, sharders) if plan is None else to_core(plan),
        sharders,
        init_data_parallel=False,
        init_parameters=init_params,
    ).module


# Private in TorchRec, but imported by programs.
_shard_modules = shard_modules


def _planned(
    module: nn.Module, env: ShardingEnv, device: torch.device | None, sharders: Sequence[Any]
) -> OwnPlan:
    """Plan a model's tables for these ranks with the bridge's planner. Collective."""
    kind = torch.device(device).type if device is not None else group_device(env.world.group).type
    planner = EmbeddingShardingPlanner(
        topology=types.Topology(
            world_size=env.shard.size, compute_device=kind, local_world_size=env.local_size
        )
    )
    if env.world.group is None:  # A local environment plans alone, even if a process group exists.
        return to_core(planner.plan(module, sharders))
    return to_core(planner.collective_plan(module, sharders, env.world.group))
