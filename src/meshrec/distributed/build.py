"""Build the sharded module parts from an unsharded module, a plan, and the ranks.

`build` is used to shard a module, and `assemble` also to reshard it under another plan. Terms such as use,
rectangle and route are explained in [Note: how a plan becomes routes] in ``routing.py``.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.comms.agreement import together, verify_same_plan
from meshrec.comms.collectives import broadcast, gather_objects
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.comms.wire import FULL_WIRES, AcrossNodes, TableWires
from meshrec.distributed.admission import check_hashed, create_admissions
from meshrec.distributed.input_dist import InputDist
from meshrec.distributed.routing import RoutedTable, Routing, compile_plan
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.modules import BaseEmbeddingConfig, BoundsCheckMode, DataType, PoolingType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import storage_of
from meshrec.ops.memory import keep_freed_memory
from meshrec.optim.in_backward import in_backward_spec, mark_in_backward, mark_sharded
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec, StateSlot
from meshrec.optim.parts import mark_shard
from meshrec.plan.checks import verify_module_plan
from meshrec.plan.sharding_plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ShardingPlan,
    TableSize,
)
from meshrec.tables.hashed.admission_eviction import AdmissionEviction
from meshrec.tables.hashed.table import HashedTable
from meshrec.tables.initial import initial_rows
from meshrec.tables.local_shards import LocalShards, allocate
from meshrec.tables.module import TableModule, TableSplit
from meshrec.tables.optimizer import (
    DeferredUpdate,
    FusedOptimizer,
    FusedTable,
    KeyOrderedState,
    UpdateMode,
    UpdateRule,
    rules_of,
)
from meshrec.tables.placeholder import placeholder
from meshrec.tables.storage import RowStorage, slice_parts
from meshrec.tables.table import Rectangle, RowBlock, Span, initialize_rows


class SourceTable(NamedTuple):
    """A table in the unsharded module, from which shards are filled."""

    table: RoutedTable
    """Name, size and features."""
    config: BaseEmbeddingConfig
    weight: nn.Parameter
    storage: RowStorage
    """Row format, such as fp16 or int8, and row location, such as memory or a file."""
    spec: OptimizerSpec | None
    """Fused optimizer attached to ``weight``; None if there is none."""
    state: dict[str, Any]
    """State of the optimizer created by ``meshrec.fuse``, by slot name; empty if the module is not fused."""
    rows: HashedTable | None = None
    """The table's rows if it has hashed keys; None if ``weight`` contains the rows."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options for building a sharded module. They come from the sharder and from the unsharded module.

    Args:
        optimizer: fused optimizer for tables without an attached optimizer. None: these tables get ordinary
            gradients.
        optimizer_tables: names of the tables to which ``optimizer`` applies; None: all tables.
        update: whether fused tables are updated in the backward pass or by ``fused_optimizer.step()``.
        seed: seed for stochastic rounding in fp16 and bf16 tables.
        wire: wire formats, the encodings for embeddings and gradients in messages between ranks, by table.
        across_nodes: what nodes exchange: a partial sum per bag (``"sums"``), or every distinct row once
            (``"rows"``).
        sequence: whether the module returns a row per ID instead of a pooled row per bag.
        weighted: whether IDs have per-sample weights.
        bounds_check: what to do with IDs outside the table.
        output_dtype: dtype of the returned embeddings; None: fp32.
    """

    optimizer: OptimizerSpec | None = None
    optimizer_tables: frozenset[str] | None = None
    update: UpdateMode = "in_backward"
    seed: int = DEFAULT_SEED
    wire: TableWires = FULL_WIRES
    across_nodes: AcrossNodes = "sums"
    sequence: bool = False
    weighted: bool = False
    bounds_check: BoundsCheckMode = BoundsCheckMode.ERROR
    output_dtype: DataType | None = None


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Everything which determines a sharded module, except weights and optimizer state.

    All fields are equal on all ranks, except ``device`` and this rank's position in ``env``.
    """

    plan: EmbeddingModuleShardingPlan
    routing: Routing
    """The plan, compiled by `compile_plan`."""
    rules: list[UpdateRule | None]
    """Update rule (optimizer and hyperparameters) by table number; None: the table gets a gradient."""
    storages: list[RowStorage]
    """Row storage by table number."""
    env: ShardingEnv
    device: torch.device
    options: BuildOptions


