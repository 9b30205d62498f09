"""Plan report with ranks, tables, alternatives and warnings, as data and as an HTML page.

``plan_text.py`` prints it. This module also plans for other world sizes, and compares two plans.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshrec.plan.sharding_plan import ParameterSharding, ShardingPlan, ShardingType
from meshrec.planner.alternatives import Alternative, alternatives
from meshrec.planner.estimators import PHASES
from meshrec.planner.plan_file import PlannedShardingPlan
from meshrec.planner.planners import plan_tables
from meshrec.planner.search import Effort
from meshrec.planner.types import OptimizerKind
from meshrec.reports.page import to_page

# The report warns above this fraction of the memory cap.
_TIGHT_MEMORY = 0.95
# Gap between plan and lower bound above which the report warns.
_LARGE_GAP = 0.05
# Slowest rank's load, relative to the mean load, above which the report warns.
_SLOW_RANK = 1.25


class RankReport(NamedTuple):
    """Load and tables on a rank under a plan.

    Attributes:
        rank: rank in the shard group.
        num_bytes: bytes for tables, optimizer state and buffers.
        phases: seconds by phase name, without latencies.
        tables: names of the tables with a shard on this rank, without data-parallel tables.
    """

    rank: int
    num_bytes: float
    phases: dict[str, float]
    tables: list[str]


class TableReport(NamedTuple):
    """Sharding of a table under a plan.

    Attributes:
        name: table name.
        module_path: embedding module path.
        num_embeddings: row count.
        embedding_dim: column count.
        num_bytes: bytes for weights, optimizer state and index.
        sharding_type: sharding type, such as ``"row_wise"``.
        rectangles: shards as (first row, first column, row count, column count, rank).
        alternatives: other placements of this table, and how they would change the step time.
    """

    name: str
    module_path: str
    num_embeddings: int
    embedding_dim: int
    num_bytes: int
    sharding_type: str
    rectangles: list[tuple[int, int, int, int, int]]
    alternatives: list[Alternative]


class PlanReport(NamedTuple):
    """Content of a plan report. Times are in seconds, memory in bytes.

    Attributes:
        seconds: predicted step time without the dense part.
        pipelined_seconds: predicted step time with a train pipeline, which hides the ID exchange behind
            lookups and updates.
        lower_bound: step time which no plan can beat.
        gap: upper bound on the time a better plan could save, as a fraction of `seconds`.
        hardware: name of the hardware profile.
        wire: distinct wire formats of the tables, such as ``"fp16/bf16"`` (embeddings, then gradients).
        sent_bytes: bytes sent per step, summed over all ranks, by exchange: ``ids``, ``output``,
        ``gradient``.
        world_size: rank count.
        replicas: ``replicate`` axis size.
        batch_size: samples per rank.
        memory_cap: maximum bytes per rank.
        phases: seconds by phase name, on the slowest rank and with latencies.
        ranks: content per rank.
        tables: sharding per table.
        replicated: data-parallel table names.
        warnings: complete sentences to show to the user.
        inputs: planner inputs as JSON types.
    """

    seconds: float
    pipelined_seconds: float
    lower_bound: float
    gap: float
    hardware: str
    wire: list[str]
    sent_bytes: dict[str, float]
    world_size: int
    replicas: int
    batch_size: int
    memory_cap: float
    phases: dict[str, float]
    ranks: list[RankReport]
    tables: list[TableReport]
    replicated: list[str]
    warnings: list[str]
    inputs: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON types."""
        values = self._asdict()
        values["ranks"] = [rank._asdict() for rank in self.ranks]
        values["tables"] = [
            table._asdict() | {"alternatives": [choice._asdict() for choice in table.alternatives]}
            for table in self.tables
        ]
        return values


