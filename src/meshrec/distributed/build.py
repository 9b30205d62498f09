"""Makes the tables of a sharded module from an unsharded one, its plan, and the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.distributed.collectives import broadcast, gather_objects
from meshrec.distributed.fused_optimizer import (
    FusedTable,
    ShardedFusedOptimizer,
    Slot,
    SpecRule,
    make_state,
)
from meshrec.distributed.input_dist import InputDist
from meshrec.distributed.mesh import Axis, ShardingEnv
from meshrec.distributed.output_dist import FULL_PRECISION, CommsPrecision
from meshrec.distributed.plan_checks import verify_module_plan, verify_same_plan
from meshrec.distributed.routing import Rectangle, Routing, Table, compile_plan
from meshrec.distributed.sharded_tables import ShardedTables, Tables
from meshrec.distributed.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan, TableSize
from meshrec.distributed.table_init import init_rectangle
from meshrec.distributed.table_shards import TableShards
from meshrec.modules import BaseEmbeddingConfig, BoundsCheckMode, PoolingType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.ops.memory import use_huge_pages
from meshrec.optim.fused import FusedOptimizer
from meshrec.optim.in_backward import in_backward_spec
from meshrec.optim.optimizers import OptimizerSpec


class SourceTable(NamedTuple):
    """A table of the unsharded module."""

    table: Table
    config: BaseEmbeddingConfig
    weight: nn.Parameter
    spec: OptimizerSpec | None
    state: dict[str, Any]
    """What ``meshrec.fuse`` has gathered for it, by slot; nothing where the module is not fused."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """What the sharder decides. ``optimizer``: for tables without one of their own."""

    optimizer: OptimizerSpec | None = None
    precision: CommsPrecision = FULL_PRECISION
    sequence: bool = False
    weighted: bool = False
    bounds_check: BoundsCheckMode = BoundsCheckMode.ERROR


@dataclass(frozen=True, kw_only=True)
class Built:
    """The parts of a sharded module."""

    plan: EmbeddingModuleShardingPlan
    tables: ShardedTables
    shards: dict[str, TableShards]
    names: list[str]
    """The name of each use in the output: the feature, or feature@table where several tables read it."""
    dims: list[int]
    fused: dict[str, FusedTable]

    def fused_optimizer(self, prefix: str) -> ShardedFusedOptimizer:
        """The optimizer, with the names that the parameters have in the module."""
        return ShardedFusedOptimizer(
            {f"{prefix}.{table}.weight": fused for table, fused in self.fused.items()}
        )


def source_tables(module: TableCollection) -> list[SourceTable]:
    """The tables of an unsharded module with their weights (perhaps on ``meta``), optimizers and their
    state.

    Raises:
        ValueError: if the module is fused with ``update="on_step"``: sharded tables are updated in backward.
    """
    fused = module.fused_optimizer if module.is_fused else None
    if isinstance(fused, FusedOptimizer) and not fused.updates_in_backward:
        names = [config.name for config, _ in module.tables().values()]
        raise ValueError(
            f'the module with the tables {names} is fused with update="on_step" and cannot be sharded: '
            'sharded tables allow only update="in_backward". Fuse it with update="in_backward", or leave it '
            "unfused and give the sharder the optimizer (fused_params)."
        )
    state = {} if fused is None else fused.state  # type: ignore[attr-defined]
    found = []
    for config, weight in module.tables().values():
        mean = getattr(config, "pooling", None) is PoolingType.MEAN
        table = Table(
            config.name, config.num_embeddings, config.embedding_dim, tuple(config.feature_names), mean
        )
        found.append(SourceTable(table, config, weight, in_backward_spec(weight), state.get(weight, {})))
    return found


def build(
    sources: Sequence[SourceTable],
    plan: EmbeddingModuleShardingPlan,
    env: ShardingEnv,
    device: torch.device,
    options: BuildOptions,
) -> Built:
    """Checks the plan, allocates what this rank owns, and fills it. Collective over all ranks.

    Raises:
        ValueError: for a plan that does not fit the module or differs between ranks, before anything is
        allocated.
    """
    verify_same_plan(ShardingPlan({"": plan}), env.world.group)
    sizes = {s.table.name: TableSize(s.table.num_rows, s.table.dim) for s in sources}
    verify_module_plan(plan, sizes, world_size=env.shard.size)
    routing = compile_plan([source.table for source in sources], plan, num_ranks=env.shard.size)
    rules = _rules(sources, options.optimizer)
    seed = gather_objects(torch.initial_seed(), env.world, "seed")[0]
    own = routing.work[env.shard.rank].rectangles
    split = _allocate(own, sources, rules, device, seed)
    local = _allocate(routing.local.rectangles, sources, rules, device, seed)
    _make_equal(split, env.replicate)
    _make_equal(local, env.world)
    shards = {}
    for t, table in enumerate(routing.tables):
        held, parts = (routing.local.rectangles, local) if routing.replicated[t] else (own, split)
        chosen = [i for i, rectangle in enumerate(held) if rectangle.table == t]
        shards[table.name] = TableShards(
            table,
            [held[i] for i in chosen],
            [parts.weights[i] for i in chosen],
            None if routing.replicated[t] else env.shard_mesh,
        )
    fused = {
        table.name: _fused_table(
            shards[table.name],
            rule,
            t,
            sources[t].state.get("step", 0),
            (own, split),
            (routing.local.rectangles, local),
        )
        for t, (table, rule) in enumerate(zip(routing.tables, rules, strict=True))
        if rule is not None
    }
    input_dist = InputDist(
        routing,
        env,
        device,
        weighted=options.weighted,
        sequence=options.sequence,
        bounds_check=options.bounds_check,
    )
    tables = ShardedTables(
        routing,
        env,
        split,
        local,
        rules=rules,
        input_dist=input_dist,
        sequence=options.sequence,
        precision=options.precision,
    )
    return Built(
        plan=plan, tables=tables, shards=shards, names=_names(routing), dims=routing.dims, fused=fused
    )


def _rules(sources: Sequence[SourceTable], default: OptimizerSpec | None) -> list[SpecRule | None]:
    """One rule for each spec, so that tables with equal specs are updated together."""
    rules: dict[OptimizerSpec, SpecRule] = {}
    specs = [source.spec if source.spec is not None else default for source in sources]
    return [None if spec is None else rules.setdefault(spec, SpecRule(spec)) for spec in specs]


def _allocate(
    rectangles: Sequence[Rectangle],
    sources: Sequence[SourceTable],
    rules: Sequence[SpecRule | None],
    device: torch.device,
    seed: int,
) -> Tables:
    """Weights and optimizer state of some rectangles."""
    weights, state = [], []
    for rectangle in rectangles:
        source, rule = sources[rectangle.table], rules[rectangle.table]
        weight = nn.Parameter(_filled(rectangle, source, device, seed), source.weight.requires_grad)
        weights.append(weight)
        state.append([] if rule is None else _state(rule, rectangle, source, weight))
    return Tables(weights, state)


def _filled(rectangle: Rectangle, source: SourceTable, device: torch.device, seed: int) -> Tensor:
    _, r0, r1, c0, c1 = rectangle
    weight = torch.empty(r1 - r0, c1 - c0, dtype=source.weight.dtype, device=device)
    use_huge_pages(weight)
    if not source.weight.is_meta:
        return weight.copy_(source.weight.detach()[r0:r1, c0:c1])
    init_rectangle(
        weight,
        table=source.table.name,
        size=(source.table.num_rows, source.table.dim),
        first=(r0, c0),
        init_fn=source.config.init_weight,
        seed=seed,
    )
    return weight


def _state(rule: SpecRule, rectangle: Rectangle, source: SourceTable, weight: Tensor) -> list[Tensor]:
    """New state, or this rectangle's part of what the unsharded module had gathered."""
    _, r0, r1, c0, c1 = rectangle
    state = make_state(rule.spec, weight)
    for slot, part in zip(rule.spec.state_slots(), state, strict=True):
        if slot.name in source.state:
            rows = source.state[slot.name][r0:r1]
            part.copy_(rows if slot.per_row else rows[:, c0:c1])
    return state


def _make_equal(tables: Tables, axis: Axis) -> None:
    """Replicas start from what the first of them has."""
    for weight in tables.weights:
        broadcast(weight.detach(), axis, "first weights")


def _fused_table(
    shards: TableShards,
    rule: SpecRule,
    table: int,
    step: int,
    *holders: tuple[Sequence[Rectangle], Tables],
) -> FusedTable:
    state = [
        own
        for rectangles, tables in holders
        for rectangle, own in zip(rectangles, tables.state, strict=True)
        if rectangle.table == table
    ]
    slots = {
        slot.name: Slot(slot.per_row, [own[number] for own in state])
        for number, slot in enumerate(rule.spec.state_slots())
    }
    return FusedTable(shards, rule, slots, step)


def _names(routing: Routing) -> list[str]:
    features = [use.feature for use in routing.uses]
    return [
        use.feature if features.count(use.feature) == 1 else f"{use.feature}@{routing.tables[use.table].name}"
        for use in routing.uses
    ]
