"""Enumerate candidates: every useful way to split each table under the user's constraints.

Sharding types are converted to `Layout` objects here and back in `evaluate.sharding_type`; the solver does
not know them. A sharding type is omitted if another type gives the same rectangles or is never worse. For
example, `TABLE_COLUMN_WISE` is `COLUMN_WISE` with less freedom, so it is only tried if the user allows it but
not `COLUMN_WISE`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshrec.plan.sharding_plan import ShardingType
from meshrec.planner.estimators import NUM_PHASES, CostModel, Rectangles
from meshrec.planner.problem import Layout, Problem, Scope
from meshrec.planner.types import (
    COLUMN_ALIGNMENT,
    DEFAULT_MIN_PARTITION,
    Bools,
    Floats,
    Ints,
    ParameterConstraints,
    Table,
)

# Maximum number of column parts per table, which limits the number of candidates.
_MAX_COLUMN_PARTS = 16
# Constraints of a table for which the user gave none.
_NO_CONSTRAINTS = ParameterConstraints()


def column_widths(columns: int, parts: int) -> tuple[int, ...]:
    """Return the width of every column part: multiples of 4, as even as possible.

    The last part is narrower if `columns` is not a multiple of 4: ``column_widths(18, 2)`` is (12, 6). If
    there are too few columns to give every part a multiple of 4, widths are not aligned.
    """
    units = -(-columns // COLUMN_ALIGNMENT)
    # Fewer groups of 4 columns than parts: then the widths are not multiples of 4.
    if parts > units:
        return tuple(columns // parts + (part < columns % parts) for part in range(parts))
    base, extra = divmod(units, parts)
    widths = [COLUMN_ALIGNMENT * (base + (part < extra)) for part in range(parts)]
    # The last part is narrower if the number of columns is not a multiple of 4.
    widths[-1] -= sum(widths) - columns
    return tuple(widths)


def layouts(table: Table, constraints: ParameterConstraints, num_ranks: int, node_size: int) -> list[Layout]:
    """Return the layouts (ways to split a table into column and row parts) to consider for a table.

    Layouts which can never be the best are left out.

    Args:
        table: table to split.
        constraints: the user's constraints on this table.
        num_ranks: ranks in the shard group.
        node_size: ranks per node.

    Returns:
        The layouts; empty if the constraints allow none.
    """
    allowed = constraints.allowed_types
    num_nodes = num_ranks // node_size
    # Column splits are useful in column-wise and grid shardings.
    splits = _column_splits(table.embedding_dim, _min_partition(constraints))
    whole = (table.embedding_dim,)
    result: list[Layout] = []
    if num_ranks == 1 and allowed != {ShardingType.DATA_PARALLEL}:
        return [Layout(Scope.RANKS, whole, 1)]  # all types give the same rectangle
    if ShardingType.DATA_PARALLEL in allowed and constraints.ranks is None:
        result.append(Layout(Scope.EVERYWHERE, whole, 1))
    if ShardingType.TABLE_WISE in allowed:
        result.append(Layout(Scope.RANKS, whole, 1))
    if ShardingType.COLUMN_WISE in allowed:
        result += [Layout(Scope.RANKS, widths, 1) for widths in splits if len(widths) <= num_ranks]
    elif ShardingType.TABLE_COLUMN_WISE in allowed:
        result += [Layout(Scope.ONE_NODE, widths, 1) for widths in splits if len(widths) <= node_size]
    if ShardingType.ROW_WISE in allowed:
        parts = _row_parts(num_ranks, num_nodes, table.num_embeddings)
        if constraints.all_ranks:
            # With several nodes and enough rows, the node layouts below cover every rank.
            most = min(num_ranks, table.num_embeddings)
            parts = [most] if num_nodes == 1 or most < num_ranks else []
        result += [Layout(Scope.RANKS, whole, part) for part in parts]
    # Node layouts occupy whole nodes, so they are not offered if the user restricts the ranks.
    if num_nodes > 1 and constraints.ranks is None and table.num_embeddings >= node_size:
        by_nodes = _node_layouts(table, allowed, splits, num_nodes, node_size)
        result += [
            layout for layout in by_nodes if not constraints.all_ranks or _covers_all_nodes(layout, num_nodes)
        ]
    # On a single node, table-row-wise means all ranks, which row-wise includes if it is allowed.
    elif num_nodes == 1 and num_ranks > 1 and _TWRW in allowed and ShardingType.ROW_WISE not in allowed:
        result.append(Layout(Scope.RANKS, whole, min(num_ranks, table.num_embeddings)))
    if num_ranks > 1 and ShardingType.GRID_SHARD in allowed and num_nodes == 1:
        result += [
            Layout(Scope.RANKS, widths, rows)
            for widths in splits
            for rows in range(2, num_ranks // len(widths) + 1)
            if rows <= table.num_embeddings
        ]
    return result


def _covers_all_nodes(layout: Layout, num_nodes: int) -> bool:
    """Return whether the constraint ``ParameterConstraints.all_ranks`` allows a node layout.

    In a node layout, every piece is split by rows over all ranks of a node. A row-wise layout must have a row
    part on every node. Other layouts are always allowed.
    """
    is_row_wise = len(layout.widths) == 1 and layout.row_parts > 1
    return not is_row_wise or layout.row_parts == num_nodes


_TWRW = ShardingType.TABLE_ROW_WISE


def _column_splits(columns: int, min_partition: int) -> list[tuple[int, ...]]:
    """Return the part widths for every split of the columns into 2 to `_MAX_COLUMN_PARTS` parts.

    A split is left out if a part would have fewer than `min_partition` columns.
    """
    most = min(columns // min_partition, _MAX_COLUMN_PARTS)
    splits = [column_widths(columns, parts) for parts in range(2, most + 1)]
    return [widths for widths in splits if min(widths) >= min_partition]


def _row_parts(num_ranks: int, num_nodes: int, rows: int) -> list[int]:
    """Return the part counts to try for row-wise layouts that may use any distinct ranks (`Scope.RANKS`).

    Large shard groups get only some counts, to limit the number of layouts.
    """
    if num_nodes == 1 and num_ranks <= 16:
        parts = set(range(2, num_ranks + 1))
    else:
        # Large groups try only these counts, because every count is a candidate for every table.
        parts = {part for part in (2, 3, 4, 6, 8, 12, 16) if part <= num_ranks}
        if num_nodes == 1:
            parts.add(num_ranks)
    return sorted(part for part in parts if part <= rows)


def _node_layouts(
    table: Table,
    allowed: frozenset[ShardingType],
    splits: Sequence[tuple[int, ...]],
    num_nodes: int,
    node_size: int,
) -> list[Layout]:
    """Return the node layouts (`Scope.NODES`) to consider for a table.

    In a node layout, every piece of the table occupies a node, and is split by rows over all ranks in it.
    """
    whole = (table.embedding_dim,)
    # Node counts: powers of two, and all nodes. More would multiply the candidates of large clusters.
    powers = [1 << power for power in range(num_nodes.bit_length()) if 1 << power < num_nodes] + [num_nodes]
    # Every rank should hold at least a row.
    counts = [count for count in powers if count * node_size <= table.num_embeddings]
    result = []
    if _TWRW in allowed:
        result.append(Layout(Scope.NODES, whole, 1))
    if ShardingType.ROW_WISE in allowed:
        result += [Layout(Scope.NODES, whole, count) for count in counts if count > 1]
    if ShardingType.GRID_SHARD in allowed:
        result += [
            Layout(Scope.NODES, widths, count)
            for widths in splits
            for count in counts
            if len(widths) * count <= num_nodes
        ]
    return result


class _Pieces(NamedTuple):
    """Pieces of all candidates (ways to split a table), as arrays [P] over groups of equal pieces.

    The groups are sorted by candidate.

    Attributes:
        candidate: candidate index.
        num_equal: number of equal pieces in the group.
        rows: rows of a piece on every rank that holds it; fractional, because an even split is assumed.
        columns: columns per piece.
        in_node: whether a piece is split by rows over all ranks in a node.
    """

    candidate: Ints
    num_equal: Ints
    rows: Floats
    columns: Ints
    in_node: Bools


def build_problem(model: CostModel, constraints: Mapping[str, ParameterConstraints]) -> Problem:
    """Return the planning problem: candidates (ways to split a table) for all tables, and costs per piece.

    Raises:
        ValueError: a table's constraints leave no candidate.
    """
    # Identical tables share their candidates, so thousands of tables may have few types.
    type_T, examples = _group_identical_tables(model.tables, constraints)
    layouts_C, type_C = _candidates(model, constraints, examples)
    table_C = np.array(examples, np.int64)[type_C]
    pieces = _pieces(model, layouts_C, table_C)
    ranks_P = pieces.num_equal * np.where(pieces.in_node, model.node_size, 1)
    table_P = table_C[pieces.candidate]
    rectangles = Rectangles(table_P, pieces.rows, pieces.columns.astype(np.float64), pieces.in_node)
    load_PF = model.rectangle_loads(rectangles)
    parts_C = np.array([layout.row_parts for layout in layouts_C])
    # In an uneven split, the size that varies: rows if they are split, otherwise columns if these are.
    by_rows_P = pieces.in_node | (parts_C[pieces.candidate] > 1)
    by_columns_P = ~by_rows_P & np.array([len(layout.widths) > 1 for layout in layouts_C])[pieces.candidate]
    # Loads are affine in the row count (or columns) of a piece. The value at 0 is the fixed part.
    least = rectangles._replace(
        rows_N=np.where(by_rows_P, 0, rectangles.rows_N),
        columns_N=np.where(by_columns_P, 0, rectangles.columns_N),
    )
    fixed_PF = model.rectangle_loads(least)
    merge_FK = _merge_phases(load_PF, fixed_PF)
    # Receive buffers exist on every rank, wherever the pieces are, so they are common costs.
    received_P = ranks_P * model.received_bytes(rectangles)
    # Data-parallel candidates have no pieces, only common costs.
    everywhere_C = np.array([layout.scope is Scope.EVERYWHERE for layout in layouts_C], bool)
    common_CF = np.where(everywhere_C[:, None], model.replicated_loads(table_C), 0.0)
    common_bytes_C = np.where(everywhere_C, model.replicated_bytes(table_C), 0.0)
    np.add.at(common_bytes_C, pieces.candidate, received_P)
    # In half duplex, every rank also pays the mean load over ranks, which does not depend on placement.
    mean_PF = load_PF * (ranks_P / model.num_ranks)[:, None]
    mean_CF = np.zeros((len(layouts_C), NUM_PHASES))
    np.add.at(mean_CF, pieces.candidate, mean_PF)
    shared_C = np.array([model.shared_loads(mean_F).sum() for mean_F in mean_CF])
    row_stats_C = mean_CF[:, _ROW_STATS] > 0
    start_C = np.searchsorted(pieces.candidate, np.arange(len(layouts_C) + 1))
    return Problem(
        num_ranks=model.num_ranks,
        node_size=model.node_size,
        memory_cap=model.memory_cap,
        type_T=type_T,
        layouts_C=layouts_C,
        type_C=np.array(type_C, np.int64),
        common_cost_C=common_CF.sum(1) + shared_C,
        common_bytes_C=common_bytes_C,
        piece_start_C=start_C,
        candidate_P=pieces.candidate,
        count_P=pieces.num_equal,
        load_PK=load_PF @ merge_FK,
        fixed_PK=fixed_PF @ merge_FK,
        bytes_P=model.rectangle_bytes(rectangles),
        fixed_bytes_P=model.rectangle_bytes(least),
        width_P=pieces.columns,
        rows_P=pieces.rows,
        min_partition_Y=np.array(
            [_min_partition(constraints.get(model.tables[i].name, _NO_CONSTRAINTS)) for i in examples]
        ),
        merge_FK=merge_FK,
        ranks_Y=[_rank_mask(constraints.get(model.tables[i].name), model.num_ranks) for i in examples],
        sharded_C=~everywhere_C,
        row_stats_C=row_stats_C,
    )


# Index of the phase ``row_stats`` in `PHASES`.
_ROW_STATS = 4


def _candidates(
    model: CostModel, constraints: Mapping[str, ParameterConstraints], examples: Sequence[int]
) -> tuple[list[Layout], list[int]]:
    """Return all candidates as two lists, sorted by type: the layout, and the table type's index."""
    layouts_C: list[Layout] = []
    type_C: list[int] = []
    for kind, index in enumerate(examples):
        table = model.tables[index]
        of_table = layouts(
            table, constraints.get(table.name, _NO_CONSTRAINTS), model.num_ranks, model.node_size
        )
        if not of_table:
            # Without constraints, every table has a candidate. So this table has an entry.
            raise ValueError(_no_candidate(table, constraints[table.name], model))
        layouts_C += of_table
        type_C += [kind] * len(of_table)
    return layouts_C, type_C


