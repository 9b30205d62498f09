"""The construction of a sharded module's tables from an unsharded module, its plan, and the ranks."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.comms.collectives import broadcast, gather_objects
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.comms.same_plan import verify_same_plan
from meshrec.comms.wire import FULL_WIRES, AcrossNodes, TableWires
from meshrec.distributed.hashed_shards import HashedParts, check_hashed, turnovers_of
from meshrec.distributed.input_dist import InputDist
from meshrec.distributed.node_rows import inside_node
from meshrec.distributed.routing import RoutedTable, Routing, compile_plan
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.distributed.spread_hashed import SpreadHashed
from meshrec.distributed.spread_table import SpreadTable
from meshrec.distributed.table_shards import TableShards
from meshrec.modules import BaseEmbeddingConfig, BoundsCheckMode, DataType, PoolingType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import storage_of
from meshrec.ops.memory import keep_freed_memory
from meshrec.optim.in_backward import in_backward_spec, mark_in_backward, mark_sharded
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec
from meshrec.optim.parts import mark_part
from meshrec.plan.checks import verify_module_plan
from meshrec.plan.sharding_plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ShardingPlan,
    TableSize,
)
from meshrec.tables.at_rest import RestingState
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.holdings import Holdings, allocate
from meshrec.tables.initial import initial_rows
from meshrec.tables.optimizer import Deferred, FusedOptimizer, FusedTable, UpdateMode
from meshrec.tables.rule import UpdateRule, rules_of
from meshrec.tables.storage import RowStorage, SideRows, cut
from meshrec.tables.table import LazyRows, Rectangle, RowBlock, Span


class SourceTable(NamedTuple):
    """A table of the unsharded module."""

    table: RoutedTable
    config: BaseEmbeddingConfig
    weight: nn.Parameter
    storage: RowStorage
    spec: OptimizerSpec | None
    state: dict[str, Any]
    """The optimizer state that ``meshrec.fuse`` has gathered, by slot; empty if the module is not fused."""
    rows: HashedTable | None = None
    """The rows of a table with hashed keys; None for others."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The sharder's options.

    ``optimizer``: the optimizer of tables without their own; with ``optimizer_tables``, of those tables only.
    ``update``: when fused tables are updated. ``seed``: the seed of the stochastic rounding of fp16 and bf16
    tables.
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
    """The specification of a sharded module. It is equal on all ranks except for ``device``."""

    plan: EmbeddingModuleShardingPlan
    routing: Routing
    rules: list[UpdateRule | None]
    """The update rule of each table; None: ordinary gradients."""
    storages: list[RowStorage]
    """The row storage of each table."""
    env: ShardingEnv
    device: torch.device
    options: BuildOptions


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The existing weights and optimizer state of a module."""

    split: list[Holdings]
    """The split tables of each rank that this process plays."""
    local: Holdings
    """The data-parallel tables."""
    steps: Sequence[int]
    """The number of updates of each table so far."""
    trained: Sequence[bool]
    """Whether each table is trained, that is, not frozen."""


@dataclass(frozen=True, kw_only=True)
class ModuleParts(Blueprint):
    """The parts of a sharded module, with their specification."""

    tables: ShardedTables
    shards: dict[str, TableShards | SpreadTable | SpreadHashed]
    names: list[str]
    """The name of each use in the output: the feature, or feature@table if several tables read it."""
    dims: list[int]
    fused: dict[int, FusedTable]
    """The tables with a fused rule, by number."""

    def fused_optimizer(self, prefix: str) -> FusedOptimizer:
        """Make the optimizer, with the names of the parameters in the module."""
        return FusedOptimizer(self.named_fused(prefix), self.deferred())

    def named_fused(self, prefix: str) -> dict[str, FusedTable]:
        """Return the fused tables by the names of their weights in the module."""
        tables = self.routing.tables
        return {f"{prefix}.{tables[t].name}.weight": fused for t, fused in self.fused.items()}

    def deferred(self) -> Deferred | None:
        """Return how the optimizer's step updates the tables; None if the backward pass updates them."""
        collected = self.tables.collected
        return None if collected is None else Deferred(self.tables.step, collected.signal)

    def steps(self) -> list[int]:
        """Return the number of updates of each table so far."""
        return [int(self.fused[t].state["step"]) if t in self.fused else 0 for t in range(len(self.rules))]


