"""DistributedModelParallel: a model with embedding tables split over ranks and a data-parallel dense part."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.comms.agreement import verify_same_plan
from meshrec.comms.collectives import broadcast
from meshrec.comms.mesh import Axis, ShardingEnv, default_env, group_device
from meshrec.distributed.sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from meshrec.modules.embedding_modules import seed_by_path
from meshrec.optim.keyed import CombinedOptimizer
from meshrec.optim.parts import mark_shard
from meshrec.plan.builders import tables_of
from meshrec.plan.checks import verify_plan
from meshrec.plan.sharding_plan import ShardingPlan

if TYPE_CHECKING:
    from meshrec.comms.dense_gradients import DenseGradients

Sharder = EmbeddingBagCollectionSharder | EmbeddingCollectionSharder


class DistributedModelParallel(nn.Module):
    """Model with embedding tables sharded over ranks, and a data-parallel dense part.

    Sharded modules replace the embedding modules inside ``module``, in place. All other modules are the
    *dense part*. Parameters keep their names.

    Embedding modules on ``meta`` are allocated here; each rank allocates only its shards. Dense modules on
    ``meta`` are initialised by their ``reset_parameters``, equally on all ranks. Buffers listed in a module's
    attribute ``constant_buffers`` are not broadcast. They must be equal on all ranks and never change in
    training.

    Args:
        module: the model, with or without embedding modules. Do not use it directly afterwards.
        env: the ranks. None: all ranks in the default process group, or a single process without a group.
        device: device for this rank's parameters. None: the device of the process group.
        plan: placement of the tables on ranks. None: the planner makes a plan.
        sharders: one sharder per type of embedding module, with the optimizer for the tables.
        init_data_parallel: whether to make the dense part data-parallel now. If not, call
            ``init_data_parallel`` later.
        init_parameters: whether to initialise dense parameters on ``meta`` now. If not, call
            ``init_parameters`` later.
        dense: ``"ddp"``, ``"fsdp2"`` (HSDP if there is a ``replicate`` axis), or None, which leaves the dense
            part as it is.
        dense_gradients: data type in which ranks exchange dense gradients, ``"fp32"`` or ``"bf16"``. With
            bf16, CPUs still compute the mean in fp32. bf16 needs ``dense="ddp"`` without a communication
            hook.
        dense_options: further arguments for DistributedDataParallel, or for ``fully_shard``.

    Raises:
        ValueError: the plan does not fit the model, or differs between ranks. Raised on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[Sharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        *,
        dense: Literal["ddp", "fsdp2"] | None = "ddp",
        dense_gradients: Literal["fp32", "bf16"] = "fp32",
        dense_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if dense not in ("ddp", "fsdp2", None):
            raise ValueError(f"dense must be 'ddp', 'fsdp2' or None, got {dense!r}.")
        if dense_gradients not in ("fp32", "bf16"):
            raise ValueError(f"dense_gradients must be 'fp32' or 'bf16', got {dense_gradients!r}.")
        if dense_gradients == "bf16" and dense != "ddp":
            raise ValueError(
                f"dense_gradients='bf16' needs dense='ddp', got dense={dense!r}. FSDP2 takes "
                "dense_options={'mp_policy': MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}."
            )
        # None: ranks exchange dense gradients in fp32.
        self._gradient_dtype = torch.bfloat16 if dense_gradients == "bf16" else None
        self._env = default_env() if env is None else env
        # ``devices``: a single process with several devices. Dense parameters are then on the first.
        first = self._env.devices[0] if self._env.devices else group_device(self._env.world.group)
        self._device = first if device is None else torch.device(device)
        # Used by ``init_data_parallel``, which may run later.
        self._dense, self._dense_options = dense, dict(dense_options or {})
        if sharders is None:
            sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        embedding_modules = _embedding_modules(module, sharders)
        # Replaced by ``reshard``.
        self._plan = self._checked_plan(plan, module, embedding_modules, sharders)
        # Sharded modules by path. The modules stay for the model's whole life; ``reshard`` changes them
        # inside.
        self._sharded: dict[str, Any] = {}
        # Tables with equal names in different modules get different initial rows.
        seed_by_path({path: collection for path, (collection, _) in embedding_modules.items()})  # type: ignore[misc]
        for path, (collection, sharder) in embedding_modules.items():
            module_plan = self._plan.plan[path]
            self._sharded[path] = sharder.shard(collection, module_plan, self._env, self._device)  # type: ignore[arg-type]
            module = _replace_submodule(module, path, self._sharded[path])
        self._plan = _with_actual_kernels(self._plan, self._sharded)
        # The model, or the DistributedDataParallel around it after ``init_data_parallel``. TorchRec has the
        # same attribute name.
        self._dmp_wrapped_module: nn.Module = module
        # Set by ``init_data_parallel``, and never reset.
        self._is_data_parallel = False
        # Set by ``_init_ddp``. The first training step registers it as a communication hook, and sets None.
        self._dense_gradients: DenseGradients | None = None
        self.dense_gradient_averager: DenseGradients | None = None
        """Averages dense gradients over ranks. A pipeline may delay this until after the backward pass.

        None if something else averages them: FSDP2, a user's hook, or DistributedDataParallel without bucket
        views.
        """
        if init_parameters:
            self.init_parameters()
        if init_data_parallel:
            self.init_data_parallel()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Register the hook as late as the first training step, because until then a user may register one.
        state = self._dense_gradients
        if (
            state is not None
            and (state.adds_in_order or state.is_deferred or state.dtype is not None)
            and torch.is_grad_enabled()
        ):
            self._dense_gradients = None
            wrapped = self._dmp_wrapped_module
            # A hook that the user has registered takes precedence.
            if not wrapped._comm_hooks:
                from meshrec.comms.dense_gradients import average_gradients

                state.ends_with_backward = not wrapped.static_graph
                self.register_comm_hook(state, average_gradients)
        return self._dmp_wrapped_module(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The model without the DistributedDataParallel wrapper."""
        wrapped = self._dmp_wrapped_module
        return wrapped.module if isinstance(wrapped, nn.parallel.DistributedDataParallel) else wrapped

    @property
    def env(self) -> ShardingEnv:
        """The ranks over which the tables are sharded and replicated."""
        return self._env

    @property
    def plan(self) -> ShardingPlan:
        """The placement of every table on ranks, and the kernel for its lookups and updates."""
        return self._plan

    @property
    def sharded_modules(self) -> dict[str, Any]:
        """The sharded embedding modules, by path in the model."""
        return self._sharded

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Optimizer for all tables with a fused optimizer; see ``tables.FusedOptimizer``."""
        return CombinedOptimizer([(path, module.fused_optimizer) for path, module in self._sharded.items()])

    def init_parameters(self) -> None:
        """Move dense parameters and buffers to the device, and initialize them if they are on ``meta``.

        Then copy the dense parameters of rank 0 to all ranks. Buffers are not copied. Collective.

        Raises:
            ValueError: a module on ``meta`` has no ``reset_parameters``.
        """
        tables = {tensor for module in self._sharded.values() for tensor in module.parameters()}
        # Module by module, because ``reset_parameters`` initializes only a module's own tensors.
        for child in self.module.modules():
            tensors = [*child.parameters(recurse=False), *child.buffers(recurse=False)]
            if any(tensor.is_meta for tensor in tensors):
                child.to_empty(device=self._device, recurse=False)
                if not hasattr(child, "reset_parameters"):
                    raise ValueError(
                        f"{type(child).__name__} is on meta, but has no reset_parameters() to give it "
                        "values. Build it on a device, or pass init_parameters=False and initialise it "
                        "yourself."
                    )
                child.reset_parameters()  # type: ignore[operator]
            elif tensors and not any(tensor in tables for tensor in tensors):
                child._apply(lambda tensor: tensor.to(self._device), recurse=False)
        # Ranks may have drawn different random values. Tables are left out, because ranks hold different
        # shards.
        for parameter in self.module.parameters():
            if parameter not in tables:
                broadcast(parameter.detach(), self._env.world, "first dense parameters")

    def init_data_parallel(self) -> None:
        """Make the dense part data-parallel. Further calls do nothing."""
        # Without a process group there is a single process, and nothing to average.
        if self._is_data_parallel or self._env.world.group is None or self._dense is None:
            return
        self._is_data_parallel = True
        ignored = self._table_names()
        dense = [p for name, p in self.module.named_parameters() if name not in ignored and p.requires_grad]
        # DistributedDataParallel refuses a model without trained parameters.
        if not dense:
            return
        if self._dense == "ddp":
            self._init_ddp(ignored)
        else:
            self._init_fsdp2()
        if self._env.shard.group is not None:
            for name, parameter in self.module.named_parameters():
                if name not in ignored:
                    # So a rank without tables also takes part when gradient norms are summed over ranks.
                    mark_shard(parameter, self._env.shard.group, is_sharded=False)

    def reshard(self, plan: ShardingPlan) -> None:
        """Move the tables and their optimizer state to another plan, over the network. Collective.

        Call it between steps. Names, values, and hyperparameters in ``fused_optimizer`` stay the same. The
        tables' parameters are new objects without gradients. During the move, a rank holds the old and the
        new shards in memory.

        Args:
            plan: new placement of the tables on ranks.

        Raises:
            ValueError: the plan does not fit the model or differs between ranks, or a torch optimizer holds
                parameters of the tables. Raised on every rank before any table moves; the old plan stays.
        """
        from meshrec.distributed.reshard import reshard_tables

        if self._env.devices:
            raise ValueError(
                "tables over several devices of one process cannot move. Shard the unsharded model again "
                "with the other plan."
            )
        # Check on all ranks before anything moves.
        verify_same_plan(plan, self._env.world.group)
        tables = {path: tables_of(module) for path, module in self._sharded.items()}
        verify_plan(plan, tables, world_size=self._env.shard.size)
        built = reshard_tables(
            {path: module.built for path, module in self._sharded.items()}, plan, self._env
        )
        for path, module in self._sharded.items():
            module.rebuild(built[path])
        self._plan = _with_actual_kernels(plan, self._sharded)

    def with_sharded(self, module: nn.Module, sharded: Mapping[str, Any]) -> "DistributedModelParallel":
        """Return a DistributedModelParallel around another model that is already sharded by the same plan.

        The result is for inference: the dense part is not data-parallel.

        Args:
            module: the other model, which contains sharded embedding modules.
            sharded: these sharded embedding modules, by path.
        """
        # Without the constructor, which would shard the model.
        model = DistributedModelParallel.__new__(DistributedModelParallel)
        nn.Module.__init__(model)
        model._env, model._device, model._plan = (
            self._env,
            self._device,
            _with_actual_kernels(self._plan, sharded),
        )
        model._dense, model._dense_options = None, {}
        model._sharded, model._dmp_wrapped_module = dict(sharded), module
        model._is_data_parallel = False
        model._gradient_dtype = None
        model._dense_gradients = model.dense_gradient_averager = None
        return model

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Allow copies and pickles only in a single process, which has the whole model.

        Raises:
            ValueError: the model is split over several ranks.
        """
        if self._env.world.group is not None:
            raise ValueError(
                f"this DistributedModelParallel holds a part of a model, as rank {self._env.world.rank} of "
                f"{self._env.world.size}, and can be neither copied nor pickled. Save it with "
                "meshrec.checkpoint.save, and load the checkpoint into another model."
            )
        return super().__reduce_ex__(protocol)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a communication hook with DistributedDataParallel, such as one to compress gradients.

        Call this method before the first training step. Without a hook, CPU ranks on the same host average
        gradients with ``dense_gradients.average_gradients``.

        Args:
            state: passed to the hook.
            hook: see ``DistributedDataParallel.register_comm_hook``.

        Raises:
            ValueError: the dense part does not use DistributedDataParallel, or ``dense_gradients`` is bf16,
                which your hook would replace.
        """
        from meshrec.comms.dense_gradients import average_gradients

        if self._gradient_dtype is not None and hook is not average_gradients:
            raise ValueError(
                "dense_gradients is 'bf16', and this communication hook would replace its exchange. Leave "
                "dense_gradients out, or the hook."
            )
        wrapped = self._dmp_wrapped_module
        if not isinstance(wrapped, nn.parallel.DistributedDataParallel):
            raise ValueError(f"communication hooks need dense='ddp', got dense={self._dense!r}.")
        wrapped.register_comm_hook(state, hook)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of the dense part in a ``with`` block, without averaging them over ranks.

        The first backward pass after the block averages their sum. Tables are not affected: every backward
        pass exchanges their gradients, and applies or accumulates them, as always.
        """
        wrapped: Any = self._dmp_wrapped_module
        # FSDP2 has a switch instead of a context manager.
        if self._dense == "fsdp2" and self._is_data_parallel:
            wrapped.set_requires_gradient_sync(False)
            try:
                yield
            finally:
                wrapped.set_requires_gradient_sync(True)
        else:
            is_ddp = isinstance(wrapped, nn.parallel.DistributedDataParallel)
            with wrapped.no_sync() if is_ddp else nullcontext():
                yield

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell torch.distributed.checkpoint.state_dict how parameter names differ from attribute paths.

        The result maps the first part of a parameter name to an attribute of this object. Torch follows the
        attribute before it looks up the first part. The attributes do not appear in parameter names. The key
        "" matches no name; its value only lists another attribute which does not appear in names.
        """
        model = self.module
        names = chain(model._modules, model._parameters, model._buffers)
        return {"": "_dmp_wrapped_module", **dict.fromkeys(names, "module")}

    def sparse_grad_parameter_names(
        self, destination: list[str] | None = None, prefix: str = ""
    ) -> list[str]:
        """Return the names of parameters with sparse gradients. No parameter has sparse gradients.

        Args:
            destination: list to return unchanged; None: return a new, empty list.
            prefix: unused.
        """
        return [] if destination is None else destination

    @override
    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters on this rank, under the names of the unsharded model.

        A table has a single parameter, even if this rank holds several parts of the table; see
        ``tables.Packing``.
        """
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    @override
    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers under the names of the unsharded model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return tables and dense values under the names of the unsharded model.

        Split tables are DTensors.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a result of ``state_dict``. Values for tables may also be plain tensors with whole tables."""
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _checked_plan(
        self,
        plan: ShardingPlan | None,
        module: nn.Module,
        embedding_modules: Mapping[str, tuple[nn.Module, Sharder]],
        sharders: Sequence[Sharder],
    ) -> ShardingPlan:
        """Return the plan to use, after checking it on all ranks. Collective."""
        # All ranks pass a plan or none does; the planner is collective.
        if plan is None:
            plan = self._make_plan(module, sharders) if embedding_modules else ShardingPlan({})
        verify_same_plan(plan, self._env.world.group)
        tables = {path: tables_of(collection) for path, (collection, _) in embedding_modules.items()}
        verify_plan(plan, tables, world_size=self._env.shard.size)
        return plan

    def _make_plan(self, module: nn.Module, sharders: Sequence[Sharder]) -> ShardingPlan:
        """Run the planner for this model and these ranks. Collective."""
        # Imported here, because a program with a plan needs no planner.
        from meshrec.planner import EmbeddingShardingPlanner, Topology

        topology = Topology(
            world_size=self._env.shard.size,
            compute_device=self._device.type,
            local_world_size=self._env.local_size,
        )
        planner = EmbeddingShardingPlanner(topology=topology)
        group = self._env.world.group
        # This process trains alone, even if a default process group exists.
        if group is None:
            return planner.plan(module, list(sharders))
        return planner.collective_plan(module, list(sharders), group)

    def _table_names(self) -> set[str]:
        """Return the names of all parameters and buffers in sharded embedding modules."""
        return {
            f"{path}.{name}" if path else name
            for path, module in self._sharded.items()
            for name, _ in (*module.named_parameters(), *module.named_buffers())
        }

    def _init_ddp(self, ignored: set[str]) -> None:
        """Wrap the model in DistributedDataParallel."""
        from meshrec.comms.dense_gradients import DenseGradients

        parallel = nn.parallel.DistributedDataParallel
        # DistributedDataParallel would broadcast constant buffers in each training step.
        ignored = ignored | _constant_buffers(self._dmp_wrapped_module)
        parallel._set_params_and_buffers_to_ignore_for_model(self._dmp_wrapped_module, ignored)
        # With bucket views, ``grad`` is a view into the memory that is exchanged: no second copy.
        options: dict[str, Any] = {"process_group": self._env.world.group, "gradient_as_bucket_view": True}
        if self._device.type == "cuda":
            options["device_ids"] = [self._device]
        wrapped = parallel(self._dmp_wrapped_module, **{**options, **self._dense_options})
        wrapped._fqn_modifiers = _ddp_fqn_modifiers  # type: ignore[assignment]
        self._dmp_wrapped_module = wrapped
        group = wrapped.process_group
        axis = Axis(size=group.size(), rank=group.rank(), group=group)
        self._dense_gradients = DenseGradients.for_axis(axis, self._device, dtype=self._gradient_dtype)
        # Late averaging changes the buckets after the backward pass, so ``grad`` must be a view into them.
        if wrapped.gradient_as_bucket_view:
            self.dense_gradient_averager = self._dense_gradients

    def _init_fsdp2(self) -> None:
        """Shard the dense parameters with FSDP2, or HSDP if there is a replicate axis."""
        from torch.distributed.fsdp import fully_shard

        # FSDP2 must not shard the tables again.
        tables = {tensor for module in self._sharded.values() for tensor in module.parameters()}
        fully_shard(
            self._dmp_wrapped_module, mesh=self._env.dense_mesh, ignored_params=tables, **self._dense_options
        )


def _constant_buffers(model: nn.Module) -> set[str]:
    """Return the full names of all buffers listed in a module's attribute ``constant_buffers``."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in getattr(module, "constant_buffers", ())
    }


def _ddp_fqn_modifiers() -> dict[str, str]:
    """Return a result of ``_fqn_modifiers`` for DistributedDataParallel.

    Parameter names do not contain the child ``module``. See `DistributedModelParallel._fqn_modifiers`.
    """
    return {"": "module"}


def _embedding_modules(
    module: nn.Module, sharders: Sequence[Sharder]
) -> dict[str, tuple[nn.Module, Sharder]]:
    """Return the embedding modules in a model and the sharder for each, by path.

    Raises:
        ValueError: a sharder has an option for an unknown table, or for a name that several modules have.
    """
    modules: dict[str, tuple[nn.Module, Sharder]] = {
        path: (collection, sharder)
        for path, collection in module.named_modules()
        for sharder in sharders
        if isinstance(collection, sharder.module_type)
    }
    # A sharder with options per table may give different sharders for different modules.
    names = {path: list(tables_of(collection)) for path, (collection, _) in modules.items()}
    for sharder in sharders:
        tables = {path: names[path] for path, (_, by) in modules.items() if by is sharder}
        for path, sharder_of_module in sharder.by_path(tables, names).items():
            modules[path] = modules[path][0], sharder_of_module
    return modules


def _with_actual_kernels(plan: ShardingPlan, sharded: Mapping[str, Any]) -> ShardingPlan:
    """Return the plan with the kernels that the sharded modules actually use.

    The given plan may leave the kernels open, or name others.
    """
    return replace(plan, plan={path: module.plan for path, module in sharded.items()})


def _replace_submodule(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Replace the submodule at a path in place, and return the root. The empty path stands for the root."""
    if not path:
        return module
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
    return root


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the model inside DistributedModelParallel and DistributedDataParallel wrappers, if any."""
    while isinstance(module, DistributedModelParallel | nn.parallel.DistributedDataParallel):
        module = module.module
    return module