@dataclass(frozen=True, kw_only=True)
class Contents:
    """A sharded module's weights and optimizer state on this rank, already filled."""

    split: list[LocalShards]
    """Shards of the tables that are split over ranks. Usually the list has a single entry, this rank's
    shards. With ``env.devices``, a process has the shards of all ranks, and the list has an entry per rank.
    """
    local: LocalShards
    """This rank's copies of the data-parallel tables."""
    steps: Sequence[int]
    """Update count so far, by table number."""
    trained: Sequence[bool]
    """Whether a table is trained (not frozen), by table number."""


@dataclass(frozen=True, kw_only=True)
class ModuleParts(Blueprint):
    """All parts of a sharded module, as returned by `build` and `assemble`."""

    tables: ShardedTables
    shards: dict[str, TableModule]
    """Module with this rank's shards, by table name. Becomes a submodule of the sharded module."""
    names: list[str]
    """Name in the output for every use, where a use is a feature looked up in a table. The name is the
    feature, or feature@table if several tables read the feature.
    """
    dims: list[int]
    """Number of output columns for every use."""
    fused: dict[int, FusedTable]
    """Tables with a fused optimizer, by table number."""

    def fused_optimizer(self, prefix: str) -> FusedOptimizer:
        """Create the optimizer for all fused tables."""
        return FusedOptimizer(self.named_fused(prefix), self.deferred())

    def named_fused(self, prefix: str) -> dict[str, FusedTable]:
        """Return the fused tables by parameter name, ``PREFIX.TABLE.weight``."""
        tables = self.routing.tables
        return {f"{prefix}.{tables[t].name}.weight": fused for t, fused in self.fused.items()}

    def deferred(self) -> DeferredUpdate | None:
        """Return the update function and the gradient signal for ``fused_optimizer.step()``.

        The signal is a parameter whose gradient tells all ranks whether there is a finite gradient to apply;
        see `GradientSignal`. Return None if the backward pass updates all tables.
        """
        collected = self.tables.collected
        return None if collected is None else DeferredUpdate(self.tables.step, collected.signal)

    def steps(self) -> list[int]:
        """Return the number of updates so far, by table number; 0 without a fused optimizer."""
        return [int(self.fused[t].state["step"]) if t in self.fused else 0 for t in range(len(self.rules))]


def source_tables(module: TableCollection) -> list[SourceTable]:
    """List the tables in an unsharded module. Weights may be on the ``meta`` device."""
    # After meshrec.fuse, the optimizer has state which the sharded tables take over.
    fused = module.fused_optimizer if module.is_fused else None
    state = {} if fused is None else fused.state
    hashed = module.hashed_tables()
    sources = []
    for config, weight in module.tables().values():
        mean = getattr(config, "pooling", None) is PoolingType.MEAN
        table = RoutedTable(
            config.name,
            config.num_embeddings,
            config.embedding_dim,
            tuple(config.feature_names),
            mean,
            None if config.keys is None else config.keys.seed,
        )
        storage, spec = storage_of(config, weight), in_backward_spec(weight)
        rows = hashed.get(config.name)
        sources.append(SourceTable(table, config, weight, storage, spec, state.get(weight, {}), rows))
    return sources