def source_tables(module: TableCollection) -> list[SourceTable]:
    """Return the tables of an unsharded module with their weights (perhaps on ``meta``), optimizers and
    state.
    """
    fused = module.fused_optimizer if module.is_fused else None
    state = {} if fused is None else fused.state
    hashed = module.hashed_tables()
    found = []
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
        own = hashed.get(config.name)
        found.append(SourceTable(table, config, weight, storage, spec, state.get(weight, {}), own))
    return found


def build(
    sources: Sequence[SourceTable],
    plan: EmbeddingModuleShardingPlan,
    env: ShardingEnv,
    device: torch.device,
    options: BuildOptions,
) -> ModuleParts:
    """Check the plan, allocate this rank's part, and fill it. Collective over all ranks.

    On CPUs, the process keeps freed memory from then on, see ``keep_freed_memory``.

    Raises:
        ValueError: the plan does not fit the module or differs between ranks. It is raised before anything is
            allocated.
    """
    verify_same_plan(ShardingPlan({"": plan}), env.world.group)
    sizes = {s.table.name: TableSize(s.table.num_rows, s.table.dim) for s in sources}
    verify_module_plan(plan, sizes, world_size=env.shard.size)
    _check_untrained(sources, options)
    check_cuts({source.table.name: source.storage for source in sources}, plan)
    rules = _rules(sources, options)
    _check_side_rows(sources, rules)
    storages = [source.storage for source in sources]
    routing = compiled([source.table for source in sources], plan, rules, storages, env)
    check_hashed(routing, storages, env, options.across_nodes)
    if env.devices:
        _check_inference(sources, rules)
    seed = gather_objects(torch.initial_seed(), env.world, "seed")[0]
    played = enumerate(env.devices) if env.devices else [(env.shard.rank, device)]
    split = [_allocate(routing.work[rank].rectangles, sources, rules, where, seed) for rank, where in played]
    local = _allocate(routing.local.rectangles, sources, rules, device, seed)
    _make_equal(split[0], env.replicate)
    _make_equal(local, env.world)
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
        steps=[source.state.get("step", 0) for source in sources],
        trained=[source.weight.requires_grad for source in sources],
    )
    parts = assemble(blueprint, contents)
    parts.tables.recount()
    return parts


def assemble(blueprint: Blueprint, contents: Contents) -> ModuleParts:
    """Make a module's parts from existing weights and state."""
    routing, env, device, options = blueprint.routing, blueprint.env, blueprint.device, blueprint.options
    shards: dict[str, TableShards | SpreadTable | SpreadHashed] = {}
    fused: dict[int, FusedTable] = {}
    holders = routing.holders
    turnovers = turnovers_of(routing, blueprint.storages, env, contents.split[0], contents.local)
    for t, (table, rule) in enumerate(zip(routing.tables, blueprint.rules, strict=True)):
        storage = blueprint.storages[t]
        if env.devices and not routing.replicated[t]:
            own = [each for held in contents.split if (each := held.of_table(t)) is not None]
            shards[table.name] = (
                SpreadHashed(storage, own)
                if isinstance(storage, HashedRows)
                else SpreadTable(table, storage, own)
            )
            continue
        held, mesh = (contents.local, None) if routing.replicated[t] else (contents.split[0], env.shard_mesh)
        nothing = nn.Parameter(storage.allocate(0, storage.columns(table.dim), device), contents.trained[t])
        here = TableShards(table, storage, held.of_table(t), empty=nothing, holders=holders[t], mesh=mesh)
        if (turnover := turnovers[routing.replicated[t]]) is not None and t in turnover.storages:
            here.hashed = HashedParts(here, t, turnover, env.shard)
        shards[table.name] = here
        mark_sharded(here.weight)
        if env.shard.group is not None and not routing.replicated[t]:
            mark_part(here.weight, env.shard.group, counts=True)  # even if it is empty: norms are collective
        if rule is not None:
            mark_in_backward(here.weight, rule.spec)
            fused[t] = _fused_table(here, rule, contents.steps[t])
    inside = inside_node(routing, env) if options.across_nodes == "rows" else None
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
        may_fail=any(isinstance(each, SideRows) and each.may_fail for each in blueprint.storages),
        turnovers=turnovers,
        inside=inside,
    )
    if device.type == "cpu":
        keep_freed_memory()  # after the tables are made, so that their memory is returned when they are freed
    plan = blueprint.plan.with_kernels(_kernels(routing, blueprint.rules, blueprint.storages))
    return ModuleParts(
        **{**vars(blueprint), "plan": plan},
        tables=tables,
        shards=shards,
        names=_names(routing),
        dims=routing.dims,
        fused=fused,
    )