def _group_identical_tables(
    tables: Sequence[Table], constraints: Mapping[str, ParameterConstraints]
) -> tuple[Ints, list[int]]:
    """Group identical tables with identical constraints into types.

    Returns:
        The type index per table, and an example table index per type.
    """
    kinds: dict[str, int] = {}
    examples: list[int] = []
    type_T = np.empty(len(tables), np.int64)
    for index, table in enumerate(tables):
        # repr, because constraints may hold lists, which are not hashable.
        # Identical tables differ only in their names.
        fields = [name for name in table.__dataclass_fields__ if name not in ("name", "module_path")]
        key = repr(([getattr(table, name) for name in fields], constraints.get(table.name)))
        if key not in kinds:
            kinds[key] = len(examples)
            examples.append(index)
        type_T[index] = kinds[key]
    return type_T, examples


def _pieces(model: CostModel, layouts_C: Sequence[Layout], table_C: Ints) -> _Pieces:
    """Return the pieces of all candidates. Pieces of a candidate with equal column widths form a group."""
    pieces: list[tuple[int, int, float, int, bool]] = []
    rows_C = model.arrays.rows_T[table_C]
    for index, layout in enumerate(layouts_C):
        if layout.scope is Scope.EVERYWHERE:
            continue
        in_node = layout.scope is Scope.NODES
        # The even height. In `Scope.NODES`, a piece is also split over the ranks of its node.
        height = float(rows_C[index]) / (layout.row_parts * (model.node_size if in_node else 1))
        for width, count in Counter(layout.widths).items():
            pieces.append((index, count * layout.row_parts, height, width, in_node))
    candidate, counts, rows, columns, in_nodes = zip(*pieces, strict=True) if pieces else ((), (), (), (), ())
    return _Pieces(
        np.array(candidate, np.int64),
        np.array(counts, np.int64),
        np.array(rows, np.float64),
        np.array(columns, np.int64),
        np.array(in_nodes, bool),
    )