def build(
    sources: Sequence[SourceTable],
    plan: EmbeddingModuleShardingPlan,
    env: ShardingEnv,
    device: torch.device,
    options: BuildOptions,
) -> ModuleParts:
    """Build a sharded module: check the plan, allocate this rank's shards, and fill them. Collective.

    On CPUs, the process no longer returns freed memory to the operating system; see ``keep_freed_memory``.

    Args:
        sources: tables in the unsharded module.
        plan: the module's plan, equal on all ranks.
        env: the ranks.
        device: device for this rank's shards.
        options: options from the sharder and from the unsharded module.

    Raises:
        ValueError: the plan does not fit the module, or differs between ranks. Raised on every rank, before
            any allocation. If an allocation fails, every rank raises as well.
    """
    # First, because the checks below pass or fail alike on all ranks only if the plans are equal.
    verify_same_plan(ShardingPlan({"": plan}), env.world.group)
    # Row counts and columns, against which the plan is checked.
    sizes = {s.table.name: TableSize(s.table.num_rows, s.table.dim) for s in sources}
    verify_module_plan(plan, sizes, world_size=env.shard.size)
    # Rank 0's seed on all ranks, so initial rows do not depend on the sharding.
    seed = gather_objects(torch.initial_seed(), env.world, "seed")[0]
    # An allocation may fail on a single rank only. All ranks must then stop.
    with together(env.world, "allocation"):
        # Checks come first, so that nothing is allocated if one of them fails.
        _check_untrained(sources, options)
        check_cuts({source.table.name: source.storage for source in sources}, plan)
        rules = _rules(sources, options)
        _check_external_rows(sources, rules)
        storages = [source.storage for source in sources]
        routing = compile_routing([source.table for source in sources], plan, rules, storages, env)
        check_hashed(routing, storages, env, options.across_nodes)
        if env.devices:
            _check_inference(sources, rules)
        # (rank, device) for every rank whose shards this process holds.
        played = enumerate(env.devices) if env.devices else [(env.shard.rank, device)]
        split = [
            _allocate(routing.work[rank].rectangles, sources, rules, where, seed) for rank, where in played
        ]
        local = _allocate(routing.local.rectangles, sources, rules, device, seed)
    # Replicas must start from the same bits. The weights may differ, because every rank fills its shards
    # from its own copy of the unsharded module.
    _broadcast_weights(split[0], env.replicate)
    # Over all ranks: every rank holds a copy of the data-parallel tables.
    _broadcast_weights(local, env.world)
    # Kept in the result, from which resharding builds the module again under another plan.
    blueprint = Blueprint(
        plan=plan,
        routing=routing,
        rules=rules,
        storages=storages,
        env=env,
        device=device,
        options=options,
    )
    contents = Contents(
        split=split,
        local=local,
        # An optimizer attached by meshrec.fuse may have taken steps already.
        steps=[source.state.get("step", 0) for source in sources],
        trained=[source.weight.requires_grad for source in sources],
    )
    parts = assemble(blueprint, contents)
    # Collective: counts rows over all ranks, so every rank must have filled its shards.
    parts.tables.recount()
    return parts


def assemble(blueprint: Blueprint, contents: Contents) -> ModuleParts:
    """Create the sharded module parts around existing weights and optimizer state."""
    routing, env, device, options = blueprint.routing, blueprint.env, blueprint.device, blueprint.options
    shards: dict[str, TableModule] = {}
    fused: dict[int, FusedTable] = {}
    owners = routing.holders
    admissions = create_admissions(routing, blueprint.storages, env, contents.split[0], contents.local)
    for t, (table, rule) in enumerate(zip(routing.tables, blueprint.rules, strict=True)):
        storage, size = blueprint.storages[t], (table.num_rows, table.dim)
        if env.devices and not routing.replicated[t]:
            # One process plays all ranks: the module gets every shard and trains none.
            local = [s for rank_shards in contents.split if (s := rank_shards.of_table(t)) is not None]
            shards[table.name] = TableModule(table.name, size, storage, None, shards=local)
            continue
        shard = (contents.local if routing.replicated[t] else contents.split[0]).of_table(t)
        weight = shard.parameter if shard else _empty(table, storage, device, trained=contents.trained[t])
        split = _split_of(t, owners[t], admissions, env, is_replicated=routing.replicated[t])
        local = [] if shard is None else [shard]
        here = TableModule(table.name, size, storage, weight, shards=local, split=split)
        shards[table.name] = here
        # From now on, attaching another optimizer to the table is an error.
        mark_sharded(here.weight)
        if env.shard.group is not None and not routing.replicated[t]:
            mark_shard(here.weight, env.shard.group, is_sharded=True)  # even if empty: norms are collective
        if rule is not None:
            mark_in_backward(here.weight, rule.spec)
            fused[t] = _fused_table(here, rule, contents.steps[t])
    inside = None
    if options.across_nodes == "rows":
        from meshrec.distributed.node_rows import inside_node

        inside = inside_node(routing, env)
    input_dist = InputDist(
        *(inside or (routing, env)),
        device,
        weighted=options.weighted,
        sequence=options.sequence,
        bounds_check=options.bounds_check,
    )
    tables = ShardedTables(
        routing,
        env,
        contents.split,
        contents.local,
        fused=fused,
        input_dist=input_dist,
        sequence=options.sequence,
        wire=options.wire,
        may_fail=any(storage.may_fail for storage in blueprint.storages),
        admission_evictions=admissions,
        inside=inside,
    )
    if device.type == "cpu":
        keep_freed_memory()  # after the tables are made, so that their memory is returned when they are freed
    # The module's plan names the kernels in use; the plan from the user may name others.
    plan = blueprint.plan.with_kernels(_kernels(routing, blueprint.rules, blueprint.storages))
    return ModuleParts(
        **{**vars(blueprint), "plan": plan},
        tables=tables,
        shards=shards,
        names=_names(routing),
        dims=routing.dims,
        fused=fused,
    )


