"""Between plans and arrays: the solver's pieces become rectangles, rectangles become a plan, and back."""

from collections.abc import Mapping, Sequence

import numpy as np

from meshrec.plan.sharding_plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    Placement,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)
from meshrec.planner.problem import Layout, Problem, Scope
from meshrec.planner.state import Parts
from meshrec.planner.types import Floats, Ints, OptimizerKind, ParameterConstraints, Placements, Table


def to_placements(problem: Problem, parts_T: Sequence[Parts], tables: Sequence[Table]) -> Placements:
    """The rectangles of the solver's pieces: rows cut where the sizes say, columns as wide as the sizes
    say."""
    found: list[tuple[int, int, int, int, int, int]] = []
    replicated = []
    for index, (parts, table) in enumerate(zip(parts_T, tables, strict=True)):
        layout = problem.layouts_C[parts.candidate]
        replicated.append(layout.scope is Scope.EVERYWHERE)
        length = layout.row_parts * (problem.node_size if layout.scope is Scope.NODES else 1)
        column = 0
        for first in range(0, len(parts.rank_N), length):
            chunk = slice(first, first + length)
            group = int(parts.group_N[first])
            width = int(problem.width_P[group])
            if length == 1:
                width = round(width * float(parts.amount_N[first]))
            order = np.argsort(parts.rank_N[chunk], kind="stable")
            cuts = _row_cuts(table.num_embeddings, parts.amount_N[chunk][order])
            for rank, start, end in zip(parts.rank_N[chunk][order], cuts[:-1], cuts[1:], strict=True):
                if end > start:
                    found.append((index, int(start), int(end), column, column + width, int(rank)))
            column += width
        assert replicated[-1] or column == table.embedding_dim
    columns = np.array(found, np.int64).reshape(-1, 6).T
    return _placements(columns, replicated)


def sharding_type(layout: Layout, constraints: ParameterConstraints | None) -> ShardingType:
    """The name of a layout; where several fit, one that the constraints allow."""
    split_columns = len(layout.widths) > 1
    allowed = constraints.allowed_types if constraints else frozenset(ShardingType)
    if layout.scope is Scope.EVERYWHERE:
        return ShardingType.DATA_PARALLEL
    if layout.scope is Scope.ONE_NODE:
        return ShardingType.TABLE_COLUMN_WISE
    if layout.scope is Scope.NODES and layout.row_parts == 1 and not split_columns:
        return ShardingType.TABLE_ROW_WISE
    if layout.scope is Scope.NODES or layout.row_parts > 1:
        names = (
            [ShardingType.GRID_SHARD]
            if split_columns
            else [ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE]
        )
        return next((name for name in names if name in allowed), names[0])
    if split_columns:
        return ShardingType.COLUMN_WISE
    # One rank holds one rectangle of any type.
    return next((name for name in _OF_ONE_RECTANGLE if name in allowed), ShardingType.TABLE_WISE)


_OF_ONE_RECTANGLE = [kind for kind in ShardingType if kind is not ShardingType.DATA_PARALLEL]
_OF_ONE_RECTANGLE.sort(key=lambda kind: kind is not ShardingType.TABLE_WISE)


def to_plan(
    placements: Placements, tables: Sequence[Table], types_T: Sequence[ShardingType], device: str
) -> dict[str, EmbeddingModuleShardingPlan]:
    """The plan of each module, by path."""
    shards: list[list[ShardMetadata]] = [[] for _ in tables]
    for table, row, row_end, column, column_end, rank in zip(*placements[:6], strict=True):
        shards[table].append(
            ShardMetadata(
                shard_offsets=(int(row), int(column)),
                shard_sizes=(int(row_end - row), int(column_end - column)),
                placement=Placement(rank=int(rank), device=device),
            )
        )
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for index, table in enumerate(tables):
        kernel = (
            EmbeddingComputeKernel.DENSE
            if table.optimizer is OptimizerKind.NONE
            else EmbeddingComputeKernel.FUSED
        )
        whole = bool(placements.replicated_T[index])
        plan.setdefault(table.module_path, EmbeddingModuleShardingPlan())[table.name] = ParameterSharding(
            sharding_type=types_T[index],
            compute_kernel=kernel,
            ranks=None if whole else tuple(shard.placement.rank for shard in shards[index]),
            sharding_spec=None if whole else EnumerableShardingSpec(shards=tuple(shards[index])),
        )
    return plan


def from_plan(
    plan: ShardingPlan | Mapping[str, EmbeddingModuleShardingPlan], tables: Sequence[Table]
) -> Placements:
    """A plan's rectangles as arrays. ValueError for a table that the plan does not place."""
    modules = plan.plan if isinstance(plan, ShardingPlan) else plan
    found: list[tuple[int, int, int, int, int, int]] = []
    replicated = []
    for index, table in enumerate(tables):
        tables_of_module = modules.get(table.module_path)
        sharding = tables_of_module.get(table.name) if tables_of_module else None
        if sharding is None:
            raise ValueError(
                f"the plan does not place table {table.name!r} of module {table.module_path!r}; it has "
                f"{[(path, *names) for path, names in modules.items()]}."
            )
        replicated.append(sharding.sharding_type is ShardingType.DATA_PARALLEL)
        found += [(index, *shard.rows, *shard.columns, shard.placement.rank) for shard in sharding.shards]
    columns = np.array(found, np.int64).reshape(-1, 6).T
    return _placements(columns, replicated)


def _placements(columns: Ints, replicated: Sequence[bool]) -> Placements:
    table, row, row_end, column, column_end, rank = columns
    return Placements(table, row, row_end, column, column_end, rank, np.array(replicated, bool))


def _row_cuts(rows: int, amount_N: Floats) -> Ints:
    """Where to cut rows so that parts are in proportion to `amount_N`; no part is empty when there are
    enough rows."""
    ends = np.cumsum(amount_N)
    cuts = np.concatenate(([0], np.rint(rows * ends / ends[-1]))).astype(np.int64)
    if rows >= len(amount_N):
        floor = np.arange(len(cuts))
        cuts = np.maximum.accumulate(cuts - floor) + floor
        cuts = np.minimum(cuts, rows - floor[::-1])
    return cuts
