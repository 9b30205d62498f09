"""`EmbeddingShardingPlanner`: plan a model's tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn

from meshrec.comms.wire import FULL_PRECISION, TableWires, WireFormats
from meshrec.optim.table_names import by_full_name
from meshrec.plan.sharding_plan import ShardingPlan
from meshrec.planner.evaluate import to_plan
from meshrec.planner.module_tables import tables_by_path, tables_of_model
from meshrec.planner.optimize import DEFAULT_EFFORT, optimize
from meshrec.planner.plan_file import PlannedShardingPlan, PlannerInputs
from meshrec.planner.search import Effort
from meshrec.planner.types import OptimizerKind, ParameterConstraints, Table, Topology
from meshrec.planner.wire_choice import WireBound, choose_wires


class EmbeddingShardingPlanner:
    """Finds a fast plan for a model's embedding tables, and proves how much faster any other plan could be.

    Args:
        topology: machine to plan for. Default: CPUs, with as many ranks as the process group has, or one rank
            without a process group.
        constraints: constraints and assumptions by table name, or by ``path.name`` if several modules have a
            table with this name.
        batch_size: samples per rank.
        time_limit: seconds after which the search returns the best plan so far.
        max_work: work limit of the search, in touched array elements. It does not depend on the machine's
            speed: unless the time limit ends the search, equal inputs give equal plans on every machine.
        gap: stop when no other plan can be faster by more than this fraction of the step time.
        static_plan: plan to reuse. `plan` then only checks whether it covers the model's tables.
        default_optimizer: fused optimizer for tables that have none attached.
        default_wire: wire formats for embeddings and gradients, for tables whose sharder sets none.
        wire_bound: if given, select all tables' wire formats within these accuracy limits. Pass the
            formats from ``wire_choice.wires_of(plan)`` to the sharders.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        batch_size: int = 512,
        *,
        time_limit: float = DEFAULT_EFFORT.time_limit,
        max_work: float = DEFAULT_EFFORT.max_work,
        gap: float = DEFAULT_EFFORT.gap,
        static_plan: ShardingPlan | None = None,
        default_optimizer: OptimizerKind = OptimizerKind.NONE,
        default_wire: WireFormats | TableWires = FULL_PRECISION,
        wire_bound: WireBound | None = None,
    ) -> None:
        # None: taken from the process group at the time of `plan`.
        self._topology = topology
        self._constraints = dict(constraints or {})
        self._batch_size = batch_size
        self._effort = Effort(time_limit, max_work, gap)
        self._static_plan = static_plan
        self._default_optimizer, self._default_wire = default_optimizer, default_wire
        self._wire_bound = wire_bound

    def plan(self, module: nn.Module, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """Plan all tables in `module` which the sharders support, or all tables if `sharders` is None.

        Raises:
            ValueError: constraints cannot be satisfied, or no plan was found which fits into memory. The
                message suggests remedies.
        """
        tables = tables_of_model(
            module,
            sharders,
            self._constraints,
            default_optimizer=self._default_optimizer,
            default_wire=self._default_wire,
        )
        if self._static_plan is not None:
            return _verify_static_plan(self._static_plan, tables)
        topology = self._topology or _default_topology()
        # Before the search, because the cost of every placement depends on the formats.
        if self._wire_bound is not None:
            tables = choose_wires(tables, topology, batch_size=self._batch_size, bound=self._wire_bound)
        names_by_path = tables_by_path(module, sharders)
        return plan_tables(
            tables,
            topology,
            batch_size=self._batch_size,
            constraints=by_full_name(self._constraints, names_by_path, "constraints name"),
            effort=self._effort,
        )

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[Any] | None = None, pg: dist.ProcessGroup | None = None
    ) -> ShardingPlan:
        """Run `plan` on rank 0, and return the plan on all ranks. Collective.

        An error on rank 0 is raised on all ranks. Without a process group, this is `plan`.

        Args:
            module: model with the embedding modules.
            sharders: sharders, see `plan`.
            pg: process group (default: the default group).

        Raises:
            ValueError: the topology's world size does not divide the group's size, or see `plan`.
        """
        size = 1 if pg is None and not dist.is_initialized() else dist.get_world_size(pg)
        if self._topology is not None and size % self._topology.world_size:
            raise ValueError(
                f"the topology has {self._topology.world_size} ranks, but the group has {size}. Create the "
                f"topology with world_size={size}, or call plan() to plan for another machine."
            )
        if pg is None and not dist.is_initialized():
            return self.plan(module, sharders)
        group = pg if pg is not None else dist.group.WORLD
        assert group is not None
        # An error on rank 0 travels in the result. If it were raised before the broadcast, the other ranks
        # would hang.
        outcome: list[_PlanOrError | None] = [None]
        if group.rank() == 0:
            try:
                outcome = [_PlanOrError(self.plan(module, sharders), None)]
            except Exception as error:
                outcome = [_PlanOrError(None, error)]
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
        received = outcome[0]
        assert received is not None
        if received.error is not None:
            raise received.error
        assert received.plan is not None
        return received.plan