def _split_of(
    table: int,
    owners: Sequence[Sequence[Rectangle]],
    admissions: Sequence[AdmissionEviction | None],
    env: ShardingEnv,
    *,
    is_replicated: bool,
) -> TableSplit | None:
    """Return what creates a table's state dict tensors; None if this rank has the whole table."""
    # Data-parallel tables have no mesh: every rank's state dict contains the whole table.
    mesh = None if is_replicated else env.shard_mesh
    admission = admissions[is_replicated]
    if admission is not None and table in admission.storages:
        from meshrec.distributed.table_split import GrowableSplit

        return GrowableSplit(table, owners, mesh, admission_eviction=admission, axis=env.shard)
    if mesh is not None:
        from meshrec.distributed.table_split import FixedSplit

        return FixedSplit(owners, mesh)
    return None


def _kernels(
    routing: Routing, rules: Sequence[UpdateRule | None], storages: Sequence[RowStorage]
) -> dict[str, EmbeddingComputeKernel]:
    """Return the compute kernel which every table actually uses, by table name.

    The kernel depends only on the table's optimizer and storage. The plan may name another kernel.
    """
    kernels = {}
    for table, rule, storage in zip(routing.tables, rules, storages, strict=True):
        kernel = EmbeddingComputeKernel.DENSE if rule is None else EmbeddingComputeKernel.FUSED
        kernels[table.name] = kernel if storage.is_trainable else EmbeddingComputeKernel.QUANT
    return kernels


def _fused_table(module: TableModule, rule: UpdateRule, step: int) -> FusedTable:
    """Return a table's entry in the fused optimizer."""
    label, dim = f"table {module.name!r}", module.dim
    full_states = functools.partial(_full_states, module, rule.spec.state_slots())
    if module.is_growable:
        # A growable table has no parameter with gradients. A deferred rule collects them in buffers.
        shards = module.local_shards if rule.deferred else []
        buffers = [buffer.parameter for shard in shards for buffer in shard.gradient_buffers]
        return FusedTable(module.weight, rule, KeyOrderedState(step, full_states), label, dim, buffers)
    return FusedTable(module.weight, rule, {"step": step, **full_states()}, label, dim)


def _empty(table: RoutedTable, storage: RowStorage, device: torch.device, *, trained: bool) -> nn.Parameter:
    """Return a parameter with 0 rows, for a rank without a shard of the table."""
    rows = storage.allocate(0, storage.columns(table.dim), device)
    if storage.rows_in_parameter:
        return nn.Parameter(rows, trained)
    return placeholder(rows, table.name, trained)


def _full_states(module: TableModule, slots: Sequence[StateSlot]) -> dict[str, Tensor]:
    """Return the whole table's optimizer state, as tensors by slot name, such as "momentum".

    If the table is split over ranks, the tensors are `SplitTensor` objects.
    """
    return {slot.name: module.full_state(slot) for slot in slots}