def _kernels(
    routing: Routing, rules: Sequence[UpdateRule | None], storages: Sequence[RowStorage]
) -> dict[str, EmbeddingComputeKernel]:
    """Return the kernel that updates each table at run time, whatever the plan says."""
    kernels = {}
    for table, rule, storage in zip(routing.tables, rules, storages, strict=True):
        kernel = EmbeddingComputeKernel.DENSE if rule is None else EmbeddingComputeKernel.FUSED
        kernels[table.name] = kernel if storage.is_trainable else EmbeddingComputeKernel.QUANT
    return kernels


def _fused_table(shards: TableShards, rule: UpdateRule, step: int) -> FusedTable:
    label, dim = f"table {shards.table.name!r}", shards.table.dim
    if shards.hashed is not None:
        held = shards.held
        carriers = [] if held is None or not rule.deferred else [each.parameter for each in held.carriers]
        wanted = rule.spec.state_slots()

        def at_rest() -> dict[str, Tensor]:
            return {slot.name: shards.whole_state(slot) for slot in wanted}

        return FusedTable(shards.weight, rule, RestingState(step, at_rest), label, dim, carriers)
    slots: dict[str, Any] = {"step": step}
    slots |= {slot.name: shards.whole_state(slot) for slot in rule.spec.state_slots()}
    return FusedTable(shards.weight, rule, slots, label, dim)


def compiled(
    tables: Sequence[RoutedTable],
    plan: EmbeddingModuleShardingPlan,
    rules: Sequence[UpdateRule | None],
    storages: Sequence[RowStorage],
    env: ShardingEnv,
) -> Routing:
    """Return the routing of a verified plan, with cuts that optimizers and eviction policies can use."""
    whole_rows = [
        t
        for t, (rule, storage) in enumerate(zip(rules, storages, strict=True))
        if rule is not None and (rule.spec.formula.row_sums or _judges_rows(storage))
    ]
    return compile_plan(tables, plan, num_ranks=env.shard.size, whole_rows=whole_rows)


def _judges_rows(storage: RowStorage) -> bool:
    """Return whether the values of a row decide if it stays."""
    policy = storage.keys.evict if isinstance(storage, HashedRows) else None
    return policy is not None and policy.needs_rows


def check_cuts(storages: Mapping[str, RowStorage], plan: EmbeddingModuleShardingPlan) -> None:
    """Raise ValueError for a plan that cuts the columns of a quantised table within a byte."""
    for name, storage in storages.items():
        for shard in plan[name].shards:
            first, _ = shard.columns
            if first * storage.bits % 8:
                raise ValueError(
                    f"table {name!r}: a shard begins at column {first}, within a byte of its rows of "
                    f"{storage.bits} bits a number. Cut columns at multiples of {8 // storage.bits}."
                )


def _check_untrained(sources: Sequence[SourceTable], options: BuildOptions) -> None:
    """Raise ValueError for a quantised table with an optimizer."""
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