def make_report(plan: PlannedShardingPlan) -> PlanReport:
    """Create a plan's report, including alternatives for the largest tables.

    Raises:
        ValueError: the plan has no inputs.
    """
    inputs = plan.required_inputs()
    estimate = plan.estimate()
    # Every large table is placed again in every sharding type.
    reasons = alternatives(plan)
    on_rank: list[list[str]] = [[] for _ in estimate.bytes_R]
    tables, replicated = [], []
    for table in inputs.tables:
        sharding = plan.plan[table.module_path][table.local_name]
        if sharding.sharding_type is ShardingType.DATA_PARALLEL:
            replicated.append(table.name)
        for rank in sorted({shard.placement.rank for shard in sharding.shards}):
            on_rank[rank].append(table.name)
        tables.append(
            TableReport(
                name=table.name,
                module_path=table.module_path,
                num_embeddings=table.num_embeddings,
                embedding_dim=table.embedding_dim,
                num_bytes=table.num_bytes,
                sharding_type=sharding.sharding_type.value,
                rectangles=_rectangles(sharding),
                alternatives=reasons.get(table.name, []),
            )
        )
    ranks = [
        RankReport(rank, float(num_bytes), dict(zip(PHASES, map(float, load_F), strict=True)), on_rank[rank])
        for rank, (num_bytes, load_F) in enumerate(zip(estimate.bytes_R, estimate.load_RF, strict=True))
    ]
    return PlanReport(
        seconds=plan.seconds,
        pipelined_seconds=estimate.pipelined_seconds(),
        lower_bound=plan.lower_bound,
        gap=plan.gap,
        hardware=inputs.topology.profile.name,
        wire=sorted({str(table.wire) for table in inputs.tables}),
        sent_bytes=estimate.sent_bytes,
        world_size=inputs.topology.world_size,
        replicas=plan.replicas,
        batch_size=inputs.batch_size,
        memory_cap=estimate.memory_cap,
        phases=estimate.phases,
        ranks=ranks,
        tables=tables,
        replicated=replicated,
        warnings=_warnings(plan, ranks, estimate.memory_cap),
        inputs=inputs.to_json(),
    )