def compile_routing(
    tables: Sequence[RoutedTable],
    plan: EmbeddingModuleShardingPlan,
    rules: Sequence[UpdateRule | None],
    storages: Sequence[RowStorage],
    env: ShardingEnv,
) -> Routing:
    """Compile a verified plan into routes and lookups; see `compile_plan`.

    A table with a fused optimizer may need sums over whole rows, for the optimizer or the eviction policy.
    Rectangles (row and column ranges) of such a table are cut into parts. Any two parts then have either the
    same rows or disjoint rows.

    Args:
        tables: tables in the unsharded module.
        plan: the module's plan.
        rules: update rule by table number; None: the table gets ordinary gradients.
        storages: row storage by table number.
        env: the ranks.
    """
    # Row-wise optimizers and some eviction scores reduce over all columns of a row.
    whole_rows = [
        t
        for t, (rule, storage) in enumerate(zip(rules, storages, strict=True))
        if rule is not None and (rule.spec.formula.row_sums or storage.needs_row_sums)
    ]
    return compile_plan(tables, plan, num_ranks=env.shard.size, whole_rows=whole_rows)


def check_cuts(storages: Mapping[str, RowStorage], plan: EmbeddingModuleShardingPlan) -> None:
    """Raise ValueError if a shard of a quantized table starts within a byte.

    For example, int4 rows have two columns in a byte, so shards must start at even columns.
    """
    for name, storage in storages.items():
        for shard in plan[name].shards:
            first, _ = shard.columns
            # Floating-point storages have 0 bits per code, so they pass.
            if first * storage.bits % 8:
                raise ValueError(
                    f"table {name!r}: a shard begins at column {first}, within a byte of its rows of "
                    f"{storage.bits} bits a number. Cut columns at multiples of {8 // storage.bits}."
                )


def _check_untrained(sources: Sequence[SourceTable], options: BuildOptions) -> None:
    """Raise ValueError if a quantized table, which cannot be trained, has an optimizer."""
    given = options.optimizer_tables
    for source in sources:
        name = source.table.name
        if source.storage.is_trainable:
            continue
        if source.spec is not None or (options.optimizer is not None and (given is None or name in given)):
            raise ValueError(
                f"table {name!r} is quantised and cannot be trained, but has an optimizer. Leave out the "
                "sharder's fused_params, or shard the model as it was before meshrec.quant.quantize."
            )


def _check_external_rows(sources: Sequence[SourceTable], rules: Sequence[UpdateRule | None]) -> None:
    """Raise ValueError if a trained table has no memory in which to store its gradient.

    Hashed and cached tables have their rows outside the parameter. The parameter is empty, so autograd
    cannot store a gradient in it. Such a table needs a fused optimizer that updates rows in the backward
    pass. An optimizer with ``update="on_step"`` is allowed only if the storage has gradient buffers.
    """
    for source, rule in zip(sources, rules, strict=True):
        if source.storage.rows_in_parameter or not source.weight.requires_grad:
            continue
        if rule is None or (rule.deferred and not source.storage.collects_gradients):
            given = "no optimizer" if rule is None else "an optimizer that waits for step()"
            raise ValueError(
                f"table {source.table.name!r} keeps its rows outside of its parameter and has {given}: its "
                "gradients would have nowhere to stay. Give it a fused optimizer with "
                'update="in_backward" (the sharder\'s fused_params), or call requires_grad_(False) on it.'
            )


def _check_inference(sources: Sequence[SourceTable], rules: Sequence[UpdateRule | None]) -> None:
    """Raise ValueError if a table is to be trained while a single process holds the shards of all ranks."""
    for source, rule in zip(sources, rules, strict=True):
        if rule is not None or source.weight.requires_grad:
            raise ValueError(
                f"table {source.table.name!r} is to be trained, and tables over several devices of one "
                "process are for inference. Quantise the model, or call requires_grad_(False) on it and "
                "leave out optimizers; to train, start a process for each device."
            )


def _rules(sources: Sequence[SourceTable], options: BuildOptions) -> list[UpdateRule | None]:
    """Return the update rule by table number; None for tables without a fused optimizer.

    An optimizer attached to the table's weight takes precedence over the sharder's optimizer.
    """
    given = options.optimizer_tables
    default = [options.optimizer if given is None or s.table.name in given else None for s in sources]
    specs = [other if s.spec is None else s.spec for s, other in zip(sources, default, strict=True)]
    return rules_of(specs, deferred=options.update == "on_step", seed=options.seed)


