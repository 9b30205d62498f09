"""Make the sharding plan for a recipe's model, with pooling factors measured on the data."""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from meshrec.comms.wire import FULL_WIRES, TableWires
from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlannedShardingPlan,
    Table,
    Topology,
    estimate_from_batches,
    load_plan,
)
from meshrec.planner.module_tables import optimizer_kind, tables_of_model
from meshrec.planner.optimize import DEFAULT_EFFORT
from meshrec.planner.search import Effort
from meshrec.planner.wire_choice import AUTO, wires_of
from meshrec.train.recipe import Placement, Recipe

if TYPE_CHECKING:
    from meshrec.data import Dataset

_GIB, _MIB = 1024**3, 1024**2
_WORK_PER_TABLE = 2e6
"""Search effort per table, if the caller does not set any. For four tables, the search finds the best plan
with a fiftieth of the planner's default effort. Further effort only tries to prove that no plan is faster.
"""


def topology_of(recipe: Recipe, *, world_size: int, local_size: int, device: str) -> Topology:
    """Return the planner's description of the ranks and their hardware.

    Args:
        recipe: the recipe. Its ``placement`` has the hardware profile and the memory per rank, in GiB.
        world_size: number of ranks.
        local_size: number of ranks per node.
        device: device type, ``cpu`` or ``cuda``.
    """
    memory = recipe.placement.memory_gib
    # None leaves the limit to the hardware profile.
    cap = None if memory is None else int(memory * _GIB)
    return Topology(
        world_size=world_size,
        compute_device=device,
        local_world_size=local_size,
        hardware=recipe.placement.hardware,
        hbm_cap=cap,
        ddr_cap=cap,
    )


def constraints_of(
    recipe: Recipe, model: nn.Module, dataset: "Dataset", *, world_size: int
) -> dict[str, ParameterConstraints]:
    """Return the planner's constraints by table name, with pooling factors measured on the first batches.

    The pooling factor of a feature is the mean number of IDs per sample.

    Args:
        recipe: the recipe.
        model: the model built for ``dataset``.
        dataset: the dataset, from which sample batches are read.
        world_size: number of ranks.
    """
    placement = recipe.placement
    batches = dataset.train.batches(recipe.training.batch_size // world_size, world_size=world_size)
    # With few rows, the last ranks do not have any. If all rows are damaged, no rank has any.
    first = [batch.sparse for batch in itertools.islice(batches, placement.sample_batches) if len(batch)]
    measured = estimate_from_batches(model, first) if first else {}
    return {
        table.name: replace(
            measured.get(table.name, ParameterConstraints()),
            sharding_types=_allowed_types(placement, table),
            min_partition=placement.min_partition,
        )
        for table in tables_of_model(model)
    }


def _allowed_types(placement: Placement, table: Table) -> tuple[ShardingType | str, ...] | None:
    """Return the sharding types among which the planner may choose for a table; None: all types."""
    num_bytes = table.num_embeddings * table.embedding_dim * table.weight_bytes
    if placement.replicate_mib is None or num_bytes <= placement.replicate_mib * _MIB:
        return placement.sharding_types
    allowed = tuple(ShardingType(kind) for kind in placement.sharding_types or ShardingType)
    # The table is too large to be replicated on all ranks. Every other allowed type stays.
    return tuple(kind for kind in allowed if kind is not ShardingType.DATA_PARALLEL)


def _check_wire_formats(plan: PlannedShardingPlan, recipe: Recipe) -> PlannedShardingPlan:
    """Check that a saved plan was made for the recipe's wire formats, and return the plan unchanged.

    A wire format is the encoding of rows and gradients that ranks send, such as fp16.
    """
    # With AUTO, the formats in the plan were chosen when it was made, so any formats are accepted.
    if recipe.placement.wire == AUTO:
        return plan
    wires = TableWires.parse(recipe.placement.wire)
    for table in plan.required_inputs().tables:
        if table.wire != wires.for_table(table.name):
            raise ValueError(
                f"placement.plan {recipe.placement.plan} was made for {table.wire} between ranks (table "
                f"{table.name!r}), and placement.wire is {wires}. Set placement.wire to "
                f"{wires_of(plan)}, or plan again with `meshrec plan --wire {wires}`."
            )
    return plan


def make_plan(
    recipe: Recipe,
    model: nn.Module,
    dataset: "Dataset",
    topology: Topology,
    group: dist.ProcessGroup | None = None,
    *,
    effort: Effort | None = None,
) -> PlannedShardingPlan:
    """Return the sharding plan for a model: the recipe's saved plan, or else a new one.

    Collective if there is a group; the plan is the same on all ranks in the group.

    Args:
        recipe: the recipe.
        model: the model built for ``dataset``.
        dataset: the dataset, on which pooling factors are measured.
        topology: ranks and hardware.
        group: process group that plans together; None: this process only.
        effort: limits for the plan search; None: about a second for a few tables.

    Raises:
        ValueError: no plan fits into memory, or the saved plan cannot be used. The error says how to proceed.
            Raised on every rank.
    """
    if recipe.placement.plan is not None:
        if not recipe.placement.plan.is_file():
            raise ValueError(
                f"placement.plan {recipe.placement.plan} is not a file; save one with `meshrec plan`."
            )
        return _check_wire_formats(load_plan(recipe.placement.plan), recipe)
    # With auto, the planner itself chooses wire formats within the recipe's bound.
    is_auto = recipe.placement.wire == AUTO
    constraints = constraints_of(recipe, model, dataset, world_size=topology.world_size)
    if effort is None:
        # Limit work instead of time, so that the plan does not depend on the machine's speed.
        work = min(DEFAULT_EFFORT.max_work, _WORK_PER_TABLE * len(constraints))
        effort = DEFAULT_EFFORT._replace(max_work=work)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        constraints=constraints,
        batch_size=recipe.training.batch_size // topology.world_size,
        time_limit=effort.time_limit,
        max_work=effort.max_work,
        gap=effort.gap,
        default_optimizer=optimizer_kind(recipe.tables),
        default_wire=FULL_WIRES if is_auto else TableWires.parse(recipe.placement.wire),
        wire_bound=recipe.placement.wire_bound if is_auto else None,
    )
    plan = planner.plan(model) if group is None else planner.collective_plan(model, pg=group)
    assert isinstance(plan, PlannedShardingPlan)
    return plan