def _merge_phases(*loads_PF: Floats) -> Floats:
    """Return which phases of a step to merge, as a 0/1 matrix [phases, merged phases].

    Phases are merged if their loads are proportional for all pieces, because the same rank is then the
    slowest in these phases under any plan. The row of a phase without load is 0 everywhere.

    Args:
        loads_PF: one or more arrays of seconds per piece group and phase.
    """
    load_PF = np.concatenate(loads_PF)
    groups: list[list[int]] = []
    for phase in range(load_PF.shape[1]):
        load = load_PF[:, phase]
        if not load.any():
            continue
        for group in groups:
            other = load_PF[:, group[0]]
            # Scale by maxima rather than sums, whose quotient overflows if one is subnormal.
            if np.allclose(load / load.max(), other / other.max(), rtol=1e-9, atol=0):
                group.append(phase)
                break
        else:
            groups.append([phase])
    merge_FK = np.zeros((load_PF.shape[1], max(len(groups), 1)))
    for index, group in enumerate(groups):
        merge_FK[group, index] = 1.0
    return merge_FK


def _min_partition(constraints: ParameterConstraints) -> int:
    """Return the minimum columns per column part, with the default applied."""
    return constraints.min_partition or DEFAULT_MIN_PARTITION


def _rank_mask(constraints: ParameterConstraints | None, num_ranks: int) -> Bools | None:
    """Return a mask [R] of the ranks that may hold shards of a table; None if all ranks may."""
    if constraints is None or constraints.ranks is None:
        return None
    mask = np.zeros(num_ranks, bool)
    for rank in constraints.ranks:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"a constraint names rank {rank}; the ranks are [0, {num_ranks}).")
        mask[rank] = True
    return mask


def _no_candidate(table: Table, constraints: ParameterConstraints, model: CostModel) -> str:
    """Return the error message for a table whose constraints leave no candidate."""
    kinds = sorted(kind.value for kind in constraints.allowed_types)
    partition = _min_partition(constraints)
    return (
        f"table {table.name!r} ({table.num_embeddings} rows x {table.embedding_dim} columns): its "
        f"constraints do not allow any placement on {model.num_ranks} ranks in nodes of {model.node_size}: "
        f"sharding types {kinds}, min_partition {partition}, ranks {constraints.ranks or 'all'}. Allow "
        "another type, or a smaller min_partition."
    )