def _allocate(
    rectangles: Sequence[Rectangle],
    sources: Sequence[SourceTable],
    rules: Sequence[UpdateRule | None],
    device: torch.device,
    seed: int,
) -> LocalShards:
    """Allocate a rank's rectangles, and fill them with weights and optimizer state."""
    shards = allocate(
        rectangles,
        [source.table.name for source in sources],
        [source.storage for source in sources],
        [None if rule is None else rule.spec for rule in rules],
        [source.weight.requires_grad for source in sources],
        device=device,
    )
    for shard in shards.shards:
        for table in shard.tables:
            source, rule = sources[table.rectangle.table], rules[table.rectangle.table]
            first = functools.partial(_initial_blocks, table.rectangle, source, rule, seed)
            # Rows of a module on `meta` are drawn at random, which may wait until they are first used.
            # Rows of another module are copied now.
            initialize_rows(table, first, lazily=source.weight.is_meta)
    return shards


def _initial_blocks(
    rectangle: Rectangle, source: SourceTable, rule: UpdateRule | None, seed: int, keys: Span
) -> Iterator[RowBlock]:
    """Yield blocks with the initial rows for an interval of keys, cut to a rectangle's columns.

    Rows, and optimizer state if there is any, are copied from the unsharded module. If its weights are on the
    ``meta`` device, rows are drawn at random, and blocks contain no optimizer state.
    """
    (r0, r1), (c0, c1) = keys, rectangle.columns
    storage, dim = source.storage, source.table.dim
    names = [part.name for part in storage.row_parts]
    # Hashed tables are copied by key, with their optimizer state and counts of IDs waiting for admission.
    if source.rows is not None:
        loaded = {*names, "waiting", *(slot.name for slot in (rule.spec.state_slots() if rule else ()))}
        for piece in source.rows.stream((c0, c1), keys=(r0, r1)):
            # Other parts, such as state of another optimizer, have no memory in the new table.
            yield piece._replace(parts={name: part for name, part in piece.parts.items() if name in loaded})
        return

    def block(first: int, end: int, tensors: Mapping[str, Tensor], rows: slice) -> RowBlock:
        """Return a block with consecutive keys, cut to the rectangle's columns.

        Args:
            rows: positions of the block's rows in ``tensors``.
        """
        return RowBlock(range(first, end), (c0, c1), slice_parts(storage, tensors, rows, (c0, c1)))

    if not source.weight.is_meta:
        tensors = dict(zip(names, storage.parts(source.weight.detach(), dim), strict=True))
        if rule is not None:
            tensors |= {name: source.state[name] for name in rule.slot_names if name in source.state}
        yield block(r0, r1, tensors, slice(r0, r1))
        return
    # Rows are drawn in whole-table blocks, so every sharding starts from the same values.
    drawn = initial_rows(
        (r0, r1),
        table=source.config.seed_name or source.table.name,
        size=(source.table.num_rows, dim),
        init_fn=source.config.init_weight,
        seed=seed,
    )
    for first, values in drawn:
        rows = values if storage.is_trainable else storage.encode(values)
        tensors = dict(zip(names, storage.parts(rows, dim), strict=True))
        yield block(first, first + len(rows), tensors, slice(None))


def _broadcast_weights(shards: LocalShards, axis: Axis) -> None:
    """Overwrite the weights in ``shards`` with the weights on the axis's first rank. Collective."""
    for shard in shards.shards:
        # Only fixed tables have rows in the parameter.
        if shard.is_fixed:
            broadcast(shard.parameter.detach(), axis, "first weights")


def _names(routing: Routing) -> list[str]:
    """Return the name in the output for every use, a feature looked up in a table; see `ModuleParts`."""
    features = [use.feature for use in routing.uses]
    return [
        use.feature if features.count(use.feature) == 1 else f"{use.feature}@{routing.tables[use.table].name}"
        for use in routing.uses
    ]