def what_if(
    plan: PlannedShardingPlan, world_sizes: Sequence[int], effort: Effort
) -> list[tuple[int, PlannedShardingPlan | str]]:
    """Plan the tables and the global batch of an existing plan for other world sizes.

    Args:
        plan: plan with its inputs.
        world_sizes: numbers of ranks to plan for.
        effort: limits per search.

    Returns:
        Pairs of a world size and the plan for it. If no plan fits, an error message replaces the plan.

    Raises:
        ValueError: the plan has no inputs.
    """
    inputs = plan.required_inputs()
    samples = inputs.batch_size * inputs.topology.world_size
    plans: list[tuple[int, PlannedShardingPlan | str]] = []
    for world_size in world_sizes:
        # Fewer ranks than a node has are on a single node.
        local = min(inputs.topology.local_size, world_size)
        try:
            topology = replace(inputs.topology, world_size=world_size, local_world_size=local, replicate=(1,))
            other = plan_tables(
                inputs.tables,
                topology,
                batch_size=max(1, samples // world_size),
                constraints=inputs.constraints,
                effort=effort,
            )
            plans.append((world_size, other))
        except ValueError as error:
            plans.append((world_size, str(error)))
    return plans


class Move(NamedTuple):
    """Difference between two plans in a table's placement.

    Attributes:
        table: table name.
        old_type: sharding type in the old plan; None if the old plan lacks the table.
        new_type: sharding type in the new plan; None if the new plan lacks the table.
        num_bytes: bytes to send to ranks: the elements which a rank holds only under the new plan.
    """

    table: str
    old_type: str | None
    new_type: str | None
    num_bytes: int


def diff(old: ShardingPlan, new: PlannedShardingPlan) -> list[Move]:
    """Return the tables whose placement differs between two plans, and the bytes to move.

    The table with the most bytes comes first. Bytes include optimizer state.

    Args:
        old: plan to compare with.
        new: plan with its inputs.
    """
    moves = []
    # Tables are removed from it below; the tables which remain are only in the old plan.
    before = {(path, name): sharding for path, name, sharding in old.tables()}
    for table in new.required_inputs().tables:
        key = (table.module_path, table.local_name)
        now = new.plan[table.module_path][table.local_name]
        then = before.pop(key, None)
        if then is not None and then.digest() == now.digest():
            continue
        # Includes optimizer state and index, spread evenly over the elements.
        bytes_per_element = table.num_bytes / (table.num_embeddings * table.embedding_dim)
        elements = _new_elements(then, now, table.num_embeddings, table.embedding_dim, new)
        moves.append(
            Move(
                table.name,
                None if then is None else then.sharding_type.value,
                now.sharding_type.value,
                round(elements * bytes_per_element),
            )
        )
    moves += [Move(name, sharding.sharding_type.value, None, 0) for (_, name), sharding in before.items()]
    return sorted(moves, key=lambda move: (-move.num_bytes, move.table))


def _new_elements(
    then: ParameterSharding | None, now: ParameterSharding, rows: int, columns: int, new: PlannedShardingPlan
) -> int:
    """Return how many elements of a table must be sent to ranks, summed over the ranks of a replica group.

    These are the elements which a rank holds under the new plan, but not under the old plan.
    """
    ranks = range(new.required_inputs().topology.world_size // new.replicas)
    target = _by_rank(now, rows, columns, ranks)
    held = {} if then is None else _by_rank(then, rows, columns, ranks)
    missing = 0
    for rank, rectangles in target.items():
        for rectangle in rectangles:
            # The rectangles of a rank do not overlap, so the common elements can be added.
            already_held = sum(_overlap(rectangle, other) for other in held.get(rank, ()))
            missing += (rectangle[1] - rectangle[0]) * (rectangle[3] - rectangle[2]) - already_held
    return missing


# First row, end row, first column, end column; ends are not included.
_Rectangle = tuple[int, int, int, int]


def _by_rank(
    sharding: ParameterSharding, rows: int, columns: int, ranks: range
) -> dict[int, list[_Rectangle]]:
    """Return the rectangles that every rank holds, by rank. Data-parallel tables are whole on all `ranks`."""
    if sharding.sharding_type is ShardingType.DATA_PARALLEL:
        return {rank: [(0, rows, 0, columns)] for rank in ranks}
    rectangles: dict[int, list[_Rectangle]] = {}
    for shard in sharding.shards:
        rectangles.setdefault(shard.placement.rank, []).append((*shard.rows, *shard.columns))
    return rectangles


def _overlap(a: _Rectangle, b: _Rectangle) -> int:
    """Return the number of table elements in both rectangles."""
    rows = min(a[1], b[1]) - max(a[0], b[0])
    columns = min(a[3], b[3]) - max(a[2], b[2])
    return max(rows, 0) * max(columns, 0)


def _rectangles(sharding: ParameterSharding) -> list[tuple[int, int, int, int, int]]:
    """Return the shards as (first row, first column, row count, column count, rank)."""
    return [(*shard.shard_offsets, *shard.shard_sizes, shard.placement.rank) for shard in sharding.shards]


def _warnings(plan: PlannedShardingPlan, ranks: Sequence[RankReport], memory_cap: float) -> list[str]:
    """Return warnings about tight memory, a large gap, unequal loads, and assumptions in the inputs."""
    inputs = plan.required_inputs()
    warnings = []
    fullest = max(ranks, key=lambda rank: rank.num_bytes)
    if fullest.num_bytes > _TIGHT_MEMORY * memory_cap:
        warnings.append(f"rank {fullest.rank} uses {fullest.num_bytes / memory_cap:.0%} of its memory limit")
    if plan.gap > _LARGE_GAP:
        warnings.append(
            f"a plan up to {plan.gap:.1%} faster could exist: the search stopped, or the bound is loose"
        )
    totals = np.array([sum(rank.phases.values()) for rank in ranks])
    if totals.mean() > 0 and totals.max() > _SLOW_RANK * totals.mean():
        slowest = int(totals.argmax())
        warnings.append(
            f"rank {slowest} works {totals.max() / totals.mean():.2f} times as long as the mean rank"
        )
    # 1.0 is the default, so it probably was not measured.
    assumed = [table.name for table in inputs.tables if set(table.pooling_factors) == {1.0}]
    if assumed and len(assumed) == len(inputs.tables):
        warnings.append(
            "every pooling factor is 1: measure them with estimate_from_batches, or set pooling_factors"
        )
    if any(table.optimizer is OptimizerKind.NONE for table in inputs.tables):
        warnings.append(
            "tables without a fused optimizer: their optimizer state and dense gradients are not counted"
        )
    return warnings


def to_html(report: PlanReport) -> str:
    """Render a report as an HTML page: load and memory per rank, rectangles and alternatives per table."""
    return to_page("plan.js", report.to_json())


def write_html(report: PlanReport, path: str | Path) -> None:
    """Write the page of `to_html` to a file."""
    Path(path).write_text(to_html(report), encoding="utf-8")