def _check_side_rows(sources: Sequence[SourceTable], rules: Sequence[UpdateRule | None]) -> None:
    """Raise ValueError for a table with rows of its own whose gradients would go to its parameter."""
    for source, rule in zip(sources, rules, strict=True):
        if not isinstance(source.storage, SideRows) or not source.weight.requires_grad:
            continue
        if rule is None or (rule.deferred and not isinstance(source.storage, HashedRows)):
            given = "no optimizer" if rule is None else "an optimizer that waits for step()"
            raise ValueError(
                f"table {source.table.name!r} keeps its rows outside of its parameter and has {given}: its "
                "gradients would have nowhere to stay. Give it a fused optimizer with "
                'update="in_backward" (the sharder\'s fused_params), or call requires_grad_(False) on it.'
            )


def _check_inference(sources: Sequence[SourceTable], rules: Sequence[UpdateRule | None]) -> None:
    """Raise ValueError for a table that is trained."""
    for source, rule in zip(sources, rules, strict=True):
        if rule is not None or source.weight.requires_grad:
            raise ValueError(
                f"table {source.table.name!r} is to be trained, and tables over several devices of one "
                "process are for inference. Quantise the model, or call requires_grad_(False) on it and "
                "leave out optimizers; to train, start a process for each device."
            )


def _rules(sources: Sequence[SourceTable], options: BuildOptions) -> list[UpdateRule | None]:
    """Return the update rule of each table; None: ordinary gradients."""
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
) -> Holdings:
    """Allocate and fill the weights and optimizer state of some rectangles."""
    held = allocate(
        rectangles,
        [source.storage for source in sources],
        [None if rule is None else rule.spec for rule in rules],
        [source.weight.requires_grad for source in sources],
        device,
    )
    for each in held.held:
        for table in each.tables:
            source, rule = sources[table.rectangle.table], rules[table.rectangle.table]
            first = functools.partial(_first_blocks, table.rectangle, source, rule, seed)
            if isinstance(table, LazyRows) and source.weight.is_meta:
                table.begin_with(first)
            else:
                table.load(first((table.rectangle.r0, table.rectangle.r1)))
    return held


def _first_blocks(
    rectangle: Rectangle, source: SourceTable, rule: UpdateRule | None, seed: int, keys: Span
) -> Iterator[RowBlock]:
    """Yield the rows and state that a part of a rectangle starts from.

    They are those of the unsharded module, or first values.
    """
    (r0, r1), (c0, c1) = keys, rectangle.columns
    storage, dim = source.storage, source.table.dim
    names = [part.name for part in storage.row_parts]
    if source.rows is not None:
        wanted = {*names, "waiting", *(slot.name for slot in (rule.spec.state_slots() if rule else ()))}
        for each in source.rows.stream((c0, c1), keys=(r0, r1)):
            yield each._replace(parts={name: part for name, part in each.parts.items() if name in wanted})
        return

    def block(first: int, end: int, tensors: Mapping[str, Tensor], rows: slice) -> RowBlock:
        return RowBlock(range(first, end), (c0, c1), cut(storage, tensors, rows, (c0, c1)))

    if not source.weight.is_meta:
        tensors = dict(zip(names, storage.parts(source.weight.detach(), dim), strict=True))
        if rule is not None:
            tensors |= {name: source.state[name] for name in rule.slot_names if name in source.state}
        yield block(r0, r1, tensors, slice(r0, r1))
        return
    drawn = initial_rows(
        (r0, r1),
        table=source.table.name,
        size=(source.table.num_rows, dim),
        init_fn=source.config.init_weight,
        seed=seed,
    )
    for first, numbers in drawn:
        rows = numbers if storage.is_trainable else storage.encode(numbers)
        tensors = dict(zip(names, storage.parts(rows, dim), strict=True))
        yield block(first, first + len(rows), tensors, slice(None))


def _make_equal(held: Holdings, axis: Axis) -> None:
    """Copy the first replica's weights to the others."""
    for parameter in held.parameters:
        broadcast(parameter.detach(), axis, "first weights")


def _names(routing: Routing) -> list[str]:
    features = [use.feature for use in routing.uses]
    return [
        use.feature if features.count(use.feature) == 1 else f"{use.feature}@{routing.tables[use.table].name}"
        for use in routing.uses
    ]