def plan_tables(
    tables: Sequence[Table],
    topology: Topology,
    *,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    effort: Effort = DEFAULT_EFFORT,
) -> PlannedShardingPlan:
    """Plan tables given as sizes and statistics, without a model.

    Args:
        tables: tables to plan.
        topology: machine to plan for.
        batch_size: samples per rank.
        constraints: constraints by table name.
        effort: search limits.

    Raises:
        ValueError: constraints cannot be satisfied, or no plan was found which fits into memory. The message
            suggests remedies.
    """
    constraints = dict(constraints or {})
    optimized = None
    # Without memory for tables, the search has nothing to do; diagnose explains it.
    if topology.memory_cap > 0:
        optimized = optimize(tables, topology, batch_size=batch_size, constraints=constraints, effort=effort)
    if optimized is None:
        from meshrec.planner.diagnose import diagnose

        raise ValueError(diagnose(tables, topology, batch_size=batch_size, constraints=constraints))
    return PlannedShardingPlan(
        to_plan(optimized.placements, tables, optimized.types_T, topology.compute_device),
        seconds=optimized.estimate.seconds,
        lower_bound=optimized.lower_bound,
        replicas=optimized.replicas,
        inputs=PlannerInputs(
            tables=tuple(tables),
            # The figures, not the profile's name: a saved plan must not change with a later release.
            topology=replace(topology, hardware=topology.profile),
            batch_size=batch_size,
            constraints=constraints,
        ),
    )


class _PlanOrError(NamedTuple):
    """Result that rank 0 broadcasts: a plan, or the error that planning raised."""

    plan: ShardingPlan | None
    error: Exception | None


def _verify_static_plan(plan: ShardingPlan, tables: Sequence[Table]) -> ShardingPlan:
    """Return `plan` if it covers all tables with their sizes."""
    for table in tables:
        module_plan = plan.plan.get(table.module_path)
        sharding = module_plan.get(table.local_name) if module_plan else None
        if sharding is None:
            raise ValueError(
                f"the static plan does not place table {table.name!r} of module {table.module_path!r}. "
                "Plan again without static_plan."
            )
        # A data-parallel table has no shards.
        rows = max((shard.rows[1] for shard in sharding.shards), default=table.num_embeddings)
        columns = max((shard.columns[1] for shard in sharding.shards), default=table.embedding_dim)
        if (rows, columns) != (table.num_embeddings, table.embedding_dim):
            raise ValueError(
                f"the static plan has table {table.name!r} as {rows} x {columns}; the model has "
                f"{table.num_embeddings} x {table.embedding_dim}. Plan again without static_plan."
            )
    return plan


def _default_topology() -> Topology:
    """Return a topology of CPU ranks, as many as the default process group has.

    Without a process group, the topology has a single rank.
    """
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return Topology(world_size=world_size, compute_device="cpu")
